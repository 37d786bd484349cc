"""Shows the progress of an evaluation: a line that is updated on a terminal, lines every 10 s elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self, TextIO

from jaxrl.tracking.readable import duration

_EVERY_S = {True: 0.5, False: 10.0}
# With long answers the first one is finished after minutes. Until then a line is shown this often.
_SILENT_S = 30.0


class EtaLine:
    """Shows the number of answered problems, their accuracy and the estimated time left.

    The estimate assumes the mean time of the finished problems. It is rough: answers differ in length, and
    the last ones run alone.
    """

    def __init__(self, total: int, *, before: int = 0, out: TextIO | None = None):
        """Args:
        total: number of problems.
        before: number of problems that were answered by an earlier command.
        out: stream to write to; None for stderr.
        """
        self._total = total
        self._before = before
        self._done = 0
        self._answers = 0
        self._correct = 0
        self._tokens = 0
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._started_s = time.monotonic()
        self._last_s = self._started_s
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the line if it is unfinished."""
        with self._lock:
            self._closed.set()
            if self._live and self._left:
                print(file=self._out, flush=True)

    def add(self, *, answers: int, correct: int, tokens: int) -> None:
        """Counts an answered problem.

        Args:
          answers: number of its answers.
          correct: number of its right answers.
          tokens: number of tokens of its answers.
        """
        with self._lock:
            self._done += 1
            self._answers += answers
            self._correct += correct
            self._tokens += tokens
            self._say(_EVERY_S[self._live])

    def _break_silence(self) -> None:
        while not self._closed.wait(_SILENT_S):
            with self._lock:
                if not self._closed.is_set():
                    self._say(_SILENT_S / 2)

    def _say(self, every_s: float) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= every_s or self._left == 0:
            self._last_s = now_s
            self._write(self.text(now_s - self._started_s))

    @property
    def _left(self) -> int:
        return self._total - self._before - self._done

    def text(self, seconds: float) -> str:
        """The text of the line `seconds` after the start."""
        if not self._done and self._left:
            return (
                f"{self._before} of {self._total} problems, {duration(seconds)} at work on the next"
            )
        pace_s = seconds / max(self._done, 1)
        return (
            f"{self._before + self._done} of {self._total} problems, "
            f"{self._correct / max(self._answers, 1):.1%} right, "
            f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            + (f"eta {duration(pace_s * self._left)}" if self._left else f"in {duration(seconds)}")
        )

    def _write(self, text: str) -> None:
        # The escape code clears the rest of a longer line.
        end = "\n" if not self._live or self._left == 0 else ""
        print(f"\r\x1b[K{text}" if self._live else text, end=end, file=self._out, flush=True)
