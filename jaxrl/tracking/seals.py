"""Seals: checksums of finished checkpoints, by which a reader knows that nothing has changed.

    checkpoints/20/...           what Orbax has written
    metrics.jsonl                rows to step 20, and later ones
    checkpoints.seals/20.json    size and CRC-32 of all its files and of those rows; written last

A checkpoint without its seal was never finished, or not copied whole. A seal that cannot be read spoils its
own checkpoint and no other; files with other names are nobody's and are ignored.
"""

from __future__ import annotations

import json
import pathlib
import zlib

from jaxrl.tracking.durable import sync, write_atomically
from jaxrl.tracking.row_checksum import RowChecksum
from jaxrl.tracking.run_folder import CheckpointFolder

UNSEALED = "it has no seal"
# Where a seal has the checksum of the rows: their path from the checkpoint, which no file of it can have.
_ROWS = "../../metrics.jsonl"
_BLOCK_BYTES = 2**20


class Seals:
    """The seals of a folder of checkpoints."""

    def __init__(self, checkpoints: CheckpointFolder):
        """Args: of which each is sealed. Nothing is made yet."""
        self._checkpoints = checkpoints
        self.folder = checkpoints.seals

    def write(self, step: int, rows: RowChecksum | None = None) -> None:
        """Seals a checkpoint, whose files are on the disk before its seal is.

        Args:
          step: of the checkpoint.
          rows: of the metrics up to this step; None where no metrics are kept.
        """
        checkpoint = self._checkpoints.step(step)
        checksums = _checksums(checkpoint)
        if rows is not None:
            checksums[_ROWS] = list(rows)
        for path in (*checkpoint.rglob("*"), checkpoint, self._checkpoints.path):
            sync(path)
        self.folder.mkdir(exist_ok=True)
        write_atomically(self._checkpoints.seal(step), json.dumps(checksums).encode())
        sync(self.folder.parent)

    def fault(self, step: int) -> str | None:
        """Why a checkpoint is not as it was written; None if it is. It only reads."""
        try:
            written = _parse(self._checkpoints.seal(step).read_bytes())
        except FileNotFoundError:
            return UNSEALED
        except (OSError, ValueError, RecursionError) as error:
            return f"its seal cannot be read ({error})"
        try:
            found = _checksums(self._checkpoints.step(step))
        except OSError as error:
            return f"it cannot be read ({error})"
        for name, checksum in written.items():
            if name == _ROWS:
                continue
            if name not in found:
                return f"{name} is missing"
            if found[name] != checksum:
                return f"{name} has changed since it was written"
        return None

    def rows(self, step: int) -> RowChecksum | None:
        """The checksum of the metrics that a checkpoint was saved with; None if its seal has none."""
        try:
            written = _parse(self._checkpoints.seal(step).read_bytes())
            return RowChecksum(*written[_ROWS])
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            # A seal that is damaged is told of as a fault of its checkpoint.
            return None

    def remove(self, step: int) -> None:
        """Removes the seal of a checkpoint, if it has one."""
        self._checkpoints.seal(step).unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Steps that have a seal, in order, readable or not, with a checkpoint or without."""
        if not self.folder.is_dir():
            return []
        return numbered(path.stem for path in self.folder.glob("*.json"))


def numbered(names) -> list[int]:
    """The names that are steps as we write them, "0" or "20" but not "020", in order."""
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _parse(content: bytes) -> dict[str, list[int]]:
    seal = json.loads(content)
    whole = isinstance(seal, dict) and seal
    if not whole or not all(isinstance(checksum, list) for checksum in seal.values()):
        raise ValueError("it is no table of checksums")
    return seal


def _checksums(folder: pathlib.Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file below `folder`."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            crc, size = 0, 0
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    crc, size = zlib.crc32(block, crc), size + len(block)
            sums[path.relative_to(folder).as_posix()] = [size, crc]
    return sums
