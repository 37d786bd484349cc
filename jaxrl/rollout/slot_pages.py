"""Decides which samples of a paged cache have memory: who may start, who grows, who has to wait.

    take      a sample wants to start in a slot: yes, if its shard has pages for it and not too many samples
    grow      before a dispatch: pages for W more tokens in every slot; the newest samples give way if needed
    advance   after a dispatch: the slots have more tokens
    release   samples have left their slots

A sample that gives way goes back to the queue and is prefilled again with the tokens that it has. That costs
time, so a sample starts only if the pages of its shard are expected to last until all samples on it have
ended, at any time from now. `LengthRecord` estimates how many will still run then.

NumPy only, without a device or a clock. All processes of a run take the same decisions.

    n slots   S shards   K intervals of response lengths   W tokens of a dispatch
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.page_pool import PagePool

# Standard deviations of the expected number of tokens for which a shard keeps pages. Simulated with 8,192
# log-normal responses (mean 3,870) on 2 shards of 1.9 million tokens: 93% of the pages are used and nobody
# gives way; if samples start whenever there is a page, 41% of all tokens are prefilled again.
_DEVIATIONS = 2
# Number of intervals in which response lengths are counted.
_INTERVALS = 64
# Probabilities are integers in these units: all processes must decide alike. Of floating point only
# operations are used that IEEE 754 rounds alike on all machines, which exp is not.
_ONE_BITS = 12
_ONE = 1 << _ONE_BITS


class SlotPages:
    """The pages of all slots, and the lengths of the sequences in them.

    Attributes:
      pool: pages and page table.
    """

    def __init__(
        self,
        sizes: PageSizes,
        *,
        num_slots: int,
        tokens_per_dispatch: int,
        most_response_tokens: int,
    ):
        """Starts with idle slots.

        Args:
          sizes: sizes of the paged cache.
          num_slots: n.
          tokens_per_dispatch: W.
          most_response_tokens: maximum length of a response.
        """
        self.pool = PagePool(sizes, num_slots)
        self._tokens_per_dispatch = tokens_per_dispatch
        self._busy_n = np.zeros(num_slots, bool)
        # Tokens cached and the most that will be. The last token of a sequence is never cached.
        self._cached_n, self._most_n = np.zeros(num_slots, int), np.zeros(num_slots, int)
        self._order_n, self._num_started = np.zeros(num_slots, int), 0
        self._prompt_n = np.zeros(num_slots, int)
        self._lengths = LengthRecord(most_response_tokens, tokens_per_dispatch)
        # A slot has unused room for half a page and half a dispatch in the mean.
        self._unused = (sizes.page_tokens + tokens_per_dispatch) // 2
        # A sample that still runs k intervals later is k intervals longer.
        self._longer_K = self._lengths.width * np.arange(self._lengths.count)
        self._expect()

    def take(
        self, slot: int, tokens: np.ndarray, most: int, response_tokens: int, adapter: int = 0
    ) -> bool:
        """Gives pages to a sample that is to start in an idle slot. Returns False if it has to wait.

        Args:
          slot: index of the slot.
          tokens: int32 [T], the sequence that the sample starts from.
          most: maximum length of the sequence.
          response_tokens: number of tokens at its end that are a response already.
          adapter: number of the adapter, see `samples.Start`.
        """
        shard = int(self.pool.shard_n[slot])
        # What `_expect` adds up, for this one sample: its matrices are too slow for each of many that start.
        interval = self._lengths.intervals(np.array(response_tokens))
        tokens_K = len(tokens) + self._unused + self._longer_K
        added_2K = np.stack(
            [tokens_K * self._alive_KK[interval], tokens_K**2 * self._doubt_KK[interval]]
        )
        if not self._will_last(shard, self._expected_S2K[shard] + added_2K):
            return False
        cached = len(tokens) - 1
        room = min(cached + self._tokens_per_dispatch, most - 1)
        if not self.pool.start(slot, tokens[:cached], room, adapter):
            return False
        self._busy_n[slot] = True
        self._cached_n[slot], self._most_n[slot] = cached, most - 1
        self._order_n[slot], self._num_started = self._num_started, self._num_started + 1
        self._prompt_n[slot] = len(tokens) - response_tokens
        self._expected_S2K[shard] += added_2K
        return True

    def _will_last(self, shard: int, expected_2K: np.ndarray) -> bool:
        """Whether a shard has enough pages for the expected tokens; True if nothing runs on it."""
        # Else it would wait forever.
        if not self._busy_n[self.pool.slots_of(shard)].any():
            return True
        mean_K, variance_K = expected_2K >> _ONE_BITS
        # Squares below, so that all stays integer.
        spare_K = self.pool.num_pages * self.pool.page_tokens - mean_K
        return bool(((spare_K >= 0) & (spare_K**2 >= _DEVIATIONS**2 * variance_K)).all())

    def _expect(self) -> None:
        """Estimates the tokens of every shard from now on."""
        self._alive_KK = self._lengths.still_running()
        self._doubt_KK = self._alive_KK * (_ONE - self._alive_KK) >> _ONE_BITS
        K, longer_K, shards = self._lengths.count, self._longer_K, len(self.pool.num_free_S)
        slots = np.flatnonzero(self._busy_n)
        length = self._cached_n[slots] + 1
        interval = self._lengths.intervals(length - self._prompt_n[slots])
        of_shard, tokens = self.pool.shard_n[slots] * K + interval, length + self._unused
        # Sums of the powers 0 to 2 of the tokens of a shard's samples in an interval.
        count_SK, sum_SK, squares_SK = (
            np.bincount(of_shard, tokens**power, shards * K).astype(np.int64).reshape(shards, K)
            for power in range(3)
        )
        # Mean and variance, interval by interval, int64 in units of 1 / `_ONE`.
        mean_SK = sum_SK @ self._alive_KK + longer_K * (count_SK @ self._alive_KK)
        variance_SK = (
            squares_SK @ self._doubt_KK
            + 2 * longer_K * (sum_SK @ self._doubt_KK)
            + longer_K**2 * (count_SK @ self._doubt_KK)
        )
        self._expected_S2K = np.stack([mean_SK, variance_SK], axis=1)

    def grow(self, cached: Callable[[int], np.ndarray] | None = None) -> list[int]:
        """Gives every busy slot pages for W more tokens.

        Args:
          cached: function that returns the sequence of a slot, int32 [T], which is about to lose its pages;
            later samples may share what is cached of it. None lets them share the prompt only.

        Returns:
          Slots whose samples have lost their pages because there were too few, the newest first.
        """
        dropped = []
        while True:
            slots = np.flatnonzero(self._busy_n)
            wanted = np.minimum(
                self._cached_n[slots] + self._tokens_per_dispatch, self._most_n[slots]
            )
            short = np.flatnonzero(self.pool.lacking(slots, wanted))
            if not len(short):
                self.pool.grow(slots, wanted)
                self._expect()
                self.pool.settle()
                # Over all shards, so that the oldest of them is the first to start again.
                return sorted(dropped, key=lambda slot: -self._order_n[slot])
            for shard in short.tolist():
                of_shard = slots[self.pool.shard_n[slots] == shard]
                newest = int(of_shard[self._order_n[of_shard].argmax()])
                if cached is not None:
                    self.remember(newest, cached(newest))
                self.release([newest])
                dropped.append(newest)

    def advance(self, count_n: np.ndarray) -> None:
        """Adds the tokens that a dispatch has decoded, int [n], to the lengths of the slots."""
        count_n = np.where(self._busy_n, count_n, 0)
        response_n = np.maximum(self._cached_n + 1 - self._prompt_n, 0)
        self._lengths.add_decoded(response_n, count_n)
        self._cached_n += count_n

    def remember(self, slot: int, tokens: np.ndarray) -> None:
        """Lets later samples share what is cached of a busy slot's sequence, int32 [T]; `end` comes next."""
        self.pool.remember(slot, tokens[: self._cached_n[slot]])

    def end(self, slots: list[int]) -> None:
        """Frees slots whose samples are finished, and learns from their lengths."""
        self._lengths.add_ended(self._cached_n[slots] + 1 - self._prompt_n[slots])
        self.release(slots)

    def release(self, slots: list[int]) -> None:
        """Frees slots whose samples are dropped, left unfinished, or have to wait."""
        self.pool.release(np.array(slots, int))
        self._busy_n[slots] = False


