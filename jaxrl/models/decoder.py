"""The decoder: embeddings, a scanned stack of layers, and an unembedding.

    B sequences   T tokens   L layers   D width   F ffn width   Q query heads   K kv heads   H head size
    V vocabulary

Training, prefill and decoding run the same layers with different attention functions. Every weight names its
logical axes, and nothing here knows a mesh: `Compute.constrain` gets the logical axes of an activation where
a layout may constrain it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.attention_kind import AttentionKind
from jaxrl.models.compute import (
    REMAT_POLICIES,
    Compute,
    HeadCopies,
    are_listed,
    entry,
    layer_of,
    scan_layers,
)
from jaxrl.models.delta_net import DeltaNet, Recur, delta_of_rows
from jaxrl.models.gates import GATES
from jaxrl.models.latent_attention import Indexers, LatentAttention
from jaxrl.models.mixture import MixtureOfExperts, Routing
from jaxrl.models.model_config import STACKS, ModelConfig
from jaxrl.models.modules import (
    FeedForward,
    Projection,
    RMSNorm,
    Rotation,
    constant,
    normal,
    over_rms,
    rotary_angles,
    rotate,
)
from jaxrl.quantized import Quantized, StoredType, entries

Params = Any  # nested dict of arrays, one entry per weight
# (q_BTQH, k_BTKH, v_BTKH, kind, layer_in, row_in) -> (out_BTQH, layer_out); `layer_in` is this layer's slice
# of `per_layer`, `row_in` is `per_row`. `LatentAttention` may add what a cache holds in place of k and v. In
# a pipeline all arguments are those of one microbatch, so an attention function must not take anything that
# differs between rows from a closure.
Attend = Callable[..., tuple[jax.Array, Any]]


class LayerFlags(NamedTuple):
    """What may differ between the layers of a stack; each a bool, or an array if a scan runs over layers.

    Attributes:
      slides: whether a layer has a sliding window; None if all layers are alike.
      rotates: whether it has rotary positions; None if all layers have.
    """

    slides: Any
    rotates: Any

    @classmethod
    def of_layers(cls, config: ModelConfig) -> list[LayerFlags]:
        """The flags of each layer of the stack, which begins after the first dense layers."""
        flags = zip(config.sliding_layers, config.rotated_layers, strict=True)
        return [LayerFlags(*of_one) for of_one in flags][config.first_dense_layers :]

    @classmethod
    def of_periods(cls, config: ModelConfig) -> list[LayerFlags | None]:
        """The flags of each iteration of the scan; None if they are the same in all."""
        return [None] * config.num_periods if config.period > 1 else [*cls.of_layers(config)]

    @classmethod
    def stacked(cls, config: ModelConfig) -> LayerFlags | None:
        """The flags of all layers, arrays [L]; None as in `of_periods`."""
        if config.period > 1:
            return None
        slides, rotates = config.sliding_layers, config.rotated_layers
        return cls(
            jnp.array(slides) if any(slides) and not all(slides) else None,
            None if all(rotates) else jnp.array(rotates),
        )


class Attention(nnx.Module):
    """Projects to queries, keys and values, rotates, attends, and projects back."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shares: bool = False):
        """A layer that `shares` has queries alone: `attend` knows the keys and values."""
        width, head = ("embed", config.d_model), ("head_dim", config.head_dim)
        queries, keys = ("heads", config.num_heads), ("kv_heads", config.num_kv_heads)
        options: Any = {"lora": config.lora, "rngs": rngs}
        self.q = Projection("q", (width,), (queries, head), bias=config.qkv_bias, **options)
        if config.gated_attention:
            self.q_gate = Projection("q", (width,), (queries, head), **options)
        if not shares:
            self.k = Projection("k", (width,), (keys, head), bias=config.qkv_bias, **options)
        if not (shares or config.keys_as_values):
            self.v = Projection("v", (width,), (keys, head), bias=config.qkv_bias, **options)
        self.o = Projection("o", (queries, head), (width,), bias=config.output_bias, **options)
        if config.attention_sinks:
            self.sinks = constant(0.0, (queries,))
        if config.qk_norm:
            over_heads = config.qk_norm_over_heads
            self.q_norm = _norm(config, *([queries] if over_heads else []), head)
            if not shares:
                self.k_norm = _norm(config, *([keys] if over_heads else []), head)
        self.config, self.shares = config, shares
        # `attend` divides scores by the root of head_dim.
        scalar = config.query_pre_attn_scalar or config.head_dim
        self.query_scale = (config.head_dim / scalar) ** 0.5

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: Rotation,
        attend: Callable[..., tuple[jax.Array, Any]],
        compute: Compute,
    ) -> tuple[jax.Array, Any]:
        """Returns [B, T, D] and the second result of `attend`."""
        constrain = compute.constrain
        q_BTQH, keys_and_values = self.q(x_BTD, compute), ()
        if self.config.qk_norm:
            q_BTQH = self.q_norm(q_BTQH)
        if not self.shares:
            keys_and_values = self._keys_and_values(x_BTD, rotation, compute)
        scale: Any = self.query_scale
        if rotation.query_scale is not None:
            scale = scale * rotation.query_scale
        q_BTQH = rotate(q_BTQH, rotation, scale=scale)
        q_BTQH = constrain(q_BTQH, ("batch", "length", "heads", "head_dim"))
        mixed_BTQH, layer_out = attend(checkpoint_name(q_BTQH, "qkv"), *keys_and_values)
        if self.config.gated_attention:
            mixed_BTQH = mixed_BTQH * jax.nn.sigmoid(self.q_gate(x_BTD, compute))
        return checkpoint_name(self.o(mixed_BTQH, compute), "attention_out"), layer_out

    def _keys_and_values(
        self, x_BTD: jax.Array, rotation: Rotation, compute: Compute
    ) -> tuple[jax.Array, jax.Array]:
        k_BTKH = self.k(x_BTD, compute)
        v_BTKH = k_BTKH if self.config.keys_as_values else self.v(x_BTD, compute)
        if self.config.qk_norm:
            k_BTKH = self.k_norm(k_BTKH)
        if self.config.value_norm:
            v_BTKH = over_rms(v_BTKH, self.config.rms_norm_eps).astype(v_BTKH.dtype)
        axes = ("batch", "length", "kv_heads", "head_dim")
        k_BTKH, v_BTKH = (compute.constrain(a, axes) for a in (rotate(k_BTKH, rotation), v_BTKH))
        return checkpoint_name(k_BTKH, "qkv"), checkpoint_name(v_BTKH, "qkv")


