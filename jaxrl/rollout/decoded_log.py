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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.rollout.decode_state import DecodedTokens
from jaxrl.types import Stretch

# Columns of a block.
_COLUMNS = 256


@dataclasses.dataclass
class _Block:
    """Consecutive columns of all slots.

    Attributes:
      first: number of the first column.
      words: int32 [3, n, columns]: ids, and the bits of log-probabilities and entropies. In one array a
        stretch is copied at once.
      used: number of columns that hold tokens.
    """

    first: int
    words: np.ndarray
    used: int = 0


class DecodedLog:
    """Keeps what dispatches have decoded, for the samples in n slots."""

    def __init__(self, num_slots: int):
        self._begin_n = np.zeros(num_slots, np.int64)
        # Columns of the last dispatch that a slot has not filled, because its sample ended.
        self._missing_n = np.zeros(num_slots, np.int64)
        self._running_n = np.zeros(num_slots, bool)
        self._blocks: collections.deque[_Block] = collections.deque()
        # Memory of blocks that no running sample needs any more: new memory is slow at its first use.
        self._spare: list[np.ndarray] = []
        # Number of columns of all dispatches, and of those that are in blocks; ids and bits of the others.
        self._end, self._settled = 0, 0
        self._last: np.ndarray = np.zeros((3, num_slots, 0), np.int32)
        # Slot, first and last column, and version of stretches that `settle` passes on; what receives them.
        self._ended: list[tuple[int, int, int, int, Callable[[Stretch], Any]]] = []

    def moved(self, old_n: np.ndarray) -> DecodedLog:
        """A log of other slots; `old_n` has the slot that each of them was, int, or -1 for an idle one."""
        self.settle()
        log = DecodedLog(len(old_n))
        log._begin_n, log._missing_n = self._begin_n[old_n], self._missing_n[old_n]
        log._running_n = self._running_n[old_n] & (old_n >= 0)
        log._end = log._settled = self._end
        log._blocks.extend(_Block(b.first, b.words[:, old_n], b.used) for b in self._blocks)
        return log

    def start(self, slots: np.ndarray) -> None:
        """Begins the stretches of samples in these slots, int."""
        self._begin_n[slots], self._missing_n[slots] = self._end, 0
        self._running_n[slots] = True

    def append(self, decoded: DecodedTokens) -> None:
        """Adds the tokens of a dispatch; no slot that was started may have stopped before it."""
        # The next `settle` copies them into a block, which can wait until the devices work again.
        self.settle()
        steps = int(decoded.count.max(initial=0))
        if steps > self._last.shape[2]:
            self._last = np.empty((3, *decoded.token.shape), np.int32)
        # A copy: on CPUs these arrays are memory of the devices, which the next dispatch overwrites.
        words = decoded.token, decoded.logprob.view(np.int32), decoded.entropy.view(np.int32)
        for last, new in zip(self._last, words, strict=True):
            last[:, :steps] = new[:, :steps]
        self._end += steps
        self._missing_n = steps - decoded.count

    def settle(self) -> None:
        """Passes on what `give_later` has left, and copies the tokens of the last dispatch."""
        # In this order: the copy drops blocks that no running sample needs.
        self.pass_on()
        steps = self._end - self._settled
        if not steps:
            return
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.used + steps > block.words.shape[2]:
            # Blocks whose tokens have all been read give their memory to the next.
            needed = self._begin_n[self._running_n].min(initial=self._end)
            while self._blocks and self._blocks[0].first + self._blocks[0].used <= needed:
                self._spare.append(self._blocks.popleft().words)
            shape = (3, len(self._begin_n), max(_COLUMNS, steps))
            words = self._spare.pop() if self._spare else np.empty(shape, np.int32)
            block = _Block(self._settled, words)
            self._blocks.append(block)
        block.words[:, :, block.used : block.used + steps] = self._last[:, :, :steps]
        block.used += steps
        self._settled += steps

    def pass_on(self) -> None:
        """Passes on the tokens that `give_later` has left."""
        ended, self._ended = self._ended, []
        for *where, receive in ended:
            receive(self._stretch(*where))

    def take(self, slot: int, version: int) -> Stretch:
        """The tokens of the sample in a slot since `start`, all of weights of this version.

        A sample that runs on begins another stretch.
        """
        end = self._end - int(self._missing_n[slot])
        stretch = self._stretch(slot, int(self._begin_n[slot]), end, version)
        self._begin_n[slot], self._missing_n[slot] = self._end, 0
        return stretch

    def give_later(
        self,
        slots: np.ndarray,
        dropped: np.ndarray,
        version: int,
        receive: Sequence[Callable[[Stretch], Any]],
    ) -> None:
        """Lets `pass_on` give away the tokens of samples that have ended; `settle` calls it too.

        Args:
          slots: int [K], the slots; others may start in them before.
          dropped: int [K], number of last tokens that are left out.
          version: version of the weights.
          receive: K functions, which get what `take` returns.
        """
        ends = self._end - self._missing_n[slots] - dropped
        where = zip(slots.tolist(), self._begin_n[slots].tolist(), ends.tolist(), strict=True)
        self._ended += [(*at, version, each) for at, each in zip(where, receive, strict=True)]
        self._begin_n[slots], self._missing_n[slots] = self._end, 0

    def tail(self, slot: int, count: int) -> np.ndarray:
        """The last `count` tokens of the stretch in a slot, or all of it, int32."""
        end = self._end - int(self._missing_n[slot])
        begin = max(int(self._begin_n[slot]), end - count)
        return self._words_of(slot, begin, end, 1)[0]

    def stop(self, slots: np.ndarray) -> None:
        """Forgets the samples in these slots, int."""
        self._running_n[slots] = False

    def _stretch(self, slot: int, begin: int, end: int, version: int) -> Stretch:
        words = self._words_of(slot, begin, end, 3)
        return Stretch(words[0], words[1].view(np.float32), words[2].view(np.float32), version)

    def _words_of(self, slot: int, begin: int, end: int, kinds: int) -> np.ndarray:
        """Columns of a slot, int32 [kinds, columns]: ids, bits of log-probabilities, of entropies."""
        parts = [self._last[:kinds, slot, max(0, begin - self._settled) : end - self._settled]]
        if end <= self._settled:
            parts = [self._last[:kinds, slot, :0]]
        # From the newest: with long samples there are many blocks, and few of them are looked for.
        for b in reversed(self._blocks):
            if b.first + b.used <= begin:
                break
            parts.append(
                b.words[:kinds, slot, max(0, begin - b.first) : min(max(0, end - b.first), b.used)]
            )
        return np.concatenate(parts[::-1], axis=1)
