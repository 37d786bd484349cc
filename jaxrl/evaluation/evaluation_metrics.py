"""Metrics of an evaluation, under verl's names.

    val-core/<source>/acc/mean@8            share of right answers (avg@8)
    val-aux/<source>/acc/std@8              and the other statistics (`evaluation.statistics`)
    val-aux/<source>/acc/best@4/mean        of draws: their mean, and how far they scatter within a prompt
    val-aux/<source>/acc/best@4/std
    val-aux/<source>/acc/mean@8/stderr      standard error over prompts, from two prompts on
    val-aux/<source>/without_answer         share of answers in which the grader found nothing to read
    val-aux/all/...                         the same of all sources together, if there are several

verl also puts best@n and maj@n into `val-core/...`. Here `val-core` contains only the accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxrl.evaluation.statistics import statistics_of
from jaxrl.rewards.grading import Verdict
from jaxrl.rewards.score import score_completions
from jaxrl.types import Completions, Scored

EVALUATION_STEP = 2**31 - 1
"""The step number from which evaluations derive their sampling keys. Training never reaches it. It is
constant, so two evaluations differ only by the weights."""

# Name of all sources together, unless a source has this name.
ALL = "all"


def score_without_length_penalty(completions: Completions, verdicts: Sequence[Verdict]) -> Scored:
    """Combines answers and verdicts, without a penalty for overlong answers."""
    return score_completions(
        completions, verdicts, overlong=lambda lengths_B: np.zeros(len(lengths_B), np.float32)
    )


def evaluation_metrics(scored: Scored) -> dict[str, float]:
    """Computes the statistics of correctness, the mean length and the mean entropy of each data set."""
    completions = scored.completions
    sources = np.array(completions.prompts.sources)
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(completions.prompts.sources):
        metrics |= _metrics_of(source, scored.take(np.flatnonzero(sources == source)))
    if len(set(sources)) > 1 and ALL not in sources:
        metrics |= {
            name: value for name, value in _metrics_of(ALL, scored).items() if "/acc/" in name
        }
        # `val-core` has the accuracy of each source, and nothing twice.
        core = f"val-core/{ALL}/acc/mean@{completions.num_samples}"
        metrics[core.replace("core", "aux", 1)] = metrics.pop(core)
    return metrics


def _metrics_of(source: str, scored: Scored) -> dict[str, float]:
    completions = scored.completions
    G = completions.num_samples
    answers = [scored.predictions[i : i + G] for i in range(0, len(scored), G)]
    metrics: dict[str, float] = {}
    for name, estimate in statistics_of(scored.correct_NG, scored.correct_NG, answers).items():
        section = "val-core" if name.startswith("mean@") else "val-aux"
        if estimate.spread is None:
            metrics[f"{section}/{source}/acc/{name}"] = estimate.value
        else:
            metrics[f"{section}/{source}/acc/{name}/mean"] = estimate.value
            metrics[f"{section}/{source}/acc/{name}/std"] = estimate.spread
        # Undefined for a single prompt.
        if math.isfinite(estimate.stderr):
            metrics[f"val-aux/{source}/acc/{name}/stderr"] = estimate.stderr
    metrics[f"val-aux/{source}/response_length/mean"] = float(completions.lengths_B.mean())
    # The mean over tokens, not over responses.
    entropy = float(np.concatenate(completions.entropy).mean())
    metrics[f"val-aux/{source}/entropy/mean"] = entropy
    unread = [prediction is None for prediction in scored.predictions]
    metrics[f"val-aux/{source}/without_answer"] = float(np.mean(unread))
    return metrics
