"""Programs that run the model over known sequences: prompts, and tokens appended to them.

P sequences of a prefix   T tokens
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.cache.interface import Attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import Decoder, Params
from jaxrl.rollout.decode_state import Prefix
from jaxrl.rollout.slot_programs import SlotPrograms


@dataclasses.dataclass(frozen=True, eq=False)
class PrefillPrograms:
    """Computes keys and values of sequences; every method may be traced.

    Attributes:
      graph, compute: graph of the model, and how it computes on the mesh.
      attention: attention within a prompt.
      slots: slot programs over the same cache; they do not run the model.
    """

    graph: nnx.GraphDef
    compute: Compute
    attention: Attention
    slots: SlotPrograms

    def prefill(self, params: Params, tokens_PT: jax.Array, length_P: jax.Array) -> Prefix:
        """Runs P sequences of `length_P` tokens, padded on the right, and returns their keys and values."""
        model: Decoder = nnx.merge(self.graph, params)
        P, T = tokens_PT.shape
        positions_PT = jnp.broadcast_to(jnp.arange(T), (P, T))
        # Padding follows the prompt, so the causal mask alone hides it from real tokens.
        one_segment_PT = jnp.ones((P, T), jnp.int32)
        live_PT = positions_PT < length_P[:, None]
        new = self.slots.cache.prefill(self.attention, one_segment_PT)
        _, cache = new.run(model, tokens_PT, positions_PT, live_PT, self.compute)
        return self.slots.layout.place(
            Prefix(cache, tokens_PT, length_P - 1, _last(tokens_PT, length_P))
        )

    def extend(
        self, params: Params, prefix: Prefix, tokens_PT: jax.Array, length_P: jax.Array
    ) -> Prefix:
        """Appends tokens to sequences that have room for them.

        The model runs the prefix's last token and all new tokens but the newest (see `Prefix`).

        Args:
          params: weights in the generation layout.
          prefix: sequences to extend; consumed.
          tokens_PT: int32 [P, T], padded on the right.
          length_P: int32 [P], number of new tokens; 0 leaves a sequence unchanged.
        """
        model: Decoder = nnx.merge(self.graph, params)
        fed_PT = jnp.concatenate([prefix.token[:, None], tokens_PT[:, :-1]], axis=1)
        offset_PT = jnp.broadcast_to(jnp.arange(fed_PT.shape[1]), fed_PT.shape)
        positions_PT, live_PT = prefix.length[:, None] + offset_PT, offset_PT < length_P[:, None]
        on_top = self.slots.cache.extend(model, prefix.cache, prefix.length)
        _, new = on_top.run(model, fed_PT, positions_PT, live_PT, self.compute)
        live_P = length_P > 0
        # Padding may exceed the capacity; JAX would then shift the write backwards. So widen the cache first.
        wide = self.slots.with_capacity(prefix, prefix.capacity + fed_PT.shape[1])
        wide = self.slots.append(wide, new, fed_PT, live_P)
        prefix = self.slots.with_capacity(wide, prefix.capacity)
        token_P = jnp.where(live_P, _last(tokens_PT, length_P), prefix.token)
        return self.slots.layout.place(
            dataclasses.replace(prefix, length=prefix.length + length_P, token=token_P)
        )


def _last(tokens_PT: jax.Array, length_P: jax.Array) -> jax.Array:
    """The last real token of each sequence; the first token of an empty one."""
    return jnp.take_along_axis(tokens_PT, jnp.maximum(length_P - 1, 0)[:, None], axis=1)[:, 0]
