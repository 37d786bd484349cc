"""Bytes of a dry run are those one can work out by hand, and those of real arrays."""

import dataclasses
import pathlib

import jax
import pytest
from plans import (
    TINY,
    TINY_LAYOUT,
    TINY_TRAIN,
    buffers_named,
    plan_32b,
    plan_tiny,
    roles_planned,
    tiny_config,
)

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.config.shapes import engine_config
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.rollout.engine import Engine
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.memory import ResidentBuffers, phase_bytes
from jaxrl_planner.planned_roles import roles_without_devices

# Parts of its rows hold blocks of 8-bit moments.
WIDE = dataclasses.replace(TINY, d_model=128, d_ff=256)


def test_the_32b_recipe_by_hand():
    recipe = plan_32b()
    parameters = 32_763_876_352
    assert buffers_named(recipe, "actor in training").num_values == parameters
    # Float32 over t x fsdp = 8 x 16; norms and biases are split over one of the two only.
    masters = buffers_named(recipe, "actor in training").bytes_per_device
    assert masters == pytest.approx(parameters * 4 / 128, rel=1e-3)
    assert buffers_named(recipe, "optimiser state").bytes_per_device == pytest.approx(2 * masters)
    assert buffers_named(recipe, "gradients").bytes_per_device == masters
    # Bfloat16 over t_g = 8, norms whole.
    assert buffers_named(recipe, "actor in generation").bytes_per_device == pytest.approx(
        parameters * 2 / 8, rel=1e-3
    )
    # Pages for 75 sequences of 2048 + 20480 tokens and 64 of a dispatch, rounded up to 512, of 262,144 bytes
    # each over t_g = 8; ids and page tables are little.
    cache = 75 * 23_040 * 262_144 // 8
    assert buffers_named(recipe, "KV cache and slots").bytes_per_device == pytest.approx(
        cache, rel=1e-3
    )
    # [U, M, R, T] = [16, 32, 16, 22528], ten fields of 4 bytes, rows over 16 replicas.
    batch = 10 * 4 * 16 * 32 * 22_528
    assert buffers_named(recipe, "train batch").bytes_per_device == pytest.approx(batch, rel=1e-6)
    # With "full" nothing of a layer is kept but its input: L x T x D in bfloat16.
    assert buffers_named(recipe, "kept of the layers").bytes_per_device == 64 * 22_528 * 5120 * 2
    # Attention is blockwise, so that is the feed-forward network's T x F / t, in bfloat16.
    widest = 22_528 * 27_648 // 8 * 2
    assert buffers_named(recipe, "largest value in a layer").bytes_per_device == widest


def test_on_gpus_generation_has_one_set_of_weights():
    """Layers are resharded into a list, and no stack is beside it."""
    longer = {"rollout__max_response_tokens": 512}
    config = tiny_config(train__row_tokens=520, rollout__dtype="bfloat16", **longer)
    (pool,) = trace_plan(config, Cluster.parse("h100:1x8")).pools
    sampling = {b.name: b.bytes_per_device for b in pool.resident_buffers if b.sampling}
    # Over t_g = 2: projections with their biases, 1056 + 2 x 528 + 1024, and 3 x 32 x 64 of the feed-forward
    # network; whole: two norms. Embedding and last norm once; each in two bytes.
    layer = (1056 + 2 * 528 + 1024 + 3 * 32 * 64) // 2 + 2 * 32
    assert sampling["actor in generation"] == 2 * (4 * layer + 64 * 32 // 2 + 32)
    assert not [name for name in sampling if "layers" in name]


@pytest.mark.parametrize(
    ("optim", "shown"),
    [
        (OptimConfig(), "float32"),
        pytest.param(OptimConfig(moments="int8"), "8 bits", marks=pytest.mark.long),
        pytest.param(
            *(OptimConfig(kind="muon", moments="bfloat16"), "bfloat16"), marks=pytest.mark.long
        ),
    ],
    ids=["adamw", "8 bits", "muon"],
)
def test_counts_what_real_arrays_take(optim, shown):
    """Bytes by role equal those on the first of eight devices, and the type of moments is shown."""
    plan = roles_planned(tiny_config(WIDE, optim=optim))
    assert buffers_named(plan, "optimiser state").layout.startswith(f"{shown}, 1-4-2")
    mesh = build_mesh(ParallelLayout.from_config(TINY_LAYOUT), jax.devices()[:8])
    actor = Actor(WIDE, mesh, train=TINY_TRAIN, optim=optim, temperature=1.0, seed=0)
    actor.init()
    sizes = engine_config(
        tiny_config(), stop_ids=(1,), prompts_per_batch=tiny_config().prompts_per_batch, replicas=1
    )
    engine = Engine(WIDE, actor.graph, mesh, sizes)

    def on_first_device(tree) -> int:
        return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))

    real = {
        "actor in training": actor.state.params,
        "optimiser state": actor.state.opt_state,
        "KV cache and slots": engine.init_decode_state(),
    }
    for name, arrays in real.items():
        assert buffers_named(plan, name).bytes_per_device == on_first_device(arrays), name


