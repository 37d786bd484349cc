"""Metrics of an evaluation, under verl's names.

    val-core/<source>/acc/mean@8            share of right answers (avg@8)
    val-aux/<source>/acc/std@8              and the other statistics below
    val-aux/<source>/acc/best@4/mean        of draws: their mean, and how far they scatter within a prompt
    val-aux/<source>/acc/best@4/std
    val-aux/<source>/acc/mean@8/stderr      standard error over prompts, from two prompts on
    val-aux/<source>/without_answer         share of answers in which the grader found nothing to read
    val-aux/<source>/agent/failed           number of samples whose agent failed
    val-aux/all/...                         the same of all sources together, if there are several

verl also puts best@n and maj@n into `val-core/...`. Here `val-core` contains only the accuracy.

Statistics of n answers to each of N prompts, with standard errors:

    mean@n   mean score (avg@n)                     std@n    standard deviation of a prompt's n scores
    best@k   largest of k drawn scores              worst@k  smallest of k drawn scores
    maj@k    score of the majority of k answers     pass@k   probability of a right answer among k of the n

Names and definitions are verl's: best@k, worst@k and maj@k draw k of the n answers *with* replacement, and
std@n divides by n. verl draws 1,000 times. Here best@k and worst@k are the exact expectations of such draws,
and maj@k uses verl's random draws, so its numbers are equal to verl's. pass@k is not verl's: it is the
unbiased estimate of Chen et al. 2021, which draws *without* replacement, and is never below best@k of
correctness.

As in verl, the majority is the answer that was drawn most often; on a tie, the one that was drawn first. Its
score is that of its first response in the draw. "No answer" counts as an answer.

Samples of failed agents count nowhere else. A prompt then has fewer answers than n. One that has none left is
left out, as one with fewer than k is from pass@k. A statistic without prompts is absent.

A value is the mean over prompts. Its standard error is s / sqrt(N), with the prompts as the sample: it
estimates how much the value would vary with other prompts. It is undefined for a single prompt.

N prompts   G answers per prompt (n)   K = k   D draws
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np

from jaxrl.types import Scored

# Number and seed of verl's draws.
_DRAWS = 1000
_SEED = 42


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic over prompts.

    Attributes:
      value: mean over prompts.
      stderr: standard error of this mean; NaN for a single prompt.
      spread: standard deviation of the draws of a prompt, averaged over prompts; None for statistics without
        draws.
    """

    value: float
    stderr: float
    spread: float | None = None


def estimate(value_N: np.ndarray, spread_N: np.ndarray | None = None) -> Estimate:
    """Averages a statistic over prompts and computes the standard error.

    Example: 0, 1, 1, 0 have the mean 1/2, the standard deviation sqrt(1/3), the standard error sqrt(1/3) / 2.

    Args:
      value_N: value of each prompt.
      spread_N: standard deviation of the draws of each prompt; None without draws.
    """
    value_N = np.asarray(value_N, np.float64)
    N = len(value_N)
    stderr = float(value_N.std(ddof=1)) / math.sqrt(N) if N > 1 else math.nan
    spread = None if spread_N is None else float(np.mean(spread_N))
    return Estimate(float(value_N.mean()), stderr, spread)


