"""JetStream's driver around our engine gives the samples of ours, and its failures are errors."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from byte_engine import OPTIONS, PROMPTS, engine_of, loaded
from closeness import assert_close
from extras import import_extra

import_extra("dev", "jetstream")

from jaxrl.errors import UserError  # noqa: E402
from jaxrl.jetstream import jetstream_backend  # noqa: E402
from jaxrl.jetstream.jetstream_backend import DriverFailed  # noqa: E402
from jaxrl.rollout.driver import OfflineBackend  # noqa: E402
from jaxrl.rollout.sampling import truncation_of  # noqa: E402

CHOICE = truncation_of(top_k=0, top_p=0.9, min_p=0.0)
OFFLINE, JETSTREAM = OfflineBackend, jetstream_backend.JetStreamBackend


@pytest.mark.parametrize(
    "num_samples, train", [(3, "1-1-1"), pytest.param(2, "1-2-4", marks=pytest.mark.long)]
)
def test_its_driver_gives_the_samples_of_ours(num_samples, train):
    options = OPTIONS.replace(num_samples=num_samples, truncation=CHOICE)
    ours, groups = loaded(OFFLINE, train).generate(PROMPTS, options), []
    theirs = loaded(JETSTREAM, train).generate(PROMPTS, options, on_group=groups.append)
    handed = {int(g.prompts.ids_N[0]): g.texts for g in groups}
    N = range(len(PROMPTS))
    assert handed == {int(PROMPTS.ids_N[n]): theirs.take([n]).texts for n in N}
    assert 0 < ours.truncated_B.sum() < len(ours)
    assert [t.tolist() for t in theirs.tokens] == [t.tolist() for t in ours.tokens]
    assert theirs.texts == ours.texts
    np.testing.assert_array_equal(theirs.truncated_B, ours.truncated_B)
    for field in ("rollout_logprob", "entropy", "mask"):
        for x, y in zip(getattr(theirs, field), getattr(ours, field), strict=True):
            assert_close(x, y, err_msg=field, scale=1)


def test_stop_strings_cut_as_in_our_driver():
    whole = loaded(OFFLINE).generate(PROMPTS, OPTIONS)
    stop = next(c for text in whole.texts for c in text[3:8] if c != "\N{REPLACEMENT CHARACTER}")
    options = OPTIONS.replace(stop_strings=(stop,))
    ours, theirs = (loaded(k).generate(PROMPTS, options) for k in (OFFLINE, JETSTREAM))
    assert [t.tolist() for t in theirs.tokens] == [t.tolist() for t in ours.tokens]
    assert any(len(t) < len(w) for t, w in zip(theirs.tokens, whole.tokens, strict=True))
    np.testing.assert_array_equal(theirs.truncated_B, ours.truncated_B)


def test_what_it_cannot_do_is_refused(monkeypatch):
    backend = loaded(JETSTREAM)
    with pytest.raises(UserError, match="cannot leave a sample unfinished"):
        backend.resume(PROMPTS, OPTIONS)
    long = dataclasses.replace(PROMPTS, tokens=(np.zeros(25, np.int32),) * 5)
    with pytest.raises(UserError, match="prompt 3 has 25 tokens; the engine takes 1 to 24"):
        backend.generate(long, OPTIONS)
    monkeypatch.setattr(jetstream_backend, "num_processes", lambda: 2)
    with pytest.raises(UserError, match="on 2 hosts"):
        backend.generate(PROMPTS, OPTIONS)


@pytest.mark.parametrize("method", ["prefill", "insert", "generate"])
def test_an_engine_failure_is_raised_and_nothing_is_killed(method, monkeypatch, caplog):
    def out_of_memory(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine_of(), method, out_of_memory)
    before = threading.active_count()
    with pytest.raises(DriverFailed, match="the engine has failed: JaxRuntimeError") as caught:
        loaded(JETSTREAM).generate(PROMPTS, OPTIONS.replace(num_samples=4))
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    assert threading.active_count() == before
    assert "driver has failed" in caplog.text


def test_an_error_of_the_caller_ends_the_threads():
    before = threading.active_count()

    def broken(group):
        raise KeyError("a mistake in a grader")

    with pytest.raises(KeyError, match="a mistake in a grader") as caught:
        loaded(JETSTREAM).generate(PROMPTS, OPTIONS, on_group=broken)
    # While somebody still holds the traceback, and with it the frames.
    assert caught.tb is not None and threading.active_count() == before
