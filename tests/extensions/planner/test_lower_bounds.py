"""Lower bounds of a step by hand, and below the expectation whatever the plan."""

import dataclasses

import numpy as np
import pytest
from model_sizes import sized_model
from plans import RECIPE, tiny_config
from slow_values import mostly_slow
from toy_clusters import toy

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.mesh.layout import LayoutConfig
from jaxrl_planner.compiled.programs import Program
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.planned_roles import roles_without_devices
from jaxrl_planner.simulation.workload import LengthDistribution
from jaxrl_planner.step_load import load_of

SMALL = sized_model(152_064, 4, 256, 768, 8, 4, 32)


def programs(config: Config, responses: LengthDistribution | None = None) -> dict[str, Program]:
    planned = roles_without_devices(config)
    found = planned.programs(load_of(config, responses))
    return {program.name: program for _, program, _ in found}


def recipe_32b(**changes: str) -> Config:
    return load_config(Config, f"{RECIPE}:h100-128", changes)


def test_a_step_of_the_paged_32b_recipe_reads_what_its_samples_hold():
    """243 slots of a replica in 14,580 pages of 128 tokens, as compiled for 128 H100."""
    config = recipe_32b(
        **{"rollout.slots": str(16 * 243), "rollout.cache_tokens": str(16 * 14_580 * 128)}
    )
    generate = programs(config)["generate"]
    # 307 tokens of a prompt, and E[L^2] / 2 E[L] of an answer: 4,096 on average, 4,091 their deviation.
    live = 0.15 * 2_048 + (4_096**2 + 4_091**2) / (2 * 4_096)
    # Keys and values in bfloat16 of 64 layers; t_g = 8 leaves one kv head of 128 on a device.
    token_bytes = 2 * 2 * 64 * 1 * 128
    assert live == pytest.approx(4_398, rel=2e-3) and token_bytes == 32_768
    cache, weights = 243 * live * token_bytes, 2 * 32_763_876_352 / 8
    assert cache == pytest.approx(35.0e9, rel=2e-3)
    steps = 1_536 * 16 * 4_096 / 3_888
    assert generate.reads == pytest.approx(steps * (cache + weights), rel=2e-3)
    # An H100 reads 3,352 GB/s.
    assert generate.reads / 3.352e12 == pytest.approx(334, rel=5e-3)


def test_prefills_count_the_tokens_of_prompts_not_of_the_largest_program():
    """Programs are compiled for 2,048 tokens, and prompts have 307 of them."""
    (prefill,) = programs(recipe_32b(**{"rollout.slots": "3888"}))["prefill"].pieces
    tokens = 1_536 * 0.15 * 2_048
    # q, k, v, o and three matrices of 27,648, in 64 layers; the logits of one token of a prompt.
    weights = 64 * (2 * 5_120 * 40 * 128 + 2 * 5_120 * 8 * 128 + 3 * 5_120 * 27_648)
    matmuls = 2 * tokens * weights + 1_536 * 2 * 5_120 * 152_064
    pairs = 1_536 * (0.15 * 2_048) ** 2 / 2
    expected = matmuls + 4 * 64 * 40 * 128 * pairs
    assert prefill.step_flops == pytest.approx(expected, rel=5e-3)
    assert prefill.calls == 48 and prefill.share == pytest.approx(0.15)


def test_a_contiguous_cache_is_read_like_a_paged_one_with_the_same_tokens():
    for tokens in (1, 96):
        reads = {}
        for cache in ("contiguous", "paged"):
            changes = {"train__row_tokens": 102, "rollout__max_response_tokens": 96}
            config = tiny_config(SMALL, **changes, rollout__cache=cache)
            responses = LengthDistribution(tokens, 96)
            reads[cache] = programs(config, responses)["generate"].reads
        assert reads["contiguous"] == pytest.approx(reads["paged"], rel=1e-3)


def test_more_slots_than_samples_decode_no_faster():
    load = load_of(tiny_config())
    samples = load.prompts * load.samples
    few, many = (programs(tiny_config(rollout__slots=n))["generate"] for n in (samples, 4_096))
    assert many.reads == few.reads
    assert many.pieces[0].calls == few.pieces[0].calls


def random_plan(seed: int):
    draw = np.random.default_rng(seed)

    def pick(*values):
        return values[draw.integers(len(values))]

    cluster = pick(
        Cluster.parse("h100:1x8"),
        Cluster.parse("v5p:2x2x2"),
        Cluster(toy(per_host=8), (1, 8)),
        Cluster(dataclasses.replace(toy(per_host=4), measured=True), (2, 4)),
    )
    longest = int(pick(10, 100, 2_000))
    prompt = int(pick(6, 64, 700))
    mean, sigma = draw.uniform(0.1, 0.7) * longest, draw.uniform(0.3, 1.5)
    kind = pick("constant", "log-normal")
    responses = LengthDistribution(max(1.0, mean), longest, kind, sigma)
    config = tiny_config(
        SMALL,
        mesh=pick(
            LayoutConfig(train="1-4-2", generate="1-2-2-2", fsdp=2),
            LayoutConfig(train="2-2-2", generate="1-2-2-2", fsdp=2),
            LayoutConfig(train="1-1-8", fsdp=8),
            LayoutConfig(train="1-2-4"),
        ),
        # Rows first: every change is checked.
        train__row_tokens=prompt + longest,
        train__rows=8,
        data__max_prompt_tokens=prompt,
        rollout__cache=pick("contiguous", "paged"),
        rollout__slots=int(pick(8, 32, 256)),
        rollout__prefill_prompts=8,
        rollout__max_response_tokens=longest,
        rollout__tokens_per_dispatch=int(pick(1, 4, 64)),
        rollout__max_staleness=pick(0, 0, 8),
    )
    return config, cluster, responses


@pytest.mark.parametrize("seed", mostly_slow(range(40), fast=range(2)))
def test_no_phase_is_expected_below_its_lower_bound(seed):
    config, cluster, responses = random_plan(seed)
    times = trace_plan(config, cluster, responses=responses).times
    assert times is not None
    for task in times.tasks:
        assert 0 < task.at_least_s <= task.costs.total_s, task
    assert times.at_least_s <= times.step_s


def test_a_plan_counts_experts_and_rows_that_are_split():
    mixture = dataclasses.replace(SMALL, num_experts=8, experts_per_token=2)
    split = LayoutConfig(train="1-2-4", expert=2, context=2)
    config = tiny_config(mixture, mesh=split)
    times = trace_plan(config, Cluster.parse("h100:1x8")).times
    assert times is not None
    for task in times.tasks:
        assert 0 < task.at_least_s <= task.costs.total_s, task
        assert task.costs.seconds["tokens to experts"] > 0
        assert ("parts of rows" in task.costs.seconds) == (task.stage != "generation")
    # A device has half of 8 experts of 3 x 256 x 768 weights in 4 layers, and t_g = 2 halves everything.
    experts = 4 * 8 * 3 * 256 * 768
    (sampling,) = times.of_stage("generation")
    weights = sampling.costs.transient["weights of generation"]
    float32 = 4 * (experts / 2 + mixture.num_params - experts) / 2
    assert weights == pytest.approx(float32, rel=1e-3)
