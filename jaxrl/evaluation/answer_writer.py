"""Grades the answers of an evaluation during sampling and writes them group by group."""

from __future__ import annotations

import collections

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.evaluation.answer_file import AnswerFile
from jaxrl.evaluation.eta_line import EtaLine
from jaxrl.evaluation.sampled_answers import score_without_length_penalty
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.score import AskedVerdicts
from jaxrl.tracking.sample_rows import TokenStrings, sample_rows
from jaxrl.types import Completions


class AnswerWriter:
    """Grades groups and writes them in the order of arrival."""

    def __init__(
        self,
        answers: AnswerFile,
        graders: Graders,
        tokenizer: Tokenizer,
        line: EtaLine,
        *,
        stop_ids: tuple[int, ...],
        tokens: bool,
    ):
        """Args:
        answers: file of the answers.
        graders: the grader, which runs in the background.
        tokenizer: tokenizer of the model.
        line: progress line, updated for each written group.
        stop_ids: tokens that end an answer.
        tokens: whether to write each token with its log-probability.
        """
        self._answers = answers
        self._graders = graders
        self._token_strings = TokenStrings(tokenizer) if tokens else None
        self._stop_ids = stop_ids
        self._line = line
        self._begun: collections.deque[tuple[Completions, AskedVerdicts]] = collections.deque()

    def add(self, group: Completions) -> None:
        """Starts grading a group, and writes earlier groups that are graded.

        Raises:
          UserError: if the grader cannot read a ground truth, or the answers cannot be written.
        """
        self._begun.append((group, AskedVerdicts(self._graders, group)))
        while self._begun and self._begun[0][1].done():
            self._write(*self._begun.popleft())

    def finish(self) -> None:
        """Waits for the graders and writes the remaining groups; raises the errors of `add`."""
        while self._begun:
            self._write(*self._begun.popleft())

    def _write(self, group: Completions, asked: AskedVerdicts) -> None:
        scored = score_without_length_penalty(group, asked.result())
        self._answers.add(scored, sample_rows(scored, self._token_strings, stop_ids=self._stop_ids))
        self._line.add(
            answers=len(scored),
            correct=int(scored.correct_B.sum()),
            tokens=int(group.lengths_B.sum()),
        )
