"""Decides on the host when to speculate, and what the drafts are taken from.

Speculation pays where a forward pass costs little more for k + 1 tokens of a row than for one: with few rows,
at the end of a batch. And it pays if enough drafts are right. So a dispatch speculates if at most a few slots
of each shard are in use, and if drafts are right often enough; if they are not, it tries again after a while.

NumPy only, without a device or a clock. All processes of a run take the same decisions.

    n slots   m rows of all shards   S reference tokens
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

COMPARED = 6
"""Number of tokens at the end of a sample that are compared with earlier text to find drafts."""
# Numbers of rows on a shard that the program is compiled for.
_ROWS = (2, 4, 8)
# Tokens per row that speculation may lose against plain decoding before it stops: at first and after a pause,
# and after it has gained many.
_TRIAL, _MOST_CREDIT = 3.0, 16.0
# Dispatches without speculation before it is tried again, at first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
# Answers of full length to a prompt that are kept; of shorter ones more.
_ANSWERS = 4
# Bytes of weights from which on a step on CPU waits for memory: no cache of usual processors holds them.
_BEYOND_CACHES = 2**26
# Tokens of answers kept for later calls, over all prompts.
_MOST_KEPT = 2**26


class Rows(NamedTuple):
    """The rows of a dispatch that speculates.

    Attributes:
      slot_m: int32, slot of each row, counted within its shard; -1 for unused rows.
      source_n: int32, row of each slot, counted within its shard; -1 for none.
      slots: index of the slot of each used row, by row.
      per_shard: number of rows on a shard.
    """

    slot_m: np.ndarray
    source_n: np.ndarray
    slots: dict[int, int]
    per_shard: int


def rows_of(busy: np.ndarray, num_slots: int, shards: int) -> Rows | None:
    """Rows for the slots in use, int; None if some shard has too many of them."""
    each = num_slots // shards
    count_S = np.bincount(busy // each, minlength=shards)
    size = next((rows for rows in _ROWS if rows >= count_S.max()), None)
    if size is None:
        return None
    slot_m = np.full(shards * size, -1, np.int32)
    source_n = np.full(num_slots, -1, np.int32)
    first_S = np.cumsum(count_S) - count_S
    of_shard = np.arange(len(busy)) - first_S[busy // each]
    row = busy // each * size + of_shard
    slot_m[row], source_n[busy] = busy % each, of_shard
    return Rows(slot_m, source_n, dict(zip(row.tolist(), busy.tolist(), strict=True)), size)


def enough_tokens(
    rows_per_shard: int, platform: str | None, weight_bytes: int, drafted: int
) -> float:
    """The tokens that a row must keep in a round of `drafted` + 1 tokens for speculation to pay.

    It is the cost of a round in steps of one token. With 4 drafted tokens on two cores a model of 540 MB,
    whose weights come from memory, had 1.1 to 1.4 with one or two rows, 1.3 to 2 with four and 1.5 to 2.6
    with eight; a model of 16 MB had 2.4 to 3.4. What a round costs beyond a step is taken to grow with the
    number of drafted tokens. On accelerators it is not measured yet.
    """
    if platform not in (None, "cpu"):
        more = 0.3
    elif weight_bytes < _BEYOND_CACHES:
        more = 1 + 0.1 * rows_per_shard
    else:
        more = 0.1 + 0.15 * rows_per_shard
    return 1 + more * drafted / 4


class Acceptance:
    """Measures what speculation gains, and decides whether to go on.

    It has a credit of tokens. Rounds that keep more tokens than needed add to it, others take from it.
    Without credit there is a pause. So a trial costs little, and rounds without right drafts are tolerated
    where most are right. What counts is the row that gains least: a step costs about the same for few rows
    and for one, so a batch takes as long as its slowest row.

    Attributes:
      credit: tokens that the slowest row of the next dispatch may lose before it ends.
    """

    def __init__(self):
        self.credit = _TRIAL
        self._pause, self._left = _FIRST_PAUSE, 0

    def wants(self) -> bool:
        """Whether the next dispatch should speculate; call it once a dispatch that could."""
        self._left -= 1
        return self._left < 0

    def add(self, gain: float) -> None:
        """Notes a dispatch whose slowest row has gained so many tokens; negative if it has lost."""
        self.credit = min(self.credit + gain, _MOST_CREDIT)
        if self.credit == _MOST_CREDIT:
            self._pause = _FIRST_PAUSE
        if self.credit <= 0:
            self.credit = _TRIAL
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)


class SpeculationChoice:
    """Decides for a decode loop which dispatches speculate, and counts what that gains.

    Each number of rows has an `Acceptance` of its own: with fewer rows a round costs less.

    Attributes:
      rows: rows of the newest dispatch; None if it decodes token by token.
      enough: tokens that each of them must keep in a round.
    """

    def __init__(self, platform: str | None, weight_bytes: int, drafted: int):
        """Args as of `enough_tokens`."""
        self.rows: Rows | None = None
        self.enough = 1.0
        self._enough = functools.partial(
            enough_tokens, platform=platform, weight_bytes=weight_bytes, drafted=drafted
        )
        self._acceptance: dict[int, Acceptance] = collections.defaultdict(Acceptance)
        self._tokens = self._tokens_in_rounds = self._rounds = 0

    @property
    def credit(self) -> float:
        """Tokens that the slowest row of the newest dispatch may lose before it ends."""
        return 0.0 if self.rows is None else self._acceptance[self.rows.per_shard].credit

    def choose(
        self, busy: np.ndarray, num_slots: int, shards: int, num_tokens: Callable[[int], int]
    ) -> Rows | None:
        """The rows of the next dispatch, or None if it decodes token by token.

        Args:
          busy, num_slots, shards: as of `rows_of`.
          num_tokens: function that returns the number of tokens of the sample in a slot. Too few do not tell
            which earlier text to follow.
        """
        self.rows = None
        rows = rows_of(busy, num_slots, shards)
        if rows is None or min(map(num_tokens, rows.slots.values())) < COMPARED:
            return None
        if self._acceptance[rows.per_shard].wants():
            self.rows, self.enough = rows, self._enough(rows.per_shard)
        return self.rows

    def note(self, active_n: np.ndarray, count_n: np.ndarray, rounds_m: np.ndarray | None) -> None:
        """Notes what a dispatch has decoded.

        Args:
          active_n: bool, whether each slot decodes on.
          count_n: int, number of new tokens of each slot.
          rounds_m: int, number of rounds of each row; None if the dispatch did not speculate.
        """
        tokens = int(count_n.sum())
        self._tokens += tokens
        if self.rows is None or rounds_m is None:
            return
        self._tokens_in_rounds += tokens
        self._rounds += int(rounds_m.sum())
        gains = [
            float(count_n[slot] - self.enough * rounds_m[row])
            for row, slot in self.rows.slots.items()
            if active_n[slot]
        ]
        self._acceptance[self.rows.per_shard].add(min(gains, default=0.0))

    def metrics(self) -> dict[str, float]:
        """Tokens that a row kept in a round, if there was one; fraction of tokens decoded in rounds."""
        fraction = self._tokens_in_rounds / max(1, self._tokens)
        metrics = {"rollout/speculated_fraction": fraction}
        if self._rounds:
            metrics["rollout/tokens_per_round"] = self._tokens_in_rounds / self._rounds
        return metrics


class AnswerTexts:
    """Finished answers to each prompt, from which later samples of the prompt are drafted.

    Attributes:
      length: S, the number of reference tokens of a sample.
    """

    def __init__(self, longest: int):
        """Starts without answers. Keeps none if `longest`, the maximum length of an answer, is 0."""
        self.length = _ANSWERS * longest
        self._answers: dict[int, collections.deque[np.ndarray]] = {}
        self._kept = 0

    def add(self, prompt_id: int, tokens: np.ndarray) -> None:
        """Adds an answer, int32; drops older answers of the prompt that no longer fit into S tokens."""
        if not self.length:
            return
        # The prompt becomes the newest.
        answers = self._answers.pop(prompt_id, collections.deque())
        self._answers[prompt_id] = answers
        answers.append(tokens[-self.length :])
        self._kept += len(answers[-1])
        while _with_gaps(answers) > self.length:
            self._kept -= len(answers.popleft())
        while self._kept > _MOST_KEPT:
            oldest = next(iter(self._answers))
            self._kept -= sum(len(answer) for answer in self._answers.pop(oldest))

    def references(self, prompt_ids: Sequence[int | None]) -> np.ndarray:
        """Answers to these prompts, int32 [m, S], oldest first, with -1 between and behind; None has none."""
        reference_mS = np.full((len(prompt_ids), self.length), -1, np.int32)
        for row, prompt_id in zip(reference_mS, prompt_ids, strict=True):
            at = 0
            for answer in self._answers.get(prompt_id, ()) if prompt_id is not None else ():
                row[at : at + len(answer)] = answer
                at += len(answer) + 1
        return reference_mS


def _with_gaps(answers: collections.deque[np.ndarray]) -> int:
    """Tokens of answers with one between two."""
    return sum(len(answer) + 1 for answer in answers) - 1
