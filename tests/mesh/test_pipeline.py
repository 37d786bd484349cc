"""A pipeline gives what the layers give one after another, and moves activations instead of weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import of_extension
from closeness import BFLOAT16, assert_close
from flax import nnx
from meshes import mesh_of

from jaxrl.algos.logprobs import token_logprobs
from jaxrl.errors import UserError
from jaxrl.mesh.parallel_layers import attention_parallel, expert_parallel
from jaxrl.mesh.pipeline import bubble, check_microbatches, microbatches_of, pipeline
from jaxrl.mesh.ring import pick_split
from jaxrl.mesh.rules import TRAIN_RULES, constraint, parts_of, shardings, shards_of
from jaxrl.models.attention import attention
from jaxrl.models.compute import Compute, scan_layers
from jaxrl.models.decoder import decoder_graph, evened, fitted, init_params
from jaxrl.models.experts import apply_experts_in_tiles
from jaxrl.models.mixture import load_balancing_loss
from jaxrl.models.model_config import ModelConfig

collectives = of_extension("jaxrl_planner.compiled.traffic:collectives")

B, T = 8, 8
DENSE = ModelConfig(
    vocab_size=16, num_layers=4, d_model=16, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=8
)
# Stages whose layers differ in kind.
WINDOWED = dataclasses.replace(
    DENSE, sliding_window=2, layer_pattern=("sliding",) * 3 + ("full",), rope_local_theta=100.0
)
MIXTURE = dataclasses.replace(DENSE, num_experts=4, experts_per_token=2)
# Two stages of three layers, and of two.
UNEVEN, UNEVEN_WINDOWED = (dataclasses.replace(each, num_layers=5) for each in (DENSE, WINDOWED))
UNEVEN_MIXTURE = dataclasses.replace(MIXTURE, num_layers=3)


@functools.cache
def weights_of(model):
    return jax.device_get(init_params(model, jax.random.key(0)))


def rows():
    """Tokens, positions, segments and weights of packed rows; every other one ends in padding."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1).astype(np.int32)
    segments[::2, -2:] = 0
    starts = np.maximum.accumulate(
        np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(T), 0), axis=1
    )
    positions = (np.arange(T) - starts).astype(np.int32)
    tokens = rng.integers(0, DENSE.vocab_size, (B, T)).astype(np.int32)
    return tokens, positions, segments, rng.normal(size=(B, T)).astype(np.float32)


@functools.cache
def compiled(model, mesh=None, num_microbatches=0, remat="none", dtype=jnp.float32):
    """The loss of `rows` with log-probabilities, and its gradients, as a compiled program; its arguments."""
    graph, shapes, axes = decoder_graph(model)
    compute, attend_rows = Compute(remat=remat, dtype=dtype), attention
    params = weights_of(model)
    if mesh is not None:
        parts, tensor = (shards_of(axis, TRAIN_RULES, mesh) for axis in ("length", "heads"))
        heads = (model.num_heads // tensor, max(1, model.num_kv_heads // tensor))
        split = pick_split(parts, *heads, whole_rows=True)
        attend_rows = attention_parallel(attention, mesh, TRAIN_RULES, split)
        compute = dataclasses.replace(
            compute,
            constrain=constraint(mesh, TRAIN_RULES),
            experts=expert_parallel(apply_experts_in_tiles, mesh, TRAIN_RULES),
            layers=pipeline(scan_layers, mesh, TRAIN_RULES, num_microbatches=num_microbatches),
        )
        shapes = evened(shapes, shards_of("layers", TRAIN_RULES, mesh))
        where = shardings(axes, shapes, TRAIN_RULES, mesh)
        params = jax.device_put(fitted(params, shapes), where)

    shards = (1, 1)
    if mesh is not None:
        shards = parts_of(("rows", "length"), rows()[0].shape, TRAIN_RULES, mesh)

    def attend(q, k, v, kind, _, segments):
        return attend_rows(q, k, v, segments, kind), None

    def loss(params, tokens, positions, segments, weights):
        decoder = nnx.merge(graph, params)
        out = decoder(
            tokens,
            positions,
            attend,
            compute=compute,
            per_row=segments,
            live_BT=segments > 0,
        )
        logprob, _ = token_logprobs(
            functools.partial(decoder.logits, compute=compute),
            out.hidden_BTD,
            tokens,
            segments,
            temperature=1.0,
            chunk_tokens=B * T,
            shards=shards,
        )
        total = jnp.sum(jnp.where(segments > 0, logprob * weights, 0.0))
        if out.routing is not None:
            total = total + load_balancing_loss(out.routing)
        return total, (logprob, out.routing)

    arguments = (params, *rows())
    return jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*arguments).compile(), arguments


@functools.cache
def expected(model):
    program, arguments = compiled(model)
    return jax.device_get(program(*arguments))


