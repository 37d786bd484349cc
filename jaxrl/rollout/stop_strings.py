"""Finds the token at which a stop string ends.

Example, one token per character, with the stop string "ab":

    end_of_stop(tokens of "xxaby", newest=3, ("ab",), decode_text)   ->  4: "xxab"
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np


def tokens_to_search(newest: int, stop_strings: Sequence[str]) -> int:
    """The number of last tokens that hold every stop string which ends in the `newest` last ones."""
    # A token spells at least one byte of the text; special tokens spell none and are not counted.
    return newest + max((len(s.encode()) for s in stop_strings), default=0)


def end_of_stop(
    tokens: np.ndarray,
    newest: int,
    stop_strings: Sequence[str],
    decode_text: Callable[[np.ndarray], str],
) -> int | None:
    """The number of tokens up to the end of the first stop string; None if there is none.

    The tokens are decoded once. Only if their text has a stop string, bisection finds where it ends. That
    holds for text that more tokens only make longer, as whole characters are.

    Args:
      tokens: int32, the last `tokens_to_search` of a turn, or all of them.
      newest: number of last tokens that were not searched before.
      stop_strings: texts, none empty.
      decode_text: token ids to text.
    """

    def has_stop(end: int) -> bool:
        text = decode_text(tokens[:end])
        return any(s in text for s in stop_strings)

    if not stop_strings or not newest or not has_stop(len(tokens)):
        return None
    ends = range(max(1, len(tokens) - newest + 1), len(tokens) + 1)
    return ends[bisect.bisect_left(ends, True, hi=len(ends) - 1, key=has_stop)]
