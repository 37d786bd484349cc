"""Accuracy on the evaluation prompts."""

from __future__ import annotations

from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.rewarding import Grading, GroupsBeside
from jaxrl.evaluation.evaluation_metrics import evaluation_metrics
from jaxrl.evaluation.sampled_answers import EVALUATION_STEP, score_without_length_penalty
from jaxrl.rewards.graders import Graders
from jaxrl.roles.policy import Actor
from jaxrl.tracking.report_content import keep_samples
from jaxrl.trainer.context import RunContext


class Evaluation:
    """Samples answers to the evaluation prompts and grades them."""

    def __init__(self, run: RunContext, graders: Graders):
        """Raises UserError if the environment cannot be loaded."""
        self._run = run
        self._grading = Grading(graders)
        self._options = run.config.evaluation.sampling(run.sampling, step=EVALUATION_STEP)

    def __call__(self, actor: Actor, when: str) -> Metrics:
        """Metrics of an actor; the report shows sample answers of "before" and "after" training."""
        beside = GroupsBeside(self._grading)
        completions = actor.generate(self._run.evaluation_prompts, self._options, on_group=beside)
        scored = score_without_length_penalty(
            completions, self._grading.collect(beside.of(completions))
        )
        keep_samples(self._run.config.run_folder, scored, when)
        return {**evaluation_metrics(scored), **self._grading.take_metrics("val-aux/grader")}
