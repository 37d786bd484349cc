"""The samples of a backend in groups, one group per prompt.

Example, G = 2, one unfinished group of an earlier call, then `add` with the prompts "p", "q":

    group 0   the unfinished group; its samples keep their tokens
    group 1   p: two samples without tokens
    group 2   q: two samples without tokens

All samples of a prompt share one prefill.

    N prompts   G samples of each
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.replica_groups import ReplicaGroups
from jaxrl.rollout.backend import DecodeTexts, OnGroup, SamplingOptions
from jaxrl.rollout.fetching import fetch_rows, fetch_unfinished
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups, completions_of
from jaxrl.types import Completions, Prompts


class SampleGroups:
    """Groups of samples by number; unfinished groups of an earlier call come first.

    Attributes:
      prompts: prompt of each group, in the order in which they were added.
      samples: samples of each group.
      ended: groups that are finished and were not taken yet, in the order in which they ended.
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
        self.ended = [n for n in self.samples if self.finished(n)]

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

    def take_ended(self) -> list[int]:
        """The groups that have ended since the last call."""
        taken, self.ended = self.ended, []
        return taken

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
