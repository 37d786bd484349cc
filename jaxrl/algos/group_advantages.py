"""Advantages of whole sequences, from the scores of the other answers to the same prompt.

    B sequences   K components of a reward

`group_B` is the group (prompt) of each sequence, int32 below the static `num_groups`. Members of a group may
lie anywhere in the batch, and groups may differ in size. A sequence with a negative group is absent: it is
ignored and its advantage is 0, whatever its score. `length_B` counts trained tokens; a sequence without any
is still a member of its group. The result is one number per sequence, which holds for each of its tokens
(`segments.to_tokens`). Groups must be complete: compute advantages before the batch is cut into minibatches.

Two rules hold for every estimator here:

* equal scores in a group give exactly 0, not a rounding error divided by a rounding error;
* a group of one keeps its score, because there is nothing to compare it with: its baseline is 0 and its
  deviation 1 (verl does the same in `grpo` and `rloo`, differs in `rloo_vectorized`, and raises in
  `grpo_passk`).

Not covered: advantages that differ within a sequence, see `token_advantages`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl.algos.moments import whiten
from jaxrl.algos.segments import masked
from jaxrl.checks import positive


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Scores with statistics by group. Every field and result is [B]: a group's value on each member."""

    live: jax.Array
    bucket: jax.Array
    num_groups: int
    score: jax.Array  # 0 where absent
    size: jax.Array  # members, float

    @staticmethod
    def of(score_B: jax.Array, group_B: jax.Array, num_groups: int) -> _Groups:
        live_B = (group_B >= 0) & (group_B < num_groups)
        # Absent sequences go to an extra bucket behind those of the groups.
        bucket_B = jnp.where(live_B, group_B, num_groups)
        groups = _Groups(live_B, bucket_B, num_groups, masked(score_B, live_B), score_B)
        return dataclasses.replace(groups, size=groups.sum(jnp.ones_like(score_B)))

    def sum(self, x_B: jax.Array) -> jax.Array:
        return self._over(jax.ops.segment_sum, x_B)

    def max(self, x_B: jax.Array) -> jax.Array:
        return self._over(jax.ops.segment_max, x_B)

    def _over(self, reduce, x_B: jax.Array) -> jax.Array:
        return reduce(x_B, self.bucket, num_segments=self.num_groups + 1)[self.bucket]

    @property
    def above_lowest(self) -> jax.Array:
        """Score less the lowest of its group. In a group of equal scores it, and its mean, is exactly 0."""
        return self.score - self._over(jax.ops.segment_min, self.score)

    @property
    def centered(self) -> jax.Array:
        """Score less the group's mean; the score itself in a group of one."""
        above_B = self.above_lowest
        return self.unless_alone(above_B - self.sum(above_B) / self.size, self.score)

    @property
    def deviation(self) -> jax.Array:
        """Unbiased standard deviation; 1 in a group of one."""
        # Of the centred scores: the mean of squares less the squared mean may lose all digits, or be
        # negative.
        variance_B = self.sum(self.centered**2) / jnp.maximum(self.size - 1.0, 1.0)
        return self.unless_alone(jnp.sqrt(variance_B), jnp.ones_like(variance_B))

    def unless_alone(self, x_B: jax.Array, alone_B: jax.Array) -> jax.Array:
        return jnp.where(self.size > 1, x_B, alone_B)

    def result(self, advantage_B: jax.Array) -> jax.Array:
        return masked(advantage_B, self.live)


def grpo(
    score_B: jax.Array,
    group_B: jax.Array,
    *,
    num_groups: int,
    normalize_std: bool = True,
    epsilon: Annotated[float, positive(at_most=1)] = 1e-6,
) -> jax.Array:
    """Score relative to its group: A = (s - mean) / (std + epsilon).

    GRPO, arXiv 2402.03300 section 4.1.2; DAPO eq. 9. The deviation is the unbiased one, as in verl.

    Args:
      score_B: float, one score per sequence.
      group_B: int32, its group, below 0 if absent.
      num_groups: upper bound of the group numbers; static.
      normalize_std: divide by the deviation; False is Dr. GRPO (arXiv 2503.20783 section 3.2).
      epsilon: added to the deviation.

    Returns:
      [B], same type as the score.
    """
    groups = _Groups.of(score_B, group_B, num_groups)
    if not normalize_std:
        return groups.result(groups.centered)
    # In a group of equal scores both are exactly 0, so that epsilon makes 0 of 0 / 0 and hardly changes
    # others.
    return groups.result(groups.centered / (groups.deviation + epsilon))


def grpo_batch_std(
    score_B: jax.Array,
    group_B: jax.Array,
    *,
    num_groups: int,
    epsilon: Annotated[float, positive(at_most=1)] = 1e-6,
) -> jax.Array:
    """Score less the mean of its group, over the deviation of all scores: A = (s - mean) / (std + epsilon).

    "Tricks or Traps", arXiv 2508.08221. Unlike with whitening, the deviation is that of the scores, which
    differ between groups too.

    Args and returns as for `grpo`.
    """
    groups = _Groups.of(score_B, group_B, num_groups)
    # One group of all: `of` gives it the deviation of the batch.
    batch = _Groups.of(score_B, jnp.where(groups.live, 0, -1), 1)
    return groups.result(groups.centered / (batch.deviation + epsilon))


