"""The schedule of a sampler that runs free: dispatches with each version of the weights, and drawn prompts.

Everything about free-running sampling follows from the data and the seed but one thing: how many dispatches
the sampler makes while the learner works. The schedule records it, a row for each version of the weights:

    {"version": 3, "dispatches": 41, "drawn": [[0, 96], [0, 97], [7, 98]], "restarted": false}

41 dispatches had the weights of step 3, and prompts were drawn in the first and the eighth of them. A replay
makes the same number of dispatches with each version, so that all of its samples are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from jaxrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class VersionRow:
    """What a sampler did with one version of the weights.

    Attributes:
      version: the version, that is the number of finished steps.
      dispatches: number of dispatches.
      drawn: (dispatch, prompt id) of each drawn prompt; the first dispatch of a version is 0.
      restarted: whether the run was resumed from a checkpoint before this version.
    """

    version: int
    dispatches: int
    drawn: tuple[tuple[int, int], ...]
    restarted: bool = False


class SamplingSchedule:
    """Decides how long a sampler goes on while the learner works: by the clock, or as a recorded run did."""

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

    def begin(self, version: int) -> bool:
        """Begins a version of the weights.

        Returns:
          Whether a recorded run was resumed here, and this run was not. The slots must then be left, because
          they were empty in that run.

        Raises:
          UserError: the recorded run ends before, or was not resumed here and this run was.
        """
        self.end()
        restarted, self._restarted = self._restarted, False
        row = None
        if self._recorded is not None:
            row = self._row(self._recorded, version)
            if restarted and not row.restarted:
                raise UserError(
                    f"step {version + 1}: a run that repeats a schedule (rollout.schedule) was resumed, and "
                    "the recorded run was not resumed there; start it again with another `name`"
                )
        self._version, self._dispatches, self._drawn = version, 0, []
        self._was_restarted = restarted or (row is not None and row.restarted)
        return self._was_restarted and not restarted

    def goes_on(self, is_done: Callable[[], bool]) -> bool:
        """Whether the sampler makes another dispatch before the learner's results are read.

        Args:
          is_done: function that tells whether the results are there.
        """
        assert self._version is not None, "a version begins before the learner works"
        if self._recorded is None:
            return not is_done()
        return self._dispatches < self._row(self._recorded, self._version).dispatches

    def note_drawn(self, ids: Iterable[int]) -> None:
        """Notes the prompts that were drawn since the last dispatch."""
        self._drawn += [(self._dispatches, int(n)) for n in ids]

    def note_dispatch(self) -> None:
        """Notes a dispatch."""
        self._dispatches += 1

    def end(self) -> None:
        """Writes the row of the version, if one has begun.

        Raises:
          UserError: this run did something else than the recorded one.
        """
        if self._version is None:
            return
        row = VersionRow(self._version, self._dispatches, tuple(self._drawn), self._was_restarted)
        if self._recorded is not None and row != self._recorded[self._version]:
            raise UserError(
                f"step {self._version + 1} does not repeat the recorded schedule (rollout.schedule): "
                f"{_told(row)} in place of {_told(self._recorded[self._version])}; repeat it with the same "
                "files, the same version of jaxrl and the same kind of machine"
            )
        self._version = None
        self._write(row)

    def _row(self, recorded: Mapping[int, VersionRow], version: int) -> VersionRow:
        if version not in recorded:
            raise UserError(
                f"the recorded schedule (rollout.schedule) has {len(recorded)} steps, and this is step "
                f"{version + 1}: set run.num_steps to {len(recorded)}, or go by the clock with "
                "rollout.schedule=''"
            )
        return recorded[version]


def _told(row: VersionRow) -> str:
    return f"{row.dispatches} dispatches and prompts {[n for _, n in row.drawn][:8]}"
