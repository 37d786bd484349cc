"""The decoder: embeddings, a scanned stack of layers, and an unembedding.

    B sequences   T tokens   L layers   D width   F ffn width   Q query heads   K kv heads   H head size
    V vocabulary

Training, prefill and decoding run the same layers; they differ in the attention function handed in.
Every weight names its logical axes and no weight or activation knows a mesh: `Compute.constrain` is
called with logical names where a layout may want to pin an activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.config import ModelConfig, RopeScaling

Params = Any  # nested dict of arrays, one entry per weight
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    # Keep nothing of a layer but its input: least memory, one more forward pass.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Keep the inputs of the big products, recompute norms, rotations and activations.
    "projections": jax.checkpoint_policies.save_only_these_names("attention_out", "mlp_out", "qkv"),
    # Keep everything.
    "none": None,
}


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
      unroll: layers per iteration of the scan; all of them makes sense for shallow models on CPU.
    """

    dtype: Any = jnp.float32
    remat: str = "none"
    constrain: Callable[[jax.Array, tuple[str | None, ...]], jax.Array] = _unconstrained
    unroll: int = 1


def _weight(
    key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int
) -> nnx.Param:
    return nnx.Param(jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5, axes=axes)


def _constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, in float32."""

    def __init__(self, size: int, axis: str, eps: float):
        self.scale = _constant(1.0, (size,), (axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises [..., size]; keeps the type of `x`."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (
            x32 * jnp.expand_dims(self.scale[...].astype(jnp.float32), range(x.ndim - 1))
        ).astype(x.dtype)


class Attention(nnx.Module):
    """Projections to queries, keys and values, rotation, attention, projection back."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, Q, K, H = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
        self.q = _weight(rngs.params(), (D, Q, H), ("embed", "heads", "head_dim"), D)
        self.k = _weight(rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"), D)
        self.v = _weight(rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"), D)
        self.o = _weight(rngs.params(), (Q, H, D), ("heads", "head_dim", "embed"), Q * H)
        if config.qkv_bias:
            self.q_bias = _constant(0.0, (Q, H), ("heads", "head_dim"))
            self.k_bias = _constant(0.0, (K, H), ("kv_heads", "head_dim"))
            self.v_bias = _constant(0.0, (K, H), ("kv_heads", "head_dim"))
        if config.qk_norm:
            self.q_norm = RMSNorm(H, "head_dim", config.rms_norm_eps)
            self.k_norm = RMSNorm(H, "head_dim", config.rms_norm_eps)
        self.config = config

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        attend: Attend,
        layer_in: Any,
        compute: Compute,
    ) -> tuple[jax.Array, Any]:
        """Returns [B, T, D] and what `attend` gave for this layer."""
        dtype, constrain = compute.dtype, compute.constrain
        q_BTQH = jnp.einsum("btd,dqh->btqh", x_BTD, self.q[...].astype(dtype))
        k_BTKH = jnp.einsum("btd,dkh->btkh", x_BTD, self.k[...].astype(dtype))
        v_BTKH = jnp.einsum("btd,dkh->btkh", x_BTD, self.v[...].astype(dtype))
        if self.config.qkv_bias:
            q_BTQH = q_BTQH + self.q_bias[None, None].astype(dtype)
            k_BTKH = k_BTKH + self.k_bias[None, None].astype(dtype)
            v_BTKH = v_BTKH + self.v_bias[None, None].astype(dtype)
        if self.config.qk_norm:
            q_BTQH, k_BTKH = self.q_norm(q_BTQH), self.k_norm(k_BTKH)
        q_BTQH = constrain(rotate(q_BTQH, rotation), ("batch", "length", "heads", "head_dim"))
        k_BTKH = constrain(rotate(k_BTKH, rotation), ("batch", "length", "kv_heads", "head_dim"))
        v_BTKH = constrain(v_BTKH, ("batch", "length", "kv_heads", "head_dim"))
        q_BTQH, k_BTKH, v_BTKH = (checkpoint_name(a, "qkv") for a in (q_BTQH, k_BTKH, v_BTKH))
        mixed_BTQH, layer_out = attend(q_BTQH, k_BTKH, v_BTKH, layer_in)
        out_BTD = jnp.einsum("btqh,qhd->btd", mixed_BTQH, self.o[...].astype(dtype))
        return checkpoint_name(out_BTD, "attention_out"), layer_out


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F = config.d_model, config.d_ff
        self.gate = _weight(rngs.params(), (D, F), ("embed", "mlp"), D)
        self.up = _weight(rngs.params(), (D, F), ("embed", "mlp"), D)
        self.down = _weight(rngs.params(), (F, D), ("mlp", "embed"), F)

    def __call__(self, x_BTD: jax.Array, compute: Compute) -> jax.Array:
        """Returns [B, T, D]."""
        dtype = compute.dtype
        gate_BTF = jnp.einsum("btd,df->btf", x_BTD, self.gate[...].astype(dtype))
        up_BTF = jnp.einsum("btd,df->btf", x_BTD, self.up[...].astype(dtype))
        hidden_BTF = compute.constrain(jax.nn.silu(gate_BTF) * up_BTF, ("batch", "length", "mlp"))
        out_BTD = jnp.einsum("btf,fd->btd", hidden_BTF, self.down[...].astype(dtype))
        return checkpoint_name(out_BTD, "mlp_out")


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, "embed", config.rms_norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, "embed", config.rms_norm_eps)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        attend: Attend,
        layer_in: Any,
        compute: Compute,
    ) -> tuple[jax.Array, Any]:
        """Returns the residual stream after this layer and what `attend` gave."""
        with jax.named_scope("attention"):
            mixed_BTD, layer_out = self.attention(
                self.attention_norm(x_BTD), rotation, attend, layer_in, compute
            )
        x_BTD = x_BTD + mixed_BTD
        with jax.named_scope("mlp"):
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD), compute)
        return compute.constrain(x_BTD, ("batch", "length", "activation")), layer_out


