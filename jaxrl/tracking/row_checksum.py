"""What a checkpoint knows of metrics.jsonl: how its first rows, up to the checkpoint's step, were written."""

from __future__ import annotations

import zlib
from typing import NamedTuple


class RowChecksum(NamedTuple):
    """Of rows at the start of a file of metrics.

    Attributes:
      num_bytes: their size.
      crc32: of these bytes.
      num_rows: how many they are.
      last_step: of the last one; -1 if there is none.
    """

    num_bytes: int = 0
    crc32: int = 0
    num_rows: int = 0
    last_step: int = -1

    def extended_by(self, line: bytes, step: int) -> RowChecksum:
        """With one row more, of this step."""
        return RowChecksum(
            self.num_bytes + len(line), zlib.crc32(line, self.crc32), self.num_rows + 1, step
        )

    def is_of(self, content: bytes) -> bool:
        """Whether a file's content begins with exactly these rows."""
        start = content[: self.num_bytes]
        return len(start) == self.num_bytes and zlib.crc32(start) == self.crc32
