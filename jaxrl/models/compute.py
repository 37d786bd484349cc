"""Implementation choices of the forward pass, separate from the mathematics of the model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.experts import ExpertLayer, apply_experts
from jaxrl.quantized import Quantized


def _results_of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether these are the results of cuDNN's attention and the sums of its softmax, which have no names."""
    return primitive.name.startswith("dot_product_attention_fwd")


REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    # Keep only the input of a layer: least memory, one more forward pass.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Keep the results of the large matmuls and of attention, recompute norms, rotations and activations.
    "projections": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(
            "attended", "attention_out", "gate_up", "mlp_out", "qkv"
        ),
        _results_of_cudnn,
    ),
    # Keep a part of that and the input of the layer, in host memory. The copies run in parallel with the
    # matmuls, which repeat attention, gate and up: those are most of it.
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_in", "attention_out", "mlp_out", "qkv"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    # Keep the input of a layer in host memory: for rows so long that even these fill a device.
    "offload_inputs": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_in"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    # Keep everything.
    "none": None,
}

# (x_BTD, the layer's slice of `weights`, its slice of `per_layer`, per_row) -> (x_BTD, (out, sums)).
# `per_row`, the slice of `per_layer` and `out` have a leading dimension B; `sums` are sums over the rows.
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
      layer: function of one layer.
      x_BTD: input of the first layer.
      weights: stacked weights and kinds of all layers; every leaf has a leading dimension L. Or a list of
        those of each layer: then no scan runs, which would copy every layer out of a stack.
      per_layer: pytree of [L, B, ...], or None.
      per_row: pytree of [B, ...], the same for all layers.
      unroll: layers per iteration of the scan; L or more removes the scan.

    Returns:
      The output of the last layer, and `(out, sums)` of all layers, stacked: [L, ...].
    """

    def step(x_BTD, weights_and_in):
        layer_weights, layer_in = weights_and_in
        return layer(x_BTD, layer_weights, layer_in, per_row)

    if isinstance(weights, list):
        outs = []
        for i, own in enumerate(weights):
            x_BTD, out = layer(x_BTD, own, entry(per_layer, i), per_row)
            outs.append(out)
        return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
    num_layers = len(jax.tree.leaves(weights)[0])
    if unroll < num_layers:
        return jax.lax.scan(step, x_BTD, (weights, per_layer), unroll=unroll)
    # A Python loop, since even an unrolled scan copies the residuals of all layers into one array. Not
    # `leaf[i]`: JAX 0.10.2 cannot add the gradient of a static slice to a ref, which `roles.gradient` needs.
    outs = []
    for i in range(num_layers):
        of_layer = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        x_BTD, out = step(x_BTD, jax.tree.map(of_layer, (weights, per_layer)))
        outs.append(out)
    return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def entry(stacks: Any, i: int) -> Any:
    """Entry `i` of the first dimension of every array of a tree."""
    return jax.tree.map(lambda stack: stack[i], stacks)


def are_listed(weights: Any) -> bool:
    """Whether a tree of weights of several layers has lists of those of each in place of stacks."""
    return isinstance(jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, list))[0], list)


def layer_of(weights: Any, i: int) -> Any:
    """The weights of layer `i`, out of lists or of stacks."""
    if are_listed(weights):
        return jax.tree.map(lambda x: x[i], weights, is_leaf=lambda x: isinstance(x, list))
    # Not `leaf[i]`, see `scan_layers`.
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), weights)


def scan_layers_as_bits(
    layer: LayerFunction,
    x_BTD: jax.Array,
    weights: Any,
    per_layer: Any,
    per_row: Any,
    *,
    unroll: int = 1,
) -> tuple[jax.Array, tuple[Any, Any]]:
    """`scan_layers` for sampling on CPU: it slices and stacks narrow types as integers.

    The result has no gradient.
    """

    if isinstance(weights, list):
        return scan_layers(layer, x_BTD, weights, per_layer, per_row)

    def as_bits(x_BTD, weights, layer_in, per_row):
        x_BTD, out = layer(x_BTD, from_bits(weights), from_bits(layer_in), per_row)
        return x_BTD, to_bits(out)

    x_BTD, out = scan_layers(
        as_bits, x_BTD, to_bits(weights), to_bits(per_layer), per_row, unroll=unroll
    )
    return x_BTD, from_bits(out)


class HeadCopies(NamedTuple):
    """The unembedding as each of the G devices that share the tokens has it.

    Gradients are summed on each device, and over the devices after the last chunk.

    Attributes:
      values_GDV: the weight in the type of activations; its gradient is 0.
      sums_GDV: the weight itself, float32: it gets the gradient, and its values are never read.
    """

    values_GDV: Any
    sums_GDV: jax.Array


def _values_and_scale(
    weight: jax.Array | Quantized, num_summed: int
) -> tuple[jax.Array, jax.Array | None]:
    """The values of a weight, and the scales [*outs] of its outputs; None if it is not in 8 bits."""
    if isinstance(weight, Quantized):
        return weight.values, weight.scale.reshape(weight.shape[num_summed:])
    return weight, None


@dataclasses.dataclass(frozen=True)
class Compute:
    """Implementation choices of a forward pass. But for `adapter_B` they change its result by rounding only.

    Attributes:
      dtype: type of activations, and of weights in matmuls.
      remat: a name of `REMAT_POLICIES`: the activations kept for the backward pass.
      constrain: (activation, its logical axes) -> activation; sets its sharding on a mesh, or does nothing.
      experts: function that applies the experts of a mixture; on a mesh it exchanges tokens between devices.
      layers: function that runs the stack, like `scan_layers`; a pipeline on a mesh with stages.
      absorbs: attend to latents, as a cache has them, not to keys and values (`latent_attention`).
      unroll: layers per iteration of the scan; the number of layers suits shallow models on CPU.
      flat: flatten all tokens into one dimension for matmuls.
      sum_parts: number of parts in which matmuls add up where tensor parallelism splits their sum. The result
        is the same for every degree of tensor parallelism that divides the number. 0 lets XLA choose.
      wide_results: matmuls return float32 and are rounded to `dtype` afterwards.
      adapter_B: int32 [B], the adapter of each row in stacks of adapters; None for one that all rows share.
      keeps_routes: whether `Routing.expert` has the experts of every token.
      routes: int16 [B, T, A], experts to take in place of the router's choice; -1 leaves it. None for none.
      gathers_adapters: decode with the factors of each row, so that an adapter's place in the stack changes
        nothing, not even the rounding. False multiplies with the whole stack, which is less to read if there
        are many rows.
    """

    dtype: Any = jnp.float32
    remat: str = "none"
    constrain: Callable[[jax.Array, tuple[str | None, ...]], jax.Array] = lambda x, axes: x
    experts: ExpertLayer = apply_experts
    layers: Callable[..., tuple[jax.Array, tuple[Any, Any]]] = scan_layers
    absorbs: bool = False
    unroll: int = 1
    flat: bool = False
    sum_parts: int = 0
    wide_results: bool = False
    adapter_B: jax.Array | None = None
    keeps_routes: bool = False
    routes: jax.Array | None = None
    gathers_adapters: bool = True

    def product(
        self,
        x: jax.Array,
        weight: jax.Array | Quantized,
        *,
        num_summed: int = 1,
        out_type: Any = None,
        splits_sum: bool = False,
    ) -> jax.Array:
        """Matmul over the last dimensions of `x` and the first of `weight`.

        Args:
          x: [..., *summed], activations.
          weight: [*summed, *outs], in any type; a `Quantized` one has a scale for each output.
          num_summed: number of dimensions that are summed over.
          out_type: type of the sum and of the result; None for `dtype`.
          splits_sum: whether tensor parallelism splits the dimensions that are summed over.

        Returns:
          [..., *outs].
        """
        if splits_sum and self.sum_parts:
            return self._product_in_parts(x, weight, num_summed)
        lead = x.shape[: x.ndim - num_summed]
        # On CPU, XLA takes twice as long for a weight gradient that is summed over two dimensions. Not on a
        # mesh that splits both dimensions, where flattening would gather one.
        if self.flat:
            x = x.reshape(math.prod(lead), *x.shape[len(lead) :])
        values, scale = _values_and_scale(weight, num_summed)
        # On CPU, XLA has fast kernels for bfloat16 only with float32 results: at 16 rows a third of the time.
        sum_type = jnp.float32 if self.wide_results or scale is not None else out_type
        out = jnp.tensordot(
            x, values.astype(self.dtype), num_summed, preferred_element_type=sum_type
        )
        if scale is not None:
            out = out * jnp.expand_dims(scale, range(out.ndim - scale.ndim))
        return out.astype(out_type or self.dtype).reshape(*lead, *weight.shape[num_summed:])

    def head_copies(
        self,
        hidden: jax.Array,
        weight_DV: jax.Array,
        shards: tuple[int, ...],
        place: Callable[[jax.Array], jax.Array] | None,
    ) -> tuple[jax.Array, HeadCopies]:
        """The hidden states, and the head for `product_of_first` with them.

        Args:
          hidden: what the head will be multiplied with.
          weight_DV: the head.
          shards: number of devices that rows lie on, and lengths.
          place: constrains the gradient of the head to its sharding; None for a frozen head.
        """

        @jax.custom_vjp
        def together(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            return hidden, weight

        # The gradient of the hidden states waits for that of the head: else the sums of all devices would
        # stay until the layers are done.
        together.defvjp(
            lambda *both: (both, None),
            lambda _, g: jax.lax.optimization_barrier((g[0], place(g[1]))),  # pyright: ignore
        )
        if place is None:
            weight_DV = jax.lax.stop_gradient(weight_DV)
        else:
            hidden, weight_DV = together(hidden, weight_DV)

        # Else XLA leaves the width of the head split as it is stored, and every device computes a part of the
        # logits of all tokens.
        def copied(weight: jax.Array) -> jax.Array:
            copies = jnp.broadcast_to(weight[None, None], (*shards, *weight.shape))
            copies = self.constrain(copies, ("rows", "length", None, "vocab"))
            return copies.reshape(-1, *weight.shape)

        # XLA drops the unused float32 copy, so only the one in the type of activations is gathered.
        values_DV = self.constrain(weight_DV.astype(self.dtype), (None, "vocab"))
        # No `stop_gradient`: a derivative of the gradient (trust regions) passes the values forwards.
        return hidden, HeadCopies(copied(values_DV), copied(weight_DV))

    def product_of_first(
        self, x: jax.Array, weight: jax.Array | HeadCopies, count: jax.Array, *, out_type: Any
    ) -> jax.Array:
        """`product` of [G, C, D] and [D, V] for the first `count` of C; what is not needed may be 0.

        One of five numbers is computed, 0 to C in quarters, forward and backward.
        """
        C = x.shape[1]
        # Shapes are static, so a count that is known at run time is rounded up to one of a few.
        sizes = sorted({-(-C * quarters // 4) for quarters in range(5)})

        def multiplied(out_type: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
            if isinstance(weight, HeadCopies):
                return functools.partial(
                    jnp.einsum, "gcd,gdv->gcv", preferred_element_type=out_type
                )
            return functools.partial(self.product, out_type=out_type)

        # Gradients of logits are rounded to the type of activations: in float32 their products took a tenth
        # of an update of 1.5B (H200, benchmarks/results/2026-11-26-h200.md). TPUs round them by themselves.
        multiply, narrow = multiplied(out_type), multiplied(self.dtype)

        def of_size(values: Callable[..., Any], count: jax.Array, *arguments: jax.Array) -> Any:
            index = (count > jnp.array(sizes[:-1])).sum()
            branches = [functools.partial(values, size) for size in sizes]
            return jax.lax.switch(index, branches, *arguments)

        def all_of(x_GKV: jax.Array) -> jax.Array:
            return jnp.pad(x_GKV, ((0, 0), (0, C - x_GKV.shape[1]), (0, 0)))

        def values_of(weight: jax.Array | HeadCopies) -> jax.Array:
            return weight.values_GDV if isinstance(weight, HeadCopies) else weight

        def forward(size: int, x: jax.Array, weight: jax.Array) -> jax.Array:
            return all_of(multiply(x[:, :size], weight))

        def backward(size: int, x: jax.Array, weight: jax.Array, g: jax.Array):
            x, g = x[:, :size], g[:, :size]
            (to_x,) = jax.linear_transpose(lambda x: narrow(x, weight), x)(g)
            (to_weight,) = jax.linear_transpose(lambda weight: narrow(x, weight), weight)(g)
            return all_of(to_x), to_weight

        @jax.custom_vjp
        def of_first(x: jax.Array, weight: Any, count: jax.Array) -> jax.Array:
            return of_size(forward, count, x, values_of(weight))

        def pull_back(kept: tuple[jax.Array, jax.Array, Any], g: jax.Array):
            count, x, weight = kept
            # Not in the branches: XLA would write the gradient in float32 first.
            g = g.astype(self.dtype)
            to_x, to_weight = of_size(backward, count, x, values_of(weight), g)
            if isinstance(weight, HeadCopies):
                to_weight = HeadCopies(None, to_weight.astype(weight.sums_GDV.dtype))
            return to_x, to_weight, None

        of_first.defvjp(
            # Not `of_first` again: a derivative of this derivative cannot pass a `custom_vjp` forwards.
            lambda x, weight, count: (
                of_size(forward, count, x, values_of(weight)),
                (count, x, weight),
            ),
            pull_back,
        )
        return checkpoint_name(of_first(x, weight, count), "logits")

    def _product_in_parts(
        self, x: jax.Array, weight: jax.Array | Quantized, num_summed: int
    ) -> jax.Array:
        """`product` as the sum of `sum_parts` products, in float32 and one after the other."""
        lead, outs = x.shape[: x.ndim - num_summed], weight.shape[num_summed:]
        others = (None,) * (len(lead) - 1)
        x = x.reshape(*lead, self.sum_parts, -1)
        values, scale = _values_and_scale(weight, num_summed)
        values = values.astype(self.dtype).reshape(self.sum_parts, -1, math.prod(outs))
        # "mlp" stands for the axes of tensor parallelism: every device has whole parts.
        x = self.constrain(x, ("batch", *others, "mlp", None))
        values = self.constrain(values, ("mlp", None, None))
        parts = jnp.einsum("...nk,nko->n...o", x, values, preferred_element_type=jnp.float32)
        parts = self.constrain(parts, ("mlp", "batch", *others, None))
        # The parts of all devices, gathered; a sum over split parts would be one in XLA's order.
        parts = self.constrain(parts, (None, "batch", *others, None))
        # One after the other, so that the order does not depend on the mesh.
        total = functools.reduce(jnp.add, [parts[i] for i in range(self.sum_parts)])
        if scale is not None:
            total = total * jnp.expand_dims(scale.reshape(-1), range(total.ndim - 1))
        return total.astype(self.dtype).reshape(*lead, *outs)


# On CPU, XLA computes nothing but matmuls in bfloat16. It slices and writes such arrays by way of float32,
# which takes several times as long as the matmul with the slice. It copies integers as they are.
_BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16}
_OF_BITS = {jnp.dtype(bits): dtype for dtype, bits in _BITS.items()}


def moved_as_bits(move: Callable[..., Any], *trees: Any) -> Any:
    """The result of `move`, which only moves values; in a program for CPU it gets and returns bits.

    Elsewhere it gets the arrays as they are: with bits XLA would copy a TPU's whole cache.
    """

    as_bits = lambda *trees: from_bits(move(*to_bits(trees)))  # noqa: E731
    return jax.lax.platform_dependent(*trees, cpu=as_bits, default=move)


def to_bits(tree: Any) -> Any:
    """Replaces bfloat16 arrays by unsigned integers of the same bits; no gradient."""
    return _bitcast(tree, _BITS)


def from_bits(tree: Any) -> Any:
    """The inverse of `to_bits`. The tree must not have had uint16 arrays before."""
    return _bitcast(tree, _OF_BITS)


def _bitcast(tree: Any, types: dict[Any, Any]) -> Any:
    return jax.tree.map(
        lambda x: jax.lax.bitcast_convert_type(x, types[x.dtype]) if x.dtype in types else x, tree
    )
