"""A line about how far an evaluation is, written again and again on a terminal, now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self, TextIO

from jaxrl.tracking.readable import duration

_EVERY_S = {True: 0.5, False: 10.0}
# Long answers are all at work for minutes before the first is there: so long nothing is said.
_SILENT_S = 30.0


class EtaLine:
    """Problems answered, how right they are so far, and how long the others will take.

    At the pace of those that are finished: as answers differ in length, and the last ones run alone, that is
    a rough guess.
    """

    def __init__(self, total: int, *, before: int = 0, out: TextIO | None = None):
        """Args: problems in all, those answered by an earlier start, and where to write (stderr)."""
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
        """Ends the line, if it is still open."""
        with self._lock:
            self._closed.set()
            if self._live and self._left:
                print(file=self._out, flush=True)

    def add(self, *, answers: int, correct: int, tokens: int) -> None:
        """A problem is answered."""
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
        """The line, so many seconds after the start."""
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
        # Clears what a longer line has left.
        end = "\n" if not self._live or self._left == 0 else ""
        print(f"\r\x1b[K{text}" if self._live else text, end=end, file=self._out, flush=True)
