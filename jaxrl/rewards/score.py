"""Turns completions into scores: the graders' verdicts, shaped by length, and the sum of several rewards.

    Completions -> verdicts -> Scored -> terms (grader, model, judge, functions) -> Scored, their metrics

Each term has one float per response, from a grader, function, model or judge. The weighted sum becomes the
score. Correctness is still the grader's, and dynamic sampling filters groups by correctness.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.grading import RIGHT, GradingTask, Response, Verdict
from jaxrl.types import Completions, Scored


class AskedVerdicts:
    """Verdicts that are computed on a thread. Samples that their agent has scored have that verdict."""

    def __init__(self, graders: Graders, completions: Completions):
        self._graders = graders
        self._prompts = prompts = completions.prompts
        # The rows of N prompts, as graders see them.
        self._rows = list(map(GradingTask, prompts.answers, prompts.extras, prompts.sources))
        self._given: list[Verdict | None] = [None] * len(completions)
        if (agents := completions.of_agents) is not None:
            for b, score in enumerate(agents.score_B.tolist()):
                if agents.failures[b] is not None:
                    # No verdict on the policy: a failed sample has no tokens, and counts in no baseline.
                    self._given[b] = Verdict(0.0, False)
                elif not math.isnan(score):
                    self._given[b] = Verdict(score, score >= RIGHT)
        # The thread of the graders also makes the texts, if they have not been read yet.
        self._future = graders.submit(
            lambda: [
                # Without the turns of an environment: an answer that a tool gave is not the policy's.
                Response(text, tokens[mask > 0], self._rows[n])
                for text, tokens, mask, n, given in zip(
                    completions.policy_texts,
                    completions.tokens,
                    completions.mask,
                    completions.prompt_index_B,
                    self._given,
                    strict=True,
                )
                if given is None
            ]
        )

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> list[Verdict]:
        """Waits for the verdicts.

        Raises:
          UserError: A ground truth is empty or malformed; the message names the prompt.
        """
        try:
            graded = iter(self._future.result())
            return [next(graded) if given is None else given for given in self._given]
        except UserError as error:
            for n, row in enumerate(self._rows):
                if fault := self._graders.validate(row):
                    where = f"prompt {self._prompts.ids_N[n]} of {row.source!r}"
                    raise UserError(f"{where}: {fault}") from error
            raise


def score_completions(
    completions: Completions,
    verdicts: Sequence[Verdict],
    *,
    overlong: Callable[[np.ndarray], np.ndarray],
) -> Scored:
    """Turns verdicts into scores: +1 if right, -1 if wrong (DAPO eq. 7), plus a term for length (eq. 13).

    Args:
      completions: B responses.
      verdicts: one verdict per response.
      overlong: function of response lengths in tokens, int64 [B]; returns values to add to the scores, [B].
    """
    correct_B = np.array([v.correct for v in verdicts], np.bool_)
    shaping_B = np.asarray(overlong(completions.lengths_B), np.float32)
    assert shaping_B.shape == correct_B.shape, "overlong returns one value for each response"
    return Scored(
        completions=completions,
        correct_B=correct_B,
        score_B=np.array([v.score for v in verdicts], np.float32),
        shaping_B=shaping_B,
        predictions=tuple(v.prediction for v in verdicts),
        failures=tuple(v.failure for v in verdicts),
    )


@dataclasses.dataclass(frozen=True)
class Term:
    """One of several rewards.

    Attributes:
      name: name in the metrics.
      weight: factor of the scores in the sum.
      score_B: unweighted scores, float [B].
    """

    name: str
    weight: float
    score_B: np.ndarray


def weighted_sum(scored: Scored, terms: Sequence[Term]) -> tuple[Scored, dict[str, float]]:
    """Replaces the scores by the sum of weight * score over the terms, and stores the terms too.

    Args:
      scored: graded responses. Their score is part of the sum only as a term "grader".
      terms: one or more terms with different names.

    Returns:
      The responses with new scores, and for each term `reward/<name>/mean` and `reward/<name>/std` of its
      unweighted scores; absent if all agents failed.

    Raises:
      UserError: Two terms share a name, or a term's scores are too many, too few or not finite.
    """
    names = collections.Counter(term.name for term in terms)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UserError(
            f"{len(terms)} rewards share the names {', '.join(map(repr, twice))}; metrics are kept "
            "by name, so give each reward its own"
        )
    assert terms, "a sum without terms is no reward"
    metrics: dict[str, float] = {}
    total_B, counts_B = np.zeros(len(scored), np.float32), scored.completions.counts_B
    columns = []
    for term in terms:
        score_B = checked_scores(term.score_B, len(scored), f"reward {term.name!r}")
        # In float32 and in this order on every host, so that sums are equal to the bit.
        total_B += np.float32(term.weight) * score_B
        columns.append(score_B)
        if counts_B.any():
            metrics[f"reward/{term.name}/mean"] = float(score_B[counts_B].mean())
            metrics[f"reward/{term.name}/std"] = float(score_B[counts_B].std())
    scored = scored.replace(
        score_B=total_B,
        term_BK=np.stack(columns, axis=1),
        term_weight_K=np.array([term.weight for term in terms], np.float32),
    )
    return scored, metrics


def checked_scores(values: Any, count: int, what: str) -> np.ndarray:
    """Converts the scores of a reward to float32 [count].

    Args:
      values: list or array with one number per response.
      count: number of responses.
      what: name of the reward, for messages.

    Raises:
      UserError: The values are no numbers, too many, too few, or not finite in float32.
    """
    rule = f"it must return {count} numbers, one for each response"
    try:
        value_B = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        shown = f"{type(values).__name__} {values!r}"[:80]
        raise UserError(f"{what} returned {shown}: {error}; {rule}") from error
    if value_B.shape != (count,):
        raise UserError(f"{what} returned an array of shape {value_B.shape}; {rule}")
    # Written so that NaN, which compares false, counts as wrong.
    wrong = np.flatnonzero(~(np.abs(value_B) <= np.finfo(np.float32).max))
    if len(wrong):
        raise UserError(
            f"{what} returned {value_B[wrong[0]]} for response {wrong[0]} and {len(wrong)} of {count} "
            "numbers that are not finite in float32; one would make every weight NaN, so return a "
            "number for every response, such as 0 where there is nothing to score"
        )
    return value_B.astype(np.float32)
