"""Accuracy on the held-out problems."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxrl.rewards.score import grader, score_completions
from jaxrl.roles.policy import Actor
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import Truncation, truncation_of
from jaxrl.trainer.config import EvaluationConfig
from jaxrl.trainer.environment import environment_of
from jaxrl.trainer.run_folder import keep_samples
from jaxrl.trainer.setup import Parts
from jaxrl.trainer.step_metrics import evaluation_metrics

# Evaluation samples with keys of a step that training never reaches, the same every time: two evaluations
# differ by the weights alone.
_STEP = 2**31 - 1


def evaluator(parts: Parts) -> Callable[[Actor, str], dict[str, float]]:
    """A function of an actor, whose weights are loaded, and of when this is; returns metrics."""
    config = parts.config
    grade = grader(config.reward.grader)
    options = config.evaluation
    sampling = SamplingOptions(
        num_samples=options.num_samples,
        seed=config.seed,
        step=_STEP,
        temperature=options.temperature,
        truncation=_truncation(options),
        # What ends a turn, and who answers it, belongs to the task: as in training.
        stop_strings=tuple(config.rollout.stop_strings),
        environment=environment_of(parts),
    )

    def evaluate(actor: Actor, when: str) -> dict[str, float]:
        completions = actor.generate(parts.held_out, sampling)
        scored = score_completions(completions, grade=grade, overlong=_unpunished)
        keep_samples(config, scored, when)
        return evaluation_metrics(scored)

    return evaluate


def _truncation(options: EvaluationConfig) -> Truncation:
    return truncation_of(top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)


def _unpunished(lengths_B: np.ndarray) -> np.ndarray:
    return np.zeros(len(lengths_B), np.float32)
