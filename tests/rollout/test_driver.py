"""What the driver does beyond sampling a batch to its end: unfinished samples, order, sizes."""

import dataclasses
import functools
import gc

import byte_engine
import jax
import numpy as np
import pytest
from byte_engine import assert_same_samples
from test_engine import MODEL, weights
from tokens import prompts_of

from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.types import Completions, Prompts

BASE = dataclasses.replace(byte_engine.CONFIG, slots=16, max_response_tokens=40, stop_ids=(1,))
N, G = 5, 3


engine_of = functools.partial(byte_engine.engine_of, base=BASE, model=MODEL)


def make_prompts(lengths=(1, 20, 7, 24, 3)) -> Prompts:
    rng = np.random.default_rng(1)
    return prompts_of(*(rng.integers(3, MODEL.num_tokens, n) for n in lengths))


PROMPTS = make_prompts()
OPTIONS = SamplingOptions(num_samples=G, seed=7, step=3, temperature=0.8)


def spell(tokens) -> str:
    return "".join(chr(ord("a") + t) for t in tokens)


def run(engine=None, prompts=PROMPTS, **changes) -> Completions:
    return backend_of(engine).generate(prompts, OPTIONS.replace(**changes))


def backend_of(engine=None) -> OfflineBackend:
    backend = OfflineBackend(engine or engine_of(), functools.partial(map, spell))
    backend.load(weights())
    return backend


@pytest.fixture(scope="module")
def whole() -> Completions:
    return run()


def test_the_batch_has_short_and_long_responses(whole):
    assert whole.truncated_B.any() and not whole.truncated_B.all()
    assert whole.lengths_B.min() < 6 and whole.lengths_B.max() == 40


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 2, "prefill_prompts": 1, "tokens_per_dispatch": 3},
        {"unroll": 2, "tokens_per_dispatch": 64, "prefill_chunk_tokens": 5},
    ],
    ids=["two slots", "layers apart, prefill in chunks"],
)
def test_sizes_never_change_a_sample(changes, whole):
    assert_same_samples(run(engine_of(**changes)), whole)


@pytest.mark.long
def test_slots_of_shards_are_moved_and_lengthened_as_on_one_device(whole):
    assert_same_samples(run(engine_of(("1-2-4",), slots=32, prefill_chunk_tokens=9)), whole)


def test_sizes_follow_what_is_needed(monkeypatch):
    """Programs for the slots and lengths that occur, not for the limits; each compiled once."""
    engine = engine_of(max_response_tokens=400, tokens_per_dispatch=8)
    assert engine.cache_sizes[-1] == 24 + 400 + 8
    sizes = []

    def watched(num_slots, capacity):
        sizes.append((num_slots, capacity))
        return Engine.init_decode_state(engine, num_slots, capacity)

    monkeypatch.setattr(engine, "init_decode_state", watched)
    options = OPTIONS.replace(budget_tokens=16)
    for _ in range(2):
        backend_of(engine).resume(make_prompts((4, 5)), options)
        assert engine.generate._cache_size() == 1
    assert sizes == [(8, 128)] * 2


def test_a_generation_leaves_nothing_on_the_devices():
    """Whatever refers to itself keeps its cache, most of a device's memory, until Python looks for cycles."""
    backend = backend_of()
    backend.generate(PROMPTS, OPTIONS)
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        backend.generate(PROMPTS, OPTIONS)
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "kv_dtype, tolerance", [("int8", 0.1), pytest.param("bfloat16", 0.1, marks=pytest.mark.long)]
)
def test_a_cache_of_another_type_gives_nearly_the_same_probabilities(kv_dtype, tolerance, whole):
    narrow = run(engine_of(kv_dtype=kv_dtype))
    gaps = []
    for a, b, x, y in zip(
        narrow.tokens, whole.tokens, narrow.rollout_logprob, whole.rollout_logprob, strict=True
    ):
        # Up to the first token that differs both saw the same text.
        n = min(len(a), len(b))
        same = int(np.argmin(np.append(a[:n] == b[:n], False)))
        gaps += np.abs(x[:same] - y[:same]).tolist()
    assert len(gaps) > 150
    assert 0 < np.max(gaps) < tolerance


# Unfinished groups


def test_an_unfinished_sample_goes_on_as_if_it_had_not_been_left(whole):
    first = OPTIONS.replace(budget_tokens=7)
    part = backend_of().resume(PROMPTS, first)
    assert len(part.unfinished.prompts) > 0
    assert max(len(s) for s in part.unfinished.samples) == 7
    parts = {
        int(part.completions.prompts.ids_N[i]): part for i in range(len(part.completions.prompts))
    }
    nothing = PROMPTS.take([])
    step = OPTIONS.step
    while len(part.unfinished.prompts):
        step += 1
        now = first.replace(step=step, budget_tokens=11)
        part = backend_of().resume(nothing, now, unfinished=part.unfinished)
        parts |= {int(i): part for i in part.completions.prompts.ids_N}
    assert sorted(parts) == list(range(N))
    for n, part in parts.items():
        at = part.completions.prompts.ids_N.tolist().index(n)
        assert_same_samples(part.completions.take([at]), whole.take([n]))
    versions = np.concatenate(part.completions.version)
    # Tokens 0 to 6 are of the first step, 7 to 17 of the next, and so on.
    longest = max(part.completions.version, key=len)
    assert longest.tolist() == [3] * 7 + [4] * 11 + [5] * 11 + [6] * 11
    assert set(versions.tolist()) == {3, 4, 5, 6}


def test_the_longest_expected_start_first():
    started = []

    def note(group: Completions) -> None:
        started.append(int(group.prompts.ids_N[0]))

    # One slot after the other, and one token each, so that groups finish in the order of their start.
    engine = engine_of(slots=1, prefill_prompts=1, max_response_tokens=1)
    for expected, first in [(None, 3), (np.array([5, 9, 2, 1, 30]), 4)]:
        started.clear()
        backend_of(engine).generate(PROMPTS, OPTIONS, on_group=note, expected_tokens_N=expected)
        assert started[0] == first and len(started) == N


# Stopping


def test_a_stop_string_ends_a_response_and_cuts_off_what_follows(whole):
    text = next(t for t in whole.texts if len(t) > 12)
    stop = text[5:7]
    cut = run(stop_strings=(stop,))
    for mine, theirs, tokens, truncated in zip(
        cut.texts, whole.texts, cut.tokens, cut.truncated_B, strict=True
    ):
        end = theirs.find(stop)
        assert mine == (theirs if end < 0 else theirs[: end + 2])
        assert len(tokens) == len(mine)
        assert not (truncated and end >= 0)
    assert any(stop in t for t in cut.texts)
