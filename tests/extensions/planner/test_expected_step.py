"""The expected seconds of a step: the same in plans and in the search, above their lower bounds."""

import dataclasses
import functools
import pathlib

import pytest
from plans import pod_plan, tiny_config
from toy_clusters import toy

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.shapes import model_shapes
from jaxrl.trainer.resolved import resolve
from jaxrl_planner.compiled.counts import Counts
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.plan import Plan
from jaxrl_planner.planned_roles import roles_without_devices
from jaxrl_planner.search.mapping_choice import propose
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.step_load import load_of
from jaxrl_planner.step_times import StepTimes, expected_step, tasks_of_run

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
TOY = Cluster(toy(per_host=8), (1, 8))


def recipe(name: str, **changes: str) -> Config:
    return load_config(Config, str(CONFIGS / name), changes)


def planned_of(config: Config):
    return roles_without_devices(config)


@functools.cache
def tiny_plan() -> Plan:
    return trace_plan(tiny_config(), TOY)


def times_of(config: Config, cluster: Cluster) -> StepTimes:
    times = trace_plan(config, cluster).times
    assert times is not None
    return times


@pytest.mark.parametrize(
    ("cache", "minutes"),
    [
        (
            {"rollout.cache": "contiguous", "rollout.slots": str(16 * 83)},
            {"drained": 32.6, "full": 27.3},
        ),
        pytest.param({}, {"drained": 27.3, "full": 22.6}, marks=pytest.mark.slow),
        pytest.param(
            {"rollout.kv_dtype": "int8"}, {"drained": 19.1, "full": 14.1}, marks=pytest.mark.slow
        ),
    ],
    ids=["contiguous", "paged", "paged, int8"],
)
def test_pages_and_full_slots_shorten_a_generation_batch(cache, minutes):
    """The slots and pages that fit, as compiled for 128 H100: docs/planning.md."""
    samples = 2 if "rollout.kv_dtype" in cache else 1
    if "rollout.cache" not in cache:
        slots, pages = 16 * 243 * samples, 16 * 14_580 * samples
        cache = cache | {"rollout.slots": str(slots), "rollout.cache_tokens": str(128 * pages)}
    cluster = Cluster.parse("h100:16x8")
    for kind, expected in minutes.items():
        partial = {"rollout.max_staleness": "8" if kind == "full" else "0"}
        config = recipe("dapo_qwen32b.py:h100-128", **cache, **partial)
        step = expected_step(planned_of(config), cluster, load_of(config))
        assert step.stage_s("generation") / 60 == pytest.approx(expected, rel=0.02), kind


def test_a_proposal_has_the_seconds_of_its_plan():
    cluster = Cluster.parse("h100:1x4")
    found, proposed = propose(recipe("ppo_tiny.py"), cluster)
    times = times_of(proposed, cluster)
    assert found.seconds == pytest.approx(times.step_s)
    for stage in times.stages:
        assert found.breakdown.stage_s(stage) == pytest.approx(times.stage_s(stage))


def test_the_lower_bound_is_below_the_expectation_in_every_phase():
    times = pod_plan().times
    assert times is not None
    for task in times.tasks:
        assert 0 < task.at_least_s < task.costs.total_s
    (sampling,) = times.of_stage("generation")
    assert sampling.bound == "memory"
    assert {"weights read", "cache read", "tensor all-reduces"} <= sampling.costs.seconds.keys()
    assert 0 < sampling.costs.idle_s < sampling.costs.total_s
    assert all(task.costs.slot_use is None for task in times.tasks if task is not sampling)
    # Long answers are in flight for longer than short ones: 4,096 tokens on average, not half of them.
    assert times.load.work.response_lengths.mean_in_flight == pytest.approx(4090, rel=0.02)


def test_the_first_minibatch_takes_its_log_probabilities_from_the_update():
    config = recipe("dapo_qwen32b.py:h100-128")
    (actor,) = tasks_of_run(resolve(config))
    assert actor.forwards == 15 / 16


@pytest.mark.parametrize(
    ("overlap", "expected"), [(False, 10 + 3 + 4), (True, 10)], ids=["in turn", "one step off"]
)
def test_sampling_for_the_next_step_overlaps_with_learning(overlap, expected):
    times = tiny_plan().times
    assert times is not None
    seconds = {"generation": 10.0, "preparation": 3.0, "training": 4.0}
    tasks = tuple(
        dataclasses.replace(
            task, costs=dataclasses.replace(task.costs, seconds={"all": seconds[task.stage]})
        )
        for task in times.tasks
    )
    assert dataclasses.replace(times, tasks=tasks, overlaps=overlap).step_s == expected


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("grpo_tiny.py", {("generation", "actor"), ("training", "actor")}),
        ("ppo_tiny.py", {("preparation", "critic"), ("training", "critic")}),
    ],
)
def test_every_role_has_its_seconds(name, roles):
    config = recipe(name, **{"mesh.simulated_devices": "0", "mesh.train": "1-1-1"})
    step = expected_step(planned_of(config), Cluster(toy(per_host=1), (1, 1)), load_of(config))
    assert roles <= {(task.stage, task.role) for task in step.tasks}
    assert all(task.costs.total_s > 0 for task in step.tasks)


def test_a_sampler_on_its_own_devices_is_simulated_there():
    model = model_shapes("qwen2.5-0.5b")
    placement = {
        "learn": {"roles": ("actor",), "train": "1-2-2", "generate": "1-2-1-2"},
        "sample": {"roles": ("rollout",), "train": "1-2-2", "generate": "1-2-1-2", "fsdp": 1},
    }
    config = dataclasses.replace(tiny_config(model), placement=placement)
    times = times_of(config, TOY)
    (sampling,) = times.of_stage("generation")
    assert (sampling.role, sampling.pool) == ("rollout", 1)
    assert sampling.costs.seconds["resharding"] == 0
    assert 0 < sampling.at_least_s < sampling.costs.total_s


def test_measured_rates_are_taken_as_they_are():
    planned = planned_of(tiny_config())
    given, measured = (
        expected_step(
            planned,
            Cluster(toy(per_host=8, memory_gbs=1e6, measured=measured), (1, 8)),
            load_of(tiny_config()),
        )
        for measured in (False, True)
    )
    for stage, cause, share in (
        ("training", "compute", Assumptions().flops_rate),
        ("generation", "weights read", Assumptions().weights_rate),
    ):
        slow, fast = (
            sum(task.costs.seconds[cause] for task in times.of_stage(stage))
            for times in (given, measured)
        )
        assert fast == pytest.approx(share * slow), cause


def test_a_compiled_program_is_counted_in_place_of_the_table():
    token = Counts(1000, 0, 8e9, 0, 0, 0, 0)
    config, cluster = tiny_config(), Cluster.parse("h100:1x8")
    step = expected_step(planned_of(config), cluster, load_of(config), token)
    (sampling,) = step.of_stage("generation")
    seconds = sampling.costs.seconds
    # 1,000 kernels of 1.6 us, and 8 GB read and written at .68 of 3,352 GB/s: 1.6 and 7.02 ms a token.
    each = seconds["layers copied out of their stack"] / seconds["small kernels"]
    assert each == pytest.approx(7.02 / 1.6, rel=0.001)
    assert seconds["visits of the host"] == seconds["activations and logits"] == 0


def test_a_cluster_of_another_size_is_refused():
    with pytest.raises(UserError, match=r"toy:2x8 has 16 devices, layout .* needs 8"):
        trace_plan(tiny_config(), Cluster(toy(per_host=8), (2, 8)))
