"""Sampling of one token per sequence, reproducible wherever it runs.

A token is drawn by Gumbel-max: argmax(logits / temperature + noise). The noise is a function of (seed,
step, prompt id, sample index, position, token id) and of nothing else, so a sample does not depend on slot,
batch, mesh or restart. Gumbel-max rather than the inverse of the cumulative distribution because a
rounding difference can then flip a token only where two candidates nearly tie, not at every boundary.

    S slots   V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.checks import at_least, between, check_value, positive

# What `Truncation` may be set to.
TOP_K = at_least(0)
TOP_P = between(0, 1, has_low=False)
MIN_P = between(0, 1, has_high=False)
MIN_TOKENS = at_least(0)
REPETITION_PENALTY = positive(at_most=1000)

# Finite, so that noise of any size cannot make a NaN of it.
_NEVER = -1e30


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
    return jnp.argmax(scaled_logits_SV + noise_SV, axis=-1).astype(jnp.int32)


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


def truncate(scaled_logits_SV: jax.Array, truncation: Truncation) -> jax.Array:
    """Logits [S, V] in which tokens outside the truncation can never be drawn.

    The order is that of Transformers: top-k, then top-p of what is left, then min-p. Log-probabilities are
    taken before this, so that they stay those of the policy that is trained. Costs a sort over the
    vocabulary, which is skipped while no slot is truncated.
    """
    limits = jax.tree.map(lambda x: x[:, None], truncation)
    truncated_S = (truncation.top_k > 0) | (truncation.top_p < 1) | (truncation.min_p > 0)
    return jax.lax.cond(
        truncated_S.any(), lambda: _truncated(scaled_logits_SV, limits), lambda: scaled_logits_SV
    )


def _truncated(logits_SV: jax.Array, limits: Truncation) -> jax.Array:
    sorted_SV = jnp.sort(logits_SV, axis=-1, descending=True)
    rank_1V = jnp.arange(logits_SV.shape[-1])[None]
    in_top_k_SV = (limits.top_k == 0) | (rank_1V < limits.top_k)
    probability_SV = jax.nn.softmax(sorted_SV, axis=-1, where=in_top_k_SV)
    before_SV = jnp.cumsum(probability_SV, axis=-1) - probability_SV
    # The sum of all may miss 1 by a rounding error.
    in_top_p_SV = (limits.top_p >= 1) | (before_SV < limits.top_p)
    in_min_p_SV = probability_SV >= limits.min_p * probability_SV[:, :1]
    # Each condition holds for a run of the most probable tokens, so their intersection is one too.
    num_kept_S1 = (in_top_k_SV & in_top_p_SV & in_min_p_SV).sum(axis=-1, keepdims=True)
    least_S1 = jnp.take_along_axis(sorted_SV, jnp.maximum(num_kept_S1 - 1, 0), axis=-1)
    return jnp.where(logits_SV >= least_S1, logits_SV, _NEVER)
