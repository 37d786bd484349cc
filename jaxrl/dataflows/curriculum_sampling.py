"""Sampling with a curriculum: graded answers change the probability of drawing each problem."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxrl.data.stream import PromptStream
from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.samplers import Enough, PromptSource, Sampler


class CurriculumSampling:
    """Updates the pass rates of the prompt stream with every graded group, and counts skipped problems.

    Dynamic sampling wraps it, so groups that are dropped later count too. Prompts drawn already stay.
    All processes have the same verdicts (`rewarding.Rewards` checks this), so they draw the same prompts.
    """

    def __init__(self, inner: Sampler, stream: PromptStream):
        """Args: the wrapped sampler, and the stream of its prompts."""
        self._inner = inner
        self._stream = stream
        self._counted = stream.counts()

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """Groups of the wrapped sampler."""
        sampled = self._inner.sample(prompts, enough=enough)
        self._stream.learn(sampled.completions.prompts.ids_N, sampled.scored.correct_NG)
        counts = Counter(sampled.counts)
        counts.update(self._new_counts())
        return dataclasses.replace(
            sampled, metrics={**sampled.metrics, **self._stream.metrics()}, counts=counts
        )

    def _new_counts(self) -> dict[str, int]:
        before, self._counted = self._counted, self._stream.counts()
        return {name: count - before[name] for name, count in self._counted.items()}

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """The record of the wrapped sampler; the stream saves the pass rates."""
        return self._inner.record(prompts)

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Continues from a record."""
        self._inner.restore(record, prompts)
        self._counted = self._stream.counts()
