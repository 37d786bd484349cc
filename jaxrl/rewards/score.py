"""Turns completions into scores: the graders' verdicts, shaped by length, and the sum of several rewards.

    Completions -> verdicts -> Scored -> terms (grader, model, judge, functions) -> Scored, their metrics

Each term has one float per response, from a grader, function, model or judge. The weighted sum becomes the
score. A function may abstain from a response by None. Correctness is still the grader's, and dynamic sampling
filters groups by correctness.
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

    Raises:
      UserError: a score is not finite.
    """
    correct_B = np.array([v.correct for v in verdicts], np.bool_)
    shaping_B = np.asarray(overlong(completions.lengths_B), np.float32)
    assert shaping_B.shape == correct_B.shape, "overlong returns one value for each response"
    # A grader of the user's may give any number, and a NaN would say that there is no reward.
    score_B = _checked([v.score for v in verdicts], "the grader", completions)
    return Scored(
        completions=completions,
        correct_B=correct_B,
        score_B=score_B,
        shaping_B=shaping_B,
        predictions=tuple(v.prediction for v in verdicts),
        failures=tuple(v.failure for v in verdicts),
    )


Scores = Sequence[float | None] | np.ndarray
"""B scores of a reward, None where it abstains."""


@dataclasses.dataclass(frozen=True)
class Term:
    """One of several rewards.

    Attributes:
      name: name in the metrics.
      weight: factor of the scores in the sum.
      score_B: unweighted scores.
    """

    name: str
    weight: float
    score_B: Scores


def weighted_sum(scored: Scored, terms: Sequence[Term]) -> tuple[Scored, dict[str, float]]:
    """Replaces the scores by the sum of weight * score over the terms, and stores the terms too.

    A term that abstains from a response is left out of its sum: score_b = sum over k that answered of
    weight_k * score_bk. The weights stay as they are. If no term of a weight answers, there is no score, NaN.

    Args:
      scored: graded responses. Their score is part of the sum only as a term "grader".
      terms: one or more terms with different names.

    Returns:
      The responses with new scores, and for each term `reward/<name>/mean` and `reward/<name>/std` of its
      unweighted scores, absent if none counts; and `reward/<name>/abstained`, absent without abstentions.

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
    total_B, finished_B = np.zeros(len(scored), np.float32), scored.completions.finished_B
    # Samples that a term abstains from, and those that a term of a weight scores.
    without_B, decided_B = np.zeros((2, len(scored)), bool)
    columns = []
    for term in terms:
        score_B = _checked(term.score_B, f"reward {term.name!r}", scored.completions)
        answers_B = ~np.isnan(score_B)
        # In float32 and in this order on every host, so that sums are equal to the bit.
        total_B += np.float32(term.weight) * np.where(answers_B, score_B, np.float32(0))
        without_B |= ~answers_B
        decided_B |= answers_B & (term.weight != 0)
        columns.append(score_B)
        counted = score_B[finished_B & answers_B]
        if len(counted):
            metrics[f"reward/{term.name}/mean"] = float(counted.mean())
            metrics[f"reward/{term.name}/std"] = float(counted.std())
        if abstained := int((finished_B & ~answers_B).sum()):
            metrics[f"reward/{term.name}/abstained"] = float(abstained)
    scored = scored.replace(
        score_B=np.where(without_B & ~decided_B, np.float32(np.nan), total_B),
        term_BK=np.stack(columns, axis=1),
        term_weight_K=np.array([term.weight for term in terms], np.float32),
    )
    return scored, metrics


def _checked(values: Any, what: str, completions: Completions) -> np.ndarray:
    prompts, G = completions.prompts, completions.num_samples
    of_prompts = {"prompts": prompts.texts, "sources": prompts.sources}
    return checked_scores(values, what, num_samples=G, **of_prompts)


def checked_scores(
    values: Any, what: str, *, num_samples: int, prompts: Sequence[str], sources: Sequence[str]
) -> np.ndarray:
    """Converts the scores of a reward to float32 [B], NaN where it abstains.

    Args:
      values: list or array with a number or None per response.
      what: name of the reward, for messages.
      num_samples: G, number of responses to each prompt.
      prompts, sources: N texts of prompts, and names of their data sets, for messages.

    Raises:
      UserError: The values are no numbers, too many, too few, or not finite in float32.
    """
    count = len(prompts) * num_samples
    rule = f"it must return {count} numbers, one for each response"
    try:
        value_B = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        shown = f"{type(values).__name__} {values!r}"[:80]
        raise UserError(f"{what} returned {shown}: {error}; {rule}") from error
    if value_B.shape != (count,):
        raise UserError(f"{what} returned an array of shape {value_B.shape}; {rule}")
    # NumPy makes NaN of None, too.
    abstains_B = np.array([value is None for value in values], bool)
    # Written so that NaN, which compares false, counts as wrong.
    wrong = np.flatnonzero(~abstains_B & ~(np.abs(value_B) <= np.finfo(np.float32).max))
    if len(wrong):
        n, g = divmod(int(wrong[0]), num_samples)
        raise UserError(
            f"{what} returned {value_B[wrong[0]]} for response {wrong[0]} (sample {g} of the prompt "
            f"{prompts[n][-80:]!r} of {sources[n]!r}) and {len(wrong)} of {count} numbers that are not "
            "finite in float32; one would make every weight NaN, so return a number for every response, or "
            "None where there is nothing to score"
        )
    return value_B.astype(np.float32)
