"""Replays what the engine's host decides for samples of known lengths, dispatch by dispatch.

Scheduler (rollout/scheduler.py) and pages (rollout/slot_pages.py) are the engine's own, and are called in the
order of rollout/decode_loop.py. There are two ways to feed them, as in rollout/driver.py:

    drained       the samples of a batch wait from the beginning, until none is left
    always full   prompts are drawn as slots fall free, until enough groups are finished; the next step goes
                  on with the others (dataflows/samplers.py)

tests/planner/simulation/test_engine_replay.py holds every dispatch equal to the driver's.

    N prompts   G samples of each   B = N G samples   S replicas   W tokens of a dispatch
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxrl.planner.simulation.decode_trace import DecodeTrace, PrefillSizes, PrefillWork
from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.scheduler import Scheduler
from jaxrl.rollout.slot_pages import SlotPages


@dataclasses.dataclass(frozen=True)
class ReplayedEngine:
    """The sizes of an engine that its host decides by.

    Attributes:
      slot_sizes: numbers of slots of all replicas that programs are compiled for, ascending.
      prefill_batch: maximum number of sequences of a prefill.
      replicas: S.
      tokens_per_dispatch: W.
      longest_response: maximum length of a response.
      pages: sizes of a paged cache; None for a contiguous one.
    """

    slot_sizes: tuple[int, ...]
    prefill_batch: int
    replicas: int
    tokens_per_dispatch: int
    longest_response: int
    pages: PageSizes | None = None


class Dispatch(NamedTuple):
    """A dispatch of the engine.

    Attributes:
      steps: number of decoding steps.
      active: number of samples in slots.
      tokens: number of decoded tokens.
      slots: number of slots of all replicas, idle ones included.
      reads: mean number of cached tokens that a step reads, on all replicas.
      busiest: the same for the replica that reads most.
    """

    steps: int
    active: int
    tokens: int
    slots: int
    reads: float
    busiest: float


@dataclasses.dataclass
class ReplayedCall:
    """The host's decisions in one call of a rollout backend.

    Attributes:
      dispatches: all dispatches.
      preempted: number of times that a sample lost its pages and went back to the queue.
      prefills: lengths of the sequences of each prefill.
      inserts: index of the prefill of each insertion into slots.
      finished: groups that were finished, in their order.
      dropped: number of groups that were dropped before, because their tokens were too old.
    """

    dispatches: list[Dispatch] = dataclasses.field(default_factory=list)
    preempted: int = 0
    prefills: list[list[int]] = dataclasses.field(default_factory=list)
    inserts: list[int] = dataclasses.field(default_factory=list)
    finished: list[int] = dataclasses.field(default_factory=list)
    dropped: int = 0

    def trace(self, replicas: int, sizes: PrefillSizes | None = None) -> DecodeTrace:
        """The trace of the busiest replica; with the work of prefills if their `sizes` are given."""
        steps, _, tokens, slots, reads, busiest = np.array(self.dispatches, float).T
        each_step = replicas * steps.sum()
        return DecodeTrace(
            steps,
            slots / replicas,
            busiest,
            tokens.sum() / each_step,
            (steps * reads).sum() / each_step,
            len(self.dispatches),
            PrefillWork.of(self.prefills, sizes, self.inserts) if sizes else None,
            self.preempted,
        )


class EngineReplay:
    """Samples with known lengths on an engine. Begins the lengths again if more prompts are drawn."""

    def __init__(
        self, engine: ReplayedEngine, prompt_tokens: np.ndarray, response_tokens: np.ndarray
    ):
        """Draws no prompts yet.

        Args:
          engine: sizes of the engine.
          prompt_tokens: int [N], length of each prompt.
          response_tokens: int [N, G], length of each response.
        """
        self._engine = engine
        self._prompts_N = np.asarray(prompt_tokens, np.int64)
        self._responses_NG = np.minimum(response_tokens, engine.longest_response)
        self._samples = _Samples(self._responses_NG.shape[1])
        # Unfinished groups in the order in which they were drawn, and the step of their oldest token.
        self._open: dict[int, int | None] = {}
        self._step = 0

    def drained(self) -> ReplayedCall:
        """A batch of all N prompts, until every sample is finished."""
        loop = _Loop(self._engine, self._samples)
        loop.add(self._draw(len(self._prompts_N)))
        while loop.scheduler.unfinished:
            loop.begin()
            loop.finish()
        return loop.call

    def always_full(
        self, *, groups: int, prompts_per_batch: int, max_staleness: int
    ) -> ReplayedCall:
        """A step that ends when enough groups are finished; the next call is the next step.

        Args:
          groups: number of groups of a step.
          prompts_per_batch: largest number of groups whose samples wait or decode.
          max_staleness: largest age of a token, in steps.
        """
        samples, loop = self._samples, _Loop(self._engine, self._samples)
        loop.call.dropped = self._drop_stale(max_staleness)
        loop.add(self._oldest_first())
        most = prompts_per_batch * samples.num_samples

        def start_more() -> bool:
            places = min(loop.scheduler.places, most - loop.scheduler.num_unfinished)
            if places > 0:
                new = self._draw(-(-places // samples.num_samples))
                self._open.update(dict.fromkeys(sorted({samples.group(i) for i in new})))
                loop.add(new)
            return loop.scheduler.unfinished

        start_more()
        finished, ended = loop.call.finished, []
        while len(finished) < groups and (loop.scheduler.unfinished or start_more()):
            loop.begin()
            # The host looks at the groups of the dispatch before, while the devices decode.
            finished += samples.finished_groups(ended)
            if len(finished) < groups:
                start_more()
            ended = loop.finish()
        finished += samples.finished_groups(ended)
        for group in finished:
            del self._open[group]
        for group, step in self._open.items():
            if step is None and samples.has_tokens(group):
                self._open[group] = self._step
        self._step += 1
        return loop.call

    def _draw(self, count: int) -> list[int]:
        """Draws prompts; returns their samples in the order in which they start."""
        first = self._samples.num_groups
        source_N = np.arange(first, first + count) % len(self._prompts_N)
        prompts_N = self._prompts_N[source_N]
        self._samples.add(prompts_N, self._responses_NG[source_N])
        order = first + np.argsort(-prompts_N, kind="stable")
        G = self._samples.num_samples
        return (order[:, None] * G + np.arange(G)).reshape(-1).tolist()

    def _drop_stale(self, max_staleness: int) -> int:
        """Drops groups with tokens that are too old; returns their number."""
        ages = {g: self._step - step for g, step in self._open.items() if step is not None}
        stale = [group for group, age in ages.items() if age > max_staleness]
        for group in stale:
            del self._open[group]
        return len(stale)

    def _oldest_first(self) -> list[int]:
        """The unfinished samples, those of the oldest groups first, and of these the longest."""
        G, samples = self._samples.num_samples, self._samples
        unfinished = [
            i for g in self._open for i in range(g * G, g * G + G) if samples.left_B[i] > 0
        ]

        def place(i: int) -> tuple[float, int]:
            step = self._open[samples.group(i)]
            return math.inf if step is None else step, -int(samples.done_B[i])

        return sorted(unfinished, key=place)


class _Samples:
    """All drawn samples. Sample i is one of the G samples of group i // G.

    Attributes:
      num_samples: G.
      prompt_B: int [B], length of the prompt.
      done_B, left_B: int [B], decoded tokens, and those still to decode.
    """

    def __init__(self, num_samples: int):
        self.num_samples = num_samples
        self.prompt_B, self.done_B, self.left_B = (np.zeros(0, np.int64) for _ in range(3))

    @property
    def num_groups(self) -> int:
        """The number of drawn groups."""
        return len(self.prompt_B) // self.num_samples

    def add(self, prompts_N: np.ndarray, responses_NG: np.ndarray) -> None:
        """Adds groups."""
        new = responses_NG.reshape(-1)
        prompts_B = np.repeat(prompts_N, self.num_samples)
        self.prompt_B = np.concatenate([self.prompt_B, prompts_B])
        self.done_B = np.concatenate([self.done_B, np.zeros_like(new)])
        self.left_B = np.concatenate([self.left_B, new])

    def group(self, i: int) -> int:
        """The group of a sample."""
        return i // self.num_samples

    def source(self, i: int) -> Hashable:
        """What the prefill of a sample is shared by: a prompt, or nothing if the sample has tokens."""
        return ("sample", i) if self.done_B[i] else self.group(i)

    def source_tokens(self, source: Any) -> int:
        """The length of a source."""
        if isinstance(source, tuple):
            return int(self.prompt_B[source[1]] + self.done_B[source[1]])
        return int(self.prompt_B[source * self.num_samples])

    def tokens(self, i: int) -> np.ndarray:
        """Any tokens: those of a prompt differ from those of others, and so do those of a sample."""
        prompt, done = int(self.prompt_B[i]), int(self.done_B[i])
        return np.repeat(np.array([self.group(i), -1 - i], np.int32), [prompt, done])

    def has_tokens(self, group: int) -> bool:
        """Whether any sample of a group has tokens."""
        return bool(self._of_group(self.done_B, group).any())

    def finished_groups(self, ended: Iterable[int]) -> list[int]:
        """The groups of ended samples that have no other samples left."""
        groups = dict.fromkeys(self.group(i) for i in ended)
        return [g for g in groups if not self._of_group(self.left_B, g).any()]

    def _of_group(self, values_B: np.ndarray, group: int) -> np.ndarray:
        return values_B[group * self.num_samples : (group + 1) * self.num_samples]


class _Loop:
    """The decisions of a `DecodeLoop`.

    Attributes:
      scheduler: samples that wait, and slots.
      call: what has been decided so far.
    """

    def __init__(self, engine: ReplayedEngine, samples: _Samples):
        self._engine, self._samples = engine, samples
        self._pages: SlotPages | None = None
        if engine.pages is not None:
            self._pages = SlotPages(
                engine.pages,
                num_slots=engine.slot_sizes[-1],
                tokens_per_dispatch=engine.tokens_per_dispatch,
                most_response_tokens=engine.longest_response,
            )
        self.scheduler = Scheduler(
            (),
            slot_sizes=engine.slot_sizes,
            prefill_batch=engine.prefill_batch,
            shards=engine.replicas,
            may_start=self._take,
        )
        self.call = ReplayedCall()

    def add(self, samples: Iterable[int]) -> None:
        """Queues samples; they start in this order."""
        for i in samples:
            self.scheduler.add(i, self._samples.source(i))

    def _take(self, slot: int, i: int) -> bool:
        if self._pages is None:
            return True
        tokens = self._samples.tokens(i)
        done = int(self._samples.done_B[i])
        most = len(tokens) - done + self._engine.longest_response
        return self._pages.take(slot, tokens, most, done)

    def begin(self) -> None:
        """Chooses the slots of a dispatch: resize, grow pages, admit."""
        scheduler = self.scheduler
        scheduler.resize()
        dropped = [] if self._pages is None else self._pages.grow()
        self.call.preempted += len(dropped)
        for i in scheduler.finish(dropped):
            scheduler.add_first(i, self._samples.source(i))
        while (admission := scheduler.admit()) is not None:
            if admission.needs_prefill:
                tokens = [self._samples.source_tokens(source) for source in admission.sources]
                self.call.prefills.append(tokens)
            self.call.inserts.append(len(self.call.prefills) - 1)

    def finish(self) -> list[int]:
        """Decodes until the host has to act; returns the samples that ended."""
        scheduler, samples = self.scheduler, self._samples
        slot_n = scheduler.busy_slots
        ids = np.array([scheduler.owner(slot) for slot in slot_n.tolist()])
        left = samples.left_B[ids]
        steps = _dispatch_steps(left, scheduler.enough_active, self._engine.tokens_per_dispatch)
        count = np.minimum(left, steps)
        tokens = samples.prompt_B[ids] + samples.done_B[ids] + count / 2
        replicas = self._engine.replicas
        replica_n = slot_n // (scheduler.num_slots // replicas)
        reads_S = np.bincount(replica_n, tokens * count / steps, replicas)
        self.call.dispatches.append(
            Dispatch(
                steps,
                len(ids),
                int(count.sum()),
                scheduler.num_slots,
                float(reads_S.sum()),
                float(reads_S.max()),
            )
        )
        samples.done_B[ids] += count
        samples.left_B[ids] -= count
        over = samples.left_B[ids] == 0
        self._free(slot_n, count, slot_n[over])
        return ids[over].tolist()

    def _free(self, slot_n: np.ndarray, count: np.ndarray, ended: np.ndarray) -> None:
        """Frees the slots of ended samples after a dispatch."""
        self.scheduler.finish(ended.tolist())
        if self._pages is not None:
            count_n = np.zeros(self._engine.slot_sizes[-1], np.int64)
            count_n[slot_n] = count
            self._pages.advance(count_n)
            self._pages.end(ended.tolist())


def _dispatch_steps(left: np.ndarray, enough_active: int, most: int) -> int:
    """Steps until few enough slots are active for the host to act, at most W."""
    ending = len(left) - enough_active
    return int(min(most, np.partition(left, ending - 1)[ending - 1]))
