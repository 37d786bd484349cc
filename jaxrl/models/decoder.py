"""The decoder: embeddings, a scanned stack of layers, and an unembedding.

    B sequences   T tokens   L layers   D width   F ffn width   Q query heads   K kv heads   H head size
    V vocabulary

Training, prefill and decoding run the same layers; they differ in the attention function handed in.
Every weight names its logical axes and no weight or activation knows a mesh: `Compute.constrain` is
called with logical names where a layout may want to pin an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.compute import REMAT_POLICIES, Compute
from jaxrl.models.mixture import MixtureOfExperts, Routing
from jaxrl.models.model_config import ModelConfig, RopeScaling
from jaxrl.models.modules import Projection, RMSNorm, normal

Params = Any  # nested dict of arrays, one entry per weight
# (q_BTQH, k_BTKH, v_BTKH, layer_in, row_in) -> (out_BTQH, layer_out); `layer_in` is this layer's part of
# `per_layer`, `row_in` is `per_row`. Both, as the rest, may be of some of the rows only: nothing that
# differs between rows can come from a closure.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Projections to queries, keys and values, rotation, attention, projection back."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, head = ("embed", config.d_model), ("head_dim", config.head_dim)
        queries, keys = ("heads", config.num_heads), ("kv_heads", config.num_kv_heads)
        options: Any = {"lora": config.lora, "rngs": rngs}
        self.q = Projection("q", (width,), (queries, head), bias=config.qkv_bias, **options)
        self.k = Projection("k", (width,), (keys, head), bias=config.qkv_bias, **options)
        self.v = Projection("v", (width,), (keys, head), bias=config.qkv_bias, **options)
        self.o = Projection("o", (queries, head), (width,), **options)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, "head_dim", config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, "head_dim", config.rms_norm_eps)
        self.config = config

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
        compute: Compute,
    ) -> tuple[jax.Array, Any]:
        """Returns [B, T, D] and what `attend` gave for this layer."""
        dtype, constrain = compute.dtype, compute.constrain
        q_BTQH, k_BTKH, v_BTKH = (project(x_BTD, dtype) for project in (self.q, self.k, self.v))
        if self.config.qk_norm:
            q_BTQH, k_BTKH = self.q_norm(q_BTQH), self.k_norm(k_BTKH)
        q_BTQH = constrain(rotate(q_BTQH, rotation), ("batch", "length", "heads", "head_dim"))
        k_BTKH = constrain(rotate(k_BTKH, rotation), ("batch", "length", "kv_heads", "head_dim"))
        v_BTKH = constrain(v_BTKH, ("batch", "length", "kv_heads", "head_dim"))
        q_BTQH, k_BTKH, v_BTKH = (checkpoint_name(a, "qkv") for a in (q_BTQH, k_BTKH, v_BTKH))
        mixed_BTQH, layer_out = attend(q_BTQH, k_BTKH, v_BTKH)
        return checkpoint_name(self.o(mixed_BTQH, dtype), "attention_out"), layer_out


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, inner = ("embed", config.d_model), ("mlp", config.d_ff)
        options: Any = {"lora": config.lora, "rngs": rngs}
        self.gate = Projection("gate", (width,), (inner,), **options)
        self.up = Projection("up", (width,), (inner,), **options)
        self.down = Projection("down", (inner,), (width,), **options)

    def __call__(
        self, x_BTD: jax.Array, live_BT: jax.Array, compute: Compute
    ) -> tuple[jax.Array, None]:
        """Returns [B, T, D], and that nothing was routed. Padding costs what every token costs."""
        del live_BT
        dtype = compute.dtype
        hidden_BTF = jax.nn.silu(self.gate(x_BTD, dtype)) * self.up(x_BTD, dtype)
        hidden_BTF = compute.constrain(hidden_BTF, ("batch", "length", "mlp"))
        return checkpoint_name(self.down(hidden_BTF, dtype), "mlp_out"), None


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, "embed", config.rms_norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, "embed", config.rms_norm_eps)
        feed_forward = MixtureOfExperts if config.num_experts else FeedForward
        self.mlp = feed_forward(config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
        live_BT: jax.Array,
        compute: Compute,
    ) -> tuple[jax.Array, Any, Routing | None]:
        """Returns the residual stream after this layer, what `attend` gave, and the routing."""
        with jax.named_scope("attention"):
            mixed_BTD, layer_out = self.attention(
                self.attention_norm(x_BTD), rotation, attend, compute
            )
        x_BTD = x_BTD + mixed_BTD
        with jax.named_scope("mlp"):
            out_BTD, routing = self.mlp(self.mlp_norm(x_BTD), live_BT, compute)
        x_BTD = compute.constrain(x_BTD + out_BTD, ("batch", "length", "activation"))
        return x_BTD, layer_out, routing


class DecoderOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
      hidden_BTD: the normalised last hidden state.
      layer_out: what `attend` returned, stacked over layers.
      routing: where a mixture's tokens went, stacked over layers; None of a dense model.
    """

    hidden_BTD: jax.Array
    layer_out: Any
    routing: Routing | None


