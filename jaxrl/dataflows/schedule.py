"""What decides by the clock in sampling, noted so that another run can repeat it.

    SamplingSchedule   how many dispatches a free-running sampler makes while the learner works
    RequestOrder       which requests of agents start in which dispatch of a step

Both give a row for each version of the weights (`tracking.schedule_file` writes it), or follow recorded rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl.mesh import hosts

_LOG = logging.getLogger(__name__)

# How long a recorded request is waited for; tools may be slower than they were.
_PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True)
class VersionRow:
    """What a sampler did with one version of the weights.

    Attributes:
      version: the version, that is the number of finished steps.
      dispatches: number of dispatches.
      drawn: (dispatch, prompt id) of each drawn prompt; the first dispatch of a version is 0.
      restarted: whether the run was resumed from a checkpoint before this version.
      members: group of each replica of the sampler (`mesh.replica_groups`); () if all sample together.
      asked: (dispatch, seeds) of the requests of agents that started in it.
    """

    version: int
    dispatches: int
    drawn: tuple[tuple[int, int], ...]
    restarted: bool = False
    members: tuple[int, ...] = ()
    asked: tuple[tuple[int, tuple[int, ...]], ...] = ()


class SamplingSchedule:
    """Decides how long a sampler goes on while the learner works: by the clock, or as a recorded run did.

    Attributes:
      dispatches: number of dispatches with the version so far; the sampler counts them here.
      drawn: (dispatch, prompt id) of each prompt that the sampler has drawn.
      members: `VersionRow.members` of the sampler, which sets it.
    """

    dispatches: int
    drawn: list[tuple[int, int]]
    members: tuple[int, ...] = ()

    def __init__(
        self,
        write: Callable[[VersionRow], None],
        recorded: Mapping[int, VersionRow] | None = None,
    ):
        """Args:
        write: called with each row, in the order of versions.
        recorded: rows to repeat, by version; None goes by the clock.
        """
        self._write = write
        self._recorded = recorded
        self._restarted = False
        self._version: int | None = None

    def restart(self) -> None:
        """Notes that the run was resumed from a checkpoint."""
        self._restarted = True

    def recorded_members(self, version: int) -> tuple[int, ...] | None:
        """The groups that the sampler has to make for a version; None if it goes by the clock."""
        return None if self._recorded is None else _row(self._recorded, version).members

    def begin(self, version: int) -> bool:
        """Begins a version of the weights.

        Returns:
          Whether a recorded run was resumed here, and this run was not. The sampler must then begin as from a
          checkpoint.

        Raises:
          UserError: the recorded run ends before, or was not resumed here and this run was.
        """
        self.end()
        restarted, self._restarted = self._restarted, False
        row = None
        if self._recorded is not None:
            row = _row(self._recorded, version)
            if restarted and not row.restarted:
                raise UserError(
                    f"step {version + 1}: a run that repeats a schedule (rollout.schedule) was resumed, and "
                    "the recorded run was not resumed there; start it again with another `name`"
                )
        self._version, self.dispatches, self.drawn = version, 0, []
        self._was_restarted = restarted or (row is not None and row.restarted)
        return self._was_restarted and not restarted

    def goes_on(self, results: Sequence[Any]) -> bool:
        """Whether the sampler makes another dispatch before the learner's results are read. Collective.

        One process decides it by the clock, the first one that has devices of the learner.

        Args:
          results: the results.
        """
        assert self._version is not None, "a version begins before the learner works"
        if self._recorded is None:
            learner = next((n for x in results for n in hosts.processes_of(x)), 0)
            return hosts.on_first(lambda: not all(x.is_ready() for x in results), process=learner)
        return self.dispatches < _row(self._recorded, self._version).dispatches

    def end(self) -> None:
        """Writes the row of the version, if one has started.

        Raises:
          UserError: this run did something else than the recorded one.
        """
        if self._version is None:
            return
        row = VersionRow(
            self._version, self.dispatches, tuple(self.drawn), self._was_restarted, self.members
        )
        if self._recorded is not None and row != self._recorded[self._version]:
            raise UserError(
                f"step {self._version + 1} does not repeat the recorded schedule (rollout.schedule): "
                f"{_told(row)} in place of {_told(self._recorded[self._version])}; repeat it with the same "
                "files, the same version of jaxrl and the same kind of machine"
            )
        self._version = None
        self._write(row)


class RequestOrder:
    """Notes which requests of agents start in each dispatch of a step, or makes them start as recorded.

    When an agent asks depends on its tools and on the clock, and beside other rows a row rounds differently.
    The seed of a request names it: it follows from the prompt, the sample and all earlier tokens.
    """

    def __init__(
        self,
        write: Callable[[VersionRow], None],
        recorded: Mapping[int, VersionRow] | None = None,
    ):
        """Args:
        write: called with the row of a step after each of its generation batches.
        recorded: rows to repeat, by version; None notes what comes.
        """
        self._write = write
        self._recorded = recorded
        self._version: int | None = None
        self._due: dict[int, tuple[int, ...]] | None = None
        self._held_since: float | None = None
        self._open = False

    def begin(self, version: int) -> None:
        """Begins a generation batch of a step.

        Raises:
          UserError: the recorded run ends before.
        """
        if version != self._version:
            self._version, self._dispatches, self._asked = version, 0, []
            self._started: set[int] = set()
            if self._recorded is not None:
                self._due = dict(_row(self._recorded, version).asked)
        self._open = True

    def starting(self, waiting: Sequence[int]) -> Sequence[int] | None:
        """Seeds of the waiting requests that start in the next dispatch; None to wait for others first.

        A request that is made twice starts as it comes, since the second may find the first one's answer. All
        do from where the agents ask for something else than in the recorded run.
        """
        if not self._open or self._version is None or self._due is None:
            return waiting
        due = self._due.get(self._dispatches, ())
        if {*due} <= {*waiting} | self._started:
            return [*due, *self._started.intersection(waiting)]
        held_since = self._held_since = self._held_since or time.monotonic()
        known = itertools.chain.from_iterable(self._due.values())
        if {*waiting} <= {*known} and time.monotonic() - held_since < _PATIENCE_S:
            return None
        _LOG.warning(
            "step %d: agents do not ask what they asked in the recorded run (rollout.schedule); from here on "
            "their requests start as they come",
            self._version + 1,
        )
        self._due = None
        return waiting

    def note(self, seeds: Sequence[int]) -> None:
        """Notes a dispatch, in which these requests start."""
        self._held_since = None
        if self._open:
            if seeds:
                self._asked.append((self._dispatches, tuple(seeds)))
                self._started.update(seeds)
            self._dispatches += 1

    def end(self) -> None:
        """Ends the generation batch; what is decoded until the next is not noted."""
        assert self._version is not None, "a batch has begun"
        self._open = False
        self._write(VersionRow(self._version, self._dispatches, (), asked=tuple(self._asked)))


def _row(recorded: Mapping[int, VersionRow], version: int) -> VersionRow:
    if version not in recorded:
        raise UserError(
            f"the recorded schedule (rollout.schedule) has {len(recorded)} steps, and this is step "
            f"{version + 1}: set run.num_steps to {len(recorded)}, or go by the clock with "
            "rollout.schedule=''"
        )
    return recorded[version]


def _told(row: VersionRow) -> str:
    return f"{row.dispatches} dispatches and prompts {[n for _, n in row.drawn][:8]}"