def grpo_passk(
    score_B: jax.Array,
    group_B: jax.Array,
    *,
    num_groups: int,
    normalize_std: bool = True,
    epsilon: Annotated[float, positive(at_most=1)] = 1e-6,
) -> jax.Array:
    """Rewards only the best of a group, by its lead: A = (max - second) / (std + epsilon), and 0 for others.

    Optimises the best of k, arXiv 2503.19595 (leave-one-out advantage of the maximum). If two sequences share
    the maximum the lead is 0.

    Args and returns as for `grpo`.
    """
    groups = _Groups.of(score_B, group_B, num_groups)
    above_B = groups.above_lowest
    best_B = above_B == groups.max(above_B)
    shared_B = groups.sum(best_B.astype(above_B.dtype)) > 1
    # All `above_B` are at least 0, so the 0 of masked entries never wins the maximum.
    second_B = jnp.where(shared_B, above_B, groups.max(masked(above_B, ~best_B)))
    lead_B = groups.unless_alone(masked(above_B - second_B, best_B), groups.score)
    scale_B = groups.deviation + epsilon if normalize_std else jnp.ones_like(lead_B)
    return groups.result(lead_B / scale_B)


def rloo(score_B: jax.Array, group_B: jax.Array, *, num_groups: int) -> jax.Array:
    """Score less the mean of the *other* members: A = n / (n - 1) * (s - mean).

    REINFORCE leave-one-out, arXiv 2402.14740 eq. 8. Args and returns as for `grpo`.
    """
    groups = _Groups.of(score_B, group_B, num_groups)
    # The score less the mean of the others is this multiple of the score less the mean of all.
    others_B = groups.size / jnp.maximum(groups.size - 1.0, 1.0)
    return groups.result(groups.centered * groups.unless_alone(others_B, jnp.ones_like(others_B)))


def opo(
    score_B: jax.Array, group_B: jax.Array, length_B: jax.Array, *, num_groups: int
) -> jax.Array:
    """Score less the length-weighted mean of its group: A = s - sum(length * s) / sum(length).

    The optimal baseline if the squared norm of a gradient grows with length, arXiv 2505.23585 eq. 8. A group
    without any trained token gets 0.

    Args and returns as for `grpo`; length_B is trained tokens, any number type.
    """
    groups = _Groups.of(score_B, group_B, num_groups)
    above_B, weight_B = groups.above_lowest, length_B.astype(score_B.dtype)
    tokens_B = groups.sum(weight_B)
    advantage_B = above_B - groups.sum(weight_B * above_B) / jnp.maximum(tokens_B, 1.0)
    return groups.result(masked(groups.unless_alone(advantage_B, groups.score), tokens_B))


def gpg(score_B: jax.Array, group_B: jax.Array, *, num_groups: int) -> jax.Array:
    """Score less the group's mean, scaled up for groups without gradient: A = alpha * (s - mean).

    GPG, arXiv 2504.02546: alpha = B / (B - M), where M counts the sequences in groups with equal scores,
    whose gradient is 0. If all groups have equal scores, alpha is B and multiplies zeros.

    verl differs: its M counts scores that *are* 0. The two agree only if wrong answers score 0 and no group
    is all right. With scores of +1 and -1 verl's alpha is always 1.

    Args and returns as for `grpo`.
    """
    groups = _Groups.of(score_B, group_B, num_groups)
    # Relative to the lowest, equal scores are exactly 0 whatever they are.
    teaches_B = groups.live & (
        groups.unless_alone(groups.max(groups.above_lowest), groups.score) != 0
    )
    present, teaching = (flag.astype(score_B.dtype).sum() for flag in (groups.live, teaches_B))
    return groups.result(groups.centered * (present / jnp.maximum(teaching, 1.0)))


def reinforce_plus_plus_baseline(
    score_B: jax.Array, group_B: jax.Array, length_B: jax.Array, *, num_groups: int
) -> jax.Array:
    """Score less the mean of its group, whitened over all tokens of the batch.

    REINFORCE++-baseline, arXiv 2501.03262. Whitening counts a sequence once per trained token; a sequence
    without any gets 0.

    Args and returns as for `grpo`; length_B is trained tokens, any number type.
    """
    groups = _Groups.of(score_B, group_B, num_groups)
    weight_B = masked(length_B.astype(score_B.dtype), groups.live)
    return whiten(groups.result(groups.centered), weight_B)


def gdpo(
    score_BK: jax.Array,
    group_B: jax.Array,
    length_B: jax.Array,
    weight_K: jax.Array,
    *,
    num_groups: int,
    epsilon: Annotated[float, positive(at_most=1)] = 1e-6,
) -> jax.Array:
    """GRPO of each reward component, then their weighted sum, whitened over the batch.

    GDPO, arXiv 2601.05242: different combinations of rewards can have the same sum; normalising before
    summing keeps them apart. Whitening weighs sequences by length, as in verl; with length_B = 1 it is the
    paper's.

    Args:
      score_BK: float, the components of each sequence's reward; NaN is absent from its component's group.
      group_B, num_groups, epsilon: as for `grpo`.
      length_B: trained tokens, any number type.
      weight_K: float, weight of each component.

    Returns:
      [B], same type as the score.
    """
    of_component = functools.partial(grpo, num_groups=num_groups, epsilon=epsilon)
    group_BK = jnp.where(jnp.isnan(score_BK), -1, group_B[:, None])
    advantage_BK = jax.vmap(of_component, in_axes=1, out_axes=1)(score_BK, group_BK)
    # As in `_Groups.of`: an absent sequence must not enter the whitening's mean and count.
    live_B = (group_B >= 0) & (group_B < num_groups)
    total_B = jnp.einsum("bk,k->b", advantage_BK, weight_K)
    return whiten(total_B, masked(length_B.astype(score_BK.dtype), live_B))
