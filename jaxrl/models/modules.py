"""Building blocks of layers: weights with named axes, projections with adapters, norms, feed-forward
networks, rotary positions.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.compute import Compute
from jaxrl.models.gates import GATES
from jaxrl.models.model_config import LoraConfig, ModelConfig, RopeScaling

# Name and size of each dimension. The name None marks a dimension that is never split.
Dims = tuple[tuple[str | None, int], ...]


def normal(key: jax.Array, dims: Dims, fan_in: int, *, summed: range = range(0)) -> nnx.Param:
    """A float32 weight with variance 1 / fan_in; in 8 bits the dimensions `summed` share a scale."""
    axes, shape = zip(*dims, strict=True)
    value = jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, axes=axes, summed=tuple(summed))


def constant(value: float, dims: Dims, *, exact: bool = False) -> nnx.Param:
    """A float32 weight that starts with one value everywhere; an `exact` one is never rounded."""
    axes, shape = zip(*dims, strict=True) if dims else ((), ())
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes, exact=exact)


class Projection(nnx.Module):
    """x · weight + bias + alpha / rank * x · lora_a · lora_b, where bias and adapter are optional.

    With `Compute.adapter_B` the factors are stacks, lora_a [N, *ins, r] and lora_b [N, r, *outs], and each
    row has an adapter of its own.
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
            # 0, so that a fresh adapter changes nothing.
            self.lora_b = constant(0.0, (*stack, rank, *outs))
            self.scale = lora.scale
        self.num_ins = len(ins)
        # The dimensions of weights that tensor parallelism splits (`mesh.rules`).
        self.splits_sum = ins[0][0] in ("heads", "mlp")

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        summed: Any = {"num_summed": self.num_ins, "splits_sum": self.splits_sum}
        out = compute.product(x, self.weight.get_value(), **summed)
        if self.has_bias:
            bias = self.bias[...].astype(compute.dtype)
            # The ranks written out, here and below: tests refuse an implicit promotion.
            out = out + jnp.expand_dims(bias, range(out.ndim - bias.ndim))
        if self.has_adapter:
            if compute.adapter_B is not None:
                delta = self._of_rows(x, compute.adapter_B, compute)
            else:
                low_rank = compute.product(x, self.lora_a[...], **summed)
                delta = compute.product(low_rank, self.lora_b[...])
            out = out + self.scale * delta
        return out

    def merged(self, compute: Compute) -> jax.Array:
        """The weight with its adapter, for matmuls in another order than x · weight."""
        weight = self.weight.get_value().astype(compute.dtype)
        if self.has_adapter:
            assert compute.adapter_B is None, "each row has an adapter of its own"
            low_rank = compute.product(self.lora_a[...].astype(compute.dtype), self.lora_b[...])
            weight = weight + self.scale * low_rank
        return weight

    def _of_rows(self, x: jax.Array, adapter_B: jax.Array, compute: Compute) -> jax.Array:
        """x · lora_a · lora_b of each row's adapter: [B, T, *ins] -> [B, T, *outs]."""
        a, b = (leaf[...].astype(compute.dtype) for leaf in (self.lora_a, self.lora_b))
        N, r, outs = a.shape[0], a.shape[-1], b.shape[2:]
        x_BTI = x.reshape(*x.shape[:2], -1)
        a_NIr, b_NrO = a.reshape(N, -1, r), b.reshape(N, r, -1)
        if x.shape[1] > 1 or compute.gathers_adapters:
            low_BTr = jnp.einsum("bti,bir->btr", x_BTI, a_NIr[adapter_B])
            delta_BTO = jnp.einsum("btr,bro->bto", low_BTr, b_NrO[adapter_B])
        else:
            # Decoding: slots are many, and factors gathered for each of them would be more to read than the
            # whole stack. What is of other adapters is an exact 0, but rounding depends on the place.
            own_BN = adapter_B[:, None] == jnp.arange(N)[None]
            low_BTNr = jnp.einsum("bti,nir->btnr", x_BTI, a_NIr)
            low_BTNr = jnp.where(own_BN[:, None, :, None], low_BTNr, 0)
            delta_BTO = jnp.einsum("btnr,nro->bto", low_BTNr, b_NrO)
        return delta_BTO.reshape(*x.shape[:2], *outs)


