"""Manifests: one file per checkpoint with the sizes and checksums of its files.

    checkpoints/20/...           the files that Orbax writes
    metrics.jsonl                the metric rows of step 20 and before, then later ones
    checkpoints.seals/20.json    the manifest: size and CRC-32 of each file and of those rows; written last

A checkpoint without a manifest was never finished, or was copied in part. An unreadable manifest invalidates
its own checkpoint only. Files with other names are ignored.
"""

from __future__ import annotations

import json
import pathlib
import zlib

from jaxrl.tracking.durable import sync, write_atomically
from jaxrl.tracking.row_checksum import RowChecksum
from jaxrl.tracking.run_folder import CheckpointFolder

NO_MANIFEST = "it has no manifest"
# Key of the checksum of the metric rows. It is their path from the checkpoint, so no file of a checkpoint
# has the same key.
_ROWS = "../../metrics.jsonl"
_BLOCK_BYTES = 2**20


class Manifests:
    """The manifests of a folder of checkpoints."""

    def __init__(self, checkpoints: CheckpointFolder):
        """Creates no file or folder.

        Args:
          checkpoints: the checkpoints of one training stage.
        """
        self._checkpoints = checkpoints
        self.folder = checkpoints.manifests

    def write(self, step: int, rows: RowChecksum | None = None) -> None:
        """Writes the manifest of a finished checkpoint, after flushing the checkpoint's files to disk.

        Args:
          step: the checkpoint's step.
          rows: checksum of the metric rows up to this step; None if the stage keeps no metrics.
        """
        checkpoint = self._checkpoints.step(step)
        checksums = _checksums(checkpoint)
        if rows is not None:
            checksums[_ROWS] = list(rows)
        for path in (*checkpoint.rglob("*"), checkpoint, self._checkpoints.path):
            sync(path)
        self.folder.mkdir(exist_ok=True)
        write_atomically(self._checkpoints.manifest(step), json.dumps(checksums).encode())
        sync(self.folder.parent)

    def fault(self, step: int) -> str | None:
        """Returns why a checkpoint is damaged or unfinished; None if it is intact. Reads all of its files."""
        try:
            written = _parse(self._checkpoints.manifest(step).read_bytes())
        except FileNotFoundError:
            return NO_MANIFEST
        except (OSError, ValueError, RecursionError) as error:
            return f"its manifest cannot be read ({error})"
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
        """The checksum of the metric rows up to a checkpoint; None if the manifest has none or is damaged."""
        try:
            written = _parse(self._checkpoints.manifest(step).read_bytes())
            return RowChecksum(*written[_ROWS])
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            # `fault` reports a damaged manifest.
            return None

    def remove(self, step: int) -> None:
        """Removes the manifest of a checkpoint, if there is one."""
        self._checkpoints.manifest(step).unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """The steps of all manifests in ascending order, also of unreadable ones and without a checkpoint."""
        if not self.folder.is_dir():
            return []
        return numbered(path.stem for path in self.folder.glob("*.json"))


def numbered(names) -> list[int]:
    """The step numbers among `names`, in ascending order: "0" and "20" count, "020" and "x" do not."""
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _parse(content: bytes) -> dict[str, list[int]]:
    manifest = json.loads(content)
    whole = isinstance(manifest, dict) and manifest
    if not whole or not all(isinstance(checksum, list) for checksum in manifest.values()):
        raise ValueError("it is no table of checksums")
    return manifest


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
