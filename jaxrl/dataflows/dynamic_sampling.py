"""Dynamic sampling: train only on prompts that the policy answers sometimes right and sometimes wrong.

DAPO eq. 11. A group whose answers are all right or all wrong has no advantage and no gradient; such
groups are dropped and new prompts are sampled until the batch is full.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.dataflows.experience import Metrics, Sampled
from jaxrl.dataflows.samplers import Enough, PromptSource, Sampler
from jaxrl.errors import UserError
from jaxrl.types import Scored


def keep_mixed_groups(scored: Scored) -> Scored:
    """The groups with 0 < number correct < G.

    Looks at correctness, not at the spread of rewards: a length penalty makes rewards differ within a
    group that carries no signal about the answer, and the float deviation of equal rewards need not be 0.
    """
    correct_N = scored.correct_NG.sum(axis=1)
    mixed_N = (correct_N > 0) & (correct_N < scored.completions.num_samples)
    return scored.take(np.flatnonzero(mixed_N))


@dataclasses.dataclass(frozen=True)
class SamplingStats:
    """What one step sampled, before anything was dropped.

    Attributes:
      generation_batches: how often prompts were drawn.
      prompts: prompts sampled.
      accuracy: share of right answers among all samples.
      all_correct, all_wrong: share of prompts dropped for either reason.
      surplus_prompts: mixed groups beyond the batch, thrown away: by the next step they would be off-policy.
      response_tokens: tokens sampled.
    """

    generation_batches: int
    prompts: int
    accuracy: float
    all_correct: float
    all_wrong: float
    surplus_prompts: int
    response_tokens: int

    def metrics(self) -> dict[str, float]:
        """Under the names that verl and its DAPO recipe use, where they have one."""
        return {
            "train/num_gen_batches": self.generation_batches,
            "train/num_prompts_sampled": self.prompts,
            "train/accuracy": self.accuracy,
            "training/filter_groups/all_correct": self.all_correct,
            "training/filter_groups/all_wrong": self.all_wrong,
            "training/filter_groups/discarded_surplus_prompts": self.surplus_prompts,
            "train/num_response_tokens_sampled": self.response_tokens,
        }


class GroupBuffer:
    """Collects groups over generation batches until a step's worth is there."""

    def __init__(self, num_prompts: int, *, max_generation_batches: int):
        """Args: prompts of a step, and how many generation batches a step may take."""
        self._num_prompts = num_prompts
        self._max_batches = max_generation_batches
        self._sampled: list[Scored] = []
        self._kept: list[Scored] = []

    def add(self, scored: Scored, kept: Scored) -> bool:
        """Takes one generation batch and what was kept of it; True once the step is full.

        Raises:
          UserError: the last allowed batch is in and the step is still not full.
        """
        self._sampled.append(scored)
        self._kept.append(kept)
        if self.missing <= 0:
            return True
        if len(self._sampled) == self._max_batches:
            raise UserError(self._too_few())
        return False

    @property
    def missing(self) -> int:
        """Groups that the step still wants."""
        return self._num_prompts - sum(len(k.completions.prompts) for k in self._kept)

    def take(self) -> tuple[Scored, SamplingStats]:
        """The first groups of the full buffer, and what it took to find them; empties the buffer."""
        groups = Scored.concatenate(self._kept)
        stats = self._stats(surplus=len(groups.completions.prompts) - self._num_prompts)
        self._sampled, self._kept = [], []
        return groups.take(np.arange(self._num_prompts)), stats

    def _stats(self, surplus: int) -> SamplingStats:
        correct_NG = np.concatenate([s.correct_NG for s in self._sampled])
        return SamplingStats(
            generation_batches=len(self._sampled),
            prompts=len(correct_NG),
            accuracy=float(correct_NG.mean()),
            all_correct=float(correct_NG.all(axis=1).mean()),
            all_wrong=float((~correct_NG).all(axis=1).mean()),
            surplus_prompts=surplus,
            response_tokens=int(sum(s.completions.lengths_B.sum() for s in self._sampled)),
        )

    def _too_few(self) -> str:
        stats = self._stats(surplus=0)
        return (
            f"{stats.generation_batches} generation batches ({stats.prompts} prompts) gave "
            f"{self._num_prompts - self.missing} of the {self._num_prompts} groups with both right and wrong "
            "answers that a step needs: "
            f"{stats.all_correct:.0%} of the prompts were answered all right, "
            f"{stats.all_wrong:.0%} all wrong. Use easier or harder prompts, raise "
            "rollout.num_samples, or raise rollout.max_generation_batches"
        )


class DynamicSampling:
    """Takes generation batches from another sampler until a step's worth of groups is mixed."""

    def __init__(self, inner: Sampler, num_prompts: int, *, max_generation_batches: int):
        """Args: where batches come from, groups of a step, and how many batches a step may take."""
        self._inner = inner
        self._num_prompts = num_prompts
        self._max_batches = max_generation_batches

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """The first mixed groups, as many as a step needs, and what it took to find them.

        Raises:
          UserError: the last allowed batch is in and the step is still not full.
        """
        assert enough is None, "dynamic sampling is what says when there is enough"
        buffer = GroupBuffer(self._num_prompts, max_generation_batches=self._max_batches)
        metrics: Metrics = {}
        counts: Counter[str] = Counter()
        full = False
        while not full:
            sampled = self._inner.sample(prompts, enough=_fills(buffer.missing))
            metrics |= sampled.metrics
            counts.update(sampled.counts)
            full = buffer.add(sampled.scored, keep_mixed_groups(sampled.scored))
        groups, stats = buffer.take()
        return Sampled(groups, {**metrics, **stats.metrics()}, counts)

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """That of the other sampler: between two steps nothing is kept."""
        return self._inner.record(prompts)

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Goes on from a record."""
        self._inner.restore(record, prompts)


def _fills(missing: int) -> Enough:
    """Says of each group that is finished whether the step will be full with it."""

    def enough(group: Scored) -> bool:
        nonlocal missing
        missing -= len(keep_mixed_groups(group).completions.prompts)
        return missing <= 0

    return enough