DELTA = dataclasses.replace(
    TINY,
    layer_pattern=("delta", "delta", "delta", "full"),
    delta_key_heads=4,
    delta_value_heads=4,
)
TWO_KINDS = dataclasses.replace(
    TINY, num_kv_heads=4, full_kv_heads=2, layer_pattern=("sliding", "full"), sliding_window=8
)


@pytest.mark.parametrize(
    ("model", "changes", "held"),
    [
        (TINY, {}, "8 slots x 2 kv heads"),
        # The states of delta layers come first: their heads are no slots.
        (DELTA, {}, "8 slots x 2 kv heads"),
        (TWO_KINDS, {}, "8 slots x 2 and 4 kv heads"),
        (TINY, {"rollout__kv_dtype": "int8"}, "8 slots x 2 kv heads"),
        # Two replicas and two tensor shards of generation in each of two groups.
        (TINY, {"mesh": TINY_LAYOUT}, "2 slots x 1 kv heads"),
        (DELTA, {"mesh": TINY_LAYOUT}, "2 slots x 1 kv heads"),
        (TWO_KINDS, {"mesh": TINY_LAYOUT}, "2 slots x 1 and 2 kv heads"),
        # A page of 128 tokens holds a slot's 16 + 4; one more takes what is written beyond the others.
        (DELTA, {"rollout__cache": "paged"}, "9 pages x 2 kv heads"),
    ],
)
def test_the_row_of_the_cache_says_slots_and_heads_of_a_device(model, changes, held):
    plan = roles_planned(tiny_config(model, **{"mesh": LayoutConfig()} | changes))
    assert buffers_named(plan, "KV cache and slots").layout.startswith(f"{held} a device, ")


def test_weights_that_need_not_move_are_counted_once():
    alone = roles_planned(tiny_config(mesh=LayoutConfig()))
    assert buffers_named(alone, "actor in generation").bytes_per_device == 0
    alone = roles_planned(tiny_config(mesh=LayoutConfig(), rollout__dtype="bfloat16"))
    assert buffers_named(alone, "actor in generation").bytes_per_device == TINY.num_params * 2


def test_weights_in_8_bits_are_counted_with_their_scales():
    narrow = {"rollout__dtype": "bfloat16", "rollout__weights_dtype": "int8"}
    plan = roles_planned(tiny_config(mesh=LayoutConfig(), **narrow))
    found = buffers_named(plan, "actor in generation")
    assert found.layout.startswith("int8 with scales and bfloat16, ")
    heads, keys = TINY.num_heads * TINY.head_dim, TINY.num_kv_heads * TINY.head_dim
    narrow = TINY.d_model * (2 * heads + 2 * keys + 3 * TINY.d_ff)
    channels = heads + 2 * keys + 2 * TINY.d_ff + 2 * TINY.d_model
    expected = TINY.num_params * 2 + TINY.num_layers * (4 * channels - narrow)
    assert found.bytes_per_device == expected


@pytest.mark.long
def test_remat_shows_in_what_is_kept():
    kept = {
        remat: buffers_named(
            plan_tiny(train=dataclasses.replace(TINY_TRAIN, remat=remat)), "kept of the layers"
        ).num_values
        for remat in ("full", "projections", "offload", "offload_inputs", "none")
    }
    # [L, R, T, D]
    assert kept["full"] == 4 * 4 * 16 * 32
    assert kept["offload"] == kept["offload_inputs"] == 0
    assert kept["full"] < kept["projections"] < kept["none"]


def test_a_pipeline_is_counted_by_its_stages():
    plan = plan_tiny(mesh=LayoutConfig(train="2-2-2", generate="2-2-1-2", fsdp=2))
    # Two stages of two layers; 4 rows over 2 shards in 2 microbatches, so in 3 ticks a stage keeps what goes
    # into each of its layers and what comes out of the last, of one row of T x D = 16 x 32 float32.
    # Angles and masks of its rows come on top.
    kept = 3 * (2 + 1) * 16 * 32 * 4
    assert kept < buffers_named(plan, "kept of the layers").bytes_per_device < 1.1 * kept


def test_weights_of_generation_are_given_up_for_the_actors_update_alone():
    weights = ResidentBuffers("weights", "", 1, 100, True, True, not_at="actor")
    gradients = [
        ResidentBuffers(f"{role}, gradients", "", 1, size, False, True, turn=role)
        for role, size in (("actor", 130), ("critic", 20))
    ]
    masters = ResidentBuffers("masters", "", 1, 7, True, True)
    # The actor's turn, the critic's, and between updates.
    assert phase_bytes([weights, masters, *gradients], "learning") == 130 + 7
    assert phase_bytes([weights, masters, gradients[1]], "learning") == 100 + 7 + 20
    assert phase_bytes([weights, masters], "learning") == 107
    assert buffers_named(plan_tiny(), "actor in generation").not_at == "actor"


def test_trpo_has_no_moments_but_its_critic_has():
    recipe = pathlib.Path(__file__).parents[3] / "configs" / "trpo_tiny.py"
    roles = roles_without_devices(load_config(Config, str(recipe), {}))
    named = {buffers.name for pool in roles.pools for buffers in roles.resident_buffers(pool)}
    assert "actor in training" in named and "optimiser state" not in named
    assert "critic, optimiser state" in named
