"""A model on a mesh, applied to packed rows: the forward pass of every role.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxrl.algos.kl import over_vocabulary
from jaxrl.algos.logprobs import (
    from_past,
    log_softmax_entropy,
    renormalized,
    token_logprobs,
    values_before,
)
from jaxrl.algos.truncation import Truncation
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import device_of, platform_of
from jaxrl.mesh.offload import check_host_memory, offload
from jaxrl.mesh.parallel_layers import (
    Attention,
    attention_parallel,
    delta_parallel,
    expert_parallel,
)
from jaxrl.mesh.pipeline import check_microbatches, pipeline
from jaxrl.mesh.protocols import PER_TOKEN, rows_and_length
from jaxrl.mesh.ring import ContextSplit, pick_split, spread, unspread
from jaxrl.mesh.rules import TRAIN_RULES, constraint, parts_of, shardings, shards_of, with_shardings
from jaxrl.mesh.sharding_strategies import ZERO, StateRules
from jaxrl.models import lora
from jaxrl.models.attention import TreeSegments, attention, pick_block_tokens, pick_implementation
from jaxrl.models.compute import Compute, scan_layers
from jaxrl.models.decoder import Decoder, DecoderOutput, Params, decoder_graph, evened, weight_types
from jaxrl.models.delta_net import delta_of_rows
from jaxrl.models.experts import experts_for
from jaxrl.models.kernels.proof import proven_attention, proven_experts
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.train_config import TrainConfig
from jaxrl.types import PackedBatch

Batch = TypeVar("Batch")
Values = TypeVar("Values")


# Models on CPU that are trained without a layer scan: at most so many layers, of at least this width.
_UNROLLED_LAYERS = 8
_WIDE = 256


def layers_per_iteration(num_layers: int, d_model: int, platform: str | None) -> int:
    """Layers per iteration of the layer scan in training: all of a shallow, wide model on CPU, else 1."""
    # A scan copies the kept activations of all layers into one array. That is slow for wide layers.
    pays = platform == "cpu" and d_model >= _WIDE and num_layers <= _UNROLLED_LAYERS
    return num_layers if pays else 1


def _check_state(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> None:
    """Raises UserError if shared prompts or split rows would cut off the state of a delta layer."""
    if train.shares_prompts:
        raise UserError(
            "train.share_prompts puts the answers to a prompt side by side, and a delta layer has one state "
            "for each row, which cannot go on to several; set it to False"
        )
    context, tensor = (shards_of(axis, TRAIN_RULES, mesh) for axis in ("length", "heads"))
    if context > 1 and model.delta_key_heads % (context * tensor):
        raise UserError(
            f"mesh.context {context} x t={tensor} of mesh.train do not divide model.delta_key_heads "
            f"{model.delta_key_heads}, whose states go through whole rows; lower one of them"
        )


class PackedModel:
    """A model and its sharding: pure functions of weights and microbatches. It holds no weights.

    Attributes:
      attention_kernel: "auto" or one of `models.attention.IMPLEMENTATIONS`.
      copies_head: whether all chunks of a microbatch share a copy of the head on one device, too.
      replays_routes: whether tokens take the experts that a batch has for them.
      model_shapes: shapes of the weights of the model.
      shapes: the same in training, where absent layers make stages of a pipeline equal (`decoder.evened`).
    """

    attention_kernel = "auto"
    replays_routes = False

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        state_rules: StateRules = ZERO["FSDP"],
    ):
        """Picks implementations and shardings.

        Args:
          model, mesh: shape of the model, and the mesh it runs on.
          train: settings of the learning step.
          state_rules: sharding rules of the training state; those of the weights apply here.

        Raises:
          UserError: model, mesh and settings do not go together.
        """
        self.model = model
        self.mesh = mesh
        self.graph, self.shapes, self.axes = decoder_graph(model)
        self.train = train
        # Frozen weights are stored in the type of the computation: only weights that updates change need the
        # digits of float32.
        self.frozen_dtype = jnp.dtype(train.dtype if model.lora.rank else jnp.float32)
        if model.lora.rank:
            adapters, rest = lora.split(self.shapes)
            _, types = lora.split(weight_types(model, self.frozen_dtype))
            rest = jax.tree.map(lambda leaf, stored: leaf.update(dtype=stored.dtype), rest, types)
            self.shapes = lora.join(adapters, rest)
        stages = shards_of("layers", TRAIN_RULES, mesh)
        model.check_stages(stages)
        self.model_shapes, self.shapes = self.shapes, evened(self.shapes, stages)
        self.state_rules = state_rules
        if train.remat.startswith("offload"):
            check_host_memory(mesh, f"train.remat {train.remat!r}", "'projections' or 'full'")
        if model.has_state:
            _check_state(model, train, mesh)
        check_microbatches(train.rows, TRAIN_RULES, mesh, train.pipeline_microbatches)
        self._compute = Compute(
            dtype=jnp.dtype(train.dtype),
            remat=train.remat_on(platform_of(mesh)),
            constrain=constraint(mesh, TRAIN_RULES),
            experts=expert_parallel(
                experts_for(
                    device_of(mesh),
                    train.dtype,
                    by_kernel=proven_experts(
                        model, device_of(mesh), dtype=train.dtype, gather=hosts.gather
                    ),
                ),
                mesh,
                TRAIN_RULES,
                # XLA on CPU has no ragged exchange.
                move=None if platform_of(mesh) in (None, "cpu") else jax.lax.ragged_all_to_all,
            ),
            layers=pipeline(
                scan_layers, mesh, TRAIN_RULES, num_microbatches=train.pipeline_microbatches
            ),
            # XLA on CPU is slow with what suits accelerators here; `Compute` says why for each of these.
            unroll=layers_per_iteration(model.num_layers, model.d_model, platform_of(mesh)),
            flat=platform_of(mesh) == "cpu" and mesh.shape["context"] == 1,
            wide_results=platform_of(mesh) == "cpu",
        )
        # Without a copy XLA casts the head three times a chunk: 38 of 157 GB that an update of four layers
        # of 1.5B by 8,192 tokens reads and writes outside of products (compiled for an H200).
        self.copies_head = platform_of(mesh) != "cpu" and train.dtype != "float32"
        # Checks the setting; a batch with shared prompts may come later.
        self._attention(tree=train.shares_prompts)
        self.train_shardings = shardings(self.axes, self.shapes, state_rules.weights, mesh)

    def _attention(self, *, tree: bool, tokens: int = 0) -> tuple[Attention, ContextSplit]:
        """The attention to batches with shared prompts (`tree`) or without, and how devices share rows.

        `tokens` is the length of a row, if it is known.
        """
        platform = platform_of(self.mesh)
        implementation = pick_implementation(
            platform,
            self.train.dtype,
            self.attention_kernel,
            device=device_of(self.mesh),
            softcap=self.model.attention_softcap,
            windows=bool(self.model.sliding_window),
            sinks=self.model.attention_sinks,
            head_dim=self.model.largest_head,
            tree=tree,
            tokens=tokens,
        )
        implementation = proven_attention(
            implementation,
            self.model,
            device_of(self.mesh),
            parts=shards_of("heads", TRAIN_RULES, self.mesh),
            dtype=self.train.dtype,
            gather=hosts.gather,
        )
        block_tokens = pick_block_tokens(platform, tree=tree)
        # What one device has of the heads is what a context axis can exchange.
        heads = [
            max(1, number // shards_of("heads", TRAIN_RULES, self.mesh))
            for number in (self.model.num_heads, self.model.num_kv_heads)
        ]
        size = shards_of("length", TRAIN_RULES, self.mesh)
        split = pick_split(size, *heads, whole_rows=implementation != "xla")
        # The kernels need whole rows (`mesh.ring.pick_split`).
        if split.ring > 1:
            implementation = "xla"
        own = functools.partial(
            attention,
            implementation=implementation,
            block_tokens=block_tokens,
            device=device_of(self.mesh),
        )
        return attention_parallel(own, self.mesh, TRAIN_RULES, split), split

    def abstract_params(self) -> Params:
        """Shapes and shardings of the weights in the training layout, nothing allocated."""
        return with_shardings(self.shapes, self.train_shardings)

    def place(self, batch: Batch) -> Batch:
        """Moves the arrays of a batch, from the host or another mesh, to this model's mesh."""
        return PER_TOKEN.place(self.mesh, batch)

    def rows_of(self, shape: PackedShape) -> dict[str, Any]:
        """How rows lie on the devices, as the functions that pack want it.

        Returns:
          The number of shards of the rows of a microbatch, and which rows, bool [R], this process has.
        """
        part = (shape.rows, shape.tokens)
        where = NamedSharding(self.mesh, rows_and_length(self.mesh, part))
        own_R = np.zeros(shape.rows, bool)
        for device in where.addressable_devices:
            own_R[where.devices_indices_map(part)[device][0]] = True
        return {"shards": shards_of("batch", TRAIN_RULES, self.mesh), "own_R": own_R}

    def policy(
        self,
        graph: nnx.GraphDef,
        params: Params,
        micro: PackedBatch,
        *,
        temperature: float,
        statistic: Callable[[jax.Array], jax.Array] | None = None,
        truncation: Truncation | None = None,
    ) -> tuple[jax.Array, jax.Array, Routing | None, jax.Array | None]:
        """What the two heads of a policy give, and the routing of a mixture of experts.

        `statistic` replaces the entropy, and `truncation` renormalises the log-probabilities: see
        `algos.logprobs.token_logprobs`.

        Returns:
          Log-probability and entropy [R, T] of every trained token, the routing, and the value [R, T] of the
          state before every token; None without a value head.
        """
        model: Decoder = nnx.merge(graph, params)
        out = self._run(model, micro)
        logprob, further = token_logprobs(
            *self._head(model, out.hidden_BTD, micro),
            micro.tokens,
            micro.segment_ids,
            temperature=temperature,
            trained_BT=micro.loss_mask > 0,
            statistic=statistic,
            truncation=truncation,
            **self._chunks(micro),
        )
        value = None
        if self.model.value_head:
            scores_RTS = model.scores(out.hidden_BTD, compute=self._compute)
            value = values_before(scores_RTS[..., 0], micro.segment_ids)
        return logprob, further, out.routing, value

    def packed_logprobs(
        self,
        graph: nnx.GraphDef,
        params: Params,
        batch: PackedBatch,
        *,
        temperature: float,
        truncation: Truncation | None = None,
        first_minibatch: int = 0,
    ) -> jax.Array:
        """Log-probability of every trained token, [U, M, R, T]; zeros before `first_minibatch`."""
        options: Any = {"temperature": temperature, "truncation": truncation}
        return each_micro(
            lambda micro: self.policy(graph, params, micro, **options)[0],
            batch,
            first_minibatch=first_minibatch,
        )

    def policy_and_kl(
        self,
        graph: nnx.GraphDef,
        params: Params,
        ref_model: PackedModel,
        ref_graph: nnx.GraphDef,
        ref_params: Params,
        micro: PackedBatch,
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Routing | None]:
        """`policy` with the exact KL to a reference: (log-probability, entropy, KL, routing), [R, T] each.

        The KL is that of the whole distributions, also with a truncation.

        The logits of both models are in memory for one chunk of tokens at a time, forward and backward. Of
        the reference only the last hidden states are kept for the backward pass. Its embedding may have
        another number of rows: ids that only one of them has get no probability.
        """
        model: Decoder = nnx.merge(graph, params)
        reference: Decoder = nnx.merge(ref_graph, ref_params)
        out = self._run(model, micro)
        with jax.named_scope("reference"):
            # The reference chooses its own experts, also where it is this model without adapters.
            ref_out = ref_model._run(reference, micro.replace(routes=None))
            ref_hidden = jax.lax.stop_gradient(ref_out.hidden_BTD)
        logits_of, hidden = self._head(model, out.hidden_BTD, micro)
        ref_logits_of, ref_hidden = ref_model._head(reference, ref_hidden, micro)

        def chunk(past: tuple[jax.Array, jax.Array], tokens_GC: jax.Array, needed: jax.Array):
            logprobs_GCV, entropy_GC = log_softmax_entropy(logits_of(past[0], needed) / temperature)
            ref_logprobs_GCV, _ = log_softmax_entropy(ref_logits_of(past[1], needed) / temperature)
            ids = min(logprobs_GCV.shape[-1], ref_logprobs_GCV.shape[-1])
            kl_GC = over_vocabulary(
                logprobs_GCV[..., :ids], jax.lax.stop_gradient(ref_logprobs_GCV[..., :ids])
            )
            return renormalized(logprobs_GCV, tokens_GC, truncation)[0], entropy_GC, kl_GC

        logprob, entropy, kl = from_past(
            chunk,
            (hidden, ref_hidden),
            micro.tokens,
            micro.segment_ids,
            trained_BT=micro.loss_mask > 0,
            **self._chunks(micro),
        )
        return logprob, entropy, kl, out.routing

    def _head(
        self, model: Decoder, hidden_BTD: jax.Array, micro: PackedBatch
    ) -> tuple[Callable[..., jax.Array], jax.Array]:
        """`model.logits` for chunks of the last hidden states of a microbatch, and these."""
        shards, head = self._shards(micro), None
        # On several devices XLA would otherwise leave the width of the head split as it is stored, and every
        # device would compute a part of the logits of all tokens.
        if math.prod(shards) > 1 or self.copies_head:
            tied = self.model.tie_embeddings
            where = self.train_shardings["embedding" if tied else "unembedding"]

            def place(gradient_DV: jax.Array) -> jax.Array:
                stored = gradient_DV.T if tied else gradient_DV
                stored = jax.lax.with_sharding_constraint(stored, where)
                return stored.T if tied else stored

            hidden_BTD, head = self._compute.head_copies(
                *(hidden_BTD, model.head_DV, shards), None if self.model.lora.rank else place
            )
        return functools.partial(model.logits, compute=self._compute, head=head), hidden_BTD

    def _shards(self, micro: PackedBatch) -> tuple[int, ...]:
        return parts_of(("rows", "length"), micro.tokens.shape, TRAIN_RULES, self.mesh)

    def _chunks(self, micro: PackedBatch) -> dict[str, Any]:
        """The arguments of `algos.logprobs.from_past` that say how logits are cut into chunks."""
        vocabulary = self.model.vocab_size // shards_of("vocab", TRAIN_RULES, self.mesh)
        shards = self._shards(micro)
        return {
            "chunk_tokens": self.train.positions_of_logits(
                vocabulary, platform_of(self.mesh), of_device=micro.tokens.size // math.prod(shards)
            ),
            "shards": shards,
        }

    def scores(self, params: Params, micro: PackedBatch) -> tuple[jax.Array, Routing | None]:
        """Scores [R, T, S] after every token, and the routing of a mixture of experts."""
        model: Decoder = nnx.merge(self.graph, params)
        out = self._run(model, micro)
        return model.scores(out.hidden_BTD, compute=self._compute), out.routing

    def _run(self, model: Decoder, micro: PackedBatch) -> DecoderOutput:
        attention_to, split = self._attention(
            tree=micro.prefix_ids is not None, tokens=micro.tokens.shape[-1]
        )

        def attend(q, k, v, kind, _, segments, *_latents):
            # A scope of its own separates attention from the projections in a profile.
            with jax.named_scope("attend"):
                return attention_to(q, k, v, segments, kind), None

        # Tokens are put into the order of the ring once, and the last hidden states back. All layers compute
        # in that order; labels and chunks of logits are in the order of the batch.
        order = functools.partial(spread, split=split, mesh=self.mesh, rules=TRAIN_RULES)
        segment_ids = order(micro.segment_ids)
        segments: Any = segment_ids
        if micro.prefix_ids is not None:
            segments = TreeSegments(segment_ids, order(micro.prefix_ids), order(micro.positions))
        routes = None
        if self.replays_routes and micro.routes is not None:
            # [L * A, R, T] --> [L, A, R, T] --> [L, R, T, A]
            R, T = micro.tokens.shape
            of_layers = micro.routes.reshape(-1, self.model.experts_per_token, R, T)
            routes = jax.vmap(order)(jnp.moveaxis(of_layers, 1, -1))
        out = model(
            order(micro.tokens),
            order(micro.positions),
            attend,
            compute=self._compute,
            per_row=segments,
            live_BT=segment_ids > 0,
            recur=delta_parallel(delta_of_rows, self.mesh, TRAIN_RULES, split),
            routes=routes,
        )
        return out._replace(hidden_BTD=unspread(out.hidden_BTD, split, self.mesh, TRAIN_RULES))


