"""Accuracy on the evaluation prompts."""

from __future__ import annotations

import numpy as np

from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.step_metrics import evaluation_metrics
from jaxrl.rewards.score import grader, score_completions
from jaxrl.roles.policy import Actor
from jaxrl.trainer.context import RunContext, evaluation_sampling
from jaxrl.trainer.run_folder import keep_samples

# Evaluation samples with keys of a step that training never reaches, the same every time: two evaluations
# differ by the weights alone.
_STEP = 2**31 - 1


class Evaluation:
    """Samples answers to the evaluation prompts and grades them."""

    def __init__(self, run: RunContext):
        """Raises UserError where the grader is not known or the environment cannot be loaded."""
        self._run = run
        self._grade = grader(run.config.reward.grader)
        self._options = evaluation_sampling(run, step=_STEP)

    def __call__(self, actor: Actor, when: str) -> Metrics:
        """Metrics of an actor; the report shows some answers of "before" and "after" training."""
        completions = actor.generate(self._run.evaluation_prompts, self._options)
        scored = score_completions(completions, grade=self._grade, overlong=_unpunished)
        keep_samples(self._run.config, scored, when)
        return dict(evaluation_metrics(scored))


def _unpunished(lengths_B: np.ndarray) -> np.ndarray:
    return np.zeros(len(lengths_B), np.float32)
