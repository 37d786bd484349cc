"""The tokens of many dispatches on the host, until a sample takes its own.

A dispatch decodes the same number of steps in all slots; only a sample that ends has fewer tokens. So the
tokens of a dispatch are some columns of an array with a row per slot, and the tokens of a sample are one
stretch of its row. To keep a dispatch costs three copies of arrays, whatever the number of slots:

    column   0 1 2 3   4 5 6 7   8 9
    slot 0   5 6 7 8   9 1 . .   . .     the sample took its tokens 5 6 7 8 9 1 after two dispatches
    slot 1   4 3 3 2   2 6 5 8   4 7     still decodes; its stretch begins in column 0
    slot 2   . . . .   7 7 7 1   . .     started before the second dispatch

n slots   W tokens of a dispatch   R tokens of a sample
"""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import numpy as np

from jaxrl.rollout.decode_state import DecodedTokens

# Columns of a block. Blocks that no running sample needs are dropped.
_COLUMNS = 256


class Stretch(NamedTuple):
    """Tokens of one sample: int32 ids, float32 log-probabilities and entropies, [R] each."""

    token: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray


@dataclasses.dataclass
class _Block:
    """Consecutive columns of all slots; `used` of them hold tokens."""

    first: int
    arrays: Stretch
    used: int = 0


class DecodedLog:
    """Keeps what dispatches have decoded, for the samples in n slots."""

    def __init__(self, num_slots: int):
        """Starts without tokens."""
        self._begin_n = np.zeros(num_slots, np.int64)
        # Columns of the last dispatch that a slot has not filled, because its sample ended.
        self._missing_n = np.zeros(num_slots, np.int64)
        self._running_n = np.zeros(num_slots, bool)
        self._blocks: collections.deque[_Block] = collections.deque()
        self._end = 0

    def moved(self, old_n: np.ndarray) -> DecodedLog:
        """A log of other slots; `old_n` has the slot that each of them was, int, or -1 for an idle one."""
        log = DecodedLog(len(old_n))
        log._begin_n, log._missing_n = self._begin_n[old_n], self._missing_n[old_n]
        log._running_n = self._running_n[old_n] & (old_n >= 0)
        log._end = self._end
        log._blocks.extend(
            _Block(b.first, Stretch(*(x[old_n] for x in b.arrays)), b.used) for b in self._blocks
        )
        return log

    def start(self, slots: np.ndarray) -> None:
        """Begins the stretches of samples in these slots, int."""
        self._begin_n[slots], self._missing_n[slots] = self._end, 0
        self._running_n[slots] = True

    def append(self, decoded: DecodedTokens) -> None:
        """Adds the tokens of a dispatch; no slot that was started may have stopped before it."""
        steps = int(decoded.count.max(initial=0))
        if not steps:
            return
        block = self._room_for(steps)
        here = slice(block.used, block.used + steps)
        for array, new in zip(
            block.arrays, (decoded.token, decoded.logprob, decoded.entropy), strict=True
        ):
            array[:, here] = new[:, :steps]
        block.used += steps
        self._end += steps
        self._missing_n = steps - decoded.count

    def take(self, slot: int) -> Stretch:
        """The tokens of the sample in a slot since `start`; a sample that runs on begins another stretch."""
        stretch = self._stretch(slot, int(self._begin_n[slot]))
        self._begin_n[slot], self._missing_n[slot] = self._end, 0
        return stretch

    def tail(self, slot: int, count: int) -> np.ndarray:
        """The last `count` tokens of the stretch in a slot, or all of it, int32."""
        end = self._end - int(self._missing_n[slot])
        return self._stretch(slot, max(int(self._begin_n[slot]), end - count)).token

    def stop(self, slots: np.ndarray) -> None:
        """Forgets the samples in these slots, int."""
        self._running_n[slots] = False

    def length(self, slot: int) -> int:
        """The number of tokens of the stretch in a slot."""
        return max(0, self._end - int(self._missing_n[slot]) - int(self._begin_n[slot]))

    def _stretch(self, slot: int, begin: int) -> Stretch:
        end = self._end - int(self._missing_n[slot])
        parts = [
            Stretch(*(x[slot, max(0, begin - b.first) : end - b.first] for x in b.arrays))
            for b in self._blocks
            if begin < b.first + b.used and b.first < end
        ]
        if not parts:
            return Stretch(np.zeros(0, np.int32), *np.zeros((2, 0), np.float32))
        return Stretch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _room_for(self, steps: int) -> _Block:
        """The block for the next columns. First drops those that nobody needs any more."""
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.used + steps <= block.arrays.token.shape[1]:
            return block
        needed = self._begin_n[self._running_n].min(initial=self._end)
        while self._blocks and self._blocks[0].first + self._blocks[0].used <= needed:
            self._blocks.popleft()
        shape = (len(self._begin_n), max(_COLUMNS, steps))
        arrays = Stretch(np.empty(shape, np.int32), *(np.empty(shape, np.float32) for _ in "le"))
        self._blocks.append(_Block(self._end, arrays))
        return self._blocks[-1]
