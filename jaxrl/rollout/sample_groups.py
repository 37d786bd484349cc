"""The samples of a backend in groups, one group per prompt, and the decode loops that they go through.

Example, G = 2, one unfinished group of an earlier call, then `add` with the prompts "p", "q":

    group 0   the unfinished group; its samples keep their tokens
    group 1   p: two samples without tokens
    group 2   q: two samples without tokens

All samples of a prompt share one prefill.

    N prompts   G samples of each
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.replica_groups import ReplicaGroups
from jaxrl.rollout.backend import (
    DecodeTexts,
    More,
    OnGroup,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.decode_loops import DecodeLoops
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.fetching import fetch_rows, fetch_unfinished
from jaxrl.rollout.samples import (
    Rollout,
    Sample,
    Start,
    UnfinishedGroups,
    completions_of,
    oldest_version,
)
from jaxrl.types import Completions, Prompts


class SampleGroups:
    """Groups of samples by number; unfinished groups of an earlier call come first.

    Attributes:
      prompts: prompt of each group, in the order in which they were added.
      samples: samples of each group.
      decode_texts: function from token ids to texts.
      replicas: groups of processes that sample them; None if all do together.
    """

    def __init__(
        self,
        options: SamplingOptions,
        decode_texts: DecodeTexts,
        unfinished: UnfinishedGroups | None = None,
    ):
        """Args: those of `RolloutBackend.resume`; `unfinished` is copied.

        Raises:
          UserError: the unfinished groups have another number of samples.
        """
        self._num_samples = options.num_samples
        self._step = options.step
        self.decode_texts = decode_texts
        self.replicas: ReplicaGroups | None = None
        self.prompts: dict[int, Prompts] = {}
        self.samples: dict[int, list[Sample]] = {}
        self._next = 0
        # For both `hand_out` and the result, which then share their texts.
        self._completions: dict[int, Completions] = {}
        if unfinished is not None:
            if unfinished.num_samples != options.num_samples:
                raise UserError(
                    f"{len(unfinished.prompts)} unfinished groups have {unfinished.num_samples} samples each "
                    f"and would go on with num_samples {options.num_samples}; a run keeps one number: finish "
                    f"them first, or set it to {unfinished.num_samples}"
                )
            self._next = len(unfinished.prompts)
            for n in range(self._next):
                self.prompts[n] = unfinished.prompts.take([n])
                self.samples[n] = [sample.at(n) for sample in unfinished.group(n)]

    def add(self, prompts: Prompts, *, step: int | None = None) -> range:
        """Adds a group without tokens for each prompt; returns their numbers.

        Args:
          prompts: the prompts.
          step: training step that starts the samples; None is that of the options.
        """
        new = range(self._next, self._next + len(prompts))
        self._next = new.stop
        step = self._step if step is None else step
        for n in new:
            self.prompts[n] = prompts.take([n - new.start])
            self.samples[n] = [Sample(n, k, step) for k in range(self._num_samples)]
        return new

    def finished(self, n: int) -> bool:
        return all(sample.finished for sample in self.samples[n])

    def is_mine(self, n: int) -> bool | None:
        """Whether this process grades a group; None if any may, because all have its tokens."""
        # Samples that had ended in an earlier run are everywhere.
        holder = max(sample.holder for sample in self.samples[n])
        if self.replicas is None or holder < 0:
            return None
        # Groups are dealt out in turn.
        turn = n // len(self.replicas.processes)
        return hosts.is_turn_of_this(turn, self.replicas.processes[holder])

    def hand_out(self, finished: Sequence[int], on_group: OnGroup | None) -> bool:
        """Calls `on_group` with each finished group; returns True if any call returned True."""
        return on_group is not None and any([on_group(self.completions([n])) for n in finished])

    def completions(self, finished: Sequence[int]) -> Completions:
        """The completions of the finished groups at these indices."""
        fetch = None
        if self.replicas is not None:
            fetch = functools.partial(fetch_rows, self.replicas, self.decode_texts)
        for n in finished:
            if n not in self._completions:
                self._completions[n] = completions_of(
                    self.prompts[n], self.samples[n], self._num_samples, self.decode_texts, fetch
                )
        if not finished:
            none = Prompts.concatenate([])
            return completions_of(none, [], self._num_samples, self.decode_texts, fetch)
        return Completions.concatenate([self._completions[n] for n in finished])

    def rollout(self) -> Rollout:
        """The finished groups as completions, and the unfinished groups unchanged."""
        done = [n for n in self.samples if self.finished(n)]
        return Rollout(
            completions=self.completions(done),
            prompt_indices=tuple(done),
            unfinished=self.unfinished(),
        )

    def unfinished(self) -> UnfinishedGroups:
        """A copy of the unfinished groups."""
        return self.copied([n for n in self.samples if not self.finished(n)])

    def copied(self, groups: Sequence[int]) -> UnfinishedGroups:
        """A copy of some groups."""
        bring = None
        if self.replicas is not None:
            bring = functools.partial(fetch_unfinished, self.replicas)
        return UnfinishedGroups(
            Prompts.concatenate([self.prompts[n] for n in groups]),
            self._num_samples,
            tuple(sample.at(i) for i, n in enumerate(groups) for sample in self.samples[n]),
            bring,
        )

    def remove(self, n: int) -> None:
        del self.prompts[n], self.samples[n]
        self._completions.pop(n, None)


class GroupLoop:
    """Groups in decode loops.

    Attributes:
      loops: the decode loops.
      groups: all groups, started or not.
      options: how samples are drawn. A new sample has the sampling keys of its step.
    """

    def __init__(
        self, loops: DecodeLoops, groups: SampleGroups, options: SamplingOptions, engine: Engine
    ):
        """Starts no sample yet.

        Args:
          loops: the loops.
          groups: groups; those that are there already start with `go_on`.
          options: see above.
          engine: engine whose limits the loops have.
        """
        self.loops = loops
        self.groups = groups
        groups.replicas = loops.groups
        self.options = options
        self._longest_prompt = engine.config.max_prompt_tokens
        self._max_tokens = engine.config.max_response_tokens
        self._started: dict[int, list[Sample]] = {}
        self._num_unfinished = 0

    def go_on(self) -> None:
        """Starts the unfinished samples of all groups: those of the group with the oldest tokens first."""
        # Of equally old ones the longest start first, so that sequences of a prefill have similar lengths.
        groups = self.groups.samples
        oldest = {n: oldest_version(group) for n, group in groups.items()}
        samples = [sample for group in groups.values() for sample in group if not sample.finished]
        self._start(sorted(samples, key=lambda s: (oldest[s.prompt], -len(s))))

    def add(
        self,
        prompts: Prompts,
        expected_tokens_N: np.ndarray | None = None,
    ) -> None:
        """Adds a group for each prompt and starts it, those with the longest expected responses first.

        Args: as in `RolloutBackend.generate`.
        """
        check_lengths(prompts, self._longest_prompt)
        expected_N = expected_or_prompt_lengths(prompts, expected_tokens_N)
        new = self.groups.add(prompts, step=self.options.step)
        order = sorted(new, key=lambda n: -expected_N[n - new.start])
        work_of = None
        if expected_tokens_N is not None:
            work_of = {n: float(expected_N[n - new.start]) for n in new}
        self._start((sample for n in order for sample in self.groups.samples[n]), work_of)

    def draw(self, more: More | None) -> None:
        """Fills free places with new prompts."""
        if more is not None and (places := self.loops.places):
            self.add(more(places, self._num_unfinished))

    def ended(self, samples: Sequence[Sample]) -> list[int]:
        """The groups that are finished now that these samples have ended, of which some may be of others."""
        own = [sample for sample in samples if sample in self._started.get(sample.prompt, ())]
        self._num_unfinished -= len(own)
        numbers = dict.fromkeys(sample.prompt for sample in own if sample.finished)
        return [n for n in numbers if self.groups.finished(n)]

    def remove(self, n: int) -> None:
        """Forgets a group. Its unfinished samples leave their slots."""
        dropped = [s for s in self._started.pop(n, []) if not s.finished]
        self._num_unfinished -= len(dropped)
        self.loops.drop(dropped)
        self.groups.remove(n)

    def _start(self, samples: Iterable[Sample], work_of: Mapping[int, float] | None = None) -> None:
        # Samples without tokens of their own share the prefill of their prompt.
        starts: dict[int, Start] = {}
        options: dict[int, SamplingOptions] = {}
        requested = []
        for sample in samples:
            prompt = self.groups.prompts[sample.prompt]
            start = starts.setdefault(sample.prompt, Start(prompt.tokens[0]))
            if len(sample):
                start = Start(np.concatenate([start.tokens, sample.tokens]))
            if sample.step not in options:
                options[sample.step] = self.options.replace(step=sample.step)
            requested.append(
                sample.request(start, int(prompt.ids_N[0]), options[sample.step], self._max_tokens)
            )
            self._started.setdefault(sample.prompt, []).append(sample)
        self._num_unfinished += len(requested)
        self.loops.add(requested, work_of)
