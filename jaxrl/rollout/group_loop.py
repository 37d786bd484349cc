"""The driver of all sampling: groups of samples go through decode loops, one dispatch after another.

    draw      new prompts for free slots
    step      waits for the dispatch in progress and starts the next one; draws while the devices work
    finish    waits for the dispatch in progress

    whole batch    prompts are added; steps until none is left                        (`generate`)
    partial        unfinished groups go on; each step draws, until there is enough    (`resume`)
    free running   likewise, without an end; the weights change between two steps     (`continuous`)

                       weights 0 ------------> weights 1 ----------> weights 2
    slot 0             [prompt 0     ][3               ][6         ..
    slot 1             [1  ][2                ][4  ][5             ..

A sample in a slot goes on with the new weights and keeps its cache, which older weights have computed (as in
PipelineRL). Nothing is prefilled again. The log-probability of a token is that of the weights and the cache
that drew it. Each token keeps the version of its weights.

One dispatch is always in progress, so the devices work while the host does something else. With groups of
processes (`decode_loops`) they tell each other meanwhile what the dispatch before has brought. So a process
waits for the others only if they are more than a dispatch behind.

An evaluation goes through the same slots, as further samples with options of their own. It must be finished
before the weights change, so its accuracy is that of one version of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import (
    More,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.decode_loops import DecodeLoops
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.samples import Sample, Start, UnfinishedGroups, oldest_version
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Completions, Prompts


class FinishedGroup(NamedTuple):
    """The samples of a problem, all finished.

    Attributes:
      completions: its samples: a group, or one for each role of an agent that learns.
      samples: the same arrays as a group that a checkpoint can hold.
      mine: whether this process grades it; None if they take turns.
    """

    completions: Completions
    samples: UnfinishedGroups
    mine: bool | None = None

    @property
    def oldest_version(self) -> int:
        """The policy version of its oldest token."""
        return oldest_version(self.samples.samples)


# Called with the completions of each finished group, and `FinishedGroup.mine`.
OnFinished: TypeAlias = Callable[[Completions, bool | None], None]


class GroupLoop:
    """Groups of samples that stay in their slots while the weights change. Not thread-safe.

    With `agrees` methods are collective, and answer alike on every process.

    Attributes:
      groups: all groups, started or not.
      loops: the decode loops.
      options: how samples are drawn. A new sample has the sampling keys of its step.
      members: group of each replica (`ReplicaGroups.members`), as a recorded schedule has it.
    """

    def __init__(
        self,
        groups: SampleGroups,
        options: SamplingOptions,
        make_loops: Callable[[], DecodeLoops],
        params: Callable[[], Params],
        limits: EngineConfig,
        *,
        agrees: bool = True,
    ):
        """Samples nothing yet.

        Args:
          groups: groups to go on with; finished ones are handed out.
          options: see above.
          make_loops: function that returns empty decode loops without weights.
          params: function that returns the weights that are loaded.
          limits: limits of the engine.
          agrees: whether groups of processes tell each other in each step what has ended; else each goes on
            without the others until nothing of its own is left.
        """
        self.groups = groups
        self.options = options
        self._make_loops = make_loops
        self._params = params
        self._limits = limits
        self._agrees = agrees
        self._in_progress = False
        self._ended_here: list[Sample] = []
        # Groups of an evaluation in the same decode loops, and what gets them.
        self._beside: GroupLoop | None = None
        self._on_finished: OnFinished | None = None
        self._free()
        self.members = () if self.loops.groups is None else self.loops.groups.members

    def _free(self) -> None:
        """Begins with empty slots, and with the weights that are loaded at the next step."""
        self.loops = self._make_loops()
        self.groups.replicas = self.loops.groups
        self._started: dict[int, list[Sample]] = {}
        self._num_started = 0
        self._has_weights = False

    @property
    def num_unfinished(self) -> int:
        return len(self.groups.samples) - len(self.groups.ended)

    # Into the loops

    def go_on(self) -> None:
        """Starts unfinished samples that are in no loop: those of the group with the oldest tokens first."""
        # Of equally old ones the longest start first, so that sequences of a prefill have similar lengths.
        groups = {n: x for n, x in self.groups.samples.items() if n not in self._started}
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
        check_lengths(prompts, self._limits.max_prompt_tokens)
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
            self.add(more(places, self._num_started))

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
            number, longest = int(prompt.ids_N[0]), self._limits.max_response_tokens
            requested.append(sample.request(start, number, options[sample.step], longest))
            self._started.setdefault(sample.prompt, []).append(sample)
        self._num_started += len(requested)
        self.loops.add(requested, work_of)

    # Through the loops

    def dispatch(self, options: SamplingOptions, more: More) -> bool:
        """Makes a step, and draws prompts meanwhile.

        Args:
          options: sampling options; `step` is the version of the weights.
          more: draws prompts, as in `RolloutBackend.resume`.

        Returns:
          Whether a dispatch was started; False if there is nothing to sample and nothing was drawn.
        """
        return self.step(options, functools.partial(self.draw, more))

    def step(self, options: SamplingOptions, meanwhile: Callable[[], None]) -> bool:
        """Waits for the dispatch in progress, and starts the next one with the weights that are loaded.

        Args:
          options: sampling options; `step` is the version of the weights.
          meanwhile: called while the devices work, and before if nothing is left to sample, once groups that
            the dispatch before has finished are in `groups.ended`. It may `draw`.

        Returns:
          Whether a dispatch was started; False if there is nothing to sample.
        """
        self._wait()
        if not self._has_weights or self.options.step != options.step:
            evaluates = self._beside is not None and self._beside._started
            assert not evaluates or self.options.step == options.step, (
                "an evaluation has one version"
            )
            self.loops.renew(self._params(), options.step)
        self.options, self._has_weights = options, True
        self.go_on()
        if self._beside is not None:
            self._beside.go_on()
        if not self.loops.num_unfinished(here=not self._agrees):
            self._agree()
            # No `begin` does it before.
            self.loops.give_ended()
            meanwhile()
        if not self.loops.num_unfinished(here=not self._agrees):
            return False
        self.loops.begin()
        self._in_progress = True
        # Now the devices work again.
        self._agree()
        meanwhile()
        return True

    def finish(self) -> None:
        """Waits for the dispatch in progress. All tokens then belong to their samples."""
        if self._wait():
            self._agree()
        self.loops.give_tokens()

    def _wait(self) -> bool:
        """Waits for the dispatch in progress; returns whether there was one."""
        in_progress, self._in_progress = self._in_progress, False
        if in_progress:
            self._ended_here = self.loops.finish()
        return in_progress

    def _agree(self) -> None:
        """Takes over what has ended, on all processes or here."""
        ended, self._ended_here = self._ended_here, []
        if self._agrees:
            ended = self.loops.agree()
        for each in (self, self._beside):
            if each is not None:
                each.groups.ended += each.ended(ended)

    # Out of the loops

    def ended(self, samples: Sequence[Sample]) -> list[int]:
        """The groups that are finished now that these samples have ended, of which some may be of others."""
        own = [sample for sample in samples if sample in self._started.get(sample.prompt, ())]
        self._num_started -= len(own)
        numbers = dict.fromkeys(sample.prompt for sample in own if sample.finished)
        return [n for n in numbers if self.groups.finished(n)]

    def take_finished(self) -> list[FinishedGroup]:
        """The groups that have finished since the last call, in the order in which they did."""
        self.loops.give_ended()
        if self._beside is not None and self._on_finished is not None:
            other = self._beside.groups
            for n in other.take_ended():
                self._on_finished(other.completions([n]), other.is_mine(n))
        groups, taken = self.groups, self.groups.take_ended()
        found = [
            FinishedGroup(groups.completions([n]), groups.copied([n]), groups.is_mine(n))
            for n in taken
        ]
        for n in taken:
            self._remove(n)
        return found

    def evaluate(self, prompts: Prompts, options: SamplingOptions, on_group: OnFinished) -> None:
        """Answers further prompts beside the others, from the next step on.

        Args:
          prompts, options: the prompts, and how they are sampled.
          on_group: called by `take_finished` with each finished group of them.
        """
        assert self._beside is None, "one evaluation at a time"
        groups = SampleGroups(options, self.groups.decode_texts)
        groups.add(prompts)
        self._on_finished = on_group
        self._beside = GroupLoop(groups, options, lambda: self.loops, self._params, self._limits)

    def take_evaluation(self) -> Completions | None:
        """The answers to the prompts of `evaluate`, in their order; None if some are not finished."""
        assert self._beside is not None, "`evaluate` comes first"
        groups = self._beside.groups
        if not all(groups.finished(n) for n in groups.samples):
            return None
        self._beside = None
        return groups.rollout().completions

    def drop_older(self, version: int) -> int:
        """Drops unfinished groups with a token of a version before `version`; returns their number."""
        self.finish()
        old = [n for n, oldest in self.oldest_versions().items() if oldest < version]
        for n in old:
            self._remove(n)
        return len(old)

    def oldest_versions(self) -> dict[int, int]:
        """The policy version of the oldest token of each unfinished group, by number, as of `drop_older`."""
        groups = self.groups
        return {n: oldest_version(g) for n, g in groups.samples.items() if n not in groups.ended}

    def unfinished(self) -> UnfinishedGroups:
        """A copy of the unfinished groups, without the tokens of a dispatch in progress."""
        self.loops.give_tokens()
        return self.groups.unfinished()

    def pause(self) -> None:
        """Frees the slots. The next step prefills unfinished samples, with the weights of that time."""
        self.finish()
        self._free()
        if self._beside is not None:
            self._beside._free()

    def release_weights(self) -> None:
        """Releases the weights; the next step takes those that are loaded then."""
        self.finish()
        self._has_weights = False
        self.loops.release_weights()

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of speculation since the last pause."""
        return self.loops.speculation.metrics()

    def _remove(self, n: int) -> None:
        """Forgets a group. Its unfinished samples leave their slots."""
        dropped = [s for s in self._started.pop(n, []) if not s.finished]
        self._num_started -= len(dropped)
        self.loops.drop(dropped)
        self.groups.remove(n)
