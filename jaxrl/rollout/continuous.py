"""Sampling without an end, on devices of its own: the weights change between dispatches.

                       weights 0 ------------> weights 1 ----------> weights 2
    slot 0             [prompt 0     ][3               ][6         ..
    slot 1             [1  ][2                ][4  ][5             ..

A sample in a slot goes on with the new weights and keeps its cache, which older weights have computed (as in
PipelineRL). Nothing is prefilled again. The log-probability of a token is that of the weights and the cache
that drew it. Each token keeps the version of its weights.

One dispatch is always in progress, so the devices work while the host does something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import More, SamplingOptions
from jaxrl.rollout.sample_groups import GroupLoop, SampleGroups
from jaxrl.rollout.samples import UnfinishedGroups, oldest_version
from jaxrl.types import Completions


class FinishedGroup(NamedTuple):
    """A group whose samples are all finished.

    Attributes:
      completions: its samples.
      samples: the same as a group that a checkpoint can hold.
    """

    completions: Completions
    samples: UnfinishedGroups

    @property
    def oldest_version(self) -> int:
        """The policy version of its oldest token."""
        return oldest_version(self.samples.samples)

    def count_older(self, version: int) -> int:
        """The number of tokens of versions before `version`."""
        return sum(int((s.version < version).sum()) for s in self.samples.samples)


class ContinuousRollout:
    """Samples that stay in their slots while the weights change. Not thread-safe."""

    def __init__(
        self,
        groups: SampleGroups,
        make_loop: Callable[[SampleGroups, SamplingOptions], GroupLoop],
        params: Callable[[], Params],
    ):
        """Samples nothing yet.

        Args:
          groups: groups to go on with; finished ones are handed out.
          make_loop: function that makes an empty decode loop for the groups, with the weights of `params`.
          params: function that returns the weights that are loaded.
        """
        self._groups = groups
        self._make_loop = make_loop
        self._params = params
        self._running: GroupLoop | None = None
        self._in_progress = False
        self._has_weights = False
        self._version = -1
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
        self.collect()
        running = self._running
        if running is None:
            self._running = running = self._make_loop(self._groups, options)
            running.go_on()
        elif not self._has_weights or self._version != options.step:
            running.options = options
            running.loop.renew(self._params(), options.step)
        self._has_weights, self._version = True, options.step
        if not (running.loop.scheduler.num_unfinished or running.draw(more)):
            return False
        running.loop.begin()
        self._in_progress = True
        running.draw(more)
        return True

    def collect(self) -> None:
        """Waits for the dispatch in progress, whose tokens then belong to their samples."""
        if self._in_progress:
            assert self._running is not None, "only a loop has a dispatch in progress"
            self._in_progress = False
            self._finished += self._running.finish()

    def take_finished(self) -> list[FinishedGroup]:
        """The groups that have finished since the last call, in the order in which they did."""
        if self._running is not None:
            self._running.loop.give_ended()
        taken, self._finished = self._finished, []
        found = [
            FinishedGroup(self._groups.completions([n]), self._groups.copied([n])) for n in taken
        ]
        for n in taken:
            self._remove(n)
        return found

    def drop_older(self, version: int) -> int:
        """Drops unfinished groups with a token of a version before `version`; returns their number."""
        self.collect()
        if self._running is not None:
            self._running.loop.give_tokens()
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
        """A copy of the unfinished groups, with the tokens that were collected."""
        if self._running is not None:
            self._running.loop.give_tokens()
        return self._groups.unfinished()

    def pause(self) -> None:
        """Frees the slots. The next dispatch prefills unfinished samples, with the weights of that time."""
        self.collect()
        if self._running is not None:
            self._running.loop.give_tokens()
        self._running = None

    def release_weights(self) -> None:
        """Releases the weights; the next dispatch takes those that are loaded then."""
        self.collect()
        self._has_weights = False
        if self._running is not None:
            self._running.loop.release_weights()

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of speculation since the last pause."""
        return {} if self._running is None else self._running.loop.speculation.metrics()

    def _remove(self, n: int) -> None:
        if self._running is None:
            self._groups.remove(n)
        else:
            self._running.remove(n)
