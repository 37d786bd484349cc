"""Turns completions into scores: the graders' verdicts, shaped by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.grading import GradingTask, Response, Verdict
from jaxrl.types import Completions, Prompts, Scored


def rows_of(prompts: Prompts) -> list[GradingTask]:
    """Returns the rows of N prompts, as graders see them."""
    return [
        GradingTask(answer, extra, source)
        for answer, extra, source in zip(
            prompts.answers, prompts.extras, prompts.sources, strict=True
        )
    ]


def samples_of(completions: Completions) -> list[Response]:
    """Returns the policy's own turns of B responses, as graders see them."""
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
    """Returns the graders' verdicts on B responses.

    Raises:
      UserError: A ground truth is empty or malformed; the message names the prompt.
    """
    return AskedVerdicts(graders, completions).result()


class AskedVerdicts:
    """Verdicts that are computed on a thread."""

    def __init__(self, graders: Graders, completions: Completions):
        """Starts grading."""
        self._graders = graders
        self._prompts = completions.prompts
        # The thread of the graders also makes the texts, if nobody has read them yet.
        self._future = graders.submit(lambda: samples_of(completions))

    def done(self) -> bool:
        """Returns whether `result` returns at once."""
        return self._future.done()

    def result(self) -> list[Verdict]:
        """Waits for the verdicts; raises like `verdicts_of`."""
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
