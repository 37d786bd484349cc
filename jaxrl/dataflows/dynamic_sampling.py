"""Dynamic sampling: train only on groups whose answers differ in quality.

DAPO eq. 11. A group whose answers are all right or all wrong has zero advantage and no gradient. Such groups
are dropped, and new prompts are sampled until the batch is full.

    keeps="correctness"    keeps a group with right and wrong answers
    keeps="score"          keeps a group whose scores differ, for rewards other than right or wrong
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.dataflows.experience import Metrics, Sampled
from jaxrl.dataflows.samplers import Enough, PromptSource, Sampler
from jaxrl.errors import UserError
from jaxrl.types import Scored

Keeps = Literal["correctness", "score"]
_WANTED: dict[Keeps, str] = {
    "correctness": "both right and wrong answers",
    "score": "scores that differ",
}


def kept_groups(scored: Scored, keeps: Keeps) -> np.ndarray:
    """Which groups a step trains on, bool [N], by their samples that count (`Scored.counts_B`)."""
    # Not the deviation of rewards: a length penalty makes them differ without a signal about the answer, and
    # the float deviation of equal rewards need not be 0. `score_B` is without the length penalty, too.
    return scored.differ_N(scored.correct_B if keeps == "correctness" else scored.score_B)


class NotEnoughGroups(UserError):
    """A step did not find enough groups.

    Attributes:
      sampled: all groups that were sampled for it.
    """

    def __init__(self, message: str, sampled: Scored):
        super().__init__(message)
        self.sampled = sampled


@dataclasses.dataclass(frozen=True)
class SamplingStats:
    """Statistics of everything that a step sampled, including dropped groups.

    Attributes:
      generation_batches: number of generation batches.
      prompts: number of prompts.
      accuracy: share of right answers to prompts with a ground truth; None if there are none.
      all_correct, all_wrong: share of these prompts whose answers are all right, or all wrong; None likewise.
        Answers of failed agents or without a reward count nowhere, nor do prompts without others.
      left_out: numbers of these answers, as in `Scored.left_out`.
      surplus_prompts: number of kept groups beyond the batch, which are thrown away.
      filled_prompts: number of dropped groups that were used to complete the step.
      response_tokens: number of sampled tokens.
    """

    generation_batches: int
    prompts: int
    accuracy: float | None
    all_correct: float | None
    all_wrong: float | None
    left_out: Mapping[str, int]
    surplus_prompts: int
    filled_prompts: int
    response_tokens: int

    def metrics(self) -> dict[str, float]:
        """The metrics, with the names of verl and its DAPO recipe."""
        metrics: dict[str, float | None] = {
            "train/num_gen_batches": self.generation_batches,
            "train/num_prompts_sampled": self.prompts,
            "train/accuracy": self.accuracy,
            "training/filter_groups/all_correct": self.all_correct,
            "training/filter_groups/all_wrong": self.all_wrong,
            "training/filter_groups/discarded_surplus_prompts": self.surplus_prompts,
            "train/num_response_tokens_sampled": self.response_tokens,
            # Those of the dropped groups too.
            **self.left_out,
        }
        if self.filled_prompts:
            metrics["training/filter_groups/filled_prompts"] = self.filled_prompts
        return {name: value for name, value in metrics.items() if value is not None}


class GroupBuffer:
    """Collects groups from generation batches until a step is full."""

    def __init__(
        self,
        num_prompts: int,
        *,
        max_generation_batches: int,
        keeps: Keeps = "correctness",
        fills_up: bool = False,
    ):
        """Args.

        num_prompts: number of groups of a step.
        max_generation_batches: largest number of generation batches per step; 0 for no limit.
        keeps: which groups count, see `kept_groups`.
        fills_up: whether dropped groups complete a step that is not full after the last batch.
        """
        self._num_prompts = num_prompts
        self._max_batches = max_generation_batches
        self._keeps: Keeps = keeps
        self._fills_up = fills_up
        self._prompts_sampled: list[int] = []
        # Answers to prompts with a ground truth: which are right, and which count.
        self._correct_NG: list[np.ndarray] = []
        self._counts_NG: list[np.ndarray] = []
        self._left_out: Counter[str] = Counter()
        self._response_tokens = 0
        self._kept: list[Scored] = []
        # Stored only if they may be needed: without a limit they would grow forever.
        self._sampled: list[Scored] = []
        self._dropped: list[Scored] = []

    def add(self, scored: Scored) -> bool:
        """Adds a generation batch; returns whether the step is full.

        Raises:
          NotEnoughGroups: the step is not full after the last allowed batch.
        """
        kept_N = kept_groups(scored, self._keeps)
        answers = scored.completions.prompts.answers
        self._prompts_sampled.append(len(answers))
        has_truth_N = np.array([bool(a) for a in answers], bool)
        self._correct_NG.append(scored.correct_NG[has_truth_N])
        self._counts_NG.append(scored.counts_NG[has_truth_N])
        self._left_out.update(scored.left_out)
        self._response_tokens += int(scored.completions.lengths_B.sum())
        self._kept.append(scored.take(np.flatnonzero(kept_N)))
        if self._max_batches:
            self._sampled.append(scored)
        if self._fills_up:
            self._dropped.append(scored.take(np.flatnonzero(~kept_N)))
        if self.missing <= 0:
            return True
        if not self._max_batches or len(self._sampled) < self._max_batches:
            return False
        if self._fills_up and self.missing <= _num_groups(self._dropped):
            return True
        stats, graded = self._stats(), ""
        if stats.accuracy is not None:
            graded = (
                f": {stats.all_correct:.0%} of the prompts were answered all right, "
                f"{stats.all_wrong:.0%} all wrong"
            )
        if failed := stats.left_out.get("agent/failed"):
            graded += f"; {failed} samples of agents failed (agent/failed)"
        if abstained := stats.left_out.get("reward/abstained"):
            graded += f"; {abstained} samples have no reward (reward/abstained)"
        message = (
            f"{stats.generation_batches} generation batches ({stats.prompts} prompts) gave "
            f"{self._num_prompts - self.missing} of the {self._num_prompts} groups with "
            f"{_WANTED[self._keeps]} that a step needs{graded}. Use easier or harder prompts, raise "
            "rollout.num_samples or rollout.max_generation_batches, or go on with what there is by "
            "rollout.on_shortage=fill"
        )
        raise NotEnoughGroups(message, Scored.concatenate(self._sampled))

    @property
    def missing(self) -> int:
        return self._num_prompts - _num_groups(self._kept)

    def take(self) -> tuple[Scored, SamplingStats]:
        """Returns the first groups of the full buffer with their statistics, and empties the buffer."""
        stats = self._stats()
        # Dropped groups last, so that they only fill what is missing.
        groups = Scored.concatenate([*self._kept, *self._dropped])
        self._prompts_sampled, self._correct_NG, self._response_tokens = [], [], 0
        self._counts_NG, self._left_out = [], Counter()
        self._sampled, self._kept, self._dropped = [], [], []
        # The surplus is thrown away: in the next step it would be off-policy.
        return groups.take(np.arange(self._num_prompts)), stats

    def _stats(self) -> SamplingStats:
        correct_NG, counts_NG = map(np.concatenate, (self._correct_NG, self._counts_NG))
        counted = counts_NG.any(axis=1)
        right_N = (correct_NG | ~counts_NG)[counted].all(axis=1)
        wrong_N = (~correct_NG | ~counts_NG)[counted].all(axis=1)
        return SamplingStats(
            generation_batches=len(self._prompts_sampled),
            prompts=sum(self._prompts_sampled),
            accuracy=_mean(correct_NG[counts_NG]),
            all_correct=_mean(right_N),
            all_wrong=_mean(wrong_N),
            left_out=self._left_out,
            # A buffer that is not full is filled up: it has no surplus then.
            surplus_prompts=max(0, -self.missing),
            filled_prompts=max(0, self.missing),
            response_tokens=self._response_tokens,
        )


def _mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None


def _num_groups(parts: Sequence[Scored]) -> int:
    return sum(len(part.completions.prompts) for part in parts)


class DynamicSampling:
    """Takes generation batches from another sampler until a step has enough groups with a signal."""

    def __init__(
        self,
        inner: Sampler,
        num_prompts: int,
        *,
        max_generation_batches: int,
        keeps: Keeps = "correctness",
        fills_up: bool = False,
    ):
        """Args: the wrapped sampler, and arguments of `GroupBuffer`."""
        self._inner = inner
        self._keeps: Keeps = keeps
        self._buffer = functools.partial(
            GroupBuffer,
            num_prompts,
            max_generation_batches=max_generation_batches,
            keeps=keeps,
            fills_up=fills_up,
        )

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """The groups of a step: the first that are kept, with statistics of sampling.

        Raises:
          NotEnoughGroups: the step is not full after the last allowed batch.
        """
        assert enough is None, "dynamic sampling itself decides when there is enough"
        buffer = self._buffer()
        metrics: Metrics = {}
        counts: Counter[str] = Counter()
        full = False

        def fills(groups: Scored) -> bool:
            # Called with the groups of each prompt as it finishes, before the buffer has the batch.
            nonlocal missing
            missing -= int(kept_groups(groups, self._keeps).sum())
            return missing <= 0

        while not full:
            missing = buffer.missing
            sampled = self._inner.sample(prompts, enough=fills)
            metrics |= sampled.metrics
            counts.update(sampled.counts)
            full = buffer.add(sampled.scored)
        groups, stats = buffer.take()
        return Sampled(groups, {**metrics, **stats.metrics()}, counts)

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """The record of the wrapped sampler; the buffer is empty between steps."""
        return self._inner.record(prompts)

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        self._inner.restore(record, prompts)
