"""The replay without a device does what the engine's driver does: dispatches, preemptions, prefills."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from slow_values import mostly_slow

from jaxrl.dataflows.rewarding import OverlongPunishment, Rewards
from jaxrl.dataflows.samplers import Generation, PartialSampling
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.planner.simulation.engine_replay import EngineReplay, ReplayedCall, ReplayedEngine
from jaxrl.rewards import FunctionGrader, Grade, Graders
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.settings import EngineConfig
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.slots import Slots
from jaxrl.testing.fake_engine import FakeEngine, lognormal_lengths
from jaxrl.types import Prompts

STOP, G = 1, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """Slots over all replicas; lengths in tokens; tokens of the pages of all replicas, 0 for no pages."""

    slots: int
    replicas: int
    prompts: int
    mean: int = 100
    W: int = 16
    cache_tokens: int = 0
    fewest: int = 8

    @property
    def longest(self) -> int:
        return 6 * self.mean

    def engine(self) -> FakeEngine:
        config = EngineConfig(
            slots=self.slots,
            prefill_prompts=8,
            tokens_per_dispatch=self.W,
            max_prompt_tokens=40,
            max_response_tokens=self.longest,
            stop_ids=(STOP,),
            smallest_bucket=self.fewest * self.replicas,
            cache="paged" if self.cache_tokens else "contiguous",
            cache_tokens=self.cache_tokens,
        )
        lengths = lognormal_lengths(self.mean, sigma=0.95)
        return FakeEngine(config, lengths, shards=self.replicas, platform="cpu")

    def replay(self) -> EngineReplay:
        engine, ids_N = self.engine(), np.arange(self.prompts)
        lengths = lognormal_lengths(self.mean, sigma=0.95)
        responses = [lengths(np.full(G, n), np.arange(G)) for n in ids_N]
        sizes = ReplayedEngine(
            engine.slot_sizes,
            engine.batch_sizes[-1],
            engine.shards,
            self.W,
            self.longest,
            engine.pages,
        )
        return EngineReplay(sizes, prompt_lengths(ids_N), np.array(responses))


def prompt_lengths(ids_N: np.ndarray) -> np.ndarray:
    return 20 + ids_N * 7 % 20


class RandomPrompts:
    """Prompts of several lengths, one at a time."""

    def __init__(self):
        self._next = 0

    def __iter__(self) -> "RandomPrompts":
        return self

    def __next__(self) -> Prompts:
        self._next += 1
        return prompts_of(np.array([self._next - 1]))


def prompts_of(ids_N: np.ndarray) -> Prompts:
    tokens = [
        np.random.default_rng(n).integers(2, 32_000, length).astype(np.int32)
        for n, length in zip(ids_N, prompt_lengths(ids_N), strict=True)
    ]
    nothing = ("",) * len(ids_N)
    return Prompts(ids_N, tuple(tokens), nothing, nothing, nothing)


class FixedPolicy:
    """Samples with weights that never change."""

    can_sample = True
    sampling_metrics: ClassVar[dict[str, float]] = {}

    def __init__(self, backend: OfflineBackend):
        self.resume, self.generate = backend.resume, backend.generate
        self.for_sampling = self.continuous = backend.generate


@dataclasses.dataclass
class Watched:
    """What a driver does: dispatches, preemptions, prefilled sequences."""

    calls: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    preempted: int = 0
    prefills: list[list[int]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watched(engine: FakeEngine) -> Iterator[Watched]:
    """Notes what happens on an engine."""
    found, grow, prefill = Watched(), SlotPages.grow, Slots.prefill

    def counted_grow(self: SlotPages, *cached) -> list[int]:
        dropped = grow(self, *cached)
        found.preempted += len(dropped)
        return dropped

    def counted_prefill(self: Slots, sequences: Any) -> Any:
        found.prefills.append([len(s) for s in sequences])
        return prefill(self, sequences)

    before = len(engine.calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotPages, "grow", counted_grow)
        patch.setattr(Slots, "prefill", counted_prefill)
        yield found
    found.calls = [(c.steps, c.active, c.tokens, c.slots) for c in engine.calls[before:]]


def check_same(replayed: ReplayedCall, driven: Watched) -> None:
    assert [d[:4] for d in replayed.dispatches] == driven.calls
    assert replayed.preempted == driven.preempted
    assert replayed.prefills == driven.prefills


def backend_of(engine: FakeEngine) -> OfflineBackend:
    backend = OfflineBackend(engine, lambda sequences: [""] * len(sequences))  # pyright: ignore[reportArgumentType]
    backend.load({})
    return backend


# A page has 16 tokens. At 64 slots samples give way, as so few do not average out.
CASES = {
    "64 slots": Case(64, 1, 24),
    "64 slots, 4 replicas": Case(64, 4, 24),
    "64 slots, paged": Case(64, 4, 40, cache_tokens=4 * 900),
    "512 slots": Case(512, 8, 160, W=64),
    "512 slots, paged": Case(512, 8, 160, cache_tokens=8 * 3200),
    "5,000 slots": Case(5000, 8, 1300, mean=50),
    "5,000 slots, paged": Case(5000, 8, 1300, mean=50, cache_tokens=8 * 12_000),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_drained_batch_is_replayed_dispatch_by_dispatch(case):
    replayed = case.replay().drained()
    engine = case.engine()
    with watched(engine) as driven:
        completions = backend_of(engine).generate(
            prompts_of(np.arange(case.prompts)), SamplingOptions(G, 0, 0, 1.0)
        )
    check_same(replayed, driven)
    trace = replayed.trace(case.replicas)
    tokens = completions.lengths_B.sum()
    assert trace.samples * trace.steps.sum() * case.replicas == pytest.approx(tokens)


@pytest.mark.parametrize(
    "case", mostly_slow(CASES, fast=[name for name in CASES if name != "5,000 slots"])
)
def test_steps_of_full_slots_are_replayed_dispatch_by_dispatch(case):
    engine, groups, timer = case.engine(), case.prompts // 3, NoTimer()
    limits = {"prompts_per_batch": case.prompts, "max_staleness": 1}
    replay = dataclasses.replace(case, prompts=8 * case.prompts).replay()
    graders = Graders.of(FunctionGrader(lambda response, answer: Grade(True, response)))
    policy: Any = FixedPolicy(backend_of(engine))
    sampler = PartialSampling(
        Generation(policy, SamplingOptions(G, 0, 0, 1.0), timer),
        Rewards(graders, OverlongPunishment(case.longest, 0, 0.0), timer),
        **limits,
    )
    prompts: Any = RandomPrompts()
    for _ in range(4):
        replayed = replay.always_full(groups=groups, **limits)
        done = 0

        def enough(_: Any) -> bool:
            nonlocal done
            done += 1
            return done >= groups

        with watched(engine) as driven:
            sampled = sampler.sample(prompts, enough=enough)
        timer.step += 1
        check_same(replayed, driven)
        assert sorted(replayed.finished) == sampled.completions.prompts.ids_N.tolist()
        assert replayed.dropped == sampled.counts["rollout/dropped_stale_groups"]


def test_the_cases_have_samples_that_give_way_and_groups_that_are_dropped():
    assert CASES["64 slots, paged"].replay().drained().preempted
    replay = dataclasses.replace(CASES["64 slots"], prompts=200).replay()
    steps = [replay.always_full(groups=8, prompts_per_batch=24, max_staleness=1) for _ in range(4)]
    assert sum(step.dropped for step in steps)


def test_pages_run_out_by_hand():
    """Two samples with pages for one and a half; pages of 8 tokens, 8 tokens a dispatch."""
    pages = PageSizes(1, page_tokens=8, num_pages=1 + 8, pages_per_slot=10)
    engine = ReplayedEngine((2,), 4, 1, 8, 64, pages)
    found = EngineReplay(engine, np.array([8]), np.array([[40, 40]])).drained()
    # A response is expected to have 16 tokens, so both start. With 24 tokens each they have 4 pages; then the
    # second gives way, and is prefilled again, 8 + 24 tokens, when the first has ended.
    assert [d.active for d in found.dispatches] == [2, 2, 2, 1, 1, 1, 1]
    assert (found.preempted, found.prefills) == (1, [[8], [32]])
    assert found.trace(1).samples == pytest.approx(80 / 56)