class LengthRecord:
    """Estimates how long running responses will run, from all that has been decoded.

    Attributes:
      width: number of tokens of an interval.
      count: number of intervals, K.
    """

    def __init__(self, longest: int, tokens_per_dispatch: int):
        """Args: the maximum length of a response; the number of tokens of a dispatch, W."""
        self.width = max(tokens_per_dispatch, -(-longest // _INTERVALS))
        self.count = -(-longest // self.width)
        # Long responses end last, so the lengths of those that have ended are too small. This is the estimate
        # for lives of which some have not ended (Kaplan and Meier): of the tokens decoded in an interval of
        # lengths, the share that ended a response.
        self._decoded_K, self._ended_K = np.zeros(self.count), np.zeros(self.count)
        # Without data the mean response has a quarter of the longest.
        self._prior_tokens = longest / 4

    def add_decoded(self, length_n: np.ndarray, count_n: np.ndarray) -> None:
        """Adds responses of these lengths, int [n], to which these numbers of tokens were added, int [n]."""
        self._decoded_K += np.bincount(self.intervals(length_n), count_n, self.count)

    def add_ended(self, length_n: np.ndarray) -> None:
        """Adds responses that have ended with these lengths, int [n]."""
        interval_n = self.intervals(np.maximum(length_n - 1, 0))
        self._ended_K += np.bincount(interval_n, minlength=self.count)

    def still_running(self) -> np.ndarray:
        """The probability that a response in interval i still runs k intervals later, [K, K].

        Returns:
          int64, in units of 1 / `_ONE`.
        """
        # The prior counts like one response that has ended.
        rate_K = (self._ended_K + 1) / (self._decoded_K + self._prior_tokens)
        K = self.count
        # Nothing runs beyond the last interval.
        stays = np.zeros(2 * K)
        stays[: K - 1] = np.maximum(1 - rate_K * self.width, 0)[:-1]
        before_KK = np.arange(K)[:, None] + np.arange(-1, K - 1)[None]
        stays_KK = stays[before_KK]
        stays_KK[:, 0] = 1
        return np.rint(np.cumprod(stays_KK, axis=1) * _ONE).astype(np.int64)

    def intervals(self, length_n: np.ndarray) -> np.ndarray:
        return np.minimum(length_n // self.width, self.count - 1)
