"""Accuracy on the evaluation prompts."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.dataflows.rewarding import Grading, GroupsBeside
from jaxrl.mesh import hosts
from jaxrl.rewards.evaluation_metrics import (
    EVALUATION_STEP,
    evaluation_metrics,
)
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.score import score_completions
from jaxrl.roles.policy import Actor
from jaxrl.rollout.backend import RolloutBackend, SamplingOptions
from jaxrl.tracking.durable import write_atomically
from jaxrl.trainer.context import RunContext
from jaxrl.types import Completions, Prompts, Scored

# The report shows the first answer to so many problems, before and after training.
_REPORT_SAMPLES = 8


def answered(
    sampler: Actor | RolloutBackend,
    prompts: Prompts,
    options: SamplingOptions,
    grading: Grading,
    *,
    on_group: Callable[[Completions], None] = lambda group: None,
) -> Scored:
    """Samples answers to evaluation prompts, and grades them while others are sampled. Collective.

    Args:
      sampler: the policy, or its backend with the policy's weights.
      prompts: the prompts.
      options: sampling options.
      grading: the graders on all hosts.
      on_group: called with the answers to each problem that this process samples, when they are finished.
    """
    backend = sampler.backend if isinstance(sampler, Actor) else sampler
    beside = GroupsBeside(grading, backend.samplers)

    def take(group: Completions) -> None:
        beside(group)
        on_group(group)

    return _scored(sampler.generate(prompts, options, on_group=take).with_rows(True), beside)


def _scored(completions: Completions, beside: GroupsBeside) -> Scored:
    verdicts = beside.grading.collect(beside.of(completions))
    # Without a penalty for long answers.
    return score_completions(completions, verdicts, overlong=np.zeros_like)


class Evaluation:
    """Evaluates the actor of a run."""

    def __init__(self, run: RunContext, graders: Graders):
        self._run = run
        self._grading = Grading(graders)
        self._options = run.config.evaluation.sampling(run.sampling, step=EVALUATION_STEP)

    def __call__(self, actor: Actor, when: str) -> Metrics:
        """Metrics of an actor; the report shows sample answers of "before" and "after" training."""
        scored = answered(actor, self._run.evaluation_prompts, self._options, self._grading)
        if when in ("before", "after") and hosts.is_first():
            completions, counts_NG = scored.completions, scored.counts_NG
            samples = [
                {
                    "problem_key": completions.prompts.problem_key(n),
                    "prompt": completions.prompts.texts[n],
                    "answer": completions.prompts.answers[n],
                    "text": completions.texts[b],
                    "correct": bool(scored.correct_B[b]),
                }
                # The first that no agent failed on.
                for n, counts_G in enumerate(counts_NG[:_REPORT_SAMPLES])
                for b in (n * len(counts_G) + np.flatnonzero(counts_G)[:1]).tolist()
            ]
            path = self._run.config.run_folder.samples(when)
            write_atomically(path, json.dumps(samples, indent=1).encode())
        return self._metrics(scored)

    def begin(self, sampler: FreeRunning) -> Callable[[], Metrics]:
        """Has a sampler answer beside its step; the result waits for the metrics, before the step ends."""
        beside = GroupsBeside(self._grading)
        sampler.evaluate(self._run.evaluation_prompts, self._options, beside)

        def finish() -> Metrics:
            completions = sampler.finish_evaluation().with_rows(True)
            return self._metrics(_scored(completions, beside))

        return finish

    def _metrics(self, scored: Scored) -> Metrics:
        return {**evaluation_metrics(scored), **self._grading.take_metrics("val-aux/grader")}
