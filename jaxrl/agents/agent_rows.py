"""From the conversations of agents to the rows that training packs.

    prompt     what the samples of a group have in common before their first sampled token
    response   the rest of a sample's main conversation; sampled tokens have mask 1
    branches   its further conversations: other threads, or histories that were edited

N prompts   G samples of each   T tokens
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl.agents.sessions import Session
from jaxrl.types import AgentRows, Branch, Completions, Prompts, TurnText

_SILENT = "ended without an answer of the policy, so there is nothing to learn from"

DecodeTexts = Callable[[Sequence[np.ndarray]], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Talk:
    """What a session leaves, as plain data that one process sends to the others.

    Attributes:
      branches: its conversations, the main one first; none if the agent failed or asked nothing.
      score: score of the agent; None for none.
    """

    branches: tuple[Branch, ...]
    score: float | None

    def to_plain(self) -> dict[str, Any]:
        """In types of JSON, which keep float32 exactly."""
        arrays = lambda x: x.tolist() if isinstance(x, np.ndarray) else x  # noqa: E731
        branches = [{k: arrays(v) for k, v in vars(branch).items()} for branch in self.branches]
        return {"branches": branches, "score": self.score}

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> Talk:
        """The talk that `to_plain` was called on."""

        def branch(truncated: bool, **lists: Any) -> Branch:
            types = {"tokens": np.int32, "version": np.int32}
            arrays = {k: np.array(v, types.get(k, np.float32)) for k, v in lists.items()}
            return Branch(**arrays, truncated=truncated)

        return Talk(tuple(branch(**each) for each in plain["branches"]), plain["score"])

    @staticmethod
    def of(session: Session) -> Talk:
        """The talk of a session that has ended. Nothing is trained on what a failed agent said."""
        return Talk(() if session.error else session.conversation.branches(), session.score)


class Tally:
    """Numbers of the sessions of a batch, for its metrics.

    Attributes:
      errors: how often each error has ended one.
      total: number of sessions.
    """

    def __init__(self):
        self.errors: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds: list[float] = []

    @property
    def total(self) -> int:
        return len(self._seconds)

    def add(self, session: Session) -> None:
        """Counts a session that has ended."""
        counts = session.conversation.counts
        error = session.error or ("" if counts.sampled else _SILENT)
        if error:
            self.errors[error] += 1
        self._counts.update(vars(counts))
        self._seconds.append(session.seconds)

    def metrics(self) -> dict[str, float]:
        """Tokens by `conversation.Counts`, of failed agents too, and the time of a session in seconds."""
        return {
            **{f"{name}_tokens": float(count) for name, count in self._counts.items()},
            "seconds/mean": float(np.mean(self._seconds or [0])),
            "seconds/max": max(self._seconds, default=0.0),
        }


def group_of(
    prompts: Prompts, talks: Sequence[Talk], step: int, decode_texts: DecodeTexts
) -> Completions:
    """The completions of one prompt.

    Args:
      prompts: the prompt.
      talks: what its G samples said.
      step: training step whose sampling keys they have.
      decode_texts: function from token ids to texts.
    """
    # The tokens before the first sampled one, which no other branch trains.
    mains = [talk.branches[0] for talk in talks if talk.branches]
    heads = [main.tokens[: int(np.argmax(main.mask))] for main in mains]
    common = _common_prefix(heads)
    if common:
        prompts = dataclasses.replace(prompts, tokens=(heads[0][:common],))
    # Without a common beginning there is no prompt, and every conversation stands alone.
    further = tuple(talk.branches[1:] if common else talk.branches for talk in talks)
    none, no_ids = np.zeros(0, np.float32), np.zeros(0, np.int32)
    empty = Branch(no_ids, none, none, none, no_ids)
    rows = [talk.branches[0] if common and talk.branches else empty for talk in talks]
    turns = [_turns(row.tokens[common:], row.mask[common:], decode_texts) for row in rows]
    return Completions(
        prompts=prompts,
        num_samples=len(talks),
        tokens=tuple(row.tokens[common:] for row in rows),
        rollout_logprob=tuple(row.rollout_logprob[common:] for row in rows),
        entropy=tuple(row.entropy[common:] for row in rows),
        truncated_B=np.array([any(x.truncated for x in talk.branches[:1]) for talk in talks], bool),
        texts=tuple("".join(turn.text for turn in some) for some in turns),
        mask=tuple(row.mask[common:] for row in rows),
        turns=tuple(turns),
        started_B=np.full(len(talks), step, np.int32),
        version=tuple(row.version[common:] for row in rows),
        of_agents=AgentRows(
            # Without a score of its agent a sample gets one from the grader (`rewards.score`).
            np.array([np.nan if t.score is None else t.score for t in talks], np.float32),
            np.array([not talk.branches for talk in talks], bool),
            further,
        ),
    )


def _common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """The number of first tokens that all sequences have in common; 0 without sequences."""
    if not sequences:
        return 0
    shortest = min(map(len, sequences))
    same = np.all([s[:shortest] == sequences[0][:shortest] for s in sequences], axis=0)
    # `argmin` finds the first False; the appended one stands for "all are the same".
    return int(np.argmin(np.append(same, False)))


def _turns(tokens: np.ndarray, mask: np.ndarray, decode_texts: DecodeTexts) -> tuple[TurnText, ...]:
    """The turns of a response, of which the tokens of each have one mask."""
    starts = np.flatnonzero(np.diff(mask)) + 1
    parts = np.split(tokens, starts) if len(tokens) else []
    by_policy = mask[np.append(0, starts)] > 0 if len(tokens) else []
    return tuple(
        TurnText(bool(own), text) for own, text in zip(by_policy, decode_texts(parts), strict=True)
    )
