"""Text of a response while it grows: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# What a decoder writes for bytes that are no character, or not yet.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes; what is still broken after so many tokens stays so.
_MAX_OPEN = 8
# Decoding starts anew from a few tokens back, since what a token spells can depend on its neighbours.
_LONGEST_WINDOW, _KEPT = 12, 4


class TextStream:
    """Tokens of one response to text, token by token.

    Attributes:
      stopped: a stop string has been spelled; the tokens up to here are all that count.
    """

    def __init__(self, decode_text: Callable[[np.ndarray], str], stop: Sequence[str] = ()):
        """Args: token ids to text; texts that end the response and are not part of it."""
        self.stopped = False
        self._decode_text = decode_text
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._window_text = ""
        self._open = 0
        self._pending = ""

    def add(self, token: int) -> tuple[str, str]:
        """Text of the token, "" if that is no whole character yet, and the text that can be shown now."""
        piece = self._spell(token)
        self._pending += piece
        ends = [at for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return piece, self._release(min(ends), drop=True)
        return piece, self._release(len(self._pending) - self._possible_stop())

    def flush(self) -> str:
        """The text not shown yet, at the end of a response that no stop string ended."""
        rest = self._text_of(self._window)[len(self._window_text) :]
        return self._release(len(self._pending)) + rest

    def _spell(self, token: int) -> str:
        self._window.append(token)
        text = self._text_of(self._window)
        self._open += 1
        if text.endswith(_BROKEN) and self._open < _MAX_OPEN:
            return ""
        piece = text[len(self._window_text) :]
        self._open = 0
        if len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-_KEPT:]
            text = self._text_of(self._window)
        self._window_text = text
        return piece

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._decode_text(np.array(tokens, np.int32))

    def _possible_stop(self) -> int:
        """Length of the end of the pending text that may be the beginning of a stop string."""
        longest = min(len(self._pending), max((len(s) - 1 for s in self._stop), default=0))
        for size in range(longest, 0, -1):
            if any(s.startswith(self._pending[-size:]) for s in self._stop):
                return size
        return 0

    def _release(self, size: int, *, drop: bool = False) -> str:
        shown, rest = self._pending[:size], self._pending[size:]
        self._pending = "" if drop else rest
        return shown