def _norm(config: ModelConfig, *dims: tuple[str | None, int]) -> RMSNorm:
    return RMSNorm(dims, config.rms_norm_eps, zero_centered=config.zero_centered_norms)


class Layer(nnx.Module):
    """Attention or a delta net, and feed-forward, with norms before, after or both, and residual sums."""

    def __init__(
        self,
        config: ModelConfig,
        kind: str,
        *,
        rngs: nnx.Rngs,
        dense_d_ff: int = 0,
        shares: bool = False,
    ):
        """`dense_d_ff` is the width of the feed-forward network in place of experts; 0 for those."""
        width = ("embed", config.d_model)
        self.is_delta = kind == "delta"
        if self.is_delta:
            self.delta = DeltaNet(config, rngs=rngs)
        else:
            attention = LatentAttention if config.kv_latent else Attention
            options = {"shares": True} if shares else {}
            self.attention = attention(config.of_kind(kind), rngs=rngs, **options)
        if config.num_experts and not dense_d_ff:
            self.mlp = MixtureOfExperts(config, rngs=rngs)
        else:
            self.mlp = FeedForward(config, dense_d_ff or config.d_ff, rngs=rngs)
        self.pre_norms, self.post_norms = config.pre_norms, config.post_norms
        if config.pre_norms:
            self.attention_norm = _norm(config, width)
            self.mlp_norm = _norm(config, width)
        if config.post_norms:
            self.attention_post_norm = _norm(config, width)
            self.mlp_post_norm = _norm(config, width)
        self.activation = config.activation if config.layer_inputs else ""
        if config.layer_inputs:
            inner = (None, config.layer_inputs)
            # No adapter has the name "".
            options = {"lora": config.lora, "rngs": rngs}
            self.input_gate = Projection("", (width,), (inner,), **options)
            self.input_out = Projection("", (inner,), (width,), **options)
            self.input_norm = _norm(config, width)
        self.is_scaled = config.scaled_layers
        if config.scaled_layers:
            self.layer_scale = constant(1.0, ())

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: Rotation,
        attend: Callable[..., tuple[jax.Array, Any]],
        live_BT: jax.Array,
        compute: Compute,
        input_BTp: Any = None,
    ) -> tuple[jax.Array, Any, Routing | None]:
        """Returns the residual stream after this layer, the second result of `attend`, and the routing.

        `attend` takes q, k and v, or q alone, or the `DeltaInputs` of a delta net. `input_BTp` is the layer's
        input with `ModelConfig.layer_inputs`.
        """
        with jax.named_scope("attention"):
            in_BTD = self.attention_norm(x_BTD) if self.pre_norms else x_BTD
            if self.is_delta:
                mixed_BTD, layer_out = self.delta(in_BTD, attend, live_BT, compute)
            else:
                mixed_BTD, layer_out = self.attention(in_BTD, rotation, attend, compute)
            if self.post_norms:
                mixed_BTD = self.attention_post_norm(mixed_BTD)
        x_BTD = x_BTD + mixed_BTD
        with jax.named_scope("mlp"):
            in_BTD = self.mlp_norm(x_BTD) if self.pre_norms else x_BTD
            out_BTD, routing = self.mlp(in_BTD, live_BT, compute, x_BTD)
            out_BTD = checkpoint_name(out_BTD, "mlp_out")
            if self.post_norms:
                out_BTD = self.mlp_post_norm(out_BTD)
        x_BTD = x_BTD + out_BTD
        if self.activation:
            gated_BTp = GATES[self.activation](self.input_gate(x_BTD, compute), input_BTp)
            x_BTD = x_BTD + self.input_norm(self.input_out(gated_BTp, compute))
        if self.is_scaled:
            x_BTD = x_BTD * self.layer_scale[...].astype(x_BTD.dtype)
        x_BTD = compute.constrain(x_BTD, ("batch", "length", "activation"))
        return x_BTD, layer_out, routing


