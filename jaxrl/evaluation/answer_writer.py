"""Answers on their way to the folder of an evaluation: graded beside generation, written group by group."""

from __future__ import annotations

import collections

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.evaluation.answer_file import AnswerFile
from jaxrl.evaluation.eta_line import EtaLine
from jaxrl.evaluation.sampled_answers import unpunished
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.score import AskedVerdicts
from jaxrl.tracking.sample_rows import TokenStrings, sample_rows
from jaxrl.types import Completions


class AnswerWriter:
    """Grades groups and writes them, in the order in which they come."""

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
        """Args.

        answers: where they go.
        graders: asked beside whatever comes next.
        tokenizer: of the model.
        line: is told of every group that is written.
        stop_ids: tokens that end an answer.
        tokens: every token is written, with its log-probability.
        """
        self._answers = answers
        self._graders = graders
        self._token_strings = TokenStrings(tokenizer) if tokens else None
        self._stop_ids = stop_ids
        self._line = line
        self._begun: collections.deque[tuple[Completions, AskedVerdicts]] = collections.deque()

    def add(self, group: Completions) -> None:
        """Begins to grade a group; writes those that are graded.

        Raises:
          UserError: a truth cannot be read, or the disk does not take the answers.
        """
        self._begun.append((group, AskedVerdicts(self._graders, group)))
        while self._begun and self._begun[0][1].done():
            self._write(*self._begun.popleft())

    def finish(self) -> None:
        """Waits for the graders, and writes the rest; raises as `add`."""
        while self._begun:
            self._write(*self._begun.popleft())

    def _write(self, group: Completions, asked: AskedVerdicts) -> None:
        scored = unpunished(group, asked.result())
        self._answers.add(scored, sample_rows(scored, self._token_strings, stop_ids=self._stop_ids))
        self._line.add(
            answers=len(scored),
            correct=int(scored.correct_B.sum()),
            tokens=int(group.lengths_B.sum()),
        )