class Decoder(nnx.Module):
    """A language model up to its last hidden state, and the map from there to logits or scores."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        rows, width = ("vocab", config.vocab_size), ("embed", config.d_model)
        self.embedding = normal(rngs.params(), (rows, width), config.d_model)
        self.layers = nnx.vmap(lambda r: Layer(config, rngs=r))(rngs.split(config.num_layers))
        self.final_norm = RMSNorm(config.d_model, "embed", config.rms_norm_eps)
        if config.has_unembedding:
            self.unembedding = normal(rngs.params(), (width, rows), config.d_model)
        if config.num_scores:
            scores = (None, config.num_scores)
            self.score_head = normal(rngs.params(), (width, scores), config.d_model)
        self.config = config

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        attend: Attend,
        *,
        compute: Compute,
        per_layer: Any = None,
        per_row: Any = None,
        live_BT: jax.Array | None = None,
    ) -> DecoderOutput:
        """Runs the stack.

        Args:
          tokens_BT, positions_BT: int32; positions count from the start of each sequence.
          attend: see `Attend`; what it returns beside the attention leads with rows.
          compute: how to compute it.
          per_layer: pytree of [L, B, ...], handed to `attend` layer by layer.
          per_row: pytree of [B, ...], handed to `attend` of every layer.
          live_BT: bool, False for padding, which a mixture then spends no expert on; all by default.
        """
        live_BT = jnp.ones(tokens_BT.shape, bool) if live_BT is None else live_BT
        with jax.named_scope("embed"):
            # Whole in width before the lookup: rows split over fsdp would be gathered by every token.
            table_VD = compute.constrain(self.embedding[...].astype(compute.dtype), ("vocab", None))
            x_BTD = table_VD[tokens_BT]
            x_BTD = compute.constrain(x_BTD, ("rows", "length", "activation"))
        rotation = rotary_angles(
            positions_BT, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
        )
        layer_graph, weights = nnx.split(self.layers)

        def layer(x_BTD, layer_weights, layer_in, row_in):
            rotation, live_BT, attend_in = row_in
            module = nnx.merge(layer_graph, layer_weights)
            attend_here = lambda q, k, v: attend(q, k, v, layer_in, attend_in)  # noqa: E731
            x_BTD, *outputs = module(x_BTD, rotation, attend_here, live_BT, compute)
            return x_BTD, tuple(outputs)

        policy = REMAT_POLICIES[compute.remat]
        if policy is not None:
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        row_in = (rotation, live_BT, per_row)
        x_BTD, (layer_out, routing) = compute.layers(
            layer, x_BTD, weights, per_layer, row_in, unroll=compute.unroll
        )
        return DecoderOutput(self.final_norm(x_BTD), layer_out, routing)

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

    def scores(self, hidden: jax.Array, *, compute: Compute) -> jax.Array:
        """Maps [..., D] to float32 scores [..., S] of a reward, cost or value model."""
        return jnp.einsum(
            "...d,ds->...s",
            hidden,
            self.score_head[...].astype(compute.dtype),
            preferred_element_type=jnp.float32,
        )


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
