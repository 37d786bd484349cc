"""The decode loops of a backend: one of all processes together, or one for each group of processes.

With groups (`mesh.replica_groups`) a process has the loops of its own groups alone, in nearly all runs one:

    add     deals new samples out: all processes know which group has which
    begin   starts a dispatch in the own loops
    finish  waits for it
    agree   tells the others which samples have started and ended, and how long they are

Between two calls of `agree` no process waits for another. What a process does and holds is its own part, and
a few numbers for each sample that begins or ends elsewhere. Of samples of other groups it knows the lengths,
without tokens (`Sample.holder`); `fetching` brings these where they are wanted.

A group's report is a list of integers. S samples have started; each that has ended has R runs of tokens:

    places  L A  S   S x (number, version)        free places, layers and experts of routes, samples
    number  truncated  R   R x (version, count)   for each sample that has ended
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxrl.mesh import hosts
from jaxrl.mesh.replica_groups import ReplicaGroups
from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.samples import Sample
from jaxrl.rollout.speculation import Speculation


class DecodeLoops:
    """Decode loops that look like one. Not thread-safe.

    Attributes:
      groups: the groups of processes; None if there is one loop of all.
    """

    def __init__(self, loops: Mapping[int, DecodeLoop], groups: ReplicaGroups | None):
        """Begins without weights.

        Args:
          loops: empty loops, by the number of their group; without groups one, with any number.
          groups: see above.
        """
        self.groups = groups
        self._loops = dict(loops)
        self._version = 0
        self._numbers = itertools.count()
        # With groups: all samples that have not ended, by number, with their part of the work.
        self._sample_of: dict[int, Sample] = {}
        self._number_of: dict[Sample, int] = {}
        self._work_of: dict[Sample, float] = {}
        self._busy_G = [] if groups is None else [0.0] * len(groups.meshes)
        self._places = 0
        # Own samples: those that have not begun; those that have since the last `agree`, and that ended.
        self._waiting: dict[Sample, None] = {}
        self._begun: list[Sample] = []
        self._ended: list[Sample] = []

    def num_unfinished(self, *, here: bool = False) -> int:
        """The number of samples that wait or decode; with groups as of the last `agree`, or those here."""
        if self.groups is not None and not here:
            return len(self._sample_of)
        return sum(loop.scheduler.num_unfinished for loop in self._loops.values())

    @property
    def places(self) -> int:
        """`Scheduler.places` of all loops together; with groups as of the last `agree`."""
        if self.groups is not None:
            return self._places
        return sum(loop.scheduler.places for loop in self._loops.values())

    @property
    def speculation(self) -> Speculation:
        """That of the first loop of this process."""
        return next((loop.speculation for loop in self._loops.values()), Speculation())

    def add(self, samples: Iterable[Sample], work_of: Mapping[int, float] | None = None) -> None:
        """Queues samples, as `DecodeLoop.add`; with groups, each in that of its prompt.

        Args:
          samples: all samples of some prompts that have not ended.
          work_of: work of each prompt, by `Sample.prompt`; None counts the samples.
        """
        samples = list(samples)
        if self.groups is None:
            for loop in self._loops.values():
                loop.add(samples)
            return
        counts = collections.Counter(sample.prompt for sample in samples)
        work = {n: float(counts[n] if work_of is None else work_of[n]) for n in counts}
        new = list(dict.fromkeys(sample.prompt for sample in samples if sample.holder < 0))
        dealt_N = self.groups.share_out(np.array([work[n] for n in new]), self._busy_G)
        group_of = dict(zip(new, dealt_N.tolist(), strict=True))
        # In an order that all know. Where lengths are unknown, the oldest and longest are others.
        for sample in sorted(samples, key=lambda s: (s.prompt, s.index)):
            if sample.holder < 0:
                sample.holder = group_of[sample.prompt]
            number = next(self._numbers)
            self._sample_of[number], self._number_of[sample] = sample, number
            self._work_of[sample] = work[sample.prompt] / counts[sample.prompt]
            self._busy_G[sample.holder] += self._work_of[sample]
            if sample.holder in self._loops:
                if not len(sample):
                    self._waiting[sample] = None
            elif len(sample):
                # Of an earlier run: all processes have read it.
                sample.set_runs([(sample.oldest_version, 1)])
        for g, loop in self._loops.items():
            loop.add(sample for sample in samples if sample.holder == g)
        self._places = max(0, self._places - len(samples))

    def drop(self, samples: Collection[Sample]) -> None:
        """Drops samples that have not ended."""
        if self.groups is not None:
            for sample in samples:
                self._forget(sample)
        for g, loop in self._loops.items():
            loop.drop([s for s in samples if self.groups is None or s.holder == g])

    def begin(self) -> None:
        """`DecodeLoop.begin` in all loops."""
        for loop in self._loops.values():
            loop.begin()

    def finish(self) -> list[Sample]:
        """`DecodeLoop.finish` in all loops; returns the samples that have ended here."""
        ended: list[Sample] = []
        for loop in self._loops.values():
            begun = [sample for sample in self._waiting if sample in loop.scheduler.slot_of]
            for sample in begun:
                del self._waiting[sample]
            self._begun += begun
            ended += [decoded.sample for decoded in loop.finish()]
        self._ended += ended
        return ended

    def agree(self, *, on_devices: bool = False) -> list[Sample]:
        """All samples that have ended since the last call, in the same order on every process. Collective.

        Args:
          on_devices: whether the devices are idle and carry what is told; it goes between hosts otherwise.
        """
        ended, begun, self._ended, self._begun = self._ended, self._begun, [], []
        if self.groups is None:
            return ended
        self.give_ended()
        told = {g: self._report(g, begun, ended) for g in self.groups.here}
        if on_devices:
            reports = [report.tolist() for report in self.groups.gather(told)]
        else:
            me, firsts = jax.process_index(), [each[0] for each in self.groups.processes]
            mine = [(g, report.tolist()) for g, report in told.items() if firsts[g] == me]
            of_group = dict(itertools.chain(*hosts.gather(lambda: mine)))
            reports = [of_group[g] for g in range(len(firsts))]
        self._places = 0
        return [sample for g, report in enumerate(reports) for sample in self._read(g, report)]

    def _report(self, g: int, begun: Sequence[Sample], ended: Sequence[Sample]) -> np.ndarray:
        begun, ended = ([s for s in some if s.holder == g] for some in (begun, ended))
        routes = next((s.routes.shape[1:] for s in ended if s.routes is not None), (0, 0))
        report = [self._loops[g].scheduler.places, *routes, len(begun)]
        for sample in begun:
            report += [
                self._number_of[sample],
                sample.oldest_version if len(sample) else self._version,
            ]
        for sample in ended:
            report += [self._number_of[sample], sample.truncated, len(sample.runs)]
            report += itertools.chain(*sample.runs)
        return np.array(report, np.int32)

    def _read(self, g: int, report: Sequence[int]) -> list[Sample]:
        """Takes note of what group g has told; returns the samples that have ended."""
        values, here = iter(report), g in self._loops
        places, layers, experts, num_begun = itertools.islice(values, 4)
        self._places += places
        for _ in range(num_begun):
            number, version = itertools.islice(values, 2)
            if not here:
                self._sample_of[number].set_runs([(version, 1)])
        ended = []
        for number in values:
            truncated, num_runs = itertools.islice(values, 2)
            runs = [(next(values), next(values)) for _ in range(num_runs)]
            sample = self._sample_of[number]
            self._forget(sample)
            ended.append(sample)
            if not here:
                sample.finished, sample.truncated = True, bool(truncated)
                sample.set_runs(runs)
                if layers:
                    rows = sample.num_tokens - 1
                    sample.routes = np.broadcast_to(np.int16(-1), (rows, layers, experts))
        return ended

    def _forget(self, sample: Sample) -> None:
        del self._sample_of[self._number_of.pop(sample)]
        self._busy_G[sample.holder] -= self._work_of.pop(sample)
        self._waiting.pop(sample, None)

    def give_tokens(self) -> None:
        for loop in self._loops.values():
            loop.give_tokens()

    def give_ended(self) -> None:
        for loop in self._loops.values():
            loop.give_ended()

    def renew(self, params: Params, version: int) -> None:
        """`DecodeLoop.renew`, with weights of the whole mesh."""
        self._version = version
        for g, loop in self._loops.items():
            loop.renew(params if self.groups is None else self.groups.view(params, g), version)

    def release_weights(self) -> None:
        for loop in self._loops.values():
            loop.release_weights()
