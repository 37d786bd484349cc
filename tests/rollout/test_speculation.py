"""Speculation gives the samples of plain decoding, whatever the drafts are."""

import collections
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tokens
from byte_engine import CONFIG, LAYOUTS, MODEL, OPTIONS, assert_same_samples, resumed, spread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_values import mostly_slow

from jaxrl.errors import UserError
from jaxrl.rollout import speculation
from jaxrl.rollout.decode_state import Prefix
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.drivers import SPECULATE, check_driver
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.slots import Slots
from jaxrl.rollout.speculate_program import draft
from jaxrl.rollout.speculation import AnswerTexts, Speculation, num_drafted, rows_of
from jaxrl.types import Completions, Prompts

BASE = dataclasses.replace(
    CONFIG,
    slots=8,
    max_response_tokens=40,
    tokens_per_dispatch=8,
    # Enough that greedy answers, which repeat themselves, end there too.
    stop_ids=(257, 65, *range(250, 256)),
)
WINDOWS = dataclasses.replace(MODEL, sliding_window=7, layer_pattern=("sliding", "full"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Engines that are made in these tests speculate here too."""
    monkeypatch.setattr(speculation, "OFF_ON", ())


backend_of = functools.partial(spread, base=BASE)


def prompts_of(seed: int, count: int = 5) -> Prompts:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 25, count)
    return tokens.prompts_of(*(rng.integers(3, 240, n) for n in lengths))


@pytest.fixture
def counts(monkeypatch) -> collections.Counter:
    """Counts tokens and rounds of the dispatches that speculate."""
    found = collections.Counter()
    rounds = Slots.rounds

    def counted(self):
        found["rounds"] += rounds(self)
        found["tokens"] += int(self.decoded()[1].count.sum())
        return rounds(self)

    monkeypatch.setattr(Slots, "rounds", counted)
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


CASES = {
    f"{name}, {cache}, {temperature}": (layout, cache, temperature)
    for name, layout in LAYOUTS.items()
    for cache in ("contiguous", "paged")
    for temperature in (0.0, 1.0)
}
FAST, LONG = ("one device, contiguous, 0.0",), ("replicas and heads, paged, 1.0",)


@pytest.mark.parametrize("case", mostly_slow(CASES, fast=FAST, long=LONG))
def test_samples_are_those_of_plain_decoding(case, counts):
    """Some answers end at a stop id within a draft, others at the limit."""
    layout, cache, temperature = case
    options = OPTIONS.replace(num_samples=3, temperature=temperature)
    want = backend_of().generate(prompts_of(1), options)
    assert not counts
    lengths = [len(tokens) for tokens in want.tokens]
    assert want.truncated_B.any() and min(lengths) < 20
    check_twice(backend_of(layout, cache=cache, speculate=4), options, 1, counts, want)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"truncation": truncation_of(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.5)},
            marks=pytest.mark.long,
        ),
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


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    mostly_slow({"one stack": {"unroll": 1}, "layer by layer": {"unroll": 2}}, fast=("one stack",)),
)
def test_windows(changes, counts):
    options = OPTIONS.replace(num_samples=3, temperature=1.0)
    want = backend_of(model=WINDOWS).generate(prompts_of(1), options)
    check_twice(backend_of(model=WINDOWS, speculate=4, **changes), options, 1, counts, want)


@pytest.mark.parametrize(
    ("cache", "drafted"), [("contiguous", 4), pytest.param("paged", 1, marks=pytest.mark.long)]
)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 3), budget=st.integers(3, 40), temperature=st.sampled_from([0.0, 1.0]))
def test_resumed_samples_are_the_same(cache, drafted, seed, budget, temperature):
    """Samples that a budget leaves unfinished continue."""
    backend = backend_of(cache=cache, speculate=drafted)
    options = OPTIONS.replace(num_samples=3, temperature=temperature)
    want = backend_of().generate(prompts_of(seed), options)
    found = resumed(backend, prompts_of(seed), options.replace(budget_tokens=budget))
    assert_same_samples(found, want)


@pytest.mark.long
def test_metrics_tell_what_rounds_keep():
    backend = backend_of(speculate=4, max_response_tokens=200, stop_ids=())
    options = OPTIONS.replace(num_samples=1, temperature=1.0)
    backend.generate(prompts_of(1), options)
    assert 1 <= backend.metrics["rollout/tokens_per_round"] < 1.5
    # The same answers again are drafted from the first ones.
    backend.generate(prompts_of(1), options)
    assert backend.metrics["rollout/tokens_per_round"] > 4
    assert backend.metrics["rollout/speculated_fraction"] > 0.5
    assert backend_of().metrics == {}


def test_it_is_off_on_cpus(monkeypatch, caplog):
    monkeypatch.undo()
    assert num_drafted(4, "cpu") == 0 and "speculate 4 has no effect on cpu" in caplog.text
    assert [num_drafted(4, platform) for platform in ("tpu", "gpu")] == [4, 4]


def test_siblings_that_have_ended_are_drafted_from(counts):
    """At temperature 0 the samples of a prompt are the same; those that start late copy the first."""
    backend = backend_of(speculate=4)
    prompts = dataclasses.replace(prompts_of(1), ids_N=np.arange(5) + 100)
    backend.generate(prompts.take([1]), OPTIONS.replace(num_samples=64, temperature=0.0))
    assert counts["tokens"] > 2.5 * counts["rounds"]


@pytest.mark.parametrize(
    ("own", "reference", "want"),
    [
        # The end, 3 4, occurred before 5 6.
        ([3, 4, 5, 6, 3, 4], [], [5, 6, 3]),
        # A period of two goes on.
        ([9, 3, 4, 3, 4], [], [3, 4, 3]),
        # Two equal tokens in the reference count more than one in the own text.
        ([4, 8, 3, 4], [3, 4, 7, 7, 7], [7, 7, 7]),
        # The last of equal places counts, and no text is continued across a gap.
        ([3], [3, 5, 5, -1, 3, 6, 6, -1], [6, 6, 0]),
        # The last token of a reference has nothing behind it.
        ([3], [3, 5, -1, 9, 3], [5, 0, 9]),
    ],
)
def test_drafts_follow_the_longest_agreement(own, reference, want):
    history = np.zeros((1, 12), np.int32)
    history[0, : len(own) - 1] = own[:-1]
    context = Prefix(None, jnp.array(history), jnp.array([len(own) - 1]), jnp.array(own[-1:]))
    reference_mS = jnp.array([reference], jnp.int32).reshape(1, -1)
    assert draft(context, reference_mS, 3).tolist() == [want]


def test_rows_are_the_slots_in_use_of_each_shard():
    rows = rows_of(np.array([1, 4, 5, 7]), 8, 2)
    assert rows.slot_m.tolist() == [1, -1, -1, -1, 0, 1, 3, -1]
    assert rows.source_n.tolist() == [-1, 0, -1, -1, 0, 1, -1, 2]
    assert rows.slots == {0: 1, 4: 4, 5: 5, 6: 7}
    assert rows_of(np.arange(9), 16, 1) is None
    assert rows_of(np.arange(9), 18, 2) is None
    assert len(rows_of(np.arange(16), 16, 2).slot_m) == 16


def test_few_slots_with_some_tokens_speculate():
    choice, lengths = Speculation(), {0: 6, 1: 7, 2: 8, 3: 5}
    # Five tokens of a sample do not tell which earlier text to follow.
    assert choice.choose(np.arange(4), 16, 1, lengths.__getitem__) is None
    assert choice.choose(np.arange(3), 16, 1, lengths.__getitem__) is choice.rows is not None
    choice.note(18, 6)
    assert choice.choose(np.arange(9), 16, 1, lambda slot: 9) is None
    choice.note(18, 0)
    assert choice.metrics() == {"rollout/speculated_fraction": 0.5, "rollout/tokens_per_round": 3.0}


def test_answers_are_kept_by_prompt_newest_last(monkeypatch):
    texts = AnswerTexts(2)
    for first in (10, 20, 30, 40):
        texts.add(7, np.array([first, first + 1], np.int32))
    gap = -1
    # Eight tokens hold two answers of two tokens with gaps, and a third without one behind it.
    assert texts.references([7, None, 8]).tolist() == [
        [20, 21, gap, 30, 31, gap, 40, 41],
        [gap] * 8,
        [gap] * 8,
    ]
    monkeypatch.setattr(speculation, "_MOST_KEPT", 7)
    texts.add(8, np.array([5, 6], np.int32))
    assert texts.references([7, 8])[:, :2].tolist() == [[gap, gap], [5, 6]]


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(
        ValueError, match=r"speculate 8 decodes up to 9 tokens.*tokens_per_dispatch 8"
    ):
        dataclasses.replace(BASE, speculate=8)
    with pytest.raises(ValueError, match="speculate 4 changes the rounding"):
        dataclasses.replace(BASE, speculate=4, deterministic=True)
    with pytest.raises(UserError, match=r"cannot do rollout\.speculate"):
        check_driver("jetstream", frozenset({SPECULATE}))
