"""The mapping search: the optimum of its simulation, within memory, with errors that say what to do."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
from slow_values import mostly_slow
from toy_clusters import ASSUME, brute_force, toy, toy_model, toy_work

from jaxrl.errors import UserError
from jaxrl.models.shapes import model_shapes
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.search.mapping import Mapping, SearchLimits
from jaxrl_planner.search.search import search_mapping
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.step_simulator import TASKS
from jaxrl_planner.simulation.workload import LengthDistribution, Workload

# Hosts of four and of eight, and parts of one: every cluster of up to 16 devices. The last two have pools of
# whole hosts.
CLUSTERS = [
    (4, (1, 1), False),
    (4, (1, 2), False),
    (4, (1, 4), False),
    (4, (2, 4), False),
    (4, (3, 4), False),
    (4, (4, 4), False),
    (8, (2, 8), False),
    (4, (3, 4), True),
    (8, (2, 8), True),
]


def toy_models(dataflow: str, layers: int = 2, critic_layers: int | None = None):
    def model(role):
        if role in ("actor", "reference"):
            return toy_model(layers)
        return toy_model(critic_layers or layers, scores=1)

    return {role.name: model(role.name) for role in TASKS[dataflow]}


FLOWS = {
    f"{dataflow} {cluster}": (dataflow, cluster)
    for dataflow in ("ppo", "remax", "grpo", "dapo")
    for cluster in CLUSTERS
}
FAST = (
    "remax (4, (1, 2), False)",
    "ppo (4, (1, 4), False)",
    "grpo (4, (1, 2), False)",
    "dapo (4, (3, 4), True)",
)


@pytest.mark.parametrize("flow", mostly_slow(FLOWS, fast=FAST))
@hypothesis.settings(max_examples=3)
@hypothesis.given(
    memory=st.sampled_from([0.35, 0.6, 1.2, 4.0]),
    layers=st.sampled_from([(2, 2), (2, 4), (4, 2)]),
    updates=st.integers(1, 4),
    host_gbs=st.sampled_from([0.2, 2.0]),
    max_tensor=st.sampled_from([1, 2]),
)
def test_it_is_as_good_as_brute_force(flow, memory, layers, updates, host_gbs, max_tensor):
    dataflow, (per_host, shape, whole_hosts) = flow
    cluster = Cluster(toy(memory, per_host=per_host, host_gbs=host_gbs), shape, whole_hosts)
    models, work = toy_models(dataflow, *layers), toy_work(updates=updates)
    # The other axis would be too much for brute force over several roles.
    limits = SearchLimits(
        max_tensor=max_tensor,
        max_pipeline=2 if dataflow != "ppo" else 1,
        max_context=2 if dataflow == "dapo" else 1,
    )
    expected = brute_force(TASKS[dataflow], models, work, cluster, ASSUME, limits)
    if expected == float("inf"):
        with pytest.raises(UserError, match="does not hold actor"):
            search_mapping(dataflow, models, work, cluster, assumptions=ASSUME, limits=limits)
        return
    found = search_mapping(dataflow, models, work, cluster, assumptions=ASSUME, limits=limits)
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    assert found.placements[0].seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [1.2, 4.0])
def test_six_roles_are_as_good_as_brute_force(memory):
    cluster = Cluster(toy(memory), (2, 4))
    limits = SearchLimits(max_tensor=1, max_pipeline=1, max_context=1)
    models, work = toy_models("safe_rlhf"), toy_work()
    expected = brute_force(TASKS["safe_rlhf"], models, work, cluster, ASSUME, limits)
    found = search_mapping("safe_rlhf", models, work, cluster, assumptions=ASSUME, limits=limits)
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    assert len(found.placements) == 203


def holds(found: Mapping, cluster: Cluster) -> None:
    """Checks that pools lie side by side on the devices, and that none holds more than it may."""
    end = 0
    for i, pool in enumerate(found.pools):
        assert found.peak_bytes(i) <= pool.budget_bytes
        assert pool.devices in cluster.pool_sizes
        assert pool.first == end
        end += pool.devices
        first_host, last_host = pool.first // 4, (end - 1) // 4
        if cluster.whole_hosts:
            assert first_host == last_host or (pool.first % 4, end % 4) == (0, 0)
        else:
            assert pool.devices % cluster.num_hosts == 0
    assert end <= cluster.num_devices
    for role in found.roles.values():
        assert role.layout.num_devices == found.pools[role.pool].devices


@hypothesis.settings(max_examples=4)
@hypothesis.given(
    memory=st.sampled_from([0.6, 1.2]),
    dataflow=st.sampled_from(["dapo", "grpo", "ppo", "remax"]),
    response=st.sampled_from([96, 192]),
    whole_hosts=st.booleans(),
)
def test_no_device_holds_more_than_it_has(memory, dataflow, response, whole_hosts):
    cluster = Cluster(toy(memory), (2, 4), whole_hosts)
    work = toy_work(response_lengths=LengthDistribution(response / 2, response, "log-normal"))
    found = search_mapping(dataflow, toy_models(dataflow), work, cluster, assumptions=ASSUME)
    assert found.seconds > 0
    holds(found, cluster)


@pytest.mark.parametrize("whole_hosts", [False, True])
def test_pools_lie_side_by_side(whole_hosts):
    cluster = Cluster(toy(0.6, host_gbs=0.2), (4, 4), whole_hosts)
    models = toy_models("ppo", 2, 4)
    found = search_mapping("ppo", models, toy_work(), cluster, assumptions=ASSUME)
    assert len(found.pools) > 1
    holds(found, cluster)


@pytest.mark.parametrize("dataflow", ["ppo", "dapo"])
def test_more_of_anything_is_never_slower(dataflow):
    models = toy_models(dataflow)

    def seconds(kind, hosts=2, **changes):
        question = dataflow, models, toy_work(**changes), Cluster(kind, (hosts, 4))
        return search_mapping(*question, assumptions=ASSUME).seconds

    base = seconds(toy(0.5))
    assert seconds(toy(0.5), 4) <= base
    assert seconds(toy(1.0)) <= base
    for changes in (
        {"bfloat16_tflops": 2.0},
        {"memory_gbs": 40.0},
        {"link_gbs": 8.0},
        {"host_gbs": 4.0},
    ):
        assert seconds(toy(0.5, **changes)) <= base
    longer = LengthDistribution(128, 256, "log-normal")
    assert seconds(toy(0.5), response_lengths=longer) > base


def test_all_placements_can_be_compared():
    question = "ppo", toy_models("ppo"), toy_work(), Cluster(toy(1.2), (2, 4))
    every = search_mapping(*question, assumptions=ASSUME, every_placement=True)
    assert len(every.placements) == 15
    assert all(every.seconds <= r.seconds < float("inf") for r in every.placements)
    bounded = search_mapping(*question, assumptions=ASSUME)
    assert bounded.seconds == every.seconds


def test_a_model_that_does_not_fit_names_the_smallest_cluster_that_holds_it():
    models, kind = {"actor": toy_model(4)}, toy(0.1)

    def search(hosts: int) -> Mapping:
        cluster = Cluster(kind, (hosts, 4))
        return search_mapping("dapo", models, toy_work(), cluster, assumptions=ASSUME)

    with pytest.raises(UserError, match=r"toy:1x4 .*actor of 0.1B.*smallest .* is toy:6x4"):
        search(1)
    assert search(6).seconds > 0
    with pytest.raises(UserError, match="is toy:6x4"):
        search(5)


def test_a_model_that_fits_nowhere_says_so():
    kind = toy(0.01, largest=16)
    with pytest.raises(
        UserError, match="no toy up to 16 devices does: take a kind with more memory"
    ):
        search_mapping("dapo", {"actor": toy_model()}, toy_work(), Cluster(kind, (1, 4)))


def mixture_model():
    return dataclasses.replace(toy_model(2), num_experts=4, experts_per_token=2, d_ff=512)


def test_experts_over_devices_are_as_good_as_brute_force_says():
    """16 million parameters, of which 13 are experts: over two replicas of two tensor shards."""
    cluster, limits = Cluster(toy(0.6, per_host=4), (1, 4)), SearchLimits(max_pipeline=1)
    models, work = {"actor": mixture_model()}, toy_work()
    expected = brute_force(TASKS["dapo"][:1], models, work, cluster, ASSUME, limits)
    found = search_mapping("dapo", models, work, cluster, assumptions=ASSUME, limits=limits)
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    assert found.roles["actor"].layout.expert == 2


def row_of(tokens: int) -> Workload:
    """Eight samples as long as a row."""
    prompt = min(8192, tokens // 2)
    return Workload(
        prompts=8,
        prompt_lengths=LengthDistribution.exactly(prompt),
        response_lengths=LengthDistribution.exactly(tokens - prompt),
        microbatch_tokens=tokens,
    )


@pytest.mark.parametrize(
    ("tokens", "remat"), [(8_192, "none"), (131_072, "full"), (262_144, "offload_inputs")]
)
def test_longer_rows_keep_less_for_the_backward_pass(tokens, remat):
    """7B on 4 H100, four tensor shards: 28 layers keep 52.6 GB of inputs for a row of 262,144 tokens."""
    cluster = Cluster.parse("h100:1x4")
    found = search_mapping(
        "dapo",
        {"actor": model_shapes("qwen2.5-7b")},
        row_of(tokens),
        cluster,
        assumptions=Assumptions.on(cluster.accelerator, attention="splash"),
        limits=SearchLimits(max_context=1),
        remats=("none", "full", "offload_inputs"),
    )
    assert found.remat == remat and f"remat {remat}" in found.lines()[0]
    update = next(task.costs for task in found.breakdown.tasks if task.stage == "training")
    inputs = tokens * 3584 * 2
    if remat == "offload_inputs":
        assert update.transient["kept of the layers"] == 2 * inputs
        # Eight rows, out and back at 25 GB/s.
        copies = update.seconds["inputs of layers to the host"]
        assert copies == pytest.approx(8 * 2 * 28 * inputs / 25e9)
    if remat == "full":
        rows = found.microbatch_rows // found.roles["actor"].layout.row_shards
        assert update.transient["kept of the layers"] == rows * 28 * inputs


def test_a_million_tokens_fit_if_the_devices_of_a_row_share_the_weights():
    """8B on 8 H100: by FSDP four tensor shards hold two copies, and a copy of the state is 98 GB."""
    cluster, models = Cluster.parse("h100:1x8"), {"actor": model_shapes("qwen3-8b")}
    found = search_mapping(
        "dapo",
        models,
        row_of(1_048_576),
        cluster,
        assumptions=Assumptions.on(cluster.accelerator, attention="cudnn"),
        remats=("none", "full", "offload_inputs"),
    )
    layout = found.roles["actor"].layout
    assert (layout.t, layout.context, layout.sharding) == (4, 2, "ZeRO-3")
    assert found.remat == "offload_inputs"
    assert found.peak_bytes(0) <= found.pools[0].budget_bytes
    assert "1-4-2 context 2 ZeRO-3" in found.lines()[-1]
