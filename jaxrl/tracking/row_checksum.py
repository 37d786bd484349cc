"""The checksum of the first rows of metrics.jsonl, which a checkpoint stores."""

from __future__ import annotations

import zlib
from typing import NamedTuple


class RowChecksum(NamedTuple):
    """The checksum of the rows at the start of a metrics file.

    Attributes:
      num_bytes: number of bytes of the rows.
      crc32: CRC-32 of these bytes.
      num_rows: number of rows.
      last_step: step of the last row; -1 without rows.
    """

    num_bytes: int = 0
    crc32: int = 0
    num_rows: int = 0
    last_step: int = -1

    def extended_by(self, line: bytes, step: int) -> RowChecksum:
        """The checksum after appending one row.

        Args:
          line: bytes of the row, with its newline.
          step: step of the row.
        """
        return RowChecksum(
            self.num_bytes + len(line), zlib.crc32(line, self.crc32), self.num_rows + 1, step
        )

    def matches(self, content: bytes) -> bool:
        """Whether the content of a file begins with these rows."""
        start = content[: self.num_bytes]
        return len(start) == self.num_bytes and zlib.crc32(start) == self.crc32
