"""Finds the token at which a stop string ends, and stop ids that the devices do not know.

Example, one token per character, with the stop string "ab":

    end_of_stop(tokens of "xxaby", newest=3, ("ab",), decode_text)   ->  4: "xxab"

Turning tokens into text is slow, and most tokens cannot end a stop string. `StopTokens` tells by table
lookups which new tokens can, so that text is made only for the slots that have one:

    stop string "ab:"    can end it             can stand right before such a token
    token " tab: "       yes, it holds it all
    token ": x"          yes, it begins in it
    token "a"            no                     yes: "a" + "b:"
    token "xy"           no                     no: "xy" + ":" is no end

n slots   W tokens of a dispatch
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

# Decoders write this replacement character for incomplete or invalid bytes.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Bits of a token's kind. The text around a token with `_WHOLE` must be searched. One with `_END` may be the
# last of a stop string, if the token before it has `_BEFORE`.
# An unknown kind has all bits.
_WHOLE, _END, _BEFORE, _UNKNOWN = 1, 2, 4, 255
# Stands for a token that is not known: it is beyond every table of kinds.
NO_TOKEN = np.iinfo(np.int32).max
# Stop strings whose tokens are remembered. A run has one set of them, a server one for each kind of request.
_KEPT = 256


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

    Args:
      tokens: int32, the last `tokens_to_search` of a turn, or all of them.
      newest: number of last tokens that were not searched before.
      stop_strings: texts, none empty.
      decode_text: function that turns token ids into text.
    """

    def has_stop(end: int) -> bool:
        text = decode_text(tokens[:end])
        return any(s in text for s in stop_strings)

    # The tokens are decoded once, for most texts have no stop string.
    if not stop_strings or not newest or not has_stop(len(tokens)):
        return None
    # Bisection needs text that only grows with more tokens, which holds for whole characters.
    ends = range(max(1, len(tokens) - newest + 1), len(tokens) + 1)
    return ends[bisect.bisect_left(ends, True, hi=len(ends) - 1, key=has_stop)]


class StopTokens:
    """The tokens that can end some stop strings. The kind of a token is found when it first occurs."""

    def __init__(self, stop_strings: Sequence[str], decode_text: Callable[[np.ndarray], str]):
        """Args: texts, none empty; a function from token ids to text."""
        self._stop_strings = tuple(stop_strings)
        self._heads = tuple({s[:k] for s in stop_strings for k in range(1, len(s))})
        self._tails = tuple({s[k:] for s in stop_strings for k in range(1, len(s))})
        # Some decoders write the space behind a word only with the next token, whichever that is.
        self._any_token = any(s.endswith(" ") for s in stop_strings)
        self._decode_text = decode_text
        self._kinds = np.full(1, _UNKNOWN, np.uint8)
        # Whether a stop string can end in a token: a lookup of every token, so it is a table of its own.
        self._is_end = np.ones(1, bool)

    def may_end(
        self, before_n: np.ndarray, tokens_nW: np.ndarray, count_n: np.ndarray
    ) -> np.ndarray:
        """Whether a stop string can end in the new tokens of each slot, bool [n].

        Args:
          before_n: int32, the token before the first new one, or `NO_TOKEN`.
          tokens_nW: int32, new tokens.
          count_n: int, number of new tokens of each slot; entries behind them are ignored.
        """
        if self._any_token:
            return count_n > 0
        # The last entry is unknown, and stands for all that are beyond the table.
        hits = np.flatnonzero(self._is_end.take(tokens_nW, mode="clip"))
        slots, columns = np.divmod(hits, tokens_nW.shape[1])
        new = columns < count_n[slots]
        slots, columns = slots[new], columns[new]
        tokens = tokens_nW[slots, columns]
        kinds = self._kinds.take(tokens, mode="clip")
        if (unknown := kinds == _UNKNOWN).any():
            self._learn(np.unique(tokens[unknown]))
            return self.may_end(before_n, tokens_nW, count_n)
        preceding = np.where(columns, tokens_nW[slots, columns - 1], before_n[slots])
        before = self._kinds.take(preceding, mode="clip") & _BEFORE
        found_n = np.zeros(len(tokens_nW), bool)
        found_n[slots[(kinds & _WHOLE | before) > 0]] = True
        return found_n

    def _learn(self, tokens: np.ndarray) -> None:
        """Finds the kinds of tokens, int [count]."""
        if (highest := int(tokens.max())) + 1 >= len(self._kinds):
            more = np.full(2 * (highest + 2) - len(self._kinds), _UNKNOWN, np.uint8)
            self._kinds = np.concatenate([self._kinds, more])
        for token in tokens.tolist():
            self._kinds[token] = self._kind(token)
        self._is_end = self._kinds & (_WHOLE | _END) > 0

    def _kind(self, token: int) -> int:
        """The bits of a token; with doubt they are set."""
        alone, twice = (self._decode_text(np.full(n, token, np.int32)) for n in (1, 2))
        if _BROKEN in twice:
            # Part of a character. Its text, and that of its neighbours, depends on what follows.
            return _WHOLE | _BEFORE
        # Some decoders write a space between words, or drop it at the beginning or end of a text.
        if twice == alone + alone:
            texts = (alone,)
        elif twice == f"{alone} {alone}":
            texts = (alone, f" {alone}", f"{alone} ")
        else:
            return _BEFORE | _WHOLE * any(s[-1] in twice for s in self._stop_strings)
        kind = 0
        for text in texts:
            kind |= _WHOLE * any(s in text for s in self._stop_strings)
            kind |= _END * text.startswith(self._tails)
            inside = any(text in s for s in self._stop_strings)
            kind |= _BEFORE * (inside or text.endswith(self._heads))
        return kind


