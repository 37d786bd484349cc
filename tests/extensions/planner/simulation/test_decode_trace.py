"""The decode trace beside the engine's scheduler, pages and driver, with an engine that computes nothing."""

import dataclasses
import heapq

import numpy as np
import pytest
from fake_engine import FakeEngine
from tokens import prompts_of

from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.settings import EngineConfig
from jaxrl_planner.simulation.decode_trace import trace_decoding
from jaxrl_planner.simulation.workload import LengthDistribution

STOP, G = 1, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """Slots over all replicas; mean length in tokens; tokens of the pages of all replicas, 0 for no pages."""

    slots: int
    replicas: int
    prompts: int
    mean: int = 100
    W: int = 16
    cache_tokens: int = 0

    @property
    def responses(self) -> LengthDistribution:
        return LengthDistribution(self.mean, 6 * self.mean, "log-normal")


CASES = {
    "64 slots": Case(64, 1, 24),
    "64 slots, 4 replicas": Case(64, 4, 40),
    "512 slots": Case(512, 8, 160, W=64),
    "512 slots, paged": Case(512, 8, 160, cache_tokens=8 * 16_000),
    "5,000 slots": Case(5000, 8, 1300, mean=50),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_trace_is_close_to_what_the_driver_does(case):
    config = EngineConfig(
        slots=case.slots,
        prefill_prompts=8,
        tokens_per_dispatch=case.W,
        max_prompt_tokens=40,
        max_response_tokens=case.responses.longest,
        stop_ids=(STOP,),
        smallest_bucket=8 * case.replicas,
        cache="paged" if case.cache_tokens else "contiguous",
        cache_tokens=case.cache_tokens,
    )
    lengths_NG = case.responses.quantiles(case.prompts * G)
    lengths_NG = np.random.default_rng(1).permutation(lengths_NG).reshape(-1, G)
    engine = FakeEngine(config, lambda n, i: lengths_NG[n, i], shards=case.replicas, platform="cpu")
    backend = OfflineBackend(engine, lambda sequences: [""] * len(sequences))  # pyright: ignore[reportArgumentType]
    backend.load({})
    drawn = (np.random.default_rng(n).integers(2, 32_000, 30) for n in range(case.prompts))
    done = backend.generate(prompts_of(*drawn), SamplingOptions(G, 0, 0, 1.0))
    assert done.lengths_B.sum() == lengths_NG.sum()
    samples, slots = case.prompts * G // case.replicas, case.slots // case.replicas
    fewest = engine.slot_sizes[0] // case.replicas
    trace = trace_decoding(30.0, case.responses, samples, slots, case.W, case.replicas, fewest)
    steps = sum(call.steps for call in engine.calls)
    assert trace.steps.sum() == pytest.approx(steps, rel=0.1)
    busy = sum(call.tokens for call in engine.calls) / steps
    assert trace.samples * case.replicas == pytest.approx(busy, rel=0.1)
    decoded = sum(call.steps * call.slots for call in engine.calls) / case.replicas
    # The engine gives up slots only between dispatches, and the trace at once.
    rel = 0.1 + case.W / 400
    assert (trace.steps * trace.slots).sum() == pytest.approx(decoded, rel=rel)


def lockstep(lengths, *, replicas: int, slots: int, prompt_tokens: int) -> tuple[int, float]:
    """Decoding steps of all replicas together, and the sum of what the busiest reads in each."""
    free = [(0, slot) for slot in range(replicas * slots)]
    reads = np.zeros((replicas, 2 * int(lengths.sum()) // len(free) + int(lengths.max())))
    for length in lengths.tolist():
        start, slot = free[0]
        heapq.heapreplace(free, (start + length, slot))
        reads[slot // slots, start : start + length] += prompt_tokens + np.arange(length) + 0.5
    return max(free)[0], float(reads.max(axis=0).sum())


@pytest.mark.parametrize(("slots", "replicas"), [(24, 8), (64, 4), (128, 16)])
def test_a_step_waits_for_the_busiest_replica(slots, replicas):
    responses = LengthDistribution(400, 2048, "log-normal")
    samples = 6 * slots
    trace = trace_decoding(64.0, responses, samples, slots, 16, replicas)
    lengths = np.random.default_rng(1).permutation(responses.quantiles(replicas * samples))
    steps, reads = lockstep(lengths, replicas=replicas, slots=slots, prompt_tokens=64)
    assert trace.steps.sum() == pytest.approx(steps, rel=0.08)
    found = (trace.steps * trace.cached).sum()
    assert found == pytest.approx(reads, rel=0.08)
    # One replica alone reads less than the busiest of several.
    alone = trace_decoding(64.0, responses, samples, slots, 16)
    assert (alone.steps * alone.cached).sum() < found
