"""Metrics of an evaluation, under verl's names.

    val-core/<source>/acc/mean@8            share of right answers (avg@8)
    val-aux/<source>/acc/std@8              and the other statistics (`evaluation.statistics`)
    val-aux/<source>/acc/best@4/mean        of draws: their mean, and how far they scatter within a prompt
    val-aux/<source>/acc/best@4/std
    val-aux/<source>/acc/mean@8/stderr      standard error over prompts, from two prompts on
    val-aux/<source>/without_answer         share of answers in which the grader found nothing to read
    val-aux/all/...                         the same of all sources together, if there are several

verl also puts best@n and maj@n into `val-core/...`. Here `val-core` contains only the accuracy, by which
divergence is detected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jaxrl.evaluation.statistics import Estimate, statistics_of
from jaxrl.types import Completions, Scored

# Name of all sources together, unless a source has this name.
ALL = "all"


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
        # Divergence is detected by `val-core` metrics. The sources have one each; all together need none.
        core = f"val-core/{ALL}/acc/mean@{completions.num_samples}"
        metrics[core.replace("core", "aux", 1)] = metrics.pop(core)
    return metrics


def statistics_of_scored(scored: Scored) -> dict[str, Estimate]:
    """The statistics of correctness: name -> estimate."""
    G = scored.completions.num_samples
    answers = [scored.predictions[i : i + G] for i in range(0, len(scored), G)]
    return statistics_of(scored.correct_NG, scored.correct_NG, answers)


def _metrics_of(source: str, scored: Scored) -> dict[str, float]:
    completions = scored.completions
    metrics = _named(source, statistics_of_scored(scored))
    metrics[f"val-aux/{source}/response_length/mean"] = float(completions.lengths_B.mean())
    metrics[f"val-aux/{source}/entropy/mean"] = _token_mean(completions)
    unread = [prediction is None for prediction in scored.predictions]
    metrics[f"val-aux/{source}/without_answer"] = float(np.mean(unread))
    return metrics


def _named(source: str, statistics: Mapping[str, Estimate]) -> dict[str, float]:
    metrics = {}
    for name, estimate in statistics.items():
        section = "val-core" if name.startswith("mean@") else "val-aux"
        if estimate.spread is None:
            metrics[f"{section}/{source}/acc/{name}"] = estimate.value
        else:
            metrics[f"{section}/{source}/acc/{name}/mean"] = estimate.value
            metrics[f"{section}/{source}/acc/{name}/std"] = estimate.spread
        if math.isfinite(estimate.stderr):
            metrics[f"val-aux/{source}/acc/{name}/stderr"] = estimate.stderr
    return metrics


def _token_mean(completions: Completions) -> float:
    return float(np.concatenate(completions.entropy).mean())
