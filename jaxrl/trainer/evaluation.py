"""Accuracy on the evaluation prompts."""

from __future__ import annotations

import numpy as np

from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.rewarding import Grading
from jaxrl.dataflows.step_metrics import evaluation_metrics
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.score import score_completions
from jaxrl.roles.policy import Actor
from jaxrl.trainer.context import RunContext, evaluation_sampling
from jaxrl.trainer.run_files import keep_samples

# Evaluation samples with keys of a step that training never reaches, the same every time: two evaluations
# differ by the weights alone.
_STEP = 2**31 - 1


class Evaluation:
    """Samples answers to the evaluation prompts and grades them."""

    def __init__(self, run: RunContext, graders: Graders):
        """Raises UserError where the environment cannot be loaded."""
        self._run = run
        self._grading = Grading(graders)
        self._options = evaluation_sampling(run, step=_STEP)

    def __call__(self, actor: Actor, when: str) -> Metrics:
        """Metrics of an actor; the report shows some answers of "before" and "after" training."""
        completions = actor.generate(self._run.evaluation_prompts, self._options)
        verdicts = self._grading.begin(completions)()
        scored = score_completions(completions, verdicts, overlong=_unpunished)
        keep_samples(self._run.config, scored, when)
        return evaluation_metrics(scored) | self._grading.take_metrics("val-aux/grader")


def _unpunished(lengths_B: np.ndarray) -> np.ndarray:
    return np.zeros(len(lengths_B), np.float32)