@pytest.mark.parametrize(
    ("model", "layout", "settings"),
    [
        (DENSE, {"train": "2-2-2", "fsdp": 2}, {"num_microbatches": 4}),
        pytest.param(
            *(DENSE, {"train": "4-2-1", "generate": "2-2-2-1"}, {"remat": "full"}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(WINDOWED, {"train": "2-1-2", "context": 2}, {"remat": "projections"}),
            marks=pytest.mark.long,
        ),
        (UNEVEN, {"train": "2-2-2", "fsdp": 2}, {"num_microbatches": 4, "remat": "full"}),
        pytest.param(
            *(UNEVEN_WINDOWED, {"train": "2-1-2", "context": 2}, {}), marks=pytest.mark.long
        ),
        pytest.param(UNEVEN_MIXTURE, {"train": "2-2-2", "expert": 2}, {}, marks=pytest.mark.long),
        pytest.param(MIXTURE, {"train": "2-2-2", "expert": 2}, {}, marks=pytest.mark.long),
        pytest.param(
            *(MIXTURE, {"train": "2-2-2", "context": 2}, {"num_microbatches": 1}),
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        *("p=2", "p=4", "windows", "uneven", "uneven windows", "uneven experts", "experts"),
        "context",
    ],
)
def test_losses_gradients_and_logprobs_are_those_of_one_device(model, layout, settings):
    program, arguments = compiled(model, mesh_of(**layout), **settings)
    found, gradients = jax.device_get(program(*arguments))
    absent = jax.tree.map(lambda leaf: leaf[model.num_layers :], gradients["layers"])
    assert not any(map(np.any, jax.tree.leaves(absent)))
    gradients = fitted(gradients, weights_of(model))
    assert_close((found, gradients), expected(model), scale=1)


def test_activations_go_from_stage_to_stage_and_weights_stay():
    mesh = mesh_of("2-2-2", fsdp=2)
    program, (params, *_) = compiled(DENSE, mesh, num_microbatches=4)
    # Two of the four layers, and of each half of the heads and half of the width.
    queries = params["layers"]["attention"]["q"]["weight"]
    assert (queries.shape, queries.addressable_shards[0].data.shape) == (
        (4, 16, 4, 8),
        (2, 8, 2, 8),
    )
    stage = mesh.axis_names.index("stage_gen")
    exchanged: dict[str, list[int]] = {}
    for collective in collectives(program.as_text(), mesh.size):
        places = np.stack(np.unravel_index(np.array(collective.groups), mesh.devices.shape), -1)
        if (places[..., stage] != places[:, :1, stage]).any():
            exchanged.setdefault(collective.kind, []).append(collective.result_bytes)
    rows_of_a_shard = B // 2 * T * DENSE.d_model * 4
    # There and, with the gradient, back: a microbatch to the next stage; all rows to the first, and back.
    assert exchanged.pop("collective-permute") == [rows_of_a_shard // 4] * 2
    assert exchanged.pop("all-to-all") == [rows_of_a_shard] * 4
    # The gradients of what surrounds the layers are added up over the stages.
    assert exchanged.pop("all-reduce")
    # Log-probabilities and what the rows say about themselves; the smallest weight matrix has 512 bytes.
    assert max(*exchanged.pop("all-gather", [0]), 0) <= B // 2 * T * 4
    assert not exchanged


def test_half_precision_goes_through_the_stages():
    """XLA on CPU cannot add up bfloat16 over some axes of a partly manual program: nothing here does."""
    program, arguments = compiled(DENSE, mesh_of("2-1-2", fsdp=2), dtype=jnp.bfloat16)
    (loss, (logprob, _)), _ = program(*arguments)
    (expected_loss, (expected_logprob, _)), _ = expected(DENSE)
    assert_close((loss, logprob), (expected_loss, expected_logprob), rtol=BFLOAT16, scale=1)


def test_the_bubble_by_hand():
    assert bubble(1, 1) == 0
    assert bubble(4, 1) == 3 / 4
    assert bubble(2, 4) == 1 / 5


def test_as_many_microbatches_as_the_rows_of_a_shard_allow():
    mesh = mesh_of("4-1-2")
    for num_rows, wanted in [(16, 4), (8, 4), (12, 2), (4, 2), (2, 1)]:
        assert microbatches_of(num_rows, TRAIN_RULES, mesh) == wanted
    assert microbatches_of(16, TRAIN_RULES, mesh, 8) == 8


def test_one_stage_is_no_pipeline():
    assert pipeline(scan_layers, mesh_of("1-4-2"), TRAIN_RULES) is scan_layers
    check_microbatches(3, TRAIN_RULES, mesh_of("1-4-2"), 5)


@pytest.mark.parametrize(
    ("num_rows", "requested", "message"),
    [
        (16, 6, "train.pipeline_microbatches=6 is no multiple of the 4 pipeline stages.*; use 8"),
        (
            12,
            0,
            "train.rows=12 does not divide into 4 pipeline .* 2 shards .*; use a multiple of 8",
        ),
        (8, 8, "train.rows=8 does not divide into 8 pipeline .* 2 shards .*; use a multiple of 16"),
    ],
)
def test_microbatches_that_do_not_fit_are_refused(num_rows, requested, message):
    with pytest.raises(UserError, match=message):
        check_microbatches(num_rows, TRAIN_RULES, mesh_of("4-1-2"), requested)


def test_stages_without_a_layer_are_refused():
    """Of 5 layers over 4 stages the first two have 2 each and the third one."""
    UNEVEN.check_stages(3)
    rule = "4 pipeline stages for 5 layers, 2 each, so 3 would have all of them; choose p = 3"
    with pytest.raises(UserError, match=rule):
        UNEVEN.check_stages(4)
