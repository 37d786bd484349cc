"""The mapping search on groups of hosts of different kinds, and plans of what it finds."""

import dataclasses
import itertools
import json
import pathlib
import types

import hypothesis
import hypothesis.strategies as st
import pytest
from slow_values import mostly_slow
from toy_clusters import ASSUME, brute_force, toy, toy_model, toy_work

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig
from jaxrl_planner.hardware.cluster import Cluster, MixedCluster, read_cluster
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.planned_roles import roles_without_devices
from jaxrl_planner.search.mapping import SearchLimits
from jaxrl_planner.search.mapping_choice import propose, with_searched_layout
from jaxrl_planner.search.search import search_mapping
from jaxrl_planner.simulation.step_simulator import TASKS
from jaxrl_planner.simulation.workload import LengthDistribution
from jaxrl_planner.step_load import load_of
from jaxrl_planner.step_times import expected_step

ROOT = pathlib.Path(__file__).parents[4]
LIMITS = SearchLimits(max_tensor=2, max_pipeline=1, max_context=1)
SLOW = {"name": "slow", "bfloat16_tflops": 0.4, "memory_gbs": 12.0, "host_gbs": 1.0}


def models_of(*roles: str):
    """Models of some roles; a critic and a reward model have twice the layers of an actor."""
    alike = {"actor": toy_model(2), "reference": toy_model(2)}
    return {role: alike.get(role) or toy_model(4, scores=1) for role in roles}


def search(*groups: Cluster, roles=("actor", "critic"), work=None, **options):
    cluster = MixedCluster.of(*groups) if len(groups) > 1 else groups[0]
    options = {"assumptions": ASSUME, "limits": LIMITS} | options
    return search_mapping("ppo", models_of(*roles), work or toy_work(), cluster, **options)


SHAPES = {
    f"{fast} and {slow}, {' '.join(roles)}": (fast, slow, roles)
    for fast, slow in (((1, 2), (1, 2)), ((1, 2), (2, 2)), ((1, 1), (1, 2)))
    for roles in (("actor", "critic"), ("actor", "critic", "reference"))
}
FAST = ("(1, 2) and (1, 2), actor critic", "(1, 1) and (1, 2), actor critic reference")


@pytest.mark.parametrize("shapes", mostly_slow(SHAPES, fast=FAST))
@hypothesis.settings(max_examples=4)
@hypothesis.given(
    memory=st.sampled_from([(0.5, 1.2), (1.2, 0.5), (1.2, 1.2), (4.0, 4.0)]),
    rate=st.sampled_from([0.1, 0.4, 0.9]),
    updates=st.integers(1, 3),
)
def test_it_is_as_good_as_brute_force(shapes, memory, rate, updates):
    (fast, slow, roles), work = shapes, toy_work(updates=updates)
    changes = SLOW | {"bfloat16_tflops": rate}
    cluster = MixedCluster.of(
        Cluster(toy(memory[0], per_host=fast[1]), fast),
        Cluster(toy(memory[1], per_host=slow[1], **changes), slow),
    )
    tasks = [task for task in TASKS["ppo"] if task.name in roles]
    expected = brute_force(tasks, models_of(*roles), work, cluster, ASSUME, LIMITS)
    if expected == float("inf"):
        with pytest.raises(UserError, match="does not hold actor"):
            search(*cluster.groups, roles=roles, work=work)
        return
    found = search(*cluster.groups, roles=roles, work=work)
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    for i, pool in enumerate(found.pools):
        (group,) = (group for group in cluster.groups if group.name == pool.cluster)
        assert pool.budget_bytes == group.accelerator.memory_gb * 1e9
        assert found.peak_bytes(i) <= pool.budget_bytes
        assert group.first <= pool.first
        assert pool.first + pool.devices <= group.first + group.num_devices


