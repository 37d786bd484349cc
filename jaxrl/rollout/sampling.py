"""Sampling of one token per sequence, with noise that is the same wherever it runs.

A token is drawn by Gumbel-max: argmax(logits / temperature + noise). The noise is a function of (seed,
step, prompt id, sample index, position, token id) and of nothing else: not of slot, batch, mesh or restart.
The logits do depend on these, by rounding: in float32 that changes a token only where two candidates nearly
tie, in bfloat16 it changes many samples (docs/numerics.md). Gumbel-max rather than the inverse of the
cumulative distribution because a rounding difference can then flip a token only where two candidates nearly
tie, not at every boundary.

    S slots   V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.checks import MAX_VOCABULARY, Range, at_least, between, check_value, token_count

# Logits are divided by it: what is far below leaves float32 and what is far above draws evenly.
TEMPERATURE = between(0.01, 100)
GREEDY_OR_TEMPERATURE = Range(0.01, 100, or_zero=True)

# What `Truncation` may be set to.
TOP_K = at_least(0, at_most=MAX_VOCABULARY)
TOP_P = between(0, 1, has_low=False)
MIN_P = between(0, 1, has_high=False)
MIN_TOKENS = token_count(0)
REPETITION_PENALTY = between(0.01, 100)

# Finite, so that noise of any size cannot make a NaN of it.
_NEVER = -1e30
# Up to so many top-k tokens are listed; a sort of 152k tokens would cost 100 times what finding these does.
_CANDIDATES = 256
# Draws that are looked at before the vocabulary is read anew.
_TRIES = 8
# Partial sums over the vocabulary, and the width of a block of it.
_COLUMNS = 128


def sample_keys(
    seed: jax.Array | int, step: jax.Array, prompt_ids: jax.Array, sample_indices: jax.Array
) -> jax.Array:
    """One key per sample, uint32 [S, 2].

    Args:
      seed: of the run.
      step: int32 scalar.
      prompt_ids, sample_indices: int32 [S].
    """
    step_key = jax.random.fold_in(jax.random.key(seed), step)

    def one(prompt_id, sample_index):
        key = jax.random.fold_in(jax.random.fold_in(step_key, prompt_id), sample_index)
        return jax.random.key_data(key)

    return jax.vmap(one)(prompt_ids, sample_indices)


def gumbel_noise(keys_S2: jax.Array, position_S: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise, float32 [S, V], for one position of each sample.

    Threefry makes a key per (sample, position); the vocabulary is covered by a cheap integer hash of that
    key and the token id, since threefry over V would cost more than the model of a small run.
    """
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys_S2), position_S)
    words_S2 = jax.random.key_data(keys)
    token_V = jnp.arange(vocab_size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits_SV = _mix(token_V[None] ^ words_S2[:, :1])
    bits_SV = _mix(bits_SV ^ words_S2[:, 1:])
    # v uniform in (0, 1), exact near 0: -log1p(-v) is then exact where the Gumbel variable is large,
    # which is the end that decides. The upper end is kept below 1.
    v_SV = (bits_SV.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    v_SV = jnp.minimum(v_SV, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-v_SV))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit flips each output bit about half of the time."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def sample_tokens(scaled_logits_SV: jax.Array, noise_SV: jax.Array) -> jax.Array:
    """Int32 [S]: a draw from softmax(scaled_logits), or its argmax where the noise is zero."""
    # XLA's argmax on CPU looks at one token after the other, and would make the noise so too: at 152k tokens
    # this is 6 times faster. Where a logit is NaN no token is the largest, and the last one is taken.
    V = scaled_logits_SV.shape[-1]
    sum_SV = jax.lax.optimization_barrier(scaled_logits_SV + noise_SV)
    is_largest_SV = sum_SV == sum_SV.max(axis=-1, keepdims=True)
    token_V = jnp.arange(V, dtype=jnp.int32)
    return jnp.where(is_largest_SV, token_V, V - 1).min(axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens a sample may choose from, one entry per slot (or scalars, for all alike).

    Attributes:
      top_k: int32, only so many of the most probable; 0 is all.
      top_p: float32, of these the most probable that together have at least this probability; 1 is all.
      min_p: float32, of these the ones with at least this share of the most probable one's; 0 is all.
      min_tokens: int32, stop ids cannot be drawn before so many tokens of the response.
      repetition_penalty: float32, the logit of a token that the sequence holds already, prompt included, is
        divided by this if positive and multiplied if negative (Keskar et al. 2019); 1 is none.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    min_tokens: jax.Array
    repetition_penalty: jax.Array


def untruncated() -> Truncation:
    """Every token may be drawn; scalars on the host."""
    return truncation_of(top_k=0, top_p=1.0, min_p=0.0)


def truncation_of(
    *, top_k: int, top_p: float, min_p: float, min_tokens: int = 0, repetition_penalty: float = 1.0
) -> Truncation:
    """The same truncation for every slot, scalars on the host.

    Raises:
      UserError: a limit is out of its range.
    """
    check_value("top_k", top_k, Annotated[int, TOP_K])
    check_value("top_p", top_p, Annotated[float, TOP_P])
    check_value("min_p", min_p, Annotated[float, MIN_P])
    check_value("min_tokens", min_tokens, Annotated[int, MIN_TOKENS])
    check_value("repetition_penalty", repetition_penalty, Annotated[float, REPETITION_PENALTY])
    scalars: Any = (
        np.int32(top_k),
        np.float32(top_p),
        np.float32(min_p),
        np.int32(min_tokens),
        np.float32(repetition_penalty),
    )
    return Truncation(*scalars)


def penalize(
    scaled_logits_SV: jax.Array, truncation: Truncation, seen: Callable[[], jax.Array]
) -> jax.Array:
    """Logits [S, V] with the repetition penalty; `seen`, bool [S, V], is called only if there is one.

    Scaling by the temperature first changes nothing, as the penalty keeps signs.
    """

    def penalized():
        penalty_S1 = truncation.repetition_penalty[:, None]
        lower_SV = jnp.where(
            scaled_logits_SV > 0, scaled_logits_SV / penalty_S1, scaled_logits_SV * penalty_S1
        )
        return jnp.where(seen(), lower_SV, scaled_logits_SV)

    wanted = (truncation.repetition_penalty != 1).any()
    return jax.lax.cond(wanted, penalized, lambda: scaled_logits_SV)


def forbid(
    logits_SV: jax.Array, truncation: Truncation, position_S: jax.Array, stop_ids: Sequence[int]
) -> jax.Array:
    """Logits [S, V] in which no stop id can be drawn at positions before `min_tokens`."""
    is_stop_V = jnp.isin(jnp.arange(logits_SV.shape[-1]), jnp.array(stop_ids, jnp.int32))
    early_S = position_S < truncation.min_tokens
    return jnp.where(early_S[:, None] & is_stop_V[None], _NEVER, logits_SV)


def draw(logits_SV: jax.Array, noise_SV: jax.Array, truncation: Truncation) -> jax.Array:
    """Int32 [S]: `sample_tokens` among the tokens inside the truncation.

    The order is that of Transformers: top-k, then top-p of what is left, then min-p. Tokens of one
    probability stay or go together.
    """
    limits = jax.tree.map(lambda x: x[:, None], truncation)
    asked = (truncation.top_k > 0) | (truncation.top_p < 1) | (truncation.min_p > 0)
    return jax.lax.cond(
        asked.any(),
        lambda: _draw_inside(logits_SV, noise_SV, limits),
        lambda: sample_tokens(logits_SV, noise_SV),
    )


class _Draw(NamedTuple):
    """How far the search for the token of each slot has come.

    Attributes:
      token_S1: int32, the newest candidate.
      outside_S1: tokens of this probability or less are outside.
      found_S1: the candidate is inside.
    """

    token_S1: jax.Array
    outside_S1: jax.Array
    found_S1: jax.Array


def _draw_inside(logits_SV: jax.Array, noise_SV: jax.Array, limits: Truncation) -> jax.Array:
    """`draw` by rejection: tokens are looked at in the order of logit + noise until one is inside.

    Whether a token is inside top-p is one sum over V, of the more probable ones, where the edge of what is
    inside would take some 30. A share of at least `top_p` of all draws is, and one that is not leaves only
    the more probable tokens.
    """
    p_SV = jax.nn.softmax(logits_SV, axis=-1)
    sum_SV = jax.lax.optimization_barrier(logits_SV + noise_SV)
    least_S1, mass_S1 = _least(p_SV, limits)

    def inside(p_S1: jax.Array) -> jax.Array:
        above_S1 = _sum(jnp.where(p_SV > p_S1, p_SV, 0.0))
        # The most probable token is, however small the limit.
        return (limits.top_p >= 1) | (above_S1 == 0) | (above_S1 < limits.top_p * mass_S1)

    def among(token_SK: jax.Array, draw: _Draw) -> _Draw:
        p_SK = jnp.take_along_axis(p_SV, token_SK, axis=-1)

        def left(draw: _Draw) -> jax.Array:
            return ~draw.found_S1 & (p_SK > draw.outside_S1) & (p_SK >= least_S1)

        def look(draw: _Draw) -> _Draw:
            left_SK = left(draw)
            first_S1 = left_SK.argmax(axis=-1, keepdims=True)
            token_S1, p_S1 = (jnp.take_along_axis(x, first_S1, axis=-1) for x in (token_SK, p_SK))
            any_S1, inside_S1 = left_SK.any(axis=-1, keepdims=True), inside(p_S1)
            return _Draw(
                jnp.where(any_S1, token_S1, draw.token_S1),
                jnp.where(any_S1 & ~inside_S1, p_S1, draw.outside_S1),
                draw.found_S1 | (any_S1 & inside_S1),
            )

        return jax.lax.while_loop(lambda draw: left(draw).any(), look, draw)

    def again(draw: _Draw) -> _Draw:
        left_SV = (p_SV > draw.outside_S1) & (p_SV >= least_S1)
        return among(_largest(jnp.where(left_SV, sum_SV, -jnp.inf)), draw)

    # Where a logit is NaN no token is inside, and the last one is taken, as by `sample_tokens`.
    is_nan_S1 = jnp.isnan(p_SV[:, :1])
    last_S1 = jnp.full(is_nan_S1.shape, p_SV.shape[-1] - 1)
    draw = among(_largest(sum_SV), _Draw(last_S1, jnp.full(is_nan_S1.shape, -1.0), is_nan_S1))
    return jax.lax.while_loop(lambda draw: ~draw.found_S1.all(), again, draw).token_S1[:, 0]


def _largest(x_SV: jax.Array) -> jax.Array:
    """Indices of the largest values, the largest first, int32 [S, K].

    Found among the columns of the K blocks with the largest values, which costs little more than a maximum;
    `top_k` of a vocabulary of 152k costs 10 times as much.
    """
    S, V = x_SV.shape
    padding = ((0, 0), (0, -V % _COLUMNS))
    x_SRC = jnp.pad(x_SV, padding, constant_values=-jnp.inf).reshape(S, -1, _COLUMNS)
    _, block_SK = jax.lax.top_k(x_SRC.max(axis=-1), min(_TRIES, x_SRC.shape[1]))
    # In their order, so that of equal values the first counts.
    block_SK = jnp.sort(block_SK, axis=-1)
    found_SN = jnp.take_along_axis(x_SRC, block_SK[..., None], axis=1).reshape(S, -1)
    _, index_SK = jax.lax.top_k(found_SN, min(_TRIES, V))
    of_block_SK = jnp.take_along_axis(block_SK, index_SK // _COLUMNS, axis=-1)
    return of_block_SK * _COLUMNS + index_SK % _COLUMNS


def _least(p_SV: jax.Array, limits: Truncation) -> tuple[jax.Array, jax.Array]:
    """Of top-k and min-p the least probability inside, and the mass that top-p is a share of, [S, 1] each."""
    none_S1 = jnp.zeros_like(p_SV[:, :1])

    def top_k() -> tuple[jax.Array, jax.Array]:
        least_S1 = _kth_largest(p_SV, limits.top_k)
        return least_S1, _sum(jnp.where(p_SV >= least_S1, p_SV, 0.0))

    # All tokens have 1.
    by_k_S1, mass_S1 = jax.lax.cond(
        (limits.top_k > 0).any(), top_k, lambda: (none_S1, jnp.ones_like(none_S1))
    )
    by_share_S1 = limits.min_p * p_SV.max(axis=-1, keepdims=True)
    return jnp.maximum(by_k_S1, by_share_S1), mass_S1


def _kth_largest(p_SV: jax.Array, k_S1: jax.Array) -> jax.Array:
    """The k-th largest value, float32 [S, 1], 0 where k is 0 or V and more."""
    V = p_SV.shape[-1]
    listed = min(_CANDIDATES, V)

    def in_list() -> jax.Array:
        top_SK, _ = jax.lax.top_k(p_SV, listed)
        return jnp.take_along_axis(top_SK, jnp.clip(k_S1 - 1, 0, listed - 1), axis=-1)

    least_S1 = jax.lax.cond((k_S1 <= listed).all(), in_list, lambda: _kth_by_bisection(p_SV, k_S1))
    return jnp.where((k_S1 > 0) & (k_S1 < V), least_S1, 0.0)


def _kth_by_bisection(p_SV: jax.Array, k_S1: jax.Array) -> jax.Array:
    """The k-th largest of values that are not negative, float32 [S, 1]: some 30 sums over V."""
    wanted_S1 = k_S1.astype(jnp.float32)

    # The bits of numbers that are not negative are ordered as they are.
    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_S1, high_S1 = bounds
        middle_S1 = low_S1 + (high_S1 - low_S1) // 2
        above_SV = p_SV > jax.lax.bitcast_convert_type(middle_S1, jnp.float32)
        fewer_S1 = _sum(above_SV.astype(jnp.float32)) < wanted_S1
        return jnp.where(fewer_S1, low_S1, middle_S1 + 1), jnp.where(fewer_S1, middle_S1, high_S1)

    highest_S1 = jax.lax.bitcast_convert_type(p_SV.max(axis=-1, keepdims=True), jnp.int32)
    bounds = (jnp.zeros_like(highest_S1), highest_S1)
    _, found_S1 = jax.lax.while_loop(lambda bounds: (bounds[0] < bounds[1]).any(), halve, bounds)
    return jax.lax.bitcast_convert_type(found_S1, jnp.float32)


def _sum(x_SV: jax.Array) -> jax.Array:
    """Sums over the vocabulary, [S, 1], in columns: XLA on CPU adds up a row one by one."""
    S, V = x_SV.shape
    x_SV = jnp.pad(x_SV, ((0, 0), (0, -V % _COLUMNS)))
    return x_SV.reshape(S, -1, _COLUMNS).sum(axis=1).sum(axis=-1, keepdims=True)
