"""Slots that stay full against batches that are drained: ten steps of dynamic sampling with ragged responses.

    python benchmarks/always_full.py [--engine real fake] [--slots 64 128] [--generation_prompts 48 96]

whole      every generation batch is sampled to its end
drained    a step ends once it has enough groups, and others go on in the next; prompts are drawn only at the
           beginning of a generation batch, so slots run empty until it ends
full       the same, but prompts are drawn as slots fall free (`rollout.partial`)
free       the same, but samples keep their slots and caches from step to step, so that nothing is prefilled
           again (`rollout.partial` with devices of its own; here the learner takes no time)

A step needs 32 groups of 8, and a filter keeps half of all groups, chosen by their ids; nothing is learned. A
generation batch has 48 or 96 prompts. The real engine runs a small model with random weights, in which every
token ends the response with the same probability, so lengths are exponential. The fake engine has log-normal
lengths and decodes no tokens: only its decoding steps count, which take about the same time on an accelerator
however many slots are busy. The four take turns, a step each, so that a busy machine slows all of them.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.dataflows.dynamic_sampling import DynamicSampling
from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.dataflows.rewarding import OverlongPunishment, Rewards
from jaxrl.dataflows.samplers import Generation, PartialSampling, PromptSource, Sampling
from jaxrl.dataflows.free_running import SamplingSchedule
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards import FunctionGrader, Grade, Graders
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.testing.fake_engine import FakeEngine, lognormal_lengths
from jaxrl.types import Completions, Prompts, Scored

NUM_PROMPTS, G = 32, 8
PROMPT_TOKENS, MEAN_TOKENS = 16, 64
MODEL = ModelConfig(
    vocab_size=256, num_layers=4, d_model=128, d_ff=256, num_heads=4, num_kv_heads=2, head_dim=32
)
STOP_IDS = tuple(range(MODEL.vocab_size // MEAN_TOKENS))


def engine_config(slots: int, **changes: Any) -> EngineConfig:
    """Settings of both engines."""
    return EngineConfig(
        slots=slots,
        prefill_prompts=16,
        tokens_per_dispatch=16,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=10 * MEAN_TOKENS,
        stop_ids=STOP_IDS,
        **changes,
    )


@functools.cache
def real_engine(slots: int) -> Engine:
    """An engine for a small model; its programs are compiled once for all runs."""
    layout = ParallelLayout.from_config(LayoutConfig(train="1-1-1"))
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    return Engine(MODEL, decoder_graph(MODEL)[0], mesh, engine_config(slots))


def fake_engine(slots: int) -> FakeEngine:
    """An engine of one size, as on accelerators."""
    return FakeEngine(engine_config(slots, smallest_bucket=slots), lognormal_lengths(MEAN_TOKENS))


def random_weights() -> Any:
    """Weights so small that all tokens have nearly the same probability."""
    rng = np.random.default_rng(0)
    shapes = decoder_graph(MODEL)[1]
    return jax.tree.map(lambda s: (0.02 * rng.normal(size=s.shape)).astype(np.float32), shapes)


class FixedPolicy:
    """Samples with weights that never change."""

    can_sample = True

    def __init__(self, backend: OfflineBackend):
        self._backend = backend

    @property
    def sampling_metrics(self) -> Mapping[str, float]:
        """See `RolloutBackend.metrics`."""
        return self._backend.metrics

    def for_sampling(self) -> None:
        """The backend has the weights."""

    def continuous(self, *args: Any, **further: Any) -> Any:
        """See `OfflineBackend.continuous`."""
        return self._backend.continuous(*args, **further)

    def generate(self, *args: Any, **further: Any) -> Any:
        """See `RolloutBackend.generate`."""
        return self._backend.generate(*args, **further)

    def resume(self, *args: Any, **further: Any) -> Any:
        """See `RolloutBackend.resume`."""
        return self._backend.resume(*args, **further)


class NumberedPrompts:
    """Random prompts, N at a time."""

    def __init__(self, per_batch: int):
        self._per_batch, self._next = per_batch, 0

    def __iter__(self) -> "NumberedPrompts":
        return self

    def __next__(self) -> Prompts:
        ids = np.arange(self._next, self._next + self._per_batch)
        self._next += self._per_batch
        rng = np.random.default_rng(ids[0])
        tokens = rng.integers(len(STOP_IDS), MODEL.vocab_size, (len(ids), PROMPT_TOKENS))
        texts = ("",) * len(ids)
        return Prompts(ids, tuple(tokens.astype(np.int32)), texts, texts, texts)

    def state(self, *, again: Sequence[int] | np.ndarray = ()) -> dict[str, Any]:
        """Nothing is saved."""
        raise NotImplementedError

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing is restored."""
        raise NotImplementedError


class DrainedSampling(PartialSampling):
    """Draws the missing prompts of a generation batch at its beginning, and no more."""

    def sample(self, prompts: PromptSource, **further: Any) -> Any:
        """See `PartialSampling.sample`."""
        self._may_draw = True
        return super().sample(prompts, **further)

    def _draw(self, prompts: PromptSource, places: int, unfinished: int) -> Prompts:
        if not self._may_draw:
            return Prompts.concatenate([])
        self._may_draw = False
        groups = 0 if self._unfinished is None else len(self._unfinished.prompts)
        missing = max(1, self._prompts_per_batch - groups)
        return Prompts.concatenate([next(prompts) for _ in range(missing)])


def free_running(generation: Generation, rewards: Rewards, **limits: int) -> FreeRunning:
    """Sampling that keeps its slots from step to step."""
    schedule = SamplingSchedule(lambda row: None)
    return FreeRunning(generation, rewards, schedule, groups_per_step=NUM_PROMPTS, **limits)