@pytest.mark.parametrize(("rate", "is_apart"), [(0.5, True), (0.45, False)])
def test_a_critic_moves_to_the_slow_device_if_it_then_trains_in_less_time_than_both(rate, is_apart):
    """A fast device of 1 TFLOP/s and a slow one; 8 sequences of 128 tokens, each a row.

    A token takes 2 x 2 x (4 x 1026 x 128 + 3 x 1026 x 4098) operations in two layers, and 2 x 1026 for each
    logit or score; a sequence 128 x 128 pairs x 1024 operations of attention, 2.5 times as many backward.
    """
    layers, pairs = 4 * (4 * 1026 * 128 + 3 * 1026 * 4098), 128 * 128 * 1024
    actor_s, critic_s = (
        (8 * (128 * (layers + 2 * 1026 * outputs) + pairs) / 1e12) for outputs in (2048, 1)
    )
    actor_trains_s, critic_trains_s = (3 * s + 0.5 * 8 * pairs / 1e12 for s in (actor_s, critic_s))
    assert actor_s == pytest.approx(0.0583, abs=1e-4) and critic_s == pytest.approx(
        0.0540, abs=1e-4
    )
    # Only matmuls take time.
    assume = dataclasses.replace(ASSUME, flops_rate=1.0, call_s=0.0, remat="none")
    texts = LengthDistribution.exactly(64)
    work = toy_work(
        **{"prompts": 8, "samples": 1, "updates": 1, "microbatch_tokens": 128},
        **{"prompt_lengths": texts, "response_lengths": texts},
    )
    found = search_mapping(
        "ppo",
        {"actor": toy_model(2), "critic": toy_model(2, scores=1)},
        work,
        MixedCluster.of(
            Cluster(toy(4.0, per_host=1, memory_gbs=1e6), (1, 1)),
            Cluster(
                toy(4.0, per_host=1, memory_gbs=1e6, name="slow", bfloat16_tflops=rate), (1, 1)
            ),
        ),
        assumptions=assume,
    )
    prepared_s, trained_s = map(found.breakdown.stage_s, ("preparation", "training"))
    if is_apart:
        assert {pool.roles: pool.cluster for pool in found.pools} == {
            ("actor",): "toy:1x1",
            ("critic",): "slow:1x1",
        }
        # .108 s and .324 s; together on the fast one .112 s and .337 s.
        assert prepared_s == pytest.approx(max(actor_s, critic_s / rate), rel=1e-6)
        assert trained_s == pytest.approx(max(actor_trains_s, critic_trains_s / rate), rel=1e-4)
    else:
        # Apart .120 s and .360 s.
        assert [pool.cluster for pool in found.pools] == ["toy:1x1"]
        assert prepared_s == pytest.approx(actor_s + critic_s, rel=1e-6)
        assert trained_s == pytest.approx(actor_trains_s + critic_trains_s, rel=1e-4)


GROUPS = {
    "fast": Cluster(toy(0.6, per_host=2), (2, 2)),
    "slow": Cluster(toy(1.2, per_host=2, **SLOW), (1, 2)),
    "third": Cluster(toy(0.9, per_host=2, name="third", host_gbs=0.5), (1, 2)),
}


def test_the_order_of_the_groups_does_not_matter():
    one, other = search(*GROUPS.values()), search(*reversed(GROUPS.values()))
    assert one.seconds == pytest.approx(other.seconds, rel=1e-12)
    placed = [
        {(pool.roles, pool.cluster, pool.devices) for pool in found.pools} for found in (one, other)
    ]
    assert placed[0] == placed[1] and len(placed[0]) > 1


@pytest.mark.parametrize("options", [{}, {"common_rows": True, "remats": ("none", "full")}])
def test_another_group_never_makes_a_step_slower(options):
    roles = ("actor", "critic", "reference")
    seconds = {
        names: search(*(GROUPS[name] for name in names), roles=roles, **options).seconds
        for n in (1, 2, 3)
        for names in itertools.combinations(GROUPS, n)
    }
    for names, others in itertools.permutations(seconds, 2):
        if {*names} < {*others}:
            assert seconds[others] <= seconds[names] * (1 + 1e-12)
    twice = search(GROUPS["slow"], GROUPS["slow"], roles=roles, **options)
    assert (
        twice.seconds < seconds["slow",] and [name for name, _ in twice.alone] == ["slow:1x2"] * 2
    )


def test_each_group_alone_is_found_beside_the_mixture():
    tiny = Cluster(toy(0.05, per_host=1, name="tiny"), (1, 1))
    found = search(GROUPS["fast"], tiny)
    (_, alone), (_, nothing) = found.alone
    assert alone.seconds == found.seconds == search(GROUPS["fast"]).seconds and nothing is None
    *_, first, second = found.lines()
    assert first.startswith("toy:2x2 alone: actor") and "s a step (predicted)" in first
    assert second == "tiny:1x1 alone: does not hold the models"
    assert "devices 0-" in found.lines()[1] and " of toy:2x2, " in found.lines()[1]
    neither = r"tiny:1x1 \(1 .* \+ tiny:1x1 \(1 .* does not hold .*; no tiny up to 64 devices does"
    with pytest.raises(UserError, match=neither):
        search(tiny, tiny)


def recipe(**changes: str) -> Config:
    sizes = {"train.rows": "1", "mesh.simulated_devices": "0"}
    return load_config(Config, str(ROOT / "configs/ppo_tiny.py"), sizes | changes)


