"""How many of the sampler's tokens the trainer would have drawn, from its own logits and the same noise.

The sampler draws argmax(logits / temperature + noise), and the noise depends only on the sample and the
position (`rollout.sampling`). So the draw can be repeated with the logits of the trainer. Both agree on all
tokens if both compute the same logits; each disagreement is a token where rounding, or a difference of
weights, changed the draw:

    token           17    4     9     23
    sampler drew    17    4     9     23
    trainer draws   17    4     31    23      3 of 4 tokens are the same

B sequences   R rows   T tokens of a row   G devices   C positions of a chunk   V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.logprobs import from_past
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import Truncation, draw, gumbel_noise, sample_keys
from jaxrl.types import Completions, PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """How the sampler drew the tokens of the sequences of a step.

    Attributes:
      key_B2: uint32, sampling key of each sequence.
      prompt_tokens_B: int32, number of tokens before each response.
      truncation: limits on the tokens that could be drawn, as scalars.
    """

    key_B2: jax.Array
    prompt_tokens_B: jax.Array
    truncation: Truncation


def draws_of(completions: Completions, options: SamplingOptions) -> Draws | None:
    """The draws of a step's completions, sampled with `options`; None with a repetition penalty.

    The penalty needs the tokens before each position, which a packed row does not have at hand.
    """
    if options.truncation.repetition_penalty != 1:
        return None
    index_B = completions.prompt_index_B
    sample_B = np.arange(len(completions)) % completions.num_samples
    key_B2 = _keys(
        options.seed,
        completions.started_B.astype(np.int32),
        completions.prompts.ids_N[index_B].astype(np.int32),
        sample_B.astype(np.int32),
    )
    lengths = np.array([len(tokens) for tokens in completions.prompts.tokens], np.int32)
    # Plain arrays on the host: every process of a run hands the same ones to its devices.
    arrays: Any = {"key_B2": np.asarray(key_B2), "prompt_tokens_B": lengths[index_B]}
    return Draws(**arrays, truncation=options.truncation)


@jax.jit
def _keys(seed, step_B, prompt_id_B, sample_B) -> jax.Array:
    """Sampling keys, uint32 [B, 2]; samples of one batch may have started in different steps."""

    def one(step, prompt_id, sample):
        return sample_keys(seed, step, prompt_id[None], sample[None])[0]

    return jax.vmap(one)(step_B, prompt_id_B, sample_B)


def same_token_fraction(
    logits_of: Callable[[jax.Array, jax.Array], jax.Array],
    hidden_RTD: jax.Array,
    micro: PackedBatch,
    draws: Draws,
    *,
    temperature: float,
    chunk_tokens: int,
    shards: tuple[int, int],
) -> jax.Array:
    """Fraction of the trained tokens of a microbatch that are drawn again; NaN without such tokens.

    Tokens before `Truncation.min_tokens` do not count, because the sampler forbade stop ids there.

    Args:
      logits_of, chunk_tokens, shards: as for `algos.logprobs.token_logprobs`.
      hidden_RTD: last hidden states.
      micro: the microbatch, [R, T] per field.
      draws: see `Draws`.
      temperature: sampling temperature.
    """
    own_RT = jnp.maximum(micro.sequence, 0)
    place_RT = micro.positions - draws.prompt_tokens_B[own_RT]
    counts_RT = (micro.loss_mask > 0) & (place_RT >= draws.truncation.min_tokens)
    # `from_past` hands a token the hidden state before it, so the token's own noise moves one place back.
    noise_before = (
        jnp.roll(draws.key_B2[own_RT], -1, axis=1),
        jnp.roll(place_RT, -1, axis=1)[..., None],
    )

    def chunk(past, tokens_GC: jax.Array, needed: jax.Array) -> jax.Array:
        hidden_GCD, (key_GC2, place_GC1) = past
        logits = logits_of(hidden_GCD, needed).astype(jnp.float32) / temperature
        flat_SV = logits.reshape(-1, logits.shape[-1])
        place_S = place_GC1.reshape(-1)
        limits = jax.tree.map(lambda x: jnp.broadcast_to(x, place_S.shape), draws.truncation)
        noise_SV = gumbel_noise(key_GC2.reshape(-1, 2), place_S, flat_SV.shape[-1])
        token_S = draw(flat_SV, noise_SV, limits)
        return (token_S.reshape(tokens_GC.shape) == tokens_GC).astype(jnp.float32)

    same_RT = from_past(
        chunk,
        (hidden_RTD, noise_before),
        micro.tokens,
        micro.segment_ids,
        chunk_tokens=chunk_tokens,
        trained_BT=counts_RT,
        shards=shards,
    )
    return jnp.mean(same_RT, where=counts_RT)
