"""Sampling under a curriculum: how answers are graded decides which problems are drawn later."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxrl.data.stream import PromptStream
from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.samplers import Enough, PromptSource, Sampler


class CurriculumSampling:
    """Lets the prompts' stream learn from every graded group, and counts what it passes over.

    It stands inside dynamic sampling: a group that is thrown away has been graded, and says as much. Prompts
    that were drawn ahead stay what they are. Every process has the same verdicts (`rewarding.Rewards` checks
    it), so all of them learn, and draw, the same.
    """

    def __init__(self, inner: Sampler, stream: PromptStream):
        """Args: what samples, and where its prompts come from."""
        self._inner = inner
        self._stream = stream
        self._counted = stream.counts()

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """As the other sampler does."""
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
        """That of the other sampler: what was learned is the stream's."""
        return self._inner.record(prompts)

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Goes on from a record."""
        self._inner.restore(record, prompts)
        self._counted = self._stream.counts()
