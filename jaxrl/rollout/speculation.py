"""Decides on the host when to speculate, and what the drafts are taken from.

A dispatch speculates on accelerators if at most a few slots of each shard are in use.

NumPy only, without a device or a clock. All processes of a run take the same decisions.

    n slots   m rows of all shards   S reference tokens
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

COMPARED = 6
"""Number of tokens at the end of a sample that are compared with earlier text to find drafts."""
# A round took 1.1 to 2.6 steps on two cores (benchmarks/results/2026-11-23-speculation.md): what is gained
# where most drafts are right is lost elsewhere.
OFF_ON = ("cpu",)
# Numbers of rows on a shard that the program is compiled for. With few rows, at the end of a batch, passes
# wait for memory, and k + 1 tokens of a row cost little more than one.
_ROWS = (2, 4, 8)
# Answers of full length to a prompt that are kept; of shorter ones more.
_ANSWERS = 4
# Tokens of answers kept for later calls, over all prompts: 256 MiB of int32.
_MOST_KEPT = 2**26


def num_drafted(speculate: int, platform: str | None) -> int:
    """The number of tokens that a round drafts on a platform; 0 if decoding does not speculate there."""
    if speculate and platform in OFF_ON:
        logger.warning(
            "speculate %d has no effect on %s, where it saves no time", speculate, platform
        )
        return 0
    return speculate


class Rows(NamedTuple):
    """The rows of a dispatch that speculates.

    Attributes:
      slot_m: int32, slot of each row, counted within its shard; -1 for unused rows.
      source_n: int32, row of each slot, counted within its shard; -1 for none.
      slots: index of the slot of each used row, by row.
    """

    slot_m: np.ndarray
    source_n: np.ndarray
    slots: dict[int, int]


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
    return Rows(slot_m, source_n, dict(zip(row.tolist(), busy.tolist(), strict=True)))


class Speculation:
    """Chooses the dispatches of a decode loop that speculate, and counts what that gains.

    Attributes:
      rows: rows of the newest dispatch; None if it decodes token by token.
    """

    def __init__(self):
        self.rows: Rows | None = None
        self._tokens = self._tokens_in_rounds = self._rounds = 0

    def choose(
        self, busy: np.ndarray, num_slots: int, shards: int, num_tokens: Callable[[int], int]
    ) -> Rows | None:
        """The rows of the next dispatch, or None if it decodes token by token.

        Args:
          busy, num_slots, shards: as of `rows_of`.
          num_tokens: function that returns the number of tokens of the sample in a slot.
        """
        self.rows = rows_of(busy, num_slots, shards)
        # Too few tokens do not tell which earlier text to follow.
        if self.rows and min(map(num_tokens, self.rows.slots.values())) < COMPARED:
            self.rows = None
        return self.rows

    def note(self, tokens: int, rounds: int) -> None:
        """Notes the tokens of a dispatch, and the rounds of all of its rows; 0 if it did not speculate."""
        self._tokens += tokens
        self._tokens_in_rounds += tokens if rounds else 0
        self._rounds += rounds

    def metrics(self) -> Mapping[str, float]:
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
        # With a gap between two answers.
        while sum(len(answer) + 1 for answer in answers) - 1 > self.length:
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
