"""Sums, means, ends and recurrences over packed sequences. Only this file of `algos` knows about packing.

    B rows   T tokens of a row   C sequences of a batch (a row holds several; a sequence never spans rows)

    segment_ids_BT   1 1 1 1 1 2 2 2 2 0     int32; 0 is padding; a sequence lies in one piece, its id is
                                             unique within its row and at most T
    mask_BT          0 0 1 0 1 0 1 1 1 0     1 on the tokens that count ("trained"), else 0; holes allowed
    sequence_BT      5 5 5 5 5 8 8 8 8 -1    int32; which of the C sequences a token belongs to, -1 none

Unpacked rows have segment_ids = 1 everywhere. Every function here replaces entries outside the mask by 0
before it computes, so even a NaN there has neither value nor gradient. Results are 0 outside a segment, or
outside the mask where the docstring says so. All cost O(B T), are differentiable and keep static shapes.

Not covered: sequences that continue in another row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`x` where the mask (of any type) is not 0, else 0. Masked entries have neither value nor gradient.

    A product x * mask would not do: NaN * 0 is NaN, and so is its gradient.
    """
    return jnp.where(mask.astype(bool), x, jnp.zeros_like(x))


def each_token(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Each token's own value, in the signature of `segment_sum`, `segment_mean` and `segment_max`."""
    del segment_ids_BT
    return masked(x_BT, mask_BT)


def segment_sum(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Sum over a sequence's trained tokens, on every token of the sequence; 0 on padding."""
    return _reduce(jax.ops.segment_sum, masked(x_BT, mask_BT), segment_ids_BT)


def segment_count(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Trained tokens of a sequence, on every token of it, in the mask's type."""
    return segment_sum(jnp.ones_like(mask_BT), mask_BT, segment_ids_BT)


def segment_mean(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Mean over a sequence's trained tokens, on every token of it; 0 for a sequence without any."""
    count_BT = segment_sum(jnp.ones_like(x_BT), mask_BT, segment_ids_BT)
    return segment_sum(x_BT, mask_BT, segment_ids_BT) / jnp.maximum(count_BT, 1.0)


def segment_max(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Largest value of a sequence's trained tokens, on every token of it; 0 for a sequence without any."""
    # -inf rather than the 0 of `masked`, which would win where all values are negative.
    low_BT = jnp.where(mask_BT.astype(bool), x_BT, jnp.full_like(x_BT, -jnp.inf))
    count_BT = segment_count(mask_BT, segment_ids_BT)
    return masked(_reduce(jax.ops.segment_max, low_BT, segment_ids_BT), count_BT)


def last_tokens(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """1 on the last trained token of each sequence, else 0, in the mask's type.

    The score of a whole sequence is placed there. The sum is the number of sequences with a trained token.
    """
    none_after_BT = _next_index(mask_BT, segment_ids_BT) == mask_BT.shape[1]
    return masked(jnp.ones_like(mask_BT), mask_BT.astype(bool) & none_after_BT)


def next_values(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Value of the next trained token of the same sequence, skipping holes; 0 if there is none."""
    index_BT = _next_index(mask_BT, segment_ids_BT)
    return _take(masked(x_BT, mask_BT), index_BT)


def running_sum(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Cumulative sum over the trained tokens of each sequence, inclusive; 0 outside the mask."""
    # A scale of 0 on the first token of a segment cuts the recurrence off from the segment before it.
    goes_on_BT = jnp.pad(_same_as_next(segment_ids_BT), ((0, 0), (1, 0)))
    x_BT = masked(x_BT, mask_BT)
    _, total_BT = jax.lax.associative_scan(
        _then, (masked(jnp.ones_like(x_BT), goes_on_BT), x_BT), axis=1
    )
    return masked(total_BT, mask_BT)


def segment_scan(
    x_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    decay: float | jax.Array = 1.0,
) -> jax.Array:
    """Discounted sum of a sequence from each trained token to its end: y_t = x_t + decay * y_next.

    "Next" is the sequence's next trained token: a hole neither adds nor decays.

    Returns:
      [B, T], 0 outside the mask.
    """
    goes_on_BT = jnp.pad(_same_as_next(segment_ids_BT), ((0, 0), (0, 1)))
    # A hole has a decay of 1: the sum passes through it as it is.
    keep_BT = jnp.where(mask_BT.astype(bool), decay, 1.0).astype(x_BT.dtype)
    _, y_BT = jax.lax.associative_scan(
        _then, (masked(keep_BT, goes_on_BT), masked(x_BT, mask_BT)), reverse=True, axis=1
    )
    return masked(y_BT, mask_BT)


def windowed_scan(
    x_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    decay: float | jax.Array,
    steps: int,
) -> jax.Array:
    """`segment_scan` over each token and the `steps` - 1 trained tokens after it; cost O(steps B T)."""
    index_BT = _next_index(mask_BT, segment_ids_BT)
    x_BT = masked(x_BT, mask_BT)
    add = lambda _, y_BT: x_BT + decay * _take(y_BT, index_BT)  # noqa: E731
    # x is already the sum over one token, hence `steps` - 1 turns.
    return masked(jax.lax.fori_loop(1, steps, add, x_BT), mask_BT)


def to_sequences(
    x_BT: jax.Array, mask_BT: jax.Array, sequence_BT: jax.Array, *, num_sequences: int
) -> jax.Array:
    """Sum of the trained tokens of each sequence of a batch, [C]; 0 for an absent one."""
    # Tokens of no sequence go to a bucket of their own, which is cut off again.
    bucket_BT = jnp.where(sequence_BT < 0, num_sequences, sequence_BT)
    return jax.ops.segment_sum(
        masked(x_BT, mask_BT).reshape(-1), bucket_BT.reshape(-1), num_segments=num_sequences + 1
    )[:num_sequences]


def to_tokens(x_C: jax.Array, sequence_BT: jax.Array, *, absent: float = 0) -> jax.Array:
    """The value of its sequence on each token, [B, T]; `absent` where `sequence_BT` is -1."""
    return jnp.where(sequence_BT < 0, absent, x_C[jnp.maximum(sequence_BT, 0)])


def _same_as_next(segment_ids_BT: jax.Array) -> jax.Array:
    return segment_ids_BT[:, :-1] == segment_ids_BT[:, 1:]


def _then(first, second):
    """Composes two maps y -> shift + scale * y; an associative scan of it solves a linear recurrence."""
    scale_1, shift_1 = first
    scale_2, shift_2 = second
    return scale_1 * scale_2, shift_2 + scale_2 * shift_1


def _reduce(reduce, x_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    # At most T segments of at least one token, and padding as number 0.
    num_segments = x_BT.shape[1] + 1
    total_BS = jax.vmap(lambda x, ids: reduce(x, ids, num_segments=num_segments))(
        x_BT, segment_ids_BT
    )
    return masked(jnp.take_along_axis(total_BS, segment_ids_BT, axis=1), segment_ids_BT)


def _next_index(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Position of the sequence's next trained token, strictly after each position; T where there is none."""
    B, T = mask_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    # From the right, the smallest trained position so far is the nearest one.
    here_or_later_BT = jax.lax.cummin(
        jnp.where(mask_BT.astype(bool), position_BT, T), axis=1, reverse=True
    )
    later_BT = jnp.concatenate([here_or_later_BT[:, 1:], jnp.full((B, 1), T, jnp.int32)], axis=1)
    theirs_BT = _take(segment_ids_BT, later_BT)
    # `> 0`: padding, and the 0 that `_take` returns past the end, are no segment.
    return jnp.where((theirs_BT == segment_ids_BT) & (theirs_BT > 0), later_BT, T)


def _take(x_BT: jax.Array, index_BT: jax.Array) -> jax.Array:
    """x at `index`, 0 where the index is T."""
    T = x_BT.shape[1]
    taken_BT = jnp.take_along_axis(x_BT, jnp.minimum(index_BT, T - 1), axis=1)
    return masked(taken_BT, index_BT < T)