class Period(nnx.Module):
    """The layers of one iteration of the scan over a stack of several kinds: `place0`, `place1`, ..."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, **options: Any):
        for place, kind in enumerate(config.layer_pattern):
            setattr(self, f"place{place}", Layer(config, kind, rngs=rngs, **options))


class LayerInputs(nnx.Module):
    """The inputs of all layers: an embedding of each, and a projection of the first layer's activations."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        rows, width = ("vocab", config.vocab_size), ("embed", config.d_model)
        self.sizes = config.num_layers, config.layer_inputs
        size = math.prod(self.sizes)
        self.table = normal(rngs.params(), (rows, ("embed", size)), config.layer_inputs)
        self.projection = normal(rngs.params(), (width, (None, size)), 1)
        self.norm = _norm(config, (None, config.layer_inputs))

    def __call__(self, tokens_BT: jax.Array, x_BTD: jax.Array, compute: Compute) -> jax.Array:
        """Returns [L, B, T, p] for tokens and their embeddings."""
        # Not gathered over fsdp as the embedding is: the table is larger than the rows that are looked up.
        rows_BTa = self.table[...].astype(compute.dtype)[tokens_BT]
        projected_BTa = compute.product(x_BTD, self.projection[...]) * x_BTD.shape[-1] ** -0.5
        split = lambda a: a.reshape(*tokens_BT.shape, *self.sizes)  # noqa: E731
        # Rounded to the type of the activations first, as in Transformers.
        scale = jnp.asarray(self.sizes[1] ** 0.5, compute.dtype)
        inputs_BTLp = (self.norm(split(projected_BTa)) + split(rows_BTa) * scale) * 2**-0.5
        inputs_LBTp = inputs_BTLp.transpose(2, 0, 1, 3)
        return compute.constrain(inputs_LBTp, (None, "rows", "length", "activation"))


class _RowInputs(NamedTuple):
    """What the layers get by row; in a pipeline that of one microbatch.

    Attributes:
      rotations: as of `Decoder._rotations`.
      live_BT: False for padding.
      per_row: argument of the attention function.
      adapter_B: `Compute.adapter_B`.
    """

    rotations: tuple[Rotation, Rotation | None]
    live_BT: jax.Array
    per_row: Any
    adapter_B: jax.Array | None

    def rotation(self, kind: AttentionKind, rotates: Any) -> Rotation:
        """The rotation of one layer."""
        rotation, local = self.rotations
        if local is not None and kind.window:
            # Layers of both kinds share a scan: the one of this layer is chosen by value.
            chosen = lambda a, b: a if kind.slides is None else jnp.where(kind.slides, a, b)  # noqa: E731
            rotation = jax.tree.map(chosen, local, rotation)
        if rotates is not None and rotates is not True:
            rotation = rotation._replace(
                cos=jnp.where(rotates, rotation.cos, 1.0), sin=jnp.where(rotates, rotation.sin, 0.0)
            )
        return rotation


