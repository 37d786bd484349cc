"""Completions -> Scored: the grader's verdict as a reward, plus what the length costs.

A grader compares two texts, the response and the ground truth. Those with a name live in `GRADERS`; a user's
own is named by where it is (`user_code`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rewards.answer import Grade, grade_answer, grade_gsm8k
from jaxrl.types import Completions, Scored
from jaxrl.user_code import load_function

Grader = Callable[[str, str], Grade]
"""(response, ground truth) -> Grade. It raises UserError for a ground truth it cannot read, and
never for what a response holds."""

GRADERS: dict[str, Grader] = {"answer": grade_answer, "gsm8k": grade_gsm8k}


def grader(name: str) -> Grader:
    """The grader called `name`, or the user's function at that path.

    Raises:
      UserError: there is none; the message has the known names.
    """
    if ":" in name:
        return load_function(name, "grader", takes=("response", "answer"))
    if name in GRADERS:
        return GRADERS[name]
    near = difflib.get_close_matches(name, GRADERS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UserError(
        f"no grader is called {name!r}{hint}; use one of {', '.join(sorted(GRADERS))}, "
        "or your own as package.module:function or path/to/file.py:function"
    )


def check_answers(grade: Grader, answers: Iterable[tuple[str, str]]) -> None:
    """Lets a grader read ground truths before there is a response to any.

    Args:
      grade: the grader.
      answers: of each problem what to call it in errors, and its ground truth.

    Raises:
      UserError: the grader cannot read one; the message names the problem.
    """
    # Many problems share an answer.
    for answer, where in {answer: where for where, answer in answers}.items():
        try:
            grade("", answer)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


def score_completions(
    completions: Completions,
    *,
    grade: Grader,
    overlong: Callable[[np.ndarray], np.ndarray],
) -> Scored:
    """Grades every response: +1 if right, else -1 (DAPO eq. 7), and shapes by length (eq. 13).

    Args:
      completions: B responses.
      grade: compares a response with its prompt's ground truth.
      overlong: response lengths in tokens, int64 [B], to the shaping added to the score, [B].

    Raises:
      UserError: a ground truth is empty or the grader cannot read it; the message names the
        prompt.
    """
    grades = [_grade_row(completions, row, grade) for row in range(len(completions))]
    correct_B = np.array([g.correct for g in grades], np.bool_)
    shaping_B = np.asarray(overlong(completions.lengths_B), np.float32)
    assert shaping_B.shape == correct_B.shape, "overlong returns one value for each response"
    return Scored(
        completions=completions,
        correct_B=correct_B,
        score_B=np.where(correct_B, np.float32(1), np.float32(-1)),
        shaping_B=shaping_B,
        predictions=tuple(g.prediction for g in grades),
    )


def _grade_row(completions: Completions, row: int, grade: Grader) -> Grade:
    prompts, n = completions.prompts, row // completions.num_samples
    where = f"prompt {prompts.ids_N[n]} of {prompts.sources[n]!r}"
    if not prompts.answers[n].strip():
        raise UserError(
            f"{where} has an empty ground truth; every prompt needs one: fix or drop it"
        )
    try:
        return grade(completions.texts[row], prompts.answers[n])
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
