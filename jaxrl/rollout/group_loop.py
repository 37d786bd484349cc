"""A decode loop whose samples are in groups: adds groups, draws prompts as slots fall free, finds what ends.

All samples of a prompt share one prefill.

N prompts   G samples of each
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import (
    More,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.samples import Sample, Start
from jaxrl.types import Prompts


class GroupLoop:
    """The groups of a decode loop.

    Attributes:
      loop: the decode loop.
      groups: all groups, started or not.
    """

    def __init__(
        self, loop: DecodeLoop, groups: SampleGroups, options: SamplingOptions, engine: Engine
    ):
        """Starts no sample yet.

        Args:
          loop: an empty loop.
          groups: groups; those that are there already start with `go_on`.
          options: how samples are drawn. A new sample has the sampling keys of its step.
          engine: engine of the loop.
        """
        self.loop = loop
        self.groups = groups
        self._options = options
        self._longest_prompt = engine.max_prefill_length
        self._max_tokens = engine.config.max_response_tokens
        self._started: dict[int, list[Sample]] = {}

    def go_on(self) -> None:
        """Starts the unfinished samples of all groups: those of the group with the oldest tokens first.

        Of equally old ones the longest start first, so that the sequences of a prefill have similar lengths.
        """
        oldest = {n: self.groups.oldest_version(n) for n in self.groups}
        samples = [sample for n in oldest for sample in self.groups.group(n) if not sample.finished]
        self._start(sorted(samples, key=lambda s: (oldest[s.prompt], -len(s))))

    def add(self, prompts: Prompts, expected_tokens_N: np.ndarray | None = None) -> None:
        """Starts a group for each prompt, those with the longest expected responses first."""
        check_lengths(prompts, self._longest_prompt)
        expected_N = expected_or_prompt_lengths(prompts, expected_tokens_N)
        new = self.groups.add(prompts, step=self._options.step)
        order = sorted(new, key=lambda n: -expected_N[n - new.start])
        self._start(sample for n in order for sample in self.groups.group(n))

    def draw(self, more: More | None) -> bool:
        """Fills free places with new prompts; returns whether any sample waits or decodes."""
        if more is not None and (places := self.loop.places):
            self.add(more(places, self.loop.num_unfinished))
        return self.loop.unfinished

    def finish(self) -> list[int]:
        """Waits for the dispatch in progress; returns the groups that it has finished."""
        ended = [s for result in self.loop.finish() if (s := result.sample).finished]
        numbers = dict.fromkeys(sample.prompt for sample in ended)
        return [n for n in numbers if self.groups.finished(n)]

    def renew(self, params: Params, options: SamplingOptions) -> None:
        """Goes on with other weights; samples keep their slots and what their caches hold."""
        self._options = options
        self.loop.renew(params, options.step)

    def remove(self, n: int) -> None:
        """Forgets a group. Its unfinished samples leave their slots."""
        self.loop.drop([s for s in self._started.pop(n, []) if not s.finished])
        self.groups.remove(n)

    def _start(self, samples: Iterable[Sample]) -> None:
        asked = self._options
        # Samples without tokens of their own share the prefill of their prompt.
        starts: dict[int, Start] = {}
        options: dict[int, SamplingOptions] = {}
        requested = []
        for sample in samples:
            prompt = self.groups.prompt(sample.prompt)
            start = starts.setdefault(sample.prompt, Start(prompt.tokens[0]))
            if len(sample):
                start = Start(np.concatenate([start.tokens, sample.tokens]))
            if sample.step not in options:
                options[sample.step] = asked.replace(step=sample.step)
            requested.append(
                sample.request(start, int(prompt.ids_N[0]), options[sample.step], self._max_tokens)
            )
            self._started.setdefault(sample.prompt, []).append(sample)
        self.loop.add(requested)