@dataclasses.dataclass(frozen=True)
class _LayerPass:
    """Runs layers and periods of a forward pass, whichever stack they are of.

    Attributes:
      config, attend, recur, compute: model, and arguments of `Decoder.__call__`.
      replays: whether what a layer gets comes with its routes.
    """

    config: ModelConfig
    attend: Attend
    recur: Recur
    compute: Compute
    replays: bool

    def layer(self, graph, flags, x_BTD, weights, layer_in, rows, input_BTp=None, shared=()):
        """Runs one layer, with its graph and its flags; the others are as for `LayerFunction`.

        Args:
          input_BTp: the layer's input with `ModelConfig.layer_inputs`.
          shared: keys and values of an earlier layer, to attend to; () for its own.
        """
        config, module = self.config, nnx.merge(graph, weights)
        layer_in, routes_BTA = layer_in if self.replays else (layer_in, None)
        kind = AttentionKind(
            0 if flags.slides is False else config.sliding_window,
            config.attention_softcap,
            flags.slides if isinstance(flags.slides, jax.Array) else None,
            module.attention.sinks[...].astype(jnp.float32) if config.attention_sinks else None,
        )

        def attend(q, *own):
            k, v, *latents = shared or own
            out, layer_out = self.attend(q, k, v, kind, layer_in, rows.per_row, *latents)
            return out, ((layer_out, k, v) if config.sharing_layers else layer_out)

        mixer: Any = attend
        if module.is_delta:
            mixer = lambda inputs: self.recur(inputs, layer_in, rows.per_row)  # noqa: E731
        rotation = rows.rotation(kind, flags.rotates)
        x_BTD = checkpoint_name(x_BTD, "layer_in")
        # Of this microbatch, in a pipeline.
        compute = dataclasses.replace(self.compute, adapter_B=rows.adapter_B, routes=routes_BTA)
        x_BTD, *outputs = module(x_BTD, rotation, mixer, rows.live_BT, compute, input_BTp)
        return x_BTD, tuple(outputs)

    def scanned_layer(self, graph, x_BTD, weights_and_flags, layer_in, rows):
        """`layer` for a scan over layers, which slices their flags too."""
        weights, flags = weights_and_flags
        return self.layer(graph, flags, x_BTD, weights, layer_in, rows)

    def period(self, graph, x_BTD, weights_and_inputs, period_in, rows, shared=None):
        """Runs the layers of one period; with `shared` keys and values of each."""
        weights, inputs = weights_and_inputs
        period, outs, routings = nnx.merge(graph, weights), [], []
        for place, flags in enumerate(LayerFlags.of_layers(self.config)[: self.config.period]):
            graph, weights = nnx.split(getattr(period, f"place{place}"))
            layer = self.kept(functools.partial(self.layer, graph, flags))
            layer_in = None if period_in is None else period_in[place]
            input_BTp = None if inputs is None else inputs[place]
            shares = shared[place] if shared else ()
            x_BTD, (out, routing) = layer(x_BTD, weights, layer_in, rows, input_BTp, shares)
            outs.append(out)
            routings.append(routing)
        return x_BTD, (outs, jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings))

    def sharing_period(self, graph, carry, *rest):
        """Carries the newest keys and values of each kind too, which the last layers share."""
        x_BTD, (outs, routing) = self.period(graph, carry[0], *rest)
        of_kinds = zip(self.config.layer_pattern, outs, strict=True)
        shared = {kind: keys_and_values for kind, (_, *keys_and_values) in of_kinds}
        return (x_BTD, shared), ([out for out, *_ in outs], routing)

    def kept(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer, of whose activations `Compute.remat` says which are kept for the backward pass."""
        policy = REMAT_POLICIES[self.compute.remat]
        if policy is None:
            return layer

        def of_slice(x_BTD, weights, *rest):
            # Else XLA on TPUs copies weights and moments of all layers into a layout that suits the
            # loop: .5 GB for 7B over 8 v5p. On GPUs it would copy the float32 weights of every layer.
            weights = jax.lax.platform_dependent(
                weights, cuda=lambda x: x, default=jax.lax.optimization_barrier
            )
            return layer(x_BTD, weights, *rest)

        return jax.checkpoint(of_slice, policy=policy, prevent_cse=False)


def _shared(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` for a list of layers: those with the same flags are one function, traced and lowered once."""

    @functools.partial(jax.jit, static_argnums=1)
    def function(x_BTD, flags, weights, layer_in, rows, beside):
        return step(x_BTD, (weights, beside if flags is None else flags), layer_in, rows)

    def of_list(x_BTD, weights_and_flags, layer_in, rows):
        weights, flags = weights_and_flags
        static = isinstance(flags, LayerFlags)
        given = (flags, None) if static else (None, flags)
        return function(x_BTD, given[0], weights, layer_in, rows, given[1])

    return of_list


def _if_present(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` for a stack with absent layers: they pass on what they get, and have no gradient."""

    def of_stack(x_BTD, weights_and_present, layer_in, rows):
        weights, present = weights_and_present
        # No live tokens: without weights all would choose the same experts, and load their devices alone.
        rows = rows._replace(live_BT=rows.live_BT & present)
        new_BTD, out = step(x_BTD, weights, layer_in, rows)
        return jnp.where(present, new_BTD, x_BTD), out

    return of_stack


class DecoderOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
      hidden_BTD: normalised last hidden states.
      layer_out: second result of `attend`, stacked over layers; with periods of several layers a list of the
        places in one, each stacked over periods. With first dense layers a list of two: theirs, one by one,
        and those of the stack.
      routing: routing of a mixture of experts, stacked over layers; None for a dense model.
    """

    hidden_BTD: jax.Array
    layer_out: Any
    routing: Routing | None


class Decoder(nnx.Module):
    """A language model: a stack of layers up to the last hidden state, and a head for logits or scores.

    Each weight of a stack is one array, or for sampling a list of those of the layers.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        rows, width = ("vocab", config.vocab_size), ("embed", config.d_model)
        self.embedding = normal(rngs.params(), (rows, width), config.d_model)
        if first := config.first_dense_layers:
            dense = lambda r: Layer(config, "full", rngs=r, dense_d_ff=config.dense_d_ff)  # noqa: E731
            self.first = nnx.vmap(dense)(rngs.split(first))
        one = (
            Period if config.period > 1 else functools.partial(Layer, kind=config.layer_pattern[0])
        )
        self.layers = nnx.vmap(lambda r: one(config, rngs=r))(rngs.split(config.num_periods))
        if sharing := config.sharing_layers // config.period:
            wide = config.d_ff * (1 + config.double_wide_sharing)
            reading = lambda r: Period(config, rngs=r, dense_d_ff=wide, shares=True)  # noqa: E731
            self.last = nnx.vmap(reading)(rngs.split(sharing))
        if config.layer_inputs:
            self.inputs = LayerInputs(config, rngs=rngs)
        self.final_norm = _norm(config, width)
        if config.indexed_layers:
            self.indexers = Indexers(config, rngs=rngs)
        if config.has_unembedding:
            self.unembedding = normal(rngs.params(), (width, rows), config.d_model)
        if config.num_scores:
            scores = (None, config.num_scores)
            self.score_head = normal(rngs.params(), (width, scores), config.d_model)
        if config.value_head:
            self.score_head = constant(0.0, (width, (None, 1)), exact=True)
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
        recur: Recur = delta_of_rows,
        routes: jax.Array | None = None,
    ) -> DecoderOutput:
        """Runs the stack. Layers that the weights have beyond those of the model do nothing (`evened`).

        Args:
          tokens_BT, positions_BT: int32; positions count from the start of each sequence.
          attend: attention function, see `Attend`; its second result has a leading dimension of rows.
          compute: implementation choices.
          per_layer: pytree of [L, B, ...]; `attend` gets the slice of its layer. With periods of several
            layers a list of such trees, of the places in one, [L / period, B, ...], or None. With first dense
            layers a list of two as in `DecoderOutput.layer_out`, or None.
          per_row: pytree of [B, ...], passed to `attend` of every layer.
          live_BT: bool, False for padding, which delta layers and a mixture of experts skip; None if all
            tokens are live.
          recur: recurrence of delta layers, with the same last arguments as `attend`; by default `per_row` is
            int32 [B, T], the segments of packed rows.
          routes: int16 [L, B, T, A], `Compute.routes` of the layers with experts; None for none.
        """
        config, period = self.config, self.config.period
        live_BT = jnp.ones(tokens_BT.shape, bool) if live_BT is None else live_BT
        x_BTD = self._embedded(tokens_BT, compute)
        inputs = None
        if config.layer_inputs:
            inputs = self.inputs(tokens_BT, x_BTD, compute)
            inputs = inputs.reshape(-1, period, *inputs.shape[1:])
        rows = _RowInputs(self._rotations(positions_BT), live_BT, per_row, compute.adapter_B)
        layers = _LayerPass(config, attend, recur, compute, replays=routes is not None)
        first_out = None
        if config.first_dense_layers:
            first_in, per_layer = per_layer or ([None] * config.first_dense_layers, None)
            x_BTD, first_out = self._run_first(layers, x_BTD, first_in, rows)
        if routes is not None:
            assert per_layer is None, "a cache records routes, and does not replay them"
            per_layer = [(None, routes[place::period]) for place in range(period)]
            per_layer = per_layer if period > 1 else per_layer[0]
        beside = LayerFlags.stacked(config)
        if inputs is not None:
            beside, inputs = jnp.split(inputs, [config.num_periods])
        x_BTD, layer_out, routing, shared = self._run_stack(layers, x_BTD, beside, per_layer, rows)
        if config.sharing_layers:
            x_BTD = self._run_last(layers, x_BTD, inputs, per_layer, rows, shared)
        if first_out is not None:
            layer_out = [first_out, layer_out]
        return DecoderOutput(self.final_norm(x_BTD), layer_out, routing)

    def _embedded(self, tokens_BT: jax.Array, compute: Compute) -> jax.Array:
        with jax.named_scope("embed"):
            # Gather the width before the lookup. Otherwise the compiler would gather looked-up rows, one per
            # token, over fsdp.
            table_VD = compute.constrain(self.embedding[...].astype(compute.dtype), ("vocab", None))
            x_BTD = table_VD[tokens_BT]
            if self.config.scale_embeddings:
                # Rounded to the type of the activations first, as in Transformers.
                x_BTD = x_BTD * jnp.asarray(self.config.d_model**0.5, compute.dtype)
            return compute.constrain(x_BTD, ("rows", "length", "activation"))

    def _run_first(self, layers, x_BTD, first_in, rows):
        """Runs the first dense layers, one by one; returns the second result of `attend` of each."""
        graph, stack = nnx.split(self.first)
        # All stages of a pipeline share these layers by rows, as they do the embedding.
        by_rows = lambda axes: tuple("rows" if axis == "batch" else axis for axis in axes)  # noqa: E731
        constrain = layers.compute.constrain
        compute = dataclasses.replace(
            layers.compute, constrain=lambda x, axes: constrain(x, by_rows(axes))
        )
        layers = dataclasses.replace(layers, compute=compute, replays=False)
        layer = layers.kept(functools.partial(layers.layer, graph, LayerFlags(None, None)))
        outs = []
        for i, layer_in in enumerate(first_in):
            x_BTD, (out, _) = layer(x_BTD, layer_of(stack, i), layer_in, rows)
            outs.append(out)
        return x_BTD, outs

    def _run_stack(self, layers, x_BTD, beside, per_layer, rows):
        """Runs the scanned stack.

        Args:
          beside: what is scanned beside the weights: flags, or the layers' inputs.

        Returns:
          (x_BTD, layer_out, routing, shared): as in `DecoderOutput`; `shared` are the newest keys and values
          by kind of layer, None without layers that share them.
        """
        config, compute = self.config, layers.compute
        graph, weights = nnx.split(self.layers)
        carry, stack = x_BTD, (weights, beside)
        if config.sharing_layers:
            none = {kind: self._no_keys_and_values(kind, x_BTD) for kind in config.layer_pattern}
            step, carry = functools.partial(layers.sharing_period, graph), (x_BTD, none)
        elif config.period > 1:
            step = functools.partial(layers.period, graph)
        else:
            step = layers.kept(functools.partial(layers.scanned_layer, graph))
        num_periods, num_absent = config.num_periods, 0
        if are_listed(weights):
            step, stack = _shared(step), self.layers_apart(beside)
        else:
            num_absent = len(jax.tree.leaves(weights)[0]) - num_periods
        if num_absent:
            # Only without sharing layers, which no pipeline has (`ModelConfig.check_stages`).
            step = _if_present(step)
            pad = lambda a: jnp.pad(a, [(0, num_absent), *[(0, 0)] * (a.ndim - 1)])  # noqa: E731
            beside, per_layer, present = jax.tree.map(
                pad, (beside, per_layer, jnp.ones(num_periods, bool))
            )
            stack = (weights, beside), present
        carry, (layer_out, routing) = compute.layers(
            step, carry, stack, per_layer, rows, unroll=compute.unroll
        )
        if num_absent:
            layer_out, routing = jax.tree.map(lambda a: a[:num_periods], (layer_out, routing))
        if isinstance(routing, list):  # of a loop over layers
            routing = jax.tree.map(lambda *leaves: jnp.stack(leaves), *routing)
        if config.period > 1:
            routing = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), routing)
        x_BTD, shared = carry if config.sharing_layers else (carry, None)
        return x_BTD, layer_out, routing, shared

    def layers_apart(self, beside: Any) -> list[tuple[Any, Any]]:
        """The weights of each layer, or period, of the stack, with its flags or its part of `beside`."""
        _, weights = nnx.split(self.layers)
        # Flags as Python values: a layer with a window is another program than one without.
        return [
            (layer_of(weights, i), entry(beside, i) if flags is None else flags)
            for i, flags in enumerate(LayerFlags.of_periods(self.config))
        ]

    def vectors_joined(self) -> tuple[Any, Callable[[Any], Any]] | None:
        """The weights of the stack, biases and scales of one kind as one array, and a function to split them.

        A TPU slices each array of a stack with an operation of its own, which takes as long for a vector as
        for a matrix.

        Returns:
          (stacks, weights_of): arrays [L, ...]; (slice of `stacks`) -> the weights of that layer, or period.
          None if the weights are a list of layers: nothing is sliced out of it.
        """
        _, weights = nnx.split(self.layers)
        if are_listed(weights):
            return None
        params, tree = jax.tree.flatten(weights, is_leaf=lambda x: isinstance(x, nnx.Param))
        kinds: dict[Any, list[int]] = {}
        for i, param in enumerate(params):
            named = param.get_metadata()
            if "summed" not in named:  # no matrix, see `modules.normal`
                x = param.get_value()
                kinds.setdefault((named["axes"], x.shape, x.dtype), []).append(i)
        groups = [group for group in kinds.values() if len(group) > 1]
        grouped = {i for group in groups for i in group}
        joined = [jnp.stack([params[i][...] for i in group], 1) for group in groups]
        stacks = joined, {i: param for i, param in enumerate(params) if i not in grouped}

        def weights_of(of_layer: Any) -> Any:
            joined, alone = of_layer
            found = dict(alone)
            for group, vectors in zip(groups, joined, strict=True):
                found |= {i: params[i].replace(x) for i, x in zip(group, vectors, strict=True)}
            return tree.unflatten([found[i] for i in range(len(params))])

        return stacks, weights_of

    def _run_last(self, layers, x_BTD, inputs, per_layer, rows, shared):
        """Runs the layers that attend to `shared` keys and values, or to their part of a cache."""
        pattern = self.config.layer_pattern
        last_in: Any = [None] * len(pattern)
        if per_layer is not None:
            # A list of periods, if a cache has them apart, or stacks of periods.
            last_in = per_layer[-1]
            if not isinstance(last_in, list):
                last_in = jax.tree.map(lambda leaf: leaf[-1], per_layer)
        # Of several layers of a kind the newest is shared.
        newest = dict(zip(pattern, last_in, strict=True))
        period_in, given = ([of[kind] for kind in pattern] for of in (newest, shared))
        graph, weights = nnx.split(self.last)

        def last_period(x_BTD, weights_and_inputs, _, rows):
            x_BTD, _ = layers.period(graph, x_BTD, weights_and_inputs, period_in, rows, given)
            return x_BTD, (None, None)

        unroll, stack = layers.compute.unroll, (weights, inputs)
        if are_listed(weights):
            stack = [(layer_of(weights, i), inputs[i]) for i in range(len(inputs))]
        x_BTD, _ = scan_layers(last_period, x_BTD, stack, None, rows, unroll=unroll)
        return x_BTD

    def _no_keys_and_values(self, kind: str, x_BTD: jax.Array) -> list[jax.Array]:
        heads = self.config.of_kind(kind)
        shape = (*x_BTD.shape[:2], heads.num_kv_heads, heads.head_dim)
        return [jnp.zeros(shape, x_BTD.dtype)] * 2

    def _rotations(self, positions_BT: jax.Array) -> tuple[Rotation, Rotation | None]:
        """Rotations of full layers, and of sliding layers; None for the latter if they are the same."""
        config, scaling, scale = self.config, self.config.rope_scaling, None
        if scaling is not None and scaling.query_beta:
            lengths_BT11 = positions_BT[..., None, None] // scaling.original_max_positions
            scale = 1 + scaling.query_beta * jnp.log1p(lengths_BT11.astype(jnp.float32))
        dims, theta = config.of_kind("full").rotary_dims, config.rope_theta
        whole = Rotation(*rotary_angles(positions_BT, dims, theta, scaling), scale)
        if not (config.rope_local_theta or config.full_head_dim):
            return whole, None
        dims, theta = config.rotary_dims, config.rope_local_theta or theta
        return whole, Rotation(*rotary_angles(positions_BT, dims, theta, None), scale)

    @property
    def head_DV(self) -> jax.Array:
        """The unembedding."""
        return self.embedding[...].T if self.config.tie_embeddings else self.unembedding[...]

    def logits(
        self,
        hidden: jax.Array,
        needed: jax.Array | None = None,
        *,
        compute: Compute,
        head: HeadCopies | None = None,
    ) -> jax.Array:
        """Maps [..., D] to float32 logits [..., V]; padding ids get -1e30, a probability of 0.

        With `needed`, only so many first entries of [G, C, D] are computed, forward and backward. `head` are
        copies of `head_DV` for several devices.
        """
        if needed is None:
            logits = compute.product(hidden, self.head_DV, out_type=jnp.float32)
        else:
            weight = self.head_DV if head is None else head
            logits = compute.product_of_first(hidden, weight, needed, out_type=jnp.float32)
        if self.config.logits_softcap:
            cap = self.config.logits_softcap
            logits = cap * jnp.tanh(logits / cap)
        if self.config.live_tokens < self.config.vocab_size:
            live_V = jnp.arange(self.config.vocab_size) < self.config.live_tokens
            logits = jnp.where(live_V, logits, -1e30)
        return logits

    def scores(self, hidden: jax.Array, *, compute: Compute) -> jax.Array:
        """Maps [..., D] to float32 scores [..., S] of a reward, cost or value model."""
        return compute.product(hidden, self.score_head[...], out_type=jnp.float32)


def decoder_graph(config: ModelConfig) -> tuple[nnx.GraphDef, Params, Params]:
    """The static graph of a decoder, and the shapes and logical axes of its weights.

    Returns:
      (graph, shapes, axes): `nnx.merge(graph, params)` is a Decoder; `shapes` holds ShapeDtypeStructs
      and `axes` tuples of axis names, in the structure of the parameters. "layers" is the first axis of
      stacked layers.
    """
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract, nnx.Param)
    shapes = nnx.to_pure_dict(state)
    axes_of = lambda param: param.replace(param.get_metadata()["axes"])  # noqa: E731
    is_param = lambda leaf: isinstance(leaf, nnx.Param)  # noqa: E731
    axes = nnx.to_pure_dict(jax.tree.map(axes_of, state, is_leaf=is_param))
    # The first dense layers and sharing layers lie outside of the pipeline.
    for stack in STACKS:
        axis = "layers" if stack == "layers" else "unstaged_layers"
        if stack in axes:
            axes[stack] = jax.tree.map(
                lambda names, axis=axis: (axis, *names),
                axes[stack],
                is_leaf=lambda v: isinstance(v, tuple),
            )
    return graph, shapes, axes


def evened(shapes: Params, stages: int) -> Params:
    """Shapes of weights with so many layers (or periods) that the stages of a pipeline have equally many.

    Those at the end, at the last stage, are absent: all their weights are 0, and stay so.
    """
    layers = jax.tree.map(
        lambda leaf: leaf.update(shape=(-(-leaf.shape[0] // stages) * stages, *leaf.shape[1:])),
        shapes["layers"],
    )
    return {**shapes, "layers": layers}


def split_layers(params: Params) -> Params:
    """The weights with lists of those of each layer in place of stacks."""
    stacks = {name: params[name] for name in STACKS if name in params}
    is_weight = lambda x: isinstance(x, Quantized)  # noqa: E731
    return params | jax.tree.map(entries, stacks, is_leaf=is_weight)


def fitted(params: Params, shapes: Params) -> Params:
    """Weights with as many layers as `shapes` has: absent ones (`evened`) are added or cut off."""

    def one(x: jax.Array, like: Any) -> jax.Array:
        if x.shape == like.shape:
            return x
        further = max(0, like.shape[0] - x.shape[0])
        return jnp.pad(x[: like.shape[0]], [(0, further), *[(0, 0)] * (x.ndim - 1)])

    return jax.tree.map(one, params, shapes)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random float32 weights: normal with variance 1 / fan-in; biases are 0, norms scale by 1."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param))


# Score heads in place of the unembedding: scores of reward and cost models, values of critics.


def score_config(config: ModelConfig) -> ModelConfig:
    """The model of `config` with one score instead of logits."""
    return dataclasses.replace(config, num_scores=1)


def score_params(params: Params, config: ModelConfig) -> Params:
    """Weights of a critic or reward model, initialised from a language model.

    The trunk is taken over, and the head is 0. So a fresh critic predicts 0 everywhere, and its first
    gradient reaches only the head.

    Args:
      params: weights of a language model, such as an actor's.
      config: config of the new model, see `score_config`.
    """
    trunk = {name: leaf for name, leaf in params.items() if name != "unembedding"}
    return trunk | {"score_head": jnp.zeros((config.d_model, config.num_scores), jnp.float32)}


def weight_types(model: ModelConfig, dtype: Any, matmul_dtype: str = "") -> Any:
    """A tree of `StoredType`s in the structure of the parameters.

    Projections inside layers are in `matmul_dtype`, with one scale for each output of a layer. Embeddings,
    unembedding, norms, biases, routers and adapters are in `dtype`.

    Args:
      model: the model.
      dtype: data type of weights.
      matmul_dtype: "int8", or "" for `dtype`.
    """
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))

    def one(path: Any, param: nnx.Param) -> nnx.Variable:
        summed = param.get_metadata().get("summed", ()) if matmul_dtype else ()
        stacked = path[0].key in STACKS
        dims = tuple(dim + stacked for dim in summed)
        own = jnp.float32 if param.get_metadata().get("exact") else dtype
        return param.replace(StoredType(jnp.dtype(matmul_dtype if dims else own), dims))

    types = jax.tree_util.tree_map_with_path(
        one, nnx.state(abstract, nnx.Param), is_leaf=lambda v: isinstance(v, nnx.Param)
    )
    return nnx.to_pure_dict(types)
