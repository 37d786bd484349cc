"""What n answers to each of N prompts say of a model: means, the best of k, majorities, with standard errors.

    mean@n   mean score (avg@n)                      std@n    standard deviation of a prompt's n scores
    best@k   largest of k scores drawn               worst@k  smallest of k scores drawn
    maj@k    score of the answer that most of k give  pass@k   a right answer among k of the n

These are verl's names, and its definitions: best@k, worst@k and maj@k draw k of the n answers *with*
replacement, and std@n divides by n. verl draws 1,000 times; here best@k and worst@k are the expectation of
such draws, computed exactly, and only maj@k draws: verl's very draws, so that the numbers are the same.
pass@k is not verl's: it is the unbiased estimate of Chen et al. 2021, which draws *without* replacement, so
best@k of right and wrong lies below it.

As in verl, a majority is the answer that was drawn most often, of several the one that was drawn first, and
its score is that of its first response in the draw; to have no answer is an answer like any other.

A value is the mean over prompts. Its standard error is that of this mean, s / sqrt(N) with the prompts as the
sample: how far the value would move with other prompts of the kind. It is not a number for a single prompt.

N prompts   G answers to each (n)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np

# As verl has them.
_DRAWS = 1000
_SEED = 42


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic over prompts.

    Attributes:
      value: mean over prompts.
      stderr: of this mean; NaN with a single prompt.
      spread: of a statistic of draws, how far these scatter within a prompt (standard deviation, mean over
        prompts); None for the others.
    """

    value: float
    stderr: float
    spread: float | None = None


def estimate(value_N: np.ndarray, spread_N: np.ndarray | None = None) -> Estimate:
    """The mean of a statistic of each prompt, with its standard error.

    Example: 0, 1, 1, 0 have the mean 1/2, the standard deviation sqrt(1/3), the standard error half of it.
    """
    value_N = np.asarray(value_N, np.float64)
    N = len(value_N)
    stderr = float(value_N.std(ddof=1)) / math.sqrt(N) if N > 1 else math.nan
    spread = None if spread_N is None else float(np.mean(spread_N))
    return Estimate(float(value_N.mean()), stderr, spread)


def best_at_k(score_NG: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Expectation and standard deviation of the largest of k scores drawn with replacement.

    Of scores v_1 <= ... <= v_n the largest drawn is at most v_i with probability (i / n)^k.

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
    """`best_at_k` of the smallest."""
    mean_N, std_N = best_at_k(-np.asarray(score_NG, np.float64), k)
    return -mean_N, std_N


def pass_at_k(correct_NG: np.ndarray, k: int) -> np.ndarray:
    """Probability that k of the n answers, drawn without replacement, have a right one, [N].

    1 - C(n - c, k) / C(n, k) with c right answers: unbiased for k fresh samples (Chen et al. 2021, eq. 1).

    Raises:
      ValueError: k is larger than n, of which there is no unbiased estimate.
    """
    correct_NG = np.asarray(correct_NG, bool)
    n = correct_NG.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} answers cannot be estimated; choose k from 1 to {n}")
    wrong_N1 = n - correct_NG.sum(axis=1, keepdims=True)
    drawn_K = np.arange(k)
    # As a product: the binomials themselves leave float64 soon. Once no wrong one is left a factor is 0.
    return 1 - np.prod(np.maximum(wrong_N1 - drawn_K, 0) / (n - drawn_K), axis=1)


def maj_at_k(
    score_NG: np.ndarray, answers: Sequence[Sequence[Hashable | None]], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the score of the majority among k answers drawn with replacement.

    Args:
      score_NG: of each answer.
      answers: what each response says, in one spelling; None, which says nothing, votes as well.
      k: votes.

    Returns:
      Two arrays [N].
    """
    found = [
        _majority(scores, said, k)
        for scores, said in zip(np.asarray(score_NG, np.float64), answers, strict=True)
    ]
    mean_N, std_N = np.array(found, np.float64).reshape(-1, 2).T
    return mean_N, std_N


def _majority(
    score_G: np.ndarray, answers: Sequence[Hashable | None], k: int
) -> tuple[float, float]:
    """Of one prompt."""
    if (score_G == score_G[0]).all():  # most prompts: all right, or all wrong
        return float(score_G[0]), 0.0
    number_of = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    answer_G = np.array([number_of[answer] for answer in answers])
    drawn_DK = _draws(len(answers), k)
    # The votes of each draw, counted at once: every draw has numbers of its own.
    ballot_DK = answer_G[drawn_DK] + len(number_of) * np.arange(_DRAWS)[:, None]
    votes_DK = np.bincount(ballot_DK.reshape(-1), minlength=len(number_of) * _DRAWS)[ballot_DK]
    first_D = votes_DK.argmax(axis=1)
    score_D = score_G[drawn_DK[np.arange(_DRAWS), first_D]]
    return float(score_D.mean()), float(score_D.std())


@functools.lru_cache(maxsize=16)
def _draws(n: int, k: int) -> np.ndarray:
    """Which k of n responses are drawn each time, [1,000, k], by the generator that verl draws with."""
    return np.random.RandomState(_SEED).choice(n, size=(_DRAWS, k), replace=True)


def sizes(n: int) -> tuple[int, ...]:
    """The k that statistics of n answers are told for: 2, 4, 8, ... below n, and n itself."""
    powers = (2**i for i in range(1, n.bit_length()))
    return (*(k for k in powers if k < n), n) if n > 1 else ()


def statistics_of(
    score_NG: np.ndarray,
    correct_NG: np.ndarray,
    answers: Sequence[Sequence[Hashable | None]],
) -> dict[str, Estimate]:
    """Every statistic by its name, such as "mean@8" or "maj@4", of one source or of several together.

    Args:
      score_NG: of each response; what is drawn, averaged and voted for.
      correct_NG: which of them are right, for pass@k.
      answers: as of `maj_at_k`.
    """
    score_NG = np.asarray(score_NG, np.float64)
    n = score_NG.shape[1]
    found = {
        # All prompts have n answers, so that this is the mean over prompts, rounded once.
        f"mean@{n}": dataclasses.replace(
            estimate(score_NG.mean(axis=1)), value=float(score_NG.mean())
        )
    }
    if n > 1:
        found[f"std@{n}"] = estimate(score_NG.std(axis=1))
    for k in sizes(n):
        found[f"best@{k}"] = estimate(*best_at_k(score_NG, k))
        found[f"worst@{k}"] = estimate(*worst_at_k(score_NG, k))
        found[f"maj@{k}"] = estimate(*maj_at_k(score_NG, answers, k))
    for k in sizes(n) or (n,):
        found[f"pass@{k}"] = estimate(pass_at_k(correct_NG, k))
    return found
