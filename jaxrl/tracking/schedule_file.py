"""Writes and reads the schedule of a free-running sampler or of agents: a stage's schedule.jsonl."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from jaxrl.dataflows.schedule import VersionRow
from jaxrl.errors import UserError
from jaxrl.files import read_bytes, read_text
from jaxrl.mesh import hosts
from jaxrl.tracking.durable import AppendedFile, write_atomically
from jaxrl.tracking.run_folder import CONTENT, RunFolder, parse_config

# Settings that may differ between a recorded run and one that repeats it, and further ones with agents: what
# they ask follows from tokens, whatever devices draw these, and an evaluation is not recorded.
_FREE = ("name", "rollout.schedule", "mesh.simulated_devices")
_FREE_GROUPS = (CONTENT, "run.", "hosts.")
_FREE_WITH_AGENTS = ("mesh.", "placement", "evaluation.")


class ScheduleFile:
    """Appends rows to a schedule. The first row of a resumed run replaces later ones of the file."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file: AppendedFile | None = None

    def write(self, row: VersionRow) -> None:
        """Appends a row; only the first process writes, and nothing in a loop of one's own (`open_run`)."""
        if not hosts.is_first() or not self._path.parent.exists():
            return
        if self._file is None:
            # A resumed run repeats versions after its checkpoint, so their rows go.
            kept = _rows(self._path) if self._path.exists() and row.version else {}
            earlier = [kept[version] for version in sorted(kept) if version < row.version]
            write_atomically(self._path, b"".join(map(_line, earlier)))
            self._file = AppendedFile(self._path)
        self._file.append(_line(row))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_schedule(folder: RunFolder, config_text: str) -> dict[int, VersionRow]:
    """Reads the schedule of a run that another run repeats, by version of the weights.

    Args:
      folder: folder of the recorded run.
      config_text: settings of the run that repeats it, as in `RunFolder.config`.

    Raises:
      UserError: the folder has no schedule, it is damaged, or the run has other settings.
    """
    path = folder.rl.schedule
    absent = "set rollout.schedule to the folder of a run that sampled while it learned"
    rows = _rows(path, absent=absent)
    recorded = parse_config(read_text(folder.config, absent=absent))
    now = parse_config(config_text)
    free = _FREE_GROUPS + (() if now["rollout.agent"] == "''" else _FREE_WITH_AGENTS)
    changed = [
        f"{name}: {recorded.get(name)} -> {now.get(name)}"
        for name in sorted(recorded.keys() | now.keys())
        if recorded.get(name) != now.get(name) and name not in _FREE and not name.startswith(free)
    ]
    if changed:
        raise UserError(
            f"rollout.schedule {folder}: that run has other settings ({'; '.join(changed)}); a schedule only "
            "repeats a run with the same settings, except for name, run.* and hosts.*"
        )
    return rows


def _rows(path: pathlib.Path, *, absent: str = "remove it") -> dict[int, VersionRow]:
    rows = {}
    # A killed run may leave the beginning of a row, of a step that it had not finished.
    whole, _, _ = read_bytes(path, absent=absent).rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            fields = json.loads(line)
            drawn = tuple((int(dispatch), int(n)) for dispatch, n in fields.pop("drawn"))
            asked = tuple((int(at), tuple(map(int, n))) for at, n in fields.pop("asked", ()))
            members = tuple(int(g) for g in fields.pop("members"))
            if sorted(groups := set(members)) != [*range(len(groups))]:
                raise ValueError(f"members {[*members]} leave a group out")
            row = VersionRow(drawn=drawn, members=members, asked=asked, **fields)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}:{number}: not a row of a schedule ({error}); restore the file from a copy"
            ) from error
        rows[row.version] = row
    return rows


def _line(row: VersionRow) -> bytes:
    return json.dumps(dataclasses.asdict(row)).encode() + b"\n"
