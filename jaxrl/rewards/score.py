"""Completions -> Scored: the graders' verdicts as rewards, plus what the length costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.grading import GradingTask, Response, Verdict
from jaxrl.types import Completions, Prompts, Scored


def rows_of(prompts: Prompts) -> list[GradingTask]:
    """What graders see of N prompts."""
    return [
        GradingTask(answer, extra, source)
        for answer, extra, source in zip(
            prompts.answers, prompts.extras, prompts.sources, strict=True
        )
    ]


def samples_of(completions: Completions) -> list[Response]:
    """What graders see of B responses: what the policy wrote, and nothing of an environment."""
    rows = rows_of(completions.prompts)
    return [
        Response(text, tokens[mask > 0], rows[n])
        for text, tokens, mask, n in zip(
            completions.policy_texts,
            completions.tokens,
            completions.mask,
            completions.prompt_index_B,
            strict=True,
        )
    ]


def verdicts_of(graders: Graders, completions: Completions) -> list[Verdict]:
    """The graders' verdicts on B responses.

    Raises:
      UserError: a ground truth is empty or its grader cannot read it; the message names the prompt.
    """
    return AskedVerdicts(graders, completions).result()


class AskedVerdicts:
    """Verdicts that graders are at work on, beside whatever comes next."""

    def __init__(self, graders: Graders, completions: Completions):
        """Asks for them."""
        self._graders = graders
        self._prompts = completions.prompts
        self._future = graders.submit(samples_of(completions))

    def done(self) -> bool:
        """`result` does not wait."""
        return self._future.done()

    def result(self) -> list[Verdict]:
        """Waits for them; raises as `verdicts_of`."""
        try:
            return self._future.result()
        except UserError as error:
            for n, row in enumerate(rows_of(self._prompts)):
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
    """Makes verdicts scores: +1 if right, -1 if wrong (DAPO eq. 7), shaped by length (eq. 13).

    Args:
      completions: B responses.
      verdicts: on each of them.
      overlong: response lengths in tokens, int64 [B], to the shaping added to the score, [B].
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
