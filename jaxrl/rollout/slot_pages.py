"""Decides which samples of a paged cache have memory: who may start, who grows, who has to wait.

    take      a sample wants to start in a slot: yes, if its shard has pages for it and not too many samples
    grow      before a dispatch: pages for W more tokens in every slot; the newest samples give way if needed
    advance   after a dispatch: the slots have more tokens
    release   samples have left their slots

A sample that gives way goes back to the queue and is prefilled again with the tokens that it has. That costs
time, so samples start only while the pages are expected to last: a shard decodes at most as many samples as
it has room for at their mean length over time. `LengthRecord` estimates it.

NumPy only, without a device or a clock: all processes take the same decisions.

    n slots   W tokens of a dispatch
"""

from __future__ import annotations

import numpy as np

from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.page_pool import PagePool

# Number of intervals in which response lengths are counted.
_LENGTH_BINS = 128


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
        self.pool = PagePool(
            num_slots=num_slots,
            shards=sizes.shards,
            num_pages=sizes.num_pages,
            pages_per_slot=sizes.pages_per_slot,
            page_tokens=sizes.page_tokens,
        )
        self._tokens_per_dispatch = tokens_per_dispatch
        self._busy_n = np.zeros(num_slots, bool)
        # Tokens cached and the most that will be. The last token of a sequence is never cached.
        self._cached_n, self._most_n = np.zeros(num_slots, int), np.zeros(num_slots, int)
        self._order_n, self._num_started = np.zeros(num_slots, int), 0
        self._prompt_n = np.zeros(num_slots, int)
        self._prompt_tokens = 0
        self._lengths = LengthRecord(most_response_tokens, tokens_per_dispatch)
        # A slot has unused room for half a page and half a dispatch in the mean.
        self._unused = (sizes.page_tokens + tokens_per_dispatch) / 2

    def take(self, slot: int, tokens: np.ndarray, most: int, response_tokens: int) -> bool:
        """Gives pages to a sample that is to start in an idle slot. Returns False if it has to wait.

        Args:
          slot: index of the slot.
          tokens: int32 [T], the sequence that the sample starts from.
          most: maximum length of the sequence.
          response_tokens: number of tokens at its end that are a response already.
        """
        shard = self.pool.shard_of(slot)
        prompt = len(tokens) - response_tokens
        if self._busy_n[self.pool.slots_of(shard)].sum() >= self._most_samples(prompt):
            return False
        cached = len(tokens) - 1
        room = min(cached + self._tokens_per_dispatch, most - 1)
        if self.pool.pages_to_start(shard, tokens[:cached], room) > self.pool.num_free(shard):
            return False
        self.pool.start(slot, tokens[:cached], room)
        self._busy_n[slot] = True
        self._cached_n[slot], self._most_n[slot] = cached, most - 1
        self._order_n[slot], self._num_started = self._num_started, self._num_started + 1
        self._prompt_n[slot] = prompt
        self._prompt_tokens += prompt
        return True

    def _most_samples(self, prompt: int) -> int:
        """The number of samples that the pages of a shard last for; at least 1.

        Args:
          prompt: prompt length of a sample that is about to start.
        """
        mean_prompt = (self._prompt_tokens + prompt) / (self._num_started + 1)
        each = mean_prompt + self._lengths.mean_over_time() + self._unused
        return max(1, int(self.pool.num_pages * self.pool.page_tokens / each))

    def grow(self) -> list[int]:
        """Gives every busy slot pages for W more tokens.

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
                return dropped
            for shard in short.tolist():
                of_shard = [slot for slot in slots.tolist() if self.pool.shard_of(slot) == shard]
                newest = max(of_shard, key=lambda slot: self._order_n[slot])
                self.release([newest])
                dropped.append(newest)

    def extend(self, slot: int, length: int, tokens: int) -> None:
        """Notes that the sequence in a busy slot is about to be extended; `grow` comes next.

        Args:
          slot: index of the slot.
          length: length of the sequence before, which may be less than the slot has decoded.
          tokens: number of new tokens.
        """
        self.pool.keep(slot, length - 1)
        self._cached_n[slot] = length - 1 + tokens

    def advance(self, count_n: np.ndarray) -> None:
        """Adds the tokens that a dispatch has decoded, int [n], to the lengths of the slots."""
        count_n = np.where(self._busy_n, count_n, 0)
        response_n = np.maximum(self._cached_n + 1 - self._prompt_n, 0)
        self._lengths.add_decoded(response_n, count_n)
        self._cached_n += count_n

    def end(self, slots: list[int]) -> None:
        """Frees slots whose samples are finished, and learns from their lengths."""
        self._lengths.add_ended(self._cached_n[slots] + 1 - self._prompt_n[slots])
        self.release(slots)

    def release(self, slots: list[int]) -> None:
        """Frees slots whose samples are dropped, left unfinished, or have to wait."""
        self.pool.release(np.array(slots, int))
        self._busy_n[slots] = False


class LengthRecord:
    """Estimates the mean length of a response over the time that it decodes, from what has been decoded.

    Long responses are seen longest and end last, so a mean over finished ones is too small. This is the
    estimate for lives that are cut off (Kaplan and Meier): of the tokens decoded at each length, the share
    that ended a response gives the probability to grow longer. Without data, half of the longest response is
    assumed to be the mean.
    """

    def __init__(self, longest: int, tokens_per_dispatch: int):
        """Args: the maximum length of a response; the number of tokens of a dispatch, W."""
        self._width = max(tokens_per_dispatch, -(-longest // _LENGTH_BINS))
        bins = -(-longest // self._width)
        self._decoded_b, self._ended_b = np.zeros(bins), np.zeros(bins)
        self._prior_tokens = longest / 2

    def add_decoded(self, length_n: np.ndarray, count_n: np.ndarray) -> None:
        """Adds responses of these lengths, int [n], to which these numbers of tokens were added, int [n]."""
        self._decoded_b += np.bincount(self._bins(length_n), count_n, len(self._decoded_b))

    def add_ended(self, length_n: np.ndarray) -> None:
        """Adds responses that have ended with these lengths, int [n]."""
        self._ended_b += np.bincount(self._bins(length_n), minlength=len(self._ended_b))

    def mean_over_time(self) -> float:
        """The mean length of a running response, over the time that it runs."""
        rate_b = (self._ended_b + 1) / (self._decoded_b + self._prior_tokens)
        alive_b = np.exp(-np.cumsum(rate_b * self._width))
        # As many as are alive in the middle of a bin.
        alive_b *= np.exp(rate_b * self._width / 2)
        middle_b = (np.arange(len(alive_b)) + 0.5) * self._width
        return float((middle_b * alive_b).sum() / alive_b.sum())

    def _bins(self, length_n: np.ndarray) -> np.ndarray:
        return np.minimum(np.maximum(length_n - 1, 0) // self._width, len(self._decoded_b) - 1)
