"""From hidden states to log-probabilities of tokens, without ever holding [B, T, V].

B sequences   T tokens   D width   V vocabulary   C tokens of a chunk
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxrl.models.truncation import LEAST_KEPT, Truncation, kept_tokens

Values = TypeVar("Values")


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
    statistic: Callable[[jax.Array], jax.Array] | None = None,
    truncation: Truncation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of every token given the tokens of its segment before it.

    Entry t of the result is about token t; see `from_past`.

    Args:
      logits_of: [B, C, D] -> [B, C, V], logits before temperature.
      hidden_BTD: last hidden states.
      tokens_BT, segment_ids_BT: int32; segment 0 is padding.
      temperature: divides the logits.
      chunk_tokens: C, number of positions whose logits are in memory at once, forward and backward.
      statistic: function from log-probabilities [B, C, V] to [B, C], such as `squared_probabilities`, that
        replaces the entropy; None for the entropy.
      truncation: limits; log-probabilities are those among the tokens that it keeps, and -inf for other
        tokens. The entropy stays that of the whole vocabulary. None for no limits.

    Returns:
      (logprob_BT, entropy_BT), float32.
    """

    def chunk(past_BCD: jax.Array, tokens_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs_BCV, entropy_BC = log_softmax_entropy(logits_of(past_BCD) / temperature)
        logprob_BC, logprobs_BCV = renormalized(logprobs_BCV, tokens_BC, truncation)
        return logprob_BC, entropy_BC if statistic is None else statistic(logprobs_BCV)

    return from_past(chunk, hidden_BTD, tokens_BT, segment_ids_BT, chunk_tokens=chunk_tokens)


def renormalized(
    logprobs_BCV: jax.Array, tokens_BC: jax.Array, truncation: Truncation | None
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the tokens [B, C] and of the vocabulary [B, C, V] among the kept tokens.

    Those of other tokens are -inf. Without a truncation nothing changes.
    """
    logprob_BC = of_tokens(logprobs_BCV, tokens_BC)
    if truncation is None:
        return logprob_BC, logprobs_BCV
    kept = kept_tokens(logprobs_BCV, truncation)
    return kept.renormalized(logprob_BC[..., None])[..., 0], kept.renormalized(logprobs_BCV)


def squared_probabilities(logprobs: jax.Array) -> jax.Array:
    """The sum over the vocabulary of the squared probabilities, [...] of log-probabilities [..., V]."""
    return jnp.exp(2.0 * logprobs).sum(axis=-1)


def from_past(
    function: Callable[[Any, jax.Array], Values],
    hidden: Any,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    chunk_tokens: int,
) -> Values:
    """Applies a function to each token and the hidden state before it, chunk by chunk.

    This is the only place where hidden states and tokens are shifted against each other. Entry t of the
    result is about token t and comes from hidden state t - 1. The first token of a segment has no past, and
    its entries are 0:

        tokens        a  b  c  d        e  f         two segments in a row
        hidden used   -  ha hb hc       -  he

    Args:
      function: (hidden states [B, C, D], the tokens [B, C] after them) -> pytree of values [B, C]. Its
        intermediate [B, C, V] arrays are not stored but recomputed in the backward pass.
      hidden: pytree of [B, T, D].
      tokens_BT, segment_ids_BT: int32; segment 0 is padding.
      chunk_tokens: C, number of positions computed at once.

    Returns:
      The values, [B, T] each.
    """
    B, T = tokens_BT.shape
    C = min(chunk_tokens, T)
    padding = -T % C

    def chunked(x: jax.Array) -> jax.Array:
        return x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)

    past = jax.tree.map(lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, padding), (0, 0))), hidden)
    tokens = jnp.pad(tokens_BT, ((0, 0), (0, padding)))
    _, values = jax.lax.scan(
        jax.checkpoint(
            lambda _, inputs: (None, function(*inputs)),
            policy=jax.checkpoint_policies.save_only_these_names(LEAST_KEPT),
        ),
        None,
        jax.tree.map(chunked, (past, tokens)),
    )
    has_past_BT = (segment_ids_BT > 0) & (segment_ids_BT == jnp.roll(segment_ids_BT, 1, axis=1))
    has_past_BT = has_past_BT.at[:, 0].set(False)

    def whole(x: jax.Array) -> jax.Array:
        return jnp.where(has_past_BT, x.swapaxes(0, 1).reshape(B, -1)[:, :T], 0.0)

    return jax.tree.map(whole, values)


def of_tokens(logprobs_BCV: jax.Array, tokens_BC: jax.Array) -> jax.Array:
    """The log-probability of each token, [B, C]."""
    return jnp.take_along_axis(logprobs_BCV, tokens_BC[..., None], axis=-1)[..., 0]
