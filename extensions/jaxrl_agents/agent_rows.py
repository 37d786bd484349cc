"""From the conversations of agents to the rows that training packs.

    prompt     what the samples of a group have in common before their first sampled token
    response   the rest of a sample's main conversation; sampled tokens have mask 1
    branches   its further conversations: other threads, or histories that were edited

Each role of an agent has groups of its own, as if it were another agent with the same problem.

N prompts   G samples of each   T tokens
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl.types import (
    AgentFailure,
    AgentRows,
    Branch,
    Completions,
    Prompts,
    Stretch,
    TurnText,
)
from jaxrl_agents.sessions import Session

_SILENT = "ended without an answer of the policy, so there is nothing to learn from"

DecodeTexts = Callable[[Sequence[np.ndarray]], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Talk:
    """What a session leaves of a role, as plain data that one process sends to the others.

    Attributes:
      branches: its conversations, the main one first; none if the agent failed.
      score: score that the agent gave; None for none.
      failure: why it failed, with its conversations; None if it did not.
    """

    branches: tuple[Branch, ...]
    score: float | None
    failure: AgentFailure | None = None

    def to_plain(self) -> dict[str, Any]:
        """In types of JSON, which keep float32 exactly."""
        failure = self.failure and {**vars(self.failure), "said": _to_plain(self.failure.said)}
        return {"branches": _to_plain(self.branches), "score": self.score, "failure": failure}

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> Talk:
        """The talk that `to_plain` was called on."""
        if failure := plain["failure"]:
            failure = AgentFailure(**{**failure, "said": _of_plain(failure["said"])})
        return Talk(_of_plain(plain["branches"]), plain["score"], failure)

    @staticmethod
    def all_of(session: Session) -> tuple[Talk, ...]:
        """The talk of each role that learns. Nothing that a failed agent said is trained on."""
        talks = []
        # A request that came before the end may still change a conversation.
        with session.lock:
            for role, conversation in session.learning.items():
                said, score = conversation.branches(), session.score
                error = session.error or ("" if said else _SILENT)
                if error:
                    said = said or conversation.unanswered()
                    talks.append(Talk((), None, AgentFailure(error, session.traceback, said)))
                else:
                    talks.append(Talk(said, score[role] if isinstance(score, dict) else score))
        return tuple(talks)


def _to_plain(branches: Sequence[Branch]) -> list[dict[str, Any]]:
    arrays = lambda x: x.tolist() if isinstance(x, np.ndarray) else x  # noqa: E731
    return [{k: arrays(v) for k, v in vars(branch).items()} for branch in branches]


def _of_plain(plain: Sequence[dict[str, Any]]) -> tuple[Branch, ...]:
    def branch(truncated: bool, **lists: Any) -> Branch:
        types = {"tokens": np.int32, "version": np.int32}
        arrays = {k: np.array(v, types.get(k, np.float32)) for k, v in lists.items()}
        return Branch(**arrays, truncated=truncated)

    return tuple(branch(**each) for each in plain)


class Tally:
    """Numbers of the sessions of a batch, for its metrics.

    Attributes:
      errors: how often each error has ended one.
      tracebacks: the traceback of the first of them; "" without one.
      total: number of sessions.
      failed: number of those that have failed in all of their roles that learn.
    """

    def __init__(self):
        self.errors: collections.Counter[str] = collections.Counter()
        self.tracebacks: dict[str, str] = {}
        self.failed = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._by_role: dict[str, list[float]] = collections.defaultdict(list)
        self._seconds: list[float] = []

    @property
    def total(self) -> int:
        return len(self._seconds)

    def add(self, session: Session, talks: Sequence[Talk]) -> None:
        """Counts a session that has ended, and has left these talks."""
        failures = {talk.failure.message: talk.failure for talk in talks if talk.failure}
        for message, failure in failures.items():
            self.errors[message] += 1
            self.tracebacks.setdefault(message, failure.traceback)
        self.failed += all(talk.failure for talk in talks)
        fails = {x: t.failure for x, t in zip(session.learning, talks, strict=True)}
        for role, conversation in session.conversations.items():
            self._counts.update(vars(conversation.counts))
            sampled = conversation.counts.sampled
            if role and sampled and not fails.get(role, session.error):
                self._by_role[f"{role}/sampled_tokens"].append(sampled)
                # A frozen role may have none.
                if isinstance(session.score, dict) and role in session.score:
                    self._by_role[f"{role}/score"].append(session.score[role])
        self._seconds.append(session.seconds)

    def metrics(self) -> dict[str, float]:
        """Tokens by `conversation.Counts`, of failed agents too, and the time of a session in seconds.

        Of each role the mean of its scores, and of its sampled tokens.
        """
        return {
            **{f"{name}/mean": float(np.mean(values)) for name, values in self._by_role.items()},
            **{f"{name}_tokens": float(count) for name, count in self._counts.items()},
            "seconds/mean": float(np.mean(self._seconds or [0])),
            "seconds/max": max(self._seconds, default=0.0),
        }


def group_of(
    prompts: Prompts, talks: Sequence[Talk], step: int, decode_texts: DecodeTexts, role: str = ""
) -> Completions:
    """The completions of one prompt.

    Args:
      prompts: the prompt; its source gets the name of the role, by which groups and metrics are told apart.
      talks: what its G samples said.
      step: training step whose sampling keys they have.
      decode_texts: function from token ids to texts.
      role: role that said it; "" for an agent without roles.
    """
    if role:
        (source,) = prompts.sources
        prompts = dataclasses.replace(prompts, sources=(f"{source}/{role}",))
    # The tokens before the first sampled one, which no other branch trains.
    mains = [talk.branches[0] for talk in talks if talk.branches]
    heads = [main.tokens[: int(np.argmax(main.mask))] for main in mains]
    common = _common_prefix(heads)
    if common:
        prompts = dataclasses.replace(prompts, tokens=(heads[0][:common],))
    # Without a common beginning there is no prompt, and every conversation stands alone.
    further = tuple(talk.branches[1:] if common else talk.branches for talk in talks)
    empty = Branch(*Stretch.concatenate([]).arrays, np.zeros(0, np.float32))
    rows = [talk.branches[0] if common and talk.branches else empty for talk in talks]
    turns = [_turns(row.tokens[common:], row.mask[common:], decode_texts) for row in rows]
    return Completions(
        prompts=prompts,
        num_samples=len(talks),
        tokens=tuple(row.tokens[common:] for row in rows),
        rollout_logprob=tuple(row.logprob[common:] for row in rows),
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
            tuple(talk.failure for talk in talks),
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