class HalfOfAll:
    """Keeps half of the groups, chosen by their ids."""

    wanted = "ids that are chosen"

    def __call__(self, scored: Scored) -> np.ndarray:
        """Whether each group is kept, bool [N]."""
        ids = scored.completions.prompts.ids_N.tolist()
        return np.array([np.random.default_rng((1, n)).random() < 0.5 for n in ids], bool)


@dataclasses.dataclass
class Totals:
    """Sums over the steps of a run.

    Attributes:
      seconds: processor time of sampling.
      decoded: number of decoded tokens.
      trained: number of tokens of the groups that steps take.
      decode_steps: number of decoding steps of the engine.
      slot_steps: number of slots in these steps, idle ones included.
      prefilled: number of prefilled tokens.
      read: cache entries of all slots, over all decoding steps. XLA reads them all; kernels on accelerators
        read only those in use.
    """

    seconds: float = 0.0
    decoded: int = 0
    trained: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    prefilled: int = 0
    read: int = 0


class WatchedEngine:
    """An engine whose dispatches are counted."""

    def __init__(self, engine: Any, totals: Totals):
        self._engine, self._totals = engine, totals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, params: Any, tokens: Any, lengths: Any) -> Any:
        """See `Engine.prefill`."""
        self._totals.prefilled += int(np.asarray(lengths).sum())
        return self._engine.prefill(params, tokens, lengths)

    def generate(self, params: Any, state: Any, least_active: Any) -> Any:
        """See `Engine.generate`."""
        state = self._engine.generate(params, state, least_active)
        count_n = np.asarray(state.decoded.count)
        self._totals.decoded += int(count_n.sum())
        self._totals.decode_steps += int(count_n.max(initial=0))
        self._totals.read += int(count_n.max(initial=0)) * state.num_slots * state.capacity
        self._totals.slot_steps += int(count_n.max(initial=0)) * self._engine.config.slots
        return state


class SampledRun:
    """Ten steps of one kind."""

    def __init__(self, kind: str, engine: Any, weights: Any, generation_prompts: int):
        self.totals = Totals()
        watched: Any = WatchedEngine(engine, self.totals)
        backend = OfflineBackend(watched, functools.partial(map, lambda tokens: ""))
        backend.load(weights)
        self._timer = NoTimer()
        options = SamplingOptions(G, seed=0, step=0, temperature=1.0)
        generation = Generation(FixedPolicy(backend), options, self._timer)
        grader = FunctionGrader(lambda response, answer: Grade(True, response))
        longest = engine.config.max_response_tokens
        rewards = Rewards(Graders.of(grader), OverlongPunishment(longest, 0, 0.0), self._timer)
        if kind == "whole":
            sampler, per_draw = Sampling(generation, rewards), generation_prompts
        else:
            build = {"drained": DrainedSampling, "full": PartialSampling, "free": free_running}
            limits = {"prompts_per_batch": generation_prompts, "max_staleness": 8}
            sampler, per_draw = build[kind](generation, rewards, **limits), 1
        self._sampler = DynamicSampling(
            sampler, NUM_PROMPTS, max_generation_batches=0, keeps=HalfOfAll()
        )
        self._prompts = NumberedPrompts(per_draw)

    def step(self) -> Completions:
        """Samples the groups of a step."""
        begin = time.process_time()
        completions = self._sampler.sample(self._prompts).completions
        self.totals.seconds += time.process_time() - begin
        self.totals.trained += int(completions.lengths_B.sum())
        self._timer.step += 1
        return completions


KINDS = ("whole", "drained", "full", "free")


def compared(
    build: Callable[[], Any], weights: Any, generation_prompts: int, num_steps: int
) -> dict[str, Totals]:
    """Sums over `num_steps` steps of each kind."""
    runs = {kind: SampledRun(kind, build(), weights, generation_prompts) for kind in KINDS}
    for step in range(num_steps):
        # Another one is the first in each step.
        for kind in (*KINDS[step % len(KINDS) :], *KINDS[: step % len(KINDS)]):
            runs[kind].step()
    return {kind: run.totals for kind, run in runs.items()}


def report(engine: str, slots: int, generation_prompts: int, num_steps: int) -> Iterator[str]:
    """A row of a table for each kind."""
    real = engine == "real"
    build, weights = (real_engine, random_weights()) if real else (fake_engine, {})
    measure = functools.partial(
        compared, lambda: build(slots), weights, generation_prompts, num_steps
    )
    if real:
        # The same samples once before the clock counts, so that every program is compiled.
        measure()
    found = measure()
    for kind, t in found.items():
        cells = [slots, generation_prompts, kind, f"{t.decoded / t.slot_steps:.0%}"]
        cells += [f"{x / t.decode_steps:.1f}" for x in (t.decoded, t.trained)]
        cells.append(f"{t.prefilled / t.decoded:.2f}")
        if real:
            cells.append(f"{t.read / t.decoded:,.0f}")
            cells += [f"{x / t.seconds:,.0f}" for x in (t.decoded, t.trained)]
        yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Prints a table for each engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("real", "fake"), nargs="+", default=("fake", "real"))
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--generation_prompts", type=int, nargs="+", default=[48, 96])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    for engine in args.engine:
        head = ["slots", "batch", "kind", "slots in use", "decoded per decoding step"]
        head += ["trained on per decoding step", "prefilled per decoded"]
        if engine == "real":
            head += ["cache entries read per decoded"]
            head += ["decoded per second of processor time", "trained on"]
        print(f"\n## {engine}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
        for slots, prompts in itertools.product(args.slots, args.generation_prompts):
            for row in report(engine, slots, prompts, args.steps):
                print(row, flush=True)


if __name__ == "__main__":
    main()
