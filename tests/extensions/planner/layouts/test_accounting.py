"""Bytes of a resharding: from the paper, from the specs, from compiled programs."""

import dataclasses
import pathlib
import subprocess
import sys
from fractions import Fraction

import every_layout
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.devices import abstract_mesh, build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import TRAIN_RULES, shardings
from jaxrl.mesh.sharding_strategies import GATHER_ALL, HYBRID, STRATEGIES, ZERO
from jaxrl_planner.resharding_costs import (
    ReshardingCosts,
    boxes,
    from_shardings,
    gather_everything,
    of_resharding,
    table_2,
)

M = 16 * 1024


def layout_of(train: str, generate: str = "", **shares: int) -> ParallelLayout:
    return ParallelLayout.from_config(LayoutConfig(train=train, generate=generate, **shares))


def test_the_paper_s_example():
    """1-8-2 to t_g 2, p_g 1, as worked out by hand from Table 2."""
    assert table_2(layout_of("1-8-2", "1-2-4-2"), M) == {
        "gather_all": ReshardingCosts(M * 15 // 16, M, M // 16),
        "vanilla": ReshardingCosts(M * 7 // 8, M, M // 8),
        "hybrid": ReshardingCosts(M * 3 // 8, M // 2, 0),
    }


def test_generation_as_in_training_costs_nothing():
    assert table_2(layout_of("2-4-1"), M)["hybrid"] == ReshardingCosts(0, M // 8, 0)


def test_which_part_of_an_array_a_device_has():
    mesh = build_mesh(layout_of("1-4-2", "1-2-2-2"), jax.devices())
    sharding = NamedSharding(mesh, P(("tensor_micro", "data"), None, "tensor_gen"))
    shape = (8, 3, 4)
    expected = sharding.devices_indices_map(shape)
    for device, box in zip(mesh.devices.flat, boxes(sharding, shape), strict=True):
        parts = [part.indices(size)[:2] for part, size in zip(expected[device], shape, strict=True)]
        assert box.tolist() == [list(part) for part in parts]


def test_shards_that_do_not_fit_are_counted_in_vanilla_only():
    """Figure 8: of four devices the second and third have training shards outside theirs."""
    found = {}
    for name, grouping in STRATEGIES.items():
        mesh = abstract_mesh(layout_of("1-4-2", "1-2-2-2"), grouping.axes)
        found[name], _ = every_layout.resharding(layout_of("1-4-2", "1-2-2-2"), grouping, mesh)
    # Two leaves of 1 x 8 x 4 float32.
    M = 2 * 32 * 4
    costs = {name: from_shardings(move.weights) for name, move in found.items()}
    assert costs["hybrid"] == ReshardingCosts(M // 4, M // 2, 0)
    assert costs["vanilla"] == ReshardingCosts(M // 2, M * 3 // 4, M // 4)
    # One eighth of the model in training, half of which is in the half of generation.
    assert costs["gather_all"] == ReshardingCosts(M * 7 // 16, M * 9 // 16, M // 16)


@pytest.mark.slow
def test_closed_forms_of_every_layout_of_up_to_64_devices():
    layouts = list(every_layout.layouts(64))
    assert len(layouts) == 3652
    for layout in layouts:
        every_layout.check_closed_form(layout)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 4, 2, 1, 2),
        (1, 2, 2, 1, 1),
        (2, 2, 2, 1, 2),
        (4, 2, 1, 2, 1),
        (8, 1, 1, 2, 1),
        (1, 6, 1, 1, 3),
        (3, 2, 1, 1, 2),
        (1, 1, 8, 1, 1),
        (2, 4, 1, 2, 4),
    ],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_compiled_programs_cost_what_the_paper_says(sizes):
    every_layout.check_compiled(ParallelLayout(*sizes), jax.devices())


@pytest.mark.slow
def test_compiled_programs_of_every_layout_of_up_to_64_devices():
    """In a process of its own, which can simulate 64 devices."""
    repository = pathlib.Path(__file__).parents[4]
    script = repository / "tests" / "planner" / "layouts" / "every_layout.py"
    done = subprocess.run(
        [sys.executable, script, "64"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "502 layouts of up to 64 devices" in done.stdout


def test_fsdp_is_gathered_too():
    """A device of d = fsdp = 2 holds half of the training shard that Table 2 counts."""
    layout = layout_of("1-4-2", "1-2-2-2", fsdp=2)
    move, model_bytes = every_layout.resharding(layout, HYBRID, build_mesh(layout))
    measured = of_resharding(move)
    assert measured.costs.received == model_bytes // 2 - model_bytes // 8
    assert measured.costs.received == from_shardings(move.weights).received


@pytest.mark.parametrize(
    ("layout", "strategy", "received"),
    [
        # A replica has all of its two shards of generation.
        (layout_of("1-1-4", "1-2-1-2", fsdp=2), "ZeRO-1", Fraction(0)),
        # Of half of the model a device has the half that lies in its quarter.
        (layout_of("1-1-4", "1-2-1-2", fsdp=4), "FSDP", Fraction(1, 2) - Fraction(1, 8)),
        # Of a quarter it has half if it is not split further: that of its own stage.
        (layout_of("2-2-2", "1-4-2-1", fsdp=2), "ZeRO-1", Fraction(1, 8)),
        (layout_of("2-2-2", "1-4-2-1", fsdp=2), "FSDP", Fraction(1, 4) - Fraction(1, 16)),
    ],
)
def test_more_tensor_shards_than_in_training(layout, strategy, received):
    """Compiled programs receive the least that is possible, and Table 2 is right for whole replicas."""
    hybrid = dataclasses.replace(HYBRID, train=ZERO[strategy].weights)
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    move, model_bytes = every_layout.resharding(layout, hybrid, mesh)
    costs = of_resharding(move).costs
    assert costs.received == from_shardings(move.weights).received == received * model_bytes
    if strategy == "ZeRO-1":
        assert costs.received == table_2(layout, model_bytes)["hybrid"].received


@pytest.mark.parametrize(
    ("train", "generate", "bound"),
    [
        # Training shards of whole stacks are smaller than what is yet to come when they are gathered.
        ("1-8-1", "1-2-4-1", "a bucket"),
        # The second of two stacks, a third of the model each, is not.
        ("1-4-2", "1-2-2-2", "a bucket and a training shard"),
    ],
)
def test_the_compiled_peak_is_a_bucket_above_the_generation_copy(train, generate, bound):
    """A stack of layers and some smaller leaves, as a decoder has them."""
    layout = layout_of(train, generate)
    num_layers = 16
    mesh = build_mesh(layout)
    axes = {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "embedding": ("vocab", "embed"),
        "q": ("layers", "embed", "heads", "head_dim"),
        "o": ("layers", "heads", "head_dim", "embed"),
    }
    shapes = {
        "up": (num_layers, 64, 256),
        "down": (num_layers, 256, 64),
        "embedding": (512, 64),
        "q": (num_layers, 64, 8, 8),
        "o": (num_layers, 8, 8, 64),
    }
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    train, generate = (
        shardings(axes, shapes, rules, mesh) for rules in (HYBRID.train, HYBRID.generate)
    )
    copy = sum(leaf.size for leaf in shapes.values()) * 4 // 2
    bucket = copy // 8
    move = Resharding(shapes, train, generate, jnp.float32, donate=True, bucket_bytes=bucket)
    costs = of_resharding(move).costs
    least = from_shardings(move.weights)
    assert (least.peak, least.redundant) == (copy, 0)
    assert (costs.received, costs.redundant) == (least.received, 0)
    # What the plan foresees is an upper bound of what XLA takes, but for some scalars.
    assert copy <= costs.peak <= move.peak_bytes() + 64
    largest = 0 if bound == "a bucket" else max(w.train_bytes for w in move.weights)
    assert move.peak_bytes() <= copy + bucket + largest


def test_gathering_everything_gathers_everything():
    layout = layout_of("2-2-2", "1-2-2-2")
    mesh = build_mesh(layout, axes=GATHER_ALL.axes)
    x = np.arange(8.0 * 8 * 3, dtype=np.float32).reshape(8, 8, 3)
    for spec in (P(GATHER_ALL.axes), P("tensor_gen", ("stage_micro", "data")), P()):
        sharding = NamedSharding(mesh, spec)
        gathered = jax.jit(gather_everything(sharding))(jax.device_put(x, sharding))
        for shard in gathered.addressable_shards:
            np.testing.assert_array_equal(shard.data, x)


def test_what_zero_shares():
    """Rajbhandari et al. 2020, Figure 1, for d replicas: weights, gradients, moments of one weight."""
    mesh = abstract_mesh(layout_of("1-2-4", fsdp=2))
    shape = jax.ShapeDtypeStruct((8, 2), jnp.float32)

    def values(name):
        parts = (ZERO[name].weights, ZERO[name].gradients, ZERO[name].optimizer)
        placed = (shardings(("embed", "mlp"), shape, rules, mesh) for rules in parts)
        return [int(np.prod(sharding.shard_shape(shape.shape))) for sharding in placed]

    assert values("replicated") == [8, 8, 8]
    assert values("ZeRO-1") == [8, 8, 2]
    assert values("ZeRO-2") == [8, 2, 2]
    assert values("ZeRO-3") == [2, 2, 2]
    assert values("FSDP") == [4, 4, 4]


@pytest.mark.parametrize("grouping", STRATEGIES.values(), ids=str)
def test_every_table_knows_every_axis(grouping):
    assert set(grouping.train) == set(grouping.generate) == set(TRAIN_RULES)
    assert sorted(grouping.axes) == sorted(HYBRID.axes)