def best_at_k(score_NG: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Expectation and standard deviation of the largest of k scores drawn with replacement.

    For scores v_1 <= ... <= v_n, the largest drawn score is at most v_i with probability (i / n)^k.

    Returns:
      Two arrays [N].
    """
    sorted_NG = np.sort(np.asarray(score_NG, np.float64), axis=1)
    n = sorted_NG.shape[1]
    weight_G = np.diff((np.arange(n + 1) / n) ** k)
    mean_N = sorted_NG @ weight_G
    variance_N = (sorted_NG - mean_N[:, None]) ** 2 @ weight_G
    return mean_N, np.sqrt(variance_N)


def worst_at_k(score_NG: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Same as `best_at_k`, for the smallest score."""
    mean_N, std_N = best_at_k(-np.asarray(score_NG, np.float64), k)
    return -mean_N, std_N


def pass_at_k(correct_NG: np.ndarray, k: int) -> np.ndarray:
    """Probability of a right answer among k of the n answers, drawn without replacement, [N].

    1 - C(n - c, k) / C(n, k) with c right answers: unbiased for k new samples (Chen et al. 2021, eq. 1).

    Raises:
      ValueError: if k > n, for which no unbiased estimate exists.
    """
    correct_NG = np.asarray(correct_NG, bool)
    n = correct_NG.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} answers cannot be estimated; choose k from 1 to {n}")
    wrong_N1 = n - correct_NG.sum(axis=1, keepdims=True)
    drawn_K = np.arange(k)
    # A product, because the binomials overflow float64. With fewer than k wrong answers a factor is 0.
    return 1 - np.prod(np.maximum(wrong_N1 - drawn_K, 0) / (n - drawn_K), axis=1)