def test_what_was_found_is_planned_with_the_same_seconds():
    cluster = read_cluster("a100:1x1+h100:1x2")
    config = recipe()
    found, proposed = propose(config, cluster)
    plan = trace_plan(proposed, cluster)
    assert plan.times.step_s == found.seconds and plan.times.cluster.num_devices == 3
    names = {pool.cluster for pool in found.pools}
    assert {pool.layout.split(",")[0] for pool in plan.pools} == names
    assert found.seconds <= min(best.seconds for _, best in found.alone)


def placed(*devices: str) -> dict:
    roles = (("actor", "reference"), ("critic",))
    sizes = [int(last) - int(first) + 1 for first, last in (each.split("-") for each in devices)]
    return {
        f"pool{i}": {"roles": which, "train": f"1-1-{n}", "generate": f"1-1-1-{n}", "devices": span}
        for i, (which, n, span) in enumerate(zip(roles, sizes, devices, strict=True))
    }


def test_a_placement_by_hand_is_planned_if_each_pool_lies_in_one_group():
    config = dataclasses.replace(
        recipe(**{"mesh.fsdp": "1", "train.rows": "2"}), placement=placed("0-1", "2-3")
    )
    planned = roles_without_devices(config)
    one, other = (
        expected_step(planned, read_cluster(name), load_of(config))
        for name in ("h100:1x2+a100:1x2", "a100:1x2+h100:1x2")
    )
    seconds = [{(t.role, t.stage): t.costs.total_s for t in each.tasks} for each in (one, other)]
    # The critic is on the A100s, then on the H100s.
    assert seconds[0]["critic", "training"] > seconds[1]["critic", "training"]
    assert seconds[0]["actor", "training"] < seconds[1]["actor", "training"]
    config = dataclasses.replace(config, placement=placed("0-0", "1-2"))
    with pytest.raises(
        UserError, match=r"pool1 names no devices of one group .* \(0-1 of h100:1x2, 2-3 of a100"
    ):
        trace_plan(config, read_cluster("h100:1x2+a100:1x2"))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("h100:2x8+x100:2x8", "chip 'x100' is not one of"),
        ("h100:2x8+a100", "topology 'a100' is not KIND:AxB"),
        ("h100:2x8+", r"topology 'h100:2x8\+' is not KIND:AxB"),
        ("+h100:2x8", r"chip '\+h100' is not one of"),
        ("cpu:1x8+h100:1x8", "chip 'cpu' is not one of"),
        ("h100:1x8+v5e:2x4", r"several platforms \(h100: gpu, v5e: tpu\)"),
        ("h100:1x8+a100:1x3", "a100:1x3 is no topology that exists"),
    ],
)
def test_what_is_no_topology_is_refused_in_one_line(topology, message, capsys):
    arguments = ["plan", "--config", str(ROOT / "configs/ppo_tiny.py"), "--topology", topology]
    assert cli.run("plan", [*arguments, "--search"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(UserError, match=message):
        read_cluster(topology)


def test_a_simulated_processor_is_no_group_beside_gpus(tmp_path):
    here = tmp_path / "a+b.json"
    here.write_text(json.dumps(dataclasses.asdict(toy(4.0, name="here"))))
    assert read_cluster(f"{here}:1x4").name == "here:1x4"
    assert read_cluster(f"{here}:1x4+{here}:2x4").name == "here:1x4+here:2x4"
    with pytest.raises(UserError, match=r"several platforms \(here: cpu, h100: gpu\)"):
        read_cluster(f"{here}:1x4+h100:1x8")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["plan"], "pool all names no devices of one group of h100:1x8+a100:1x8"),
        (["mesh", "--train", "1-1-16"], "h100:1x8+a100:1x8 names groups of hosts, and programs"),
    ],
)
def test_what_cannot_be_done_for_groups_is_one_line(command, message, capsys):
    recipe = ["--config", str(ROOT / "configs/ppo_tiny.py")] if command == ["plan"] else []
    assert cli.run(command[0], [*command, *recipe, "--topology", "h100:1x8+a100:1x8"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and "--search" in error


def test_a_run_on_devices_of_several_kinds_does_not_search():
    kinds = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    devices = [types.SimpleNamespace(device_kind=kind, process_index=0) for kind in kinds]
    config = dataclasses.replace(recipe(), mesh=LayoutConfig(layout="auto"))
    with pytest.raises(
        UserError, match=f"one kind, and this run has {kinds[0]}, {kinds[1]}; run on one"
    ):
        with_searched_layout(config, devices)
