"""Streams the text of a growing response: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

# Decoders write this replacement character for incomplete or invalid bytes.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes. If it is still incomplete after so many tokens, it is invalid.
_MAX_OPEN = 8
# Decoding restarts a few tokens back, because the text of a token can depend on its neighbours.
_LONGEST_WINDOW, _KEPT = 12, 4


class TextStream:
    """Turns the tokens of one response into text, a few tokens at a time.

    The stream does not decide where a response ends (`stop_strings` does). It holds back text that is or may
    become a stop string, until more tokens arrive or the response ends.
    """

    def __init__(self, decode_text: Callable[[np.ndarray], str], stop: Sequence[str] = ()):
        """Args: a function from token ids to text; texts that end the response and are not shown."""
        self._decode_text = decode_text
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._window_text = ""
        self._open = 0
        self._pending = ""

    def add(self, tokens: Iterable[int]) -> tuple[tuple[str, ...], str]:
        """Takes the next tokens.

        Returns:
          The text of each token ("" while a character is incomplete), and the text that can be shown now.
        """
        pieces = []
        for token in tokens:
            self._window.append(int(token))
            whole = self._text_of(self._window)
            self._open += 1
            if whole.endswith(_BROKEN) and self._open < _MAX_OPEN:
                pieces.append("")
                continue
            pieces.append(whole[len(self._window_text) :])
            self._open = 0
            if len(self._window) > _LONGEST_WINDOW:
                self._window = self._window[-_KEPT:]
                whole = self._text_of(self._window)
            self._window_text = whole
        self._pending += "".join(pieces)
        shown = len(self._pending) - self._held()
        text, self._pending = self._pending[:shown], self._pending[shown:]
        return tuple(pieces), text

    def end(self, *, at_stop_string: bool = False) -> str:
        """The remaining text at the end of a response.

        Args:
          at_stop_string: whether the response ends with a stop string, which is not shown.
        """
        if at_stop_string:
            found = (self._pending.find(stop) for stop in self._stop)
            return self._pending[: min((at for at in found if at >= 0), default=None)]
        return self._pending + self._text_of(self._window)[len(self._window_text) :]

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._decode_text(np.array(tokens, np.int32))

    def _held(self) -> int:
        """Length of the end of the pending text that is, or may become, a stop string."""
        for at in range(len(self._pending) if self._stop else 0):
            rest = self._pending[at:]
            if any(rest.startswith(stop) or stop.startswith(rest) for stop in self._stop):
                return len(rest)
        return 0