class Decoder(nnx.Module):
    """A language model up to its last hidden state, and the map from there to logits."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.embedding = _weight(rngs.params(), (V, D), ("vocab", "embed"), D)
        self.layers = nnx.vmap(lambda r: Layer(config, rngs=r))(rngs.split(config.num_layers))
        self.final_norm = RMSNorm(D, "embed", config.rms_norm_eps)
        if not config.tie_embeddings:
            self.unembedding = _weight(rngs.params(), (D, V), ("embed", "vocab"), D)
        self.config = config

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        attend: Attend,
        *,
        compute: Compute,
        per_layer: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Runs the stack.

        Args:
          tokens_BT, positions_BT: int32; positions count from the start of each sequence.
          attend: (q_BTQH, k_BTKH, v_BTKH, layer_in) -> (out_BTQH, layer_out).
          compute: how to compute it.
          per_layer: pytree of arrays with a leading dimension L, handed to `attend` layer by layer.

        Returns:
          The normalised last hidden state [B, T, D], and `layer_out` stacked over layers.
        """
        with jax.named_scope("embed"):
            x_BTD = self.embedding[...].astype(compute.dtype)[tokens_BT]
            x_BTD = compute.constrain(x_BTD, ("batch", "length", "activation"))
        rotation = rotary_angles(
            positions_BT, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
        )
        layer_graph, weights = nnx.split(self.layers)

        def layer(x_BTD, layer_weights_and_in):
            layer_weights, layer_in = layer_weights_and_in
            module = nnx.merge(layer_graph, layer_weights)
            return module(x_BTD, rotation, attend, layer_in, compute)

        policy = REMAT_POLICIES[compute.remat]
        if policy is not None:
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x_BTD, layer_out = jax.lax.scan(layer, x_BTD, (weights, per_layer), unroll=compute.unroll)
        return self.final_norm(x_BTD), layer_out

    def logits(self, hidden: jax.Array, *, compute: Compute) -> jax.Array:
        """Maps [..., D] to float32 logits [..., V]; padding ids get a logit that no softmax can see."""
        weight_DV = self.embedding[...].T if self.config.tie_embeddings else self.unembedding[...]
        logits = jnp.einsum(
            "...d,dv->...v",
            hidden,
            weight_DV.astype(compute.dtype),
            preferred_element_type=jnp.float32,
        )
        if self.config.live_tokens < self.config.vocab_size:
            live_V = jnp.arange(self.config.vocab_size) < self.config.live_tokens
            logits = jnp.where(live_V, logits, -1e30)
        return logits


def rotary_angles(
    positions_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, 1, H/2] of the rotary position embedding.

    Always float32: at position 20,000 a bfloat16 angle would be wrong by radians.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequency = _stretch_wavelengths(frequency, scaling)
    angle = positions_BT[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def _stretch_wavelengths(frequency: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    turns = scaling.original_max_positions * frequency / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return frequency * (keep + (1 - keep) / scaling.factor)


def rotate(x_BTNH: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]) by its angle; keeps the type of `x_BTNH`."""
    cos, sin = rotation
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x_BTNH.dtype)


def decoder_graph(config: ModelConfig) -> tuple[nnx.GraphDef, Params, Params]:
    """The static part of a decoder, its weights' shapes, and their logical axes.

    Returns:
      (graph, shapes, axes): `nnx.merge(graph, params)` is a Decoder; `shapes` holds ShapeDtypeStructs
      and `axes` tuples of axis names, in the structure of the parameters. Stacked layers lead with "layers".
    """
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract, nnx.Param)
    shapes = nnx.to_pure_dict(state)
    axes = nnx.to_pure_dict(
        jax.tree.map(_axes_of, state, is_leaf=lambda v: isinstance(v, nnx.Param))
    )
    axes["layers"] = jax.tree.map(
        lambda names: ("layers", *names), axes["layers"], is_leaf=lambda v: isinstance(v, tuple)
    )
    return graph, shapes, axes


def _axes_of(param: nnx.Param) -> nnx.Variable:
    return param.replace(param.get_metadata()["axes"])


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Fresh float32 weights: normal with variance 1 / fan-in, biases 0, norm scales 1."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param))
