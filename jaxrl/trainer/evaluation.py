"""Accuracy on the evaluation prompts."""

from __future__ import annotations

from jaxrl.dataflows.experience import Metrics
from jaxrl.evaluation.evaluation_metrics import evaluation_metrics
from jaxrl.evaluation.grading import EVALUATION_STEP, graded
from jaxrl.rewards.score import grader
from jaxrl.roles.policy import Actor
from jaxrl.trainer.context import RunContext, evaluation_sampling
from jaxrl.trainer.run_files import keep_samples


class Evaluation:
    """Samples answers to the evaluation prompts and grades them."""

    def __init__(self, run: RunContext):
        """Raises UserError where the grader is not known or the environment cannot be loaded."""
        self._run = run
        self._grade = grader(run.config.reward.grader)
        self._options = evaluation_sampling(run, step=EVALUATION_STEP)

    def __call__(self, actor: Actor, when: str) -> Metrics:
        """Metrics of an actor; the report shows some answers of "before" and "after" training."""
        completions = actor.generate(self._run.evaluation_prompts, self._options)
        scored = graded(completions, self._grade)
        keep_samples(self._run.config, scored, when)
        return dict(evaluation_metrics(scored))