class Frozen(PackedModel):
    """A model with frozen weights."""

    def __init__(self, model: ModelConfig, mesh: Mesh, *, offload: bool = False, **options: Any):
        """Args as for `PackedModel`; `offload` keeps the weights in pinned host memory between calls."""
        super().__init__(model, mesh, **options)
        self._offload = offload
        self._params: Params | None = None

    def load(self, params: Params) -> None:
        """Takes ownership of weights in the training layout."""
        self._params = offload(params) if self._offload else params

    def onloaded(self) -> Params:
        """The weights on the devices, in the training layout. If they are offloaded, this is a copy."""
        assert self._params is not None, "load() comes first"
        if self._offload:
            # The offloaded arrays remain: frozen weights need no way back.
            return jax.device_put(self._params, self.train_shardings)
        return self._params


def micro_of(batch: Any, u, m) -> Any:
    """Microbatch m of minibatch u: every [U, M, .., R, T] field becomes [.., R, T]."""
    return jax.tree.map(lambda x: x[u, m] if x.ndim >= 4 else x, batch)


def each_micro(
    function: Callable[[Any], Values], batch: PackedBatch, *, first_minibatch: int = 0
) -> Values:
    """Applies `function` to every microbatch; its results, pytrees of [R, T], are stacked to [U, M, R, T].

    Empty microbatches and minibatches before `first_minibatch` are skipped; their values are 0.
    """
    U, M = batch.tokens.shape[:2]
    zeros = jax.tree.map(
        lambda x: jnp.zeros((U, M, *x.shape), x.dtype),
        jax.eval_shape(lambda: function(micro_of(batch, 0, 0))),
    )

    # One after another, so that the activations of a single microbatch are in memory; an empty one costs no
    # more than the test.
    def one(i, out):
        u, m = i // M, i % M
        values = jax.lax.cond(
            m < batch.num_micro_U[u],
            lambda: function(micro_of(batch, u, m)),
            lambda: jax.tree.map(lambda x: jnp.zeros_like(x[0, 0]), out),
        )
        return jax.tree.map(lambda x, value: x.at[u, m].set(value), out, values)

    return jax.lax.fori_loop(first_minibatch * M, U * M, one, zeros)