def maj_at_k(
    score_NG: np.ndarray, answers: Sequence[Sequence[Hashable | None]], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the score of the majority among k answers drawn with replacement.

    Args:
      score_NG: score of each response.
      answers: N lists of G answers in a normalised spelling; None, "no answer", votes too.
      k: number of drawn answers.

    Returns:
      Two arrays [N].
    """
    found = []
    for score_G, said in zip(np.asarray(score_NG, np.float64), answers, strict=True):
        # Most prompts need no draws: all of their answers are right, or all wrong.
        if (score_G == score_G[0]).all():
            found.append((score_G[0], 0.0))
            continue
        number_of = {answer: number for number, answer in enumerate(dict.fromkeys(said))}
        answer_G = np.array([number_of[answer] for answer in said])
        drawn_DK = _draws(len(said), k)
        # Count the votes of all draws in one bincount: each draw has its own range of numbers.
        ballot_DK = answer_G[drawn_DK] + len(number_of) * np.arange(_DRAWS)[:, None]
        votes_DK = np.bincount(ballot_DK.reshape(-1), minlength=len(number_of) * _DRAWS)[ballot_DK]
        # `argmax` takes the first of several: on a tie the answer that was drawn first.
        first_D = votes_DK.argmax(axis=1)
        score_D = score_G[drawn_DK[np.arange(_DRAWS), first_D]]
        found.append((score_D.mean(), score_D.std()))
    mean_N, std_N = np.array(found, np.float64).reshape(-1, 2).T
    return mean_N, std_N


@functools.lru_cache(maxsize=16)
def _draws(n: int, k: int) -> np.ndarray:
    """Indices of the drawn responses, [1000, k], from the same random generator as in verl."""
    # The legacy generator, since that of NumPy's new API draws other numbers.
    return np.random.RandomState(_SEED).choice(n, size=(_DRAWS, k), replace=True)


def sizes(n: int) -> tuple[int, ...]:
    """The values of k for n answers: 2, 4, 8, ... below n, and n itself; empty for n = 1."""
    powers = (2**i for i in range(1, n.bit_length()))
    return (*(k for k in powers if k < n), n) if n > 1 else ()


def statistics_of(
    score_NG: np.ndarray,
    correct_NG: np.ndarray,
    answers: Sequence[Sequence[Hashable | None]],
    counts_NG: np.ndarray | None = None,
) -> dict[str, Estimate]:
    """Computes all statistics: name, such as "mean@8" or "maj@4", -> estimate.

    Args:
      score_NG: score of each response.
      correct_NG: bool, whether each response is right, for pass@k.
      answers: answers as in `maj_at_k`.
      counts_NG: bool, whether each response counts; None for all.
    """
    score_NG = np.asarray(score_NG, np.float64)
    n = score_NG.shape[1]
    counts_NG = np.ones(score_NG.shape, bool) if counts_NG is None else counts_NG
    number_N = counts_NG.sum(axis=1)
    # By name the values and spreads of all prompts: one entry for those with equally many answers.
    values: dict[str, list[tuple[np.ndarray, ...]]] = {}
    for number in np.unique(number_N[number_N > 0]):
        of_N = number_N == number
        score, correct = (
            np.asarray(x)[of_N][counts_NG[of_N]].reshape(-1, number) for x in (score_NG, correct_NG)
        )
        said = [
            [answer for answer, counts in zip(answers[i], counts_NG[i], strict=True) if counts]
            for i in np.flatnonzero(of_N).tolist()
        ]
        for name, found in _of_prompts(score, correct, said, n).items():
            values.setdefault(name, []).append(found)
    found = {
        name: estimate(*map(np.concatenate, zip(*parts, strict=True)))
        for name, parts in values.items()
    }
    if counts_NG.all():
        # All prompts have n answers, so the mean over responses is the mean over prompts, rounded once.
        mean = f"mean@{n}"
        found[mean] = dataclasses.replace(found[mean], value=float(score_NG.mean()))
    return found


def _of_prompts(
    score_NG: np.ndarray,
    correct_NG: np.ndarray,
    answers: Sequence[Sequence[Hashable | None]],
    n: int,
) -> dict[str, tuple[np.ndarray, ...]]:
    """(value [N], spread [N] if it has draws) of each statistic; its name is that of n answers."""
    found: dict[str, tuple[np.ndarray, ...]] = {f"mean@{n}": (score_NG.mean(axis=1),)}
    if n > 1:
        # Of the population, as in verl: NumPy's default divides by n.
        found[f"std@{n}"] = (score_NG.std(axis=1),)
    for k in sizes(n):
        found[f"best@{k}"] = best_at_k(score_NG, k)
        found[f"worst@{k}"] = worst_at_k(score_NG, k)
        found[f"maj@{k}"] = maj_at_k(score_NG, answers, k)
    for k in sizes(n) or (n,):
        if k <= score_NG.shape[1]:
            found[f"pass@{k}"] = (pass_at_k(correct_NG, k),)
    return found


EVALUATION_STEP = 2**31 - 1
"""The step number from which evaluations derive their sampling keys. Training never reaches it. It is
constant, so two evaluations differ only by the weights."""

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
            # `val-core` has the accuracy of each source, and nothing twice.
            name.replace("val-core", "val-aux", 1): value
            for name, value in _metrics_of(ALL, scored).items()
            if "/acc/" in name
        }
    return metrics


def _metrics_of(source: str, scored: Scored) -> dict[str, float]:
    completions, counts_B = scored.completions, scored.counts_B
    G = completions.num_samples
    answers = [scored.predictions[i : i + G] for i in range(0, len(scored), G)]
    metrics: dict[str, float] = {}
    metrics |= {f"val-aux/{source}/{name}": float(n) for name, n in scored.left_out.items()}
    found = statistics_of(scored.correct_NG, scored.correct_NG, answers, scored.counts_NG)
    for name, estimate in found.items():
        section = "val-core" if name.startswith("mean@") else "val-aux"
        if estimate.spread is None:
            metrics[f"{section}/{source}/acc/{name}"] = estimate.value
        else:
            metrics[f"{section}/{source}/acc/{name}/mean"] = estimate.value
            metrics[f"{section}/{source}/acc/{name}/std"] = estimate.spread
        # Undefined for a single prompt.
        if math.isfinite(estimate.stderr):
            metrics[f"val-aux/{source}/acc/{name}/stderr"] = estimate.stderr
    if counts_B.any():
        lengths_B = completions.lengths_B[counts_B]
        metrics[f"val-aux/{source}/response_length/mean"] = float(lengths_B.mean())
        unread_B = np.array([prediction is None for prediction in scored.predictions])[counts_B]
        metrics[f"val-aux/{source}/without_answer"] = float(unread_B.mean())
        # The mean over sampled tokens, not over responses.
        rows = zip(completions.entropy, completions.mask, counts_B, strict=True)
        entropy = np.concatenate([of_one[mask > 0] for of_one, mask, counts in rows if counts])
        if len(entropy):
            metrics[f"val-aux/{source}/entropy/mean"] = float(entropy.mean())
    return metrics