def over_rms(x: jax.Array, eps: float, over: tuple[int, ...] = (-1,)) -> jax.Array:
    """x / rms(x) over some dimensions, in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=over, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimensions, in float32; `zero_centered` weights are scale - 1."""

    def __init__(self, dims: Dims, eps: float, *, zero_centered: bool = False):
        self.scale = constant(0.0 if zero_centered else 1.0, dims)
        self.over = tuple(range(-len(dims), 0))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises [..., *dims]; keeps the type of `x`."""
        x32 = over_rms(x, self.eps, self.over)
        scale = self.scale[...].astype(jnp.float32)
        if self.zero_centered:
            scale = scale + 1
        return (x32 * jnp.expand_dims(scale, range(x.ndim - scale.ndim))).astype(x.dtype)


class FeedForward(nnx.Module):
    """down(GATES[activation](gate(x), up(x)))."""

    def __init__(self, config: ModelConfig, d_ff: int, *, rngs: nnx.Rngs):
        width, inner = ("embed", config.d_model), ("mlp", d_ff)
        options: Any = {"lora": config.lora, "rngs": rngs}
        self.gate = Projection("gate", (width,), (inner,), **options)
        self.up = Projection("up", (width,), (inner,), **options)
        self.down = Projection("down", (inner,), (width,), **options)
        self.activation = config.activation

    def __call__(
        self, x_BTD: jax.Array, live_BT: jax.Array, compute: Compute, residual_BTD: Any = None
    ) -> tuple[jax.Array, None]:
        """Returns [B, T, D], and None for the routing. Padding is computed like any other token."""
        del live_BT, residual_BTD

        # Recompute the product of the gate in the backward pass: two arrays of width F are kept, not four.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def down(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
            hidden_BTF = GATES[self.activation](gate_BTF, up_BTF)
            hidden_BTF = compute.constrain(hidden_BTF, ("batch", "length", "mlp"))
            return self.down(hidden_BTF, compute)

        gate_BTF, up_BTF = self.gate(x_BTD, compute), self.up(x_BTD, compute)
        return down(checkpoint_name(gate_BTF, "gate_up"), checkpoint_name(up_BTF, "gate_up")), None


class Rotation(NamedTuple):
    """Rotary positions of the tokens of a batch, for the layers of one kind.

    Attributes:
      cos, sin: float32 [B, T, 1, R / 2], of the R rotated dimensions of a head.
      query_scale: factor of the queries, float32 [B, T, 1, 1]; None for 1.
    """

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None


def rotary_angles(
    positions_BT: jax.Array, num_dims: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, 1, num_dims / 2] of the rotary position embedding, float32."""
    frequency = theta ** (-jnp.arange(0, num_dims, 2, dtype=jnp.float32) / num_dims)
    if scaling is not None and scaling.kind == "linear":
        frequency = frequency / scaling.factor
    elif scaling is not None and scaling.kind == "proportional":
        turning = jnp.arange(num_dims // 2) < int(scaling.rotated * num_dims // 2)
        frequency = jnp.where(turning, frequency, 0.0)
    elif scaling is not None and scaling.kind == "longrope":
        # One list for all texts of a run, not for each batch as in Transformers: cached keys depend on it.
        factors = scaling.long_factors if scaling.long else scaling.short_factors
        frequency = frequency / jnp.array(factors, jnp.float32)
    elif scaling is not None and scaling.kind == "yarn":
        low, high = (
            num_dims
            * math.log(scaling.original_max_positions / (2 * math.pi * turns))
            / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, num_dims - 1)
        # As in Transformers, the bounds count pairs, but the last one is that of all dimensions.
        ramp = (jnp.arange(num_dims // 2, dtype=jnp.float32) - low) / (high - low or 0.001)
        stretched = jnp.clip(ramp, 0, 1)
        frequency = frequency * (1 - stretched) + frequency / scaling.factor * stretched
    elif scaling is not None:
        # Llama 3.1 divides the low frequencies by the factor, with a smooth transition.
        turns = scaling.original_max_positions * frequency / (2 * jnp.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (keep + (1 - keep) / scaling.factor)
    # In bfloat16 an angle at position 20,000 would be wrong by radians.
    angle = positions_BT[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.magnitude != 1:
        cos, sin = scaling.magnitude * cos, scaling.magnitude * sin
    return cos, sin


def rotate(
    x_BTNH: jax.Array, rotation: tuple[jax.Array, jax.Array] | Rotation, *, scale: Any = 1.0
) -> jax.Array:
    """Rotates each pair (x[i], x[i + R/2]) of the first R dimensions by its angle, times `scale`.

    The result has the type of `x_BTNH`.
    """
    cos, sin, *_ = rotation
    half = cos.shape[-1]
    rest = jnp.ones((*cos.shape[:-1], x_BTNH.shape[-1] - 2 * half), jnp.float32)
    # A scale of each token is an array, perhaps traced, and cannot be compared.
    if not (isinstance(scale, float) and scale == 1.0):
        cos, sin, rest = scale * cos, scale * sin, scale * rest

    def halves(x_BTNH: jax.Array) -> jax.Array:
        first, second, last = jnp.split(x_BTNH.astype(jnp.float32), [half, 2 * half], axis=-1)
        parts = [first * cos - second * sin, second * cos + first * sin, last * rest]
        return jnp.concatenate(parts[: 2 + bool(rest.size)], axis=-1).astype(x_BTNH.dtype)

    def swapped(x_BTNH: jax.Array) -> jax.Array:
        """The same as x * cos + x · swap * sin, where a TPU needs one operation.

        Without the barrier XLA wants the queries in an order of its own, and keeps a transposed copy of the
        query weights of all layers.
        """
        x_BTNH = jax.lax.optimization_barrier(x_BTNH)
        swap_HH, at = np.zeros((x_BTNH.shape[-1],) * 2, x_BTNH.dtype), np.arange(half)
        swap_HH[at + half, at], swap_HH[at, at + half] = -1, 1
        # Exact in 16 bits, as each value is one of x.
        exact: Any = {"precision": "highest", "preferred_element_type": jnp.float32}
        other_BTNH = jnp.matmul(x_BTNH, swap_HH, **exact)
        by, with_other = (jnp.concatenate([x, x, y], -1) for x, y in ((cos, rest), (sin, 0 * rest)))
        return (x_BTNH.astype(jnp.float32) * by + other_BTNH * with_other).astype(x_BTNH.dtype)

    if x_BTNH.shape[1] > 1:
        return halves(x_BTNH)
    return jax.lax.platform_dependent(x_BTNH, tpu=swapped, default=halves)
