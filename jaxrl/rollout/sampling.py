"""Sampling of one token per sequence, reproducible wherever it runs.

A token is drawn by Gumbel-max: argmax(logits / temperature + noise). The noise is a function of (seed,
step, prompt id, sample index, position, token id) and of nothing else, so a sample does not depend on slot,
batch, mesh or restart. Gumbel-max rather than the inverse of the cumulative distribution because a
rounding difference can then flip a token only where two candidates nearly tie, not at every boundary.

    S slots   V vocabulary
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