class StopSearch:
    """Finds where stop strings end, with one tokenizer. It remembers the kinds of tokens.

    Attributes:
      decode_text: function from token ids to text.
      tokens_of: function from stop strings to their `StopTokens`.
    """

    def __init__(self, decode_text: Callable[[np.ndarray], str]):
        self.decode_text = decode_text
        # Made per instance, because a cache on the method would keep all instances.
        self.tokens_of = functools.lru_cache(_KEPT)(
            lambda stop_strings: StopTokens(stop_strings, decode_text)
        )


# The stop strings and stop ids of a sample.
Stops: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]


class StopsOfSlots:
    """Stop strings per slot, with the last token of the slots that have stop strings."""

    def __init__(self, search: StopSearch, num_slots: int):
        self._search = search
        # Whether each slot has these stops, bool [n].
        self._has_n: dict[Stops, np.ndarray] = {}
        self._newest_n = np.full(num_slots, NO_TOKEN, np.int32)

    def moved(self, old_n: np.ndarray) -> StopsOfSlots:
        """The same for slots in another order: slot i was slot `old_n[i]`, or -1 if nothing is in it."""
        moved = StopsOfSlots(self._search, len(old_n))
        moved._has_n = {stop: has_n[old_n] for stop, has_n in self._has_n.items()}
        moved._newest_n = self._newest_n[old_n]
        return moved

    def set(self, slots: np.ndarray, stops: Sequence[Stops]) -> None:
        """Sets the stops of slots in which samples start.

        Args:
          slots: int [m].
          stops: m pairs; if both are empty nothing is searched.
        """
        self._newest_n[slots] = NO_TOKEN
        for stop, has_n in list(self._has_n.items()):
            has_n[slots] = False
            if not has_n.any():
                del self._has_n[stop]
        for slot, stop in zip(slots.tolist(), stops, strict=True):
            if any(stop):
                nowhere = np.zeros(len(self._newest_n), bool)
                self._has_n.setdefault(stop, nowhere)[slot] = True

    def cuts(
        self,
        busy: np.ndarray,
        token_nW: np.ndarray,
        count_n: np.ndarray,
        tail: Callable[[int, int], np.ndarray],
    ) -> dict[int, int]:
        """Number of tokens after the first stop string or stop id, for the slots that have come to one.

        Args:
          busy: int, slots with a sample.
          token_nW: int32, new tokens.
          count_n: int, number of new tokens of each slot.
          tail: function from a slot and a count to the last tokens of its turn, at most `count`.
        """
        cuts: dict[int, int] = {}
        for (stop, stop_ids), has_n in self._has_n.items():
            slots = busy[has_n[busy]]
            tokens, count = token_nW[slots], count_n[slots]
            if stop_ids:
                is_new = np.arange(tokens.shape[1]) < count[:, None]
                at_id = np.isin(tokens, stop_ids) & is_new
                for row in np.flatnonzero(at_id.any(axis=1)).tolist():
                    cuts[int(slots[row])] = int(count[row] - at_id[row].argmax() - 1)
            if not stop:
                continue
            before = self._newest_n[slots]
            # At 4,096 slots a dispatch takes 0.8 ms on average, and 16 ms if all of them are turned into
            # text.
            may_end = self._search.tokens_of(stop).may_end(before, tokens, count)
            # Column -1 of a slot without new tokens, which the next line does not use.
            last = tokens[np.arange(len(slots)), count - 1]
            self._newest_n[slots] = np.where(count, last, before)
            more = tokens_to_search(0, stop)
            for slot, newest in zip(slots[may_end].tolist(), count[may_end].tolist(), strict=True):
                text = tail(slot, newest + more)
                end = end_of_stop(text, newest, stop, self._search.decode_text)
                if end is not None:
                    # The first of both.
                    cuts[slot] = max(len(text) - end, cuts.get(slot, 0))
        return cuts
