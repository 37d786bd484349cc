"""Several rewards in one: a weighted sum of terms, arrays in and arrays out.

    Scored (grader) -> terms: grader, model, judge, user functions -> Scored (their sum), metrics of each

Where a term's scores come from is not known here: rules, functions, models and judges all give a float for
each response. The sum is the score; correctness stays the grader's, and so does what dynamic sampling keeps.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl.types import Scored


@dataclasses.dataclass(frozen=True)
class Term:
    """One reward among several.

    Attributes:
      name: under which its metrics are kept.
      weight: of its scores in the sum.
      score_B: float, one for each response, in the term's own units.
    """

    name: str
    weight: float
    score_B: np.ndarray


def grader_term(scored: Scored, *, weight: float) -> Term:
    """The grader's +1 or -1 as a term, which is what `score_completions` leaves as the score."""
    return Term("grader", weight, scored.score_B)


def weighted_sum(scored: Scored, terms: Sequence[Term]) -> tuple[Scored, dict[str, float]]:
    """Makes the sum of weight * score over the terms the score, and keeps the terms beside it.

    Args:
      scored: graded responses. Their own score is in the sum only if a term brings it (`grader_term`).
      terms: at least one, each with a name of its own.

    Returns:
      The rescored responses, and of each term `reward/<name>/mean` and `reward/<name>/std`, unweighted.

    Raises:
      UserError: two terms share a name, or a term has the wrong number of scores or one that is not finite.
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
    total_B = np.zeros(len(scored), np.float32)
    columns = []
    for term in terms:
        score_B = checked_scores(term.score_B, len(scored), f"reward {term.name!r}")
        total_B += np.float32(term.weight) * score_B
        columns.append(score_B)
        metrics[f"reward/{term.name}/mean"] = float(score_B.mean())
        metrics[f"reward/{term.name}/std"] = float(score_B.std())
    scored = scored.replace(
        score_B=total_B,
        term_BK=np.stack(columns, axis=1),
        term_weight_K=np.array([term.weight for term in terms], np.float32),
    )
    return scored, metrics


def checked_scores(values: Any, count: int, what: str) -> np.ndarray:
    """What a reward returned as float32 [count].

    Args:
      values: numbers, one for each response: a list or an array.
      count: of responses.
      what: made them, for messages.

    Raises:
      UserError: they are no numbers, too many or too few, or not all finite in float32.
    """
    rule = f"it must return {count} numbers, one for each response"
    try:
        value_B = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} returned {_shown(values)}: {error}; {rule}") from error
    if value_B.shape != (count,):
        raise UserError(f"{what} returned an array of shape {value_B.shape}; {rule}")
    # NaN compares false.
    wrong = np.flatnonzero(~(np.abs(value_B) <= np.finfo(np.float32).max))
    if len(wrong):
        raise UserError(
            f"{what} returned {value_B[wrong[0]]} for response {wrong[0]} and {len(wrong)} of {count} "
            "numbers that are not finite in float32; one would make every weight NaN, so return a "
            "number for every response, such as 0 where there is nothing to score"
        )
    return value_B.astype(np.float32)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
