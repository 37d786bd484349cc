"""Building blocks of layers: weights with named axes, projections with optional adapters, norms."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.compute import Compute
from jaxrl.models.model_config import LoraConfig

# Name and size of each dimension. The name None marks a dimension that is never split.
Dims = tuple[tuple[str | None, int], ...]


def normal(key: jax.Array, dims: Dims, fan_in: int, *, summed: range = range(0)) -> nnx.Param:
    """A float32 weight with variance 1 / fan_in; in 8 bits the dimensions `summed` share a scale."""
    axes, shape = zip(*dims, strict=True)
    value = jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, axes=axes, summed=tuple(summed))


def constant(value: float, dims: Dims, *, exact: bool = False) -> nnx.Param:
    """A float32 weight that starts with one value everywhere; an `exact` one is never rounded."""
    axes, shape = zip(*dims, strict=True)
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes, exact=exact)


class Projection(nnx.Module):
    """x · weight + bias + alpha / rank * x · lora_a · lora_b, where bias and adapter are optional.

    `lora_b` starts at 0, so a fresh adapter changes nothing.
    """

    def __init__(
        self,
        name: str,
        ins: Dims,
        outs: Dims,
        *,
        lora: LoraConfig,
        rngs: nnx.Rngs,
        bias: bool = False,
        stack: Dims = (),
    ):
        """Creates random weights.

        Args:
          name: name of the projection; it gets an adapter if `lora.targets` contains the name.
          ins, outs: dimensions that are summed over, and dimensions of the result.
          lora, rngs: adapter settings, random streams.
          bias: True adds a bias.
          stack: leading dimensions of a stack of projections, for experts.
        """
        fan_in = math.prod(size for _, size in ins)
        summed = range(len(stack), len(stack) + len(ins))
        self.weight = normal(rngs.params(), (*stack, *ins, *outs), fan_in, summed=summed)
        if bias:
            self.bias = constant(0.0, (*stack, *outs))
        self.has_bias = bias
        self.has_adapter = bool(lora.rank) and name in lora.targets
        if self.has_adapter:
            rank = (None, lora.rank)
            self.lora_a = normal(rngs.params(), (*stack, *ins, rank), fan_in)
            self.lora_b = constant(0.0, (*stack, rank, *outs))
            self.scale = lora.scale
        self.num_ins = len(ins)
        self.splits_sum = ins[0][0] in ("heads", "mlp")

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        summed: Any = {"num_summed": self.num_ins, "splits_sum": self.splits_sum}
        out = compute.product(x, self.weight.get_value(), **summed)
        if self.has_bias:
            bias = self.bias[...].astype(compute.dtype)
            out = out + jnp.expand_dims(bias, range(out.ndim - bias.ndim))
        if self.has_adapter:
            low_rank = compute.product(x, self.lora_a[...], **summed)
            out = out + self.scale * compute.product(low_rank, self.lora_b[...])
        return out


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimensions, in float32; `zero_centered` weights are scale - 1."""

    def __init__(self, dims: Dims, eps: float, *, zero_centered: bool = False):
        self.scale = constant(0.0 if zero_centered else 1.0, dims)
        self.over = tuple(range(-len(dims), 0))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises [..., *dims]; keeps the type of `x`."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=self.over, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        if self.zero_centered:
            scale = scale + 1
        return (x32 * jnp.expand_dims(scale, range(x.ndim - scale.ndim))).astype(x.dtype)
