"""Sampling without an end, on devices of its own: the weights change between dispatches.

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

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import More, SamplingOptions
from jaxrl.rollout.sample_groups import GroupLoop, SampleGroups
from jaxrl.rollout.samples import UnfinishedGroups, oldest_version
from jaxrl.types import Completions, Prompts


class FinishedGroup(NamedTuple):
    """A group whose samples are all finished.

    Attributes:
      completions: its samples.
      samples: the same as a group that a checkpoint can hold.
      mine: whether this process grades it; None if they take turns.
    """

    completions: Completions
    samples: UnfinishedGroups
    mine: bool | None = None

    @property
    def oldest_version(self) -> int:
        """The policy version of its oldest token."""
        return oldest_version(self.samples.samples)

    def count_older(self, version: int) -> int:
        """The number of tokens of versions before `version`."""
        return sum(int((s.version < version).sum()) for s in self.samples.samples)


# Called with the completions of each finished group, and `FinishedGroup.mine`.
OnFinished: TypeAlias = Callable[[Completions, bool | None], None]


@dataclasses.dataclass
class _Evaluation:
    """Groups that are answered beside the others.

    Attributes:
      groups, options, on_group: the groups, how they are sampled, and what gets each one when it is finished.
      loop: the same in the decode loops; None while they wait for some.
      finished: finished groups that were not handed out yet.
    """

    groups: SampleGroups
    options: SamplingOptions
    on_group: OnFinished
    loop: GroupLoop | None = None
    finished: list[int] = dataclasses.field(default_factory=list)


class ContinuousRollout:
    """Samples that stay in their slots while the weights change. Not thread-safe.

    Methods are collective, and answer alike on every process.
    """

    def __init__(
        self,
        groups: SampleGroups,
        make_loop: Callable[..., GroupLoop],
        params: Callable[[], Params],
        *,
        members: tuple[int, ...] = (),
    ):
        """Samples nothing yet.

        Args:
          groups: groups to go on with; finished ones are handed out.
          make_loop: function of groups and options that makes empty decode loops for the groups, with the
            weights of `params`; of groups, options and decode loops, which the groups then share.
          params: function that returns the weights that are loaded.
          members: group of each replica (`ReplicaGroups.members`), as a recorded schedule has it.
        """
        self.members = members
        self._groups = groups
        self._make_loop = make_loop
        self._params = params
        self._running: GroupLoop | None = None
        self._in_progress = False
        self._has_weights = False
        self._version = -1
        self._evaluation: _Evaluation | None = None
        self._finished = [n for n in groups.samples if groups.finished(n)]

    @property
    def num_unfinished(self) -> int:
        return len(self._groups.samples) - len(self._finished)

    def dispatch(self, options: SamplingOptions, more: More) -> bool:
        """Waits for the dispatch in progress and starts the next one.

        Args:
          options: sampling options; `step` is the version of the weights.
          more: draws prompts, as in `RolloutBackend.resume`.

        Returns:
          Whether a dispatch was started; False if there is nothing to sample and nothing was drawn.
        """
        self._finish()
        running = self._running
        if running is None:
            self._running = running = self._make_loop(self._groups, options)
            running.go_on()
        elif not self._has_weights or self._version != options.step:
            evaluating = self._evaluation is not None and self._evaluation.loop is not None
            assert not evaluating or self._version == options.step, "an evaluation has one version"
            running.options = options
            running.loops.renew(self._params(), options.step)
        self._has_weights, self._version = True, options.step
        if (other := self._evaluation) is not None and other.loop is None:
            other.loop = self._make_loop(other.groups, other.options, running.loops)
            other.loop.go_on()
        if not running.loops.num_unfinished:
            self._agree()
            running.draw(more)
        if not running.loops.num_unfinished:
            return False
        running.loops.begin()
        self._in_progress = True
        # Now the devices work again.
        self._agree()
        running.draw(more)
        return True

    def collect(self) -> None:
        """Waits for the dispatch in progress, whose tokens then belong to their samples."""
        if self._finish():
            self._agree()

    def _finish(self) -> bool:
        """Waits for the dispatch in progress; returns whether there was one."""
        in_progress, self._in_progress = self._in_progress, False
        if in_progress:
            assert self._running is not None, "only loops have a dispatch in progress"
            self._running.loops.finish()
        return in_progress

    def _agree(self) -> None:
        """Takes over what has ended on all processes."""
        assert self._running is not None, "samples have ended in loops"
        ended = self._running.loops.agree()
        self._finished += self._running.ended(ended)
        if (other := self._evaluation) is not None and other.loop is not None:
            other.finished += other.loop.ended(ended)

    def take_finished(self) -> list[FinishedGroup]:
        """The groups that have finished since the last call, in the order in which they did."""
        if self._running is not None:
            self._running.loops.give_ended()
        if (other := self._evaluation) is not None:
            for n in other.finished:
                other.on_group(other.groups.completions([n]), other.groups.is_mine(n))
            other.finished = []
        taken, self._finished = self._finished, []
        groups = self._groups
        found = [
            FinishedGroup(groups.completions([n]), groups.copied([n]), groups.is_mine(n))
            for n in taken
        ]
        for n in taken:
            self._remove(n)
        return found

    def evaluate(self, prompts: Prompts, options: SamplingOptions, on_group: OnFinished) -> None:
        """Answers further prompts beside the others, from the next dispatch on.

        Args:
          prompts, options: the prompts, and how they are sampled.
          on_group: called by `take_finished` with each finished group of them.
        """
        assert self._evaluation is None, "one evaluation at a time"
        groups = SampleGroups(options, self._groups.decode_texts)
        groups.add(prompts)
        self._evaluation = _Evaluation(groups, options, on_group)

    def take_evaluation(self) -> Completions | None:
        """The answers to the prompts of `evaluate`, in their order; None if some are not finished."""
        assert self._evaluation is not None, "`evaluate` comes first"
        groups = self._evaluation.groups
        if not all(groups.finished(n) for n in groups.samples):
            return None
        self._evaluation = None
        return groups.rollout().completions

    def drop_older(self, version: int) -> int:
        """Drops unfinished groups with a token of a version before `version`; returns their number."""
        self.collect()
        if self._running is not None:
            self._running.loops.give_tokens()
        old = [
            n
            for n, group in self._groups.samples.items()
            if n not in self._finished and oldest_version(group) < version
        ]
        for n in old:
            self._remove(n)
        return len(old)

    def oldest_versions(self) -> list[int]:
        """The policy version of the oldest token of each unfinished group, as of `drop_older`."""
        return [
            oldest_version(g) for n, g in self._groups.samples.items() if n not in self._finished
        ]

    def unfinished(self) -> UnfinishedGroups:
        """A copy of the unfinished groups, with the tokens that were collected here."""
        if self._running is not None:
            self._running.loops.give_tokens()
        return self._groups.unfinished()

    def pause(self) -> None:
        """Frees the slots. The next dispatch prefills unfinished samples, with the weights of that time."""
        self.collect()
        if self._running is not None:
            self._running.loops.give_tokens()
        self._running = None
        if self._evaluation is not None:
            self._evaluation.loop = None

    def release_weights(self) -> None:
        """Releases the weights; the next dispatch takes those that are loaded then."""
        self.collect()
        self._has_weights = False
        if self._running is not None:
            self._running.loops.release_weights()

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of speculation since the last pause."""
        return {} if self._running is None else self._running.loops.speculation.metrics()

    def _remove(self, n: int) -> None:
        if self._running is None:
            self._groups.remove(n)
        else:
            self._running.remove(n)
