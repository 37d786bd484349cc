"""Finds the token at which a stop string ends.

Example, one token per character, with the stop string "ab":

    end_of_stop(tokens of "xxaby", newest=3, ("ab",), decode_text)   ->  4: "xxab"
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np


def tokens_to_search(newest: int, stop_strings: Sequence[str]) -> int:
    """Number of last tokens to search, so that every stop string ending in the `newest` ones is found."""
    # Each token spells at least one byte of text. Special tokens spell none; they are not counted.
    return newest + max((len(s.encode()) for s in stop_strings), default=0)


def end_of_stop(
    tokens: np.ndarray,
    newest: int,
    stop_strings: Sequence[str],
    decode_text: Callable[[np.ndarray], str],
) -> int | None:
    """Number of tokens up to the end of the first stop string; None if there is none.

    The tokens are decoded once. Only if their text contains a stop string, bisection finds the token where it
    ends. Bisection needs text that only grows with more tokens, which holds for whole characters.

    Args:
      tokens: int32, the last `tokens_to_search` of a turn, or all of them.
      newest: number of last tokens that were not searched before.
      stop_strings: texts, none empty.
      decode_text: function that turns token ids into text.
    """

    def has_stop(end: int) -> bool:
        text = decode_text(tokens[:end])
        return any(s in text for s in stop_strings)

    if not stop_strings or not newest or not has_stop(len(tokens)):
        return None
    ends = range(max(1, len(tokens) - newest + 1), len(tokens) + 1)
    return ends[bisect.bisect_left(ends, True, hi=len(ends) - 1, key=has_stop)]
