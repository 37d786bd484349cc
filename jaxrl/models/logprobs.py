"""From hidden states to log-probabilities of tokens, without ever holding [B, T, V].

B sequences   T tokens   D width   V vocabulary   C tokens of a chunk
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def log_softmax_entropy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities [..., V] and their entropy [...] in nats.

    The one definition of a token's probability: the sampler and the trainer both use it.
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return logprobs, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def token_logprobs(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of every token given the tokens of its segment before it.

    This is the one place where hidden states and tokens are shifted against each other: entry t of
    the result is about token t and comes from hidden state t - 1. A segment's first token has no
    past; its entries are 0.

    Args:
      logits_of: [B, C, D] -> [B, C, V], logits before temperature.
      hidden_BTD: last hidden states.
      tokens_BT, segment_ids_BT: int32; segment 0 is padding.
      temperature: divides the logits.
      chunk_tokens: C, how many positions have their logits in memory at once, forward and backward.

    Returns:
      (logprob_BT, entropy_BT), float32.
    """
    B, T, D = hidden_BTD.shape
    C = min(chunk_tokens, T)
    padding = -T % C
    past_BTD = jnp.pad(hidden_BTD[:, :-1], ((0, 0), (1, padding), (0, 0)))
    targets_BT = jnp.pad(tokens_BT, ((0, 0), (0, padding)))

    @jax.checkpoint
    def chunk(_, inputs):
        past_BCD, targets_BC = inputs
        logprobs_BCV, entropy_BC = log_softmax_entropy(logits_of(past_BCD) / temperature)
        logprob_BC = jnp.take_along_axis(logprobs_BCV, targets_BC[..., None], axis=-1)[..., 0]
        return None, (logprob_BC, entropy_BC)

    chunked = (
        past_BTD.reshape(B, -1, C, D).swapaxes(0, 1),
        targets_BT.reshape(B, -1, C).swapaxes(0, 1),
    )
    _, (logprob, entropy) = jax.lax.scan(chunk, None, chunked)
    logprob_BT = logprob.swapaxes(0, 1).reshape(B, -1)[:, :T]
    entropy_BT = entropy.swapaxes(0, 1).reshape(B, -1)[:, :T]
    has_past_BT = (segment_ids_BT > 0) & (segment_ids_BT == jnp.roll(segment_ids_BT, 1, axis=1))
    has_past_BT = has_past_BT.at[:, 0].set(False)
    return jnp.where(has_past_BT, logprob_BT, 0.0), jnp.where(has_past_BT, entropy_BT, 0.0)
