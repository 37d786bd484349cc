"""Free-running sampling: the sampler has devices of its own and goes on while the learner works.

    step          1                     2                     3
    sampler    [ weights 0                 ][ weights 1          ][ weights 2   ..
    learner              [ learn from 1    ][ learn from 2       ]

A step takes the finished groups with the oldest tokens. New weights are handed over between two dispatches;
samples in progress go on with them (`rollout.group_loop`). A step leaves room for older groups, and waits for
those that only it may still train on, so none gets too old. Every token keeps its log-probability and the
version of its weights, and the rollout correction (`roles.losses`) accounts for the difference.

There is one thread. JAX starts the learner's programs and returns. Before the host reads their results, it
makes dispatches on the sampler's devices until they are there (`FreeRunning.meanwhile`). So an error on
either side ends the run, and the number of dispatches in each wait is the only decision that depends on the
clock. It is recorded, and can be repeated (`schedule`).

With several processes each of them runs this thread. Their devices are in both pools, or in one
(`hosts.pools_apart`); for a program on devices of other processes JAX does nothing. They agree on:

    another dispatch, or read results?   one process of the learner decides, after each dispatch
    what ends, which prompts come        follows from what sampling processes tell after each dispatch: the
                                         lengths of samples that have ended (`rollout.decode_loops`)
    verdicts                             each group is graded by one process; sent when a step takes it

Process 0 writes the schedule, with the groups of processes that sample. A run that repeats it makes the same
groups of its devices, on any number of processes.

All this travels between hosts (`mesh.hosts`), beside the devices, which meet in the hand-over and when tokens
go to processes that want them (`rollout.fetching`). All processes make these exchanges, and call programs, in
the same order; so a lost one keeps the others waiting until they are ended (`mesh.host_watch`).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.rewarding import Rewards
from jaxrl.dataflows.samplers import (
    Enough,
    Generation,
    PromptSource,
    check_same_prompts,
    with_metrics,
)
from jaxrl.dataflows.schedule import SamplingSchedule
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.group_loop import FinishedGroup, GroupLoop, OnFinished
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.types import Completions, Prompts


class FreeRunning:
    """Samples all the time. New prompts wait while a new group could not be trained on in time.

    All groups of a prompt, of which agents have one for each role that learns, are taken together, so below a
    group stands for them all.
    """

    def __init__(
        self,
        generation: Generation,
        rewards: Rewards,
        schedule: SamplingSchedule,
        *,
        prompts_per_step: int,
        prompts_per_batch: int,
        max_staleness: int,
    ):
        """Args.

        generation: the actor in its generation layout, on devices of its own.
        rewards: rewards that score each group.
        schedule: how long the sampler goes on while the learner works.
        prompts_per_step: fewest prompts whose groups a step trains on.
        prompts_per_batch: largest number of prompts of one call of `sample`, and of those in progress; of
          these and finished ones together twice as many.
        max_staleness: largest number of steps between the weights of a token and the step that trains on it.
        """
        self._generation = generation
        self._rewards = rewards
        self._schedule = schedule
        self._prompts_per_step = prompts_per_step
        self._prompts_per_batch = prompts_per_batch
        self._max_staleness = max_staleness
        self._rollout: GroupLoop | None = None
        # Groups of a checkpoint, which the next step goes on with.
        self._left: UnfinishedGroups | None = None
        self._ready: list[FinishedGroup] = []
        self._beside = rewards.beside()
        # An evaluation that the next step begins.
        self._asked: tuple[Prompts, SamplingOptions, OnFinished] | None = None
        self._prompts: PromptSource | None = None
        # The step that is being sampled, the number of groups that it has taken, and its oldest token.
        self._step, self._num_taken, self._staleness = -1, 0, 0
        # Number of groups that no step has taken, by the version of their oldest token, as last counted.
        self._ages: collections.Counter[int] = collections.Counter()

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """The oldest finished groups, as soon as there are enough, or a generation batch of them."""
        generation, self._prompts = self._generation, prompts
        with generation.timer.phase("gen", shown="generate", may_stop=True):
            generation.load_weights()
            counts = self._begin_step(generation.timer.step)
            taken = self._take(enough)
        completions = Completions.concatenate([group.completions for group in taken])
        sampled = self._rewards(completions, self._beside)
        self._beside.forget(completions)
        counts["rollout/stale_tokens"] = completions.num_stale(self._step)
        sampled = Sampled(sampled.scored, sampled.metrics, counts)
        self._staleness = max(self._staleness, *(self._step - g.oldest_version for g in taken))
        metrics = {"rollout/staleness": self._staleness, **self._open().metrics}
        return with_metrics(sampled, metrics)

    def meanwhile(self, results: Any) -> None:
        """Goes on sampling until arrays of the learner are there, which the host is about to read."""
        arrays = [x for x in jax.tree.leaves(results) if hasattr(x, "is_ready")]
        while self._schedule.goes_on(arrays):
            if not self._dispatch():
                return

    def evaluate(self, prompts: Prompts, options: SamplingOptions, on_group: OnFinished) -> None:
        """Also answers evaluation prompts, beside the samples of the step that comes and with its weights.

        Args:
          prompts, options: the prompts, and how they are sampled.
          on_group: called with each finished group of them.
        """
        self._asked = prompts, options, on_group

    def finish_evaluation(self) -> Completions:
        """Goes on sampling until all evaluation prompts are answered; their answers.

        The step that began after `evaluate` must not have been recorded: the next one has other weights.
        """
        while (answers := self._open().take_evaluation()) is None:
            self._dispatch()
        return answers

    def _open(self) -> GroupLoop:
        if self._rollout is None:
            options, schedule = self._generation.current(), self._schedule
            left, self._left = self._left, None
            members = schedule.recorded_members(options.step)
            self._rollout = self._generation.actor.continuous(options, left, members=members)
            schedule.members = self._rollout.members
        return self._rollout

    def _begin_step(self, step: int) -> dict[str, int]:
        """Drops groups past the limit at the beginning of a step; returns counts for the metrics."""
        counts = {"rollout/unfinished_groups": 0, "rollout/dropped_stale_groups": 0}
        if step == self._step:
            return counts
        if self._schedule.begin(step) and self._rollout is not None:
            # The recorded run read them from its checkpoint, and dealt them out to its processes anew.
            self._left = self._waiting().whole(True)
            for group in self._ready:
                self._beside.forget(group.completions)
            self._ready, self._rollout = [], None
        rollout = self._open()
        if self._asked is not None:
            rollout.evaluate(*self._asked)
            self._asked = None
        self._step, self._num_taken, self._staleness = step, 0, 0
        oldest = step - self._max_staleness
        counts["rollout/dropped_stale_groups"] += rollout.drop_older(oldest)
        self._receive()
        stale = [group for group in self._ready if group.oldest_version < oldest]
        for group in stale:
            self._beside.forget(group.completions)
        self._ready = [group for group in self._ready if group.oldest_version >= oldest]
        self._count_ages()
        counts["rollout/dropped_stale_groups"] += len(stale)
        counts["rollout/unfinished_groups"] += len(self._ready) + rollout.num_unfinished
        return counts

    def _take(self, enough: Enough | None) -> list[FinishedGroup]:
        """Takes finished groups, and samples while there are none."""
        taken: list[FinishedGroup] = []
        full = False
        while not full:
            if not (self._ready and self._may_take(self._ready[0].oldest_version)):
                if self._ready:
                    # Older groups may have finished or gone since they were counted.
                    self._count_ages()
                goes_on = self._dispatch() or self._ready
                assert goes_on, "new prompts are drawn if a step has too few groups"
                continue
            group = self._ready.pop(0)
            taken.append(group)
            self._num_taken += 1
            self._ages[group.oldest_version] -= 1
            full = len(taken) >= self._prompts_per_batch
            if enough is not None:
                scored = self._rewards.graded(self._beside.of(group.completions))
                full = enough(scored) or full
        return taken

    def _count_ages(self) -> None:
        self._ages = collections.Counter(self._open().oldest_versions().values())
        self._ages.update(group.oldest_version for group in self._ready)

    def _may_take(self, version: int) -> bool:
        """Whether older groups still have room, in this step and in later ones that may train on them.

        If not, the step waits for those that are not finished.

        Args:
          version: version of the oldest token of the group to take.
        """
        P, older = self._prompts_per_step, 0
        room = max(P - self._num_taken - 1, 0)
        for each in sorted(v for v in self._ages if v < min(version, self._step)):
            older += self._ages[each]
            # The last step for them is that many after this one.
            if older > room + P * (each + self._max_staleness - self._step):
                return False
        return True

    def _dispatch(self) -> bool:
        """Makes a dispatch; returns False if there is nothing to sample."""
        started = self._open().dispatch(self._generation.current(), self._draw)
        self._receive()
        if started:
            self._schedule.dispatches += 1
        return started

    def _receive(self) -> None:
        """Takes over the groups that have finished, and begins to grade them."""
        for group in self._open().take_finished():
            self._beside(group.completions, group.mine)
            self._ready.append(group)
        self._ready.sort(key=lambda group: group.oldest_version)

    def _draw(self, places: int, unfinished: int) -> Prompts:
        """Draws groups for free places, unless others would then wait too long."""
        assert self._prompts is not None, "`sample` comes first"
        self._receive()
        G = self._generation.options.num_samples
        places = min(places, self._prompts_per_batch * G - unfinished)
        drawn: list[Prompts] = []
        while len(drawn) * G < places and self._may_draw(len(drawn)):
            drawn.append(next(self._prompts))
        new = Prompts.concatenate(drawn)
        if drawn:
            check_same_prompts(new, self._step)
            self._schedule.drawn += [(self._schedule.dispatches, n) for n in new.ids_N.tolist()]
        return new

    def _may_draw(self, drawn: int) -> bool:
        """Whether another group can be trained on in time, after all that are ahead of it."""
        waiting = len(self._ready) + self._open().num_unfinished + drawn
        # Each step takes at least `prompts_per_step` groups, this one besides those that it has taken.
        ahead = min(self._num_taken, self._prompts_per_step) + waiting
        in_time = ahead < self._prompts_per_step * (self._max_staleness + 1)
        # Not of the finished ones alone: a sampler that stops for them begins with empty slots again, and the
        # learner then waits for the longest answers.
        return in_time and waiting < 2 * self._prompts_per_batch

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """All groups that no step has taken, expected lengths, and the position in the prompts.

        Ends the schedule's row of the step, so it is called after every step.
        """
        self._schedule.end()
        groups = self._left if self._rollout is None else self._waiting()
        return {"prompts": prompts.state(), "unfinished": groups, **self._generation.record()}

    def _waiting(self) -> UnfinishedGroups:
        """All groups that no step has taken."""
        # Whether an evaluation has waited for the dispatch in progress then makes no difference.
        rollout = self._open()
        rollout.finish()
        self._receive()
        ready = [group.samples for group in self._ready]
        return UnfinishedGroups.concatenate([*ready, rollout.unfinished()])

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Continues from a record."""
        prompts.restore(record["prompts"])
        self._generation.restore(record)
        self._schedule.restart()
        if (stored := record["unfinished"]) is not None:
            self._left = UnfinishedGroups.of_record(stored)
