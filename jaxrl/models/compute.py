"""How a forward pass is computed, apart from what it computes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.experts import ExpertLayer, apply_experts
from jaxrl.models.low_precision import Product

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    # Keep nothing of a layer but its input: least memory, one more forward pass.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Keep the inputs of the big products, recompute norms, rotations and activations.
    "projections": jax.checkpoint_policies.save_only_these_names("attention_out", "mlp_out", "qkv"),
    # Keep the same and the input of the layer, in the host's memory: copies go on beside the products.
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_in", "attention_out", "mlp_out", "qkv"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    # Keep everything.
    "none": None,
}

# (x_BTD, a layer's part of `weights`, its row of `per_layer`, per_row) -> (x_BTD, (out, sums)). `per_row` and
# what comes of `per_layer` lead with B, as does `out`; `sums` are sums over the rows.
LayerFunction = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]]


def scan_layers(
    layer: LayerFunction,
    x_BTD: jax.Array,
    weights: Any,
    per_layer: Any,
    per_row: Any,
    *,
    unroll: int = 1,
) -> tuple[jax.Array, tuple[Any, Any]]:
    """Runs a stack of layers one after another.

    Args:
      layer: one of them.
      x_BTD: what goes into the first.
      weights: of all layers and what kind each is, stacked: every leaf leads with L.
      per_layer: pytree of [L, B, ...], or None.
      per_row: pytree of [B, ...], the same for all layers.
      unroll: layers per iteration of the scan; with all of them there is none.

    Returns:
      What comes out of the last, and `(out, sums)` of all, stacked: [L, ...].
    """

    def step(x_BTD, weights_and_in):
        layer_weights, layer_in = weights_and_in
        return layer(x_BTD, layer_weights, layer_in, per_row)

    num_layers = len(jax.tree.leaves(weights)[0])
    if unroll < num_layers:
        return jax.lax.scan(step, x_BTD, (weights, per_layer), unroll=unroll)
    # A scan, unrolled too, would copy what the backward pass keeps of the layers into one array. Not
    # `leaf[i]`: JAX 0.10.2 cannot add the gradient of a static slice to a ref, as the learner asks of it.
    outs = []
    for i in range(num_layers):
        of_layer = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        x_BTD, out = step(x_BTD, jax.tree.map(of_layer, (weights, per_layer)))
        outs.append(out)
    return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def _unconstrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    del axes
    return x


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a forward pass is computed; what it computes does not depend on it beyond rounding.

    Attributes:
      dtype: of activations and of weights when they are used.
      remat: a name of `REMAT_POLICIES`, what the backward pass keeps of each layer.
      constrain: called with an activation and its logical axes; places it on a mesh, or does nothing.
      experts: runs the chosen experts of a mixture; on a mesh it exchanges tokens between their owners.
      layers: runs the stack, as `scan_layers` does; on a mesh with stages it is a pipeline.
      unroll: layers per iteration of the scan; all of them makes sense for shallow models on CPU.
      flat: products see all tokens in one dimension. XLA on CPU takes twice as long for the gradient of a
        weight that is summed over two dimensions; where both are split over a mesh, one would be gathered.
      in_8_bits: makes the products of projections, in place of `product`, if given.
    """

    dtype: Any = jnp.float32
    remat: str = "none"
    constrain: Callable[[jax.Array, tuple[str | None, ...]], jax.Array] = _unconstrained
    experts: ExpertLayer = apply_experts
    layers: Callable[..., tuple[jax.Array, tuple[Any, Any]]] = scan_layers
    unroll: int = 1
    flat: bool = False
    in_8_bits: Product | None = None

    def projection(self, x: jax.Array, weight: jax.Array, *, num_summed: int) -> jax.Array:
        """The product of a projection inside the layers: `product`, or that of `in_8_bits`."""
        if self.in_8_bits is None:
            return self.product(x, weight, num_summed=num_summed)
        lead = x.shape[: x.ndim - num_summed]
        out = self.in_8_bits(self._flattened(x, num_summed), weight, num_summed)
        return out.reshape(*lead, *weight.shape[num_summed:])

    def product(
        self, x: jax.Array, weight: jax.Array, *, num_summed: int = 1, out_type: Any = None
    ) -> jax.Array:
        """Sums products over the last dimensions of `x` and the first of `weight`.

        Args:
          x: [..., *summed], activations.
          weight: [*summed, *outs], in any type.
          num_summed: how many dimensions are.
          out_type: in which it is summed and returned; `dtype` by default.

        Returns:
          [..., *outs].
        """
        lead = x.shape[: x.ndim - num_summed]
        x = self._flattened(x, num_summed)
        out = jnp.tensordot(
            x, weight.astype(self.dtype), num_summed, preferred_element_type=out_type
        )
        return out.reshape(*lead, *weight.shape[num_summed:])

    def _flattened(self, x: jax.Array, num_summed: int) -> jax.Array:
        """[..., *summed] as [tokens, *summed], where that is asked for."""
        lead = x.ndim - num_summed
        return x.reshape(math.prod(x.shape[:lead]), *x.shape[lead:]) if self.flat else x
