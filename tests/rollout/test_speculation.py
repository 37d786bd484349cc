"""Speculation gives the samples of plain decoding, whatever the drafts are."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from byte_engine import CONFIG, MODEL, OPTIONS, decode, weights
from closeness import assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.slots import Slots
from jaxrl.rollout.speculation import Acceptance
from jaxrl.types import Completions, Prompts

BASE = dataclasses.replace(
    CONFIG,
    slots=8,
    max_response_tokens=40,
    tokens_per_dispatch=8,
    # Enough that greedy answers, which repeat themselves, end there too.
    stop_ids=(257, 65, *range(250, 256)),
)
LAYOUTS = {
    "one device": ("1-1-1",),
    "replicas and heads": ("1-4-2", "1-2-2-2", 2),
    "replicas": ("1-1-8",),
    "stages": ("2-2-2", "2-2-1-2", 1),
}
WINDOWS = dataclasses.replace(MODEL, sliding_window=7, layer_pattern=("sliding", "full"))


@functools.cache
def backend_of(layout=("1-1-1",), *, model=MODEL, **changes) -> OfflineBackend:
    names = dict(zip(("train", "generate", "fsdp"), layout, strict=False))
    parallel = ParallelLayout.from_config(LayoutConfig(**names))
    mesh = build_mesh(parallel, jax.devices()[: parallel.num_devices])
    graph, shapes, axes = decoder_graph(model)
    engine = Engine(model, graph, mesh, dataclasses.replace(BASE, **changes))
    backend = OfflineBackend(engine, decode)
    backend.load(jax.device_put(weights(), shardings(axes, shapes, GENERATE_RULES, mesh)))
    return backend


def prompts_of(seed: int, count: int = 5) -> Prompts:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 25, count)
    tokens = tuple(rng.integers(3, 240, n).astype(np.int32) for n in lengths)
    blank = ("",) * count
    return Prompts(np.arange(count), tokens, blank, blank, blank)


def assert_same_samples(a: Completions, b: Completions):
    assert [t.tolist() for t in a.tokens] == [t.tolist() for t in b.tokens]
    np.testing.assert_array_equal(a.truncated_B, b.truncated_B)
    for field in ("rollout_logprob", "entropy", "mask"):
        for x, y in zip(getattr(a, field), getattr(b, field), strict=True):
            assert_close(x, y, err_msg=field, scale=1)


@pytest.fixture
def counts(monkeypatch) -> collections.Counter:
    """Speculates whenever there are few rows; counts tokens and rounds."""
    found = collections.Counter()
    rounds = Slots.rounds

    def counted(self):
        found["rounds"] += rounds(self)
        found["tokens"] += int(self.decoded()[1].count.sum())
        return rounds(self)

    monkeypatch.setattr(Slots, "rounds", counted)
    monkeypatch.setattr(Acceptance, "wants", lambda self: True)
    monkeypatch.setattr(Acceptance, "add", lambda self, gain: None)
    return found


def check_twice(backend: OfflineBackend, options, seed: int, counts, want: Completions):
    """First with drafts that are mostly wrong, then with the answers themselves as drafts."""
    prompts = prompts_of(seed)
    assert_same_samples(backend.generate(prompts, options), want)
    assert counts["rounds"]
    counts.clear()
    assert_same_samples(backend.generate(prompts, options), want)
    # A draft needs some equal tokens before it, and ends with the answer.
    assert counts["tokens"] > 2.5 * counts["rounds"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_samples_are_those_of_plain_decoding(layout, cache, temperature, counts):
    """Some answers end at a stop id within a draft, others at the limit."""
    options = OPTIONS.replace(num_samples=3, temperature=temperature)
    want = backend_of().generate(prompts_of(1), options)
    assert not counts
    lengths = [len(tokens) for tokens in want.tokens]
    assert want.truncated_B.any() and min(lengths) < 20
    check_twice(backend_of(layout, cache=cache, speculate=4), options, 1, counts, want)


@pytest.mark.parametrize(
    "settings",
    [
        {"truncation": truncation_of(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.5)},
        {"truncation": truncation_of(top_k=9, top_p=0.9, min_p=0.01, min_tokens=6)},
        {"stop_strings": ("A", "\\x04")},
    ],
    ids=["repetition penalty", "truncation", "stop strings"],
)
def test_limits_on_tokens_hold_for_drafts(settings, counts):
    """A penalty sees drafted tokens too."""
    options = OPTIONS.replace(num_samples=3, temperature=0.7, **settings)
    plain = OPTIONS.replace(num_samples=3, temperature=0.7)
    changes = {"stop_ids": (257,)}
    want = backend_of(**changes).generate(prompts_of(1), options)
    other = backend_of(**changes).generate(prompts_of(1), plain)
    assert [len(t) for t in want.tokens] != [
        len(t) for t in other.tokens
    ] or want.texts != other.texts
    check_twice(backend_of(speculate=4, **changes), options, 1, counts, want)


@pytest.mark.parametrize(
    "changes", [{"unroll": 1}, {"unroll": 2}], ids=["one stack", "layer by layer"]
)
def test_windows(changes, counts):
    options = OPTIONS.replace(num_samples=3, temperature=1.0)
    want = backend_of(model=WINDOWS).generate(prompts_of(1), options)
    check_twice(backend_of(model=WINDOWS, speculate=4, **changes), options, 1, counts, want)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 3),
    budget=st.integers(3, 40),
    drafted=st.sampled_from([1, 3, 7]),
    temperature=st.sampled_from([0.0, 1.0]),
    cache=st.sampled_from(["contiguous", "paged"]),
)
def test_resumed_samples_are_the_same(seed, budget, drafted, temperature, cache):
    """Samples that a budget leaves unfinished continue, with whatever acceptance decides."""
    backend = backend_of(cache=cache, speculate=drafted)
    options = OPTIONS.replace(num_samples=3, temperature=temperature)
    want = backend_of().generate(prompts_of(seed), options)
    given = options.replace(budget_tokens=budget)
    rest, parts = backend.resume(prompts_of(seed), given), []
    while len(rest.unfinished.prompts):
        parts.append(rest.completions)
        given = given.replace(step=given.step + 1)
        rest = backend.resume(prompts_of(seed).take([]), given, unfinished=rest.unfinished)
    whole = Completions.concatenate([*parts, rest.completions])
    order = np.argsort(whole.prompts.ids_N)
    assert_same_samples(whole.take(order), want)


def test_an_environment_answers_speculated_turns(counts):
    """Its answers are cached behind the tokens that were kept, over those of wrong drafts."""

    def answer(turn):
        return np.array([5, 6, 7], np.int32) if len(turn.response) < 20 else None

    options = OPTIONS.replace(num_samples=3, temperature=1.0, environment=answer)
    want = backend_of().generate(prompts_of(1), options)
    assert any((mask == 0).any() for mask in want.mask)
    check_twice(backend_of(speculate=4), options, 1, counts, want)
