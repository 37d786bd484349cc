"""Predicted seconds and bytes by hand, beside the real layouts, and moving the right way."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from toy_clusters import split, toy, toy_model, toy_work

from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.models.decoder import decoder_graph, evened
from jaxrl.models.shapes import SHAPES, model_shapes
from jaxrl.roles.flops import attention_flops, token_flops
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.resharding_costs import table_2
from jaxrl_planner.search.mapping import SearchLimits
from jaxrl_planner.search.pool_fronts import layouts_of
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.collective_times import Collectives, protocols_of
from jaxrl_planner.simulation.decode_trace import trace_decoding
from jaxrl_planner.simulation.filled_rows import filled_rows
from jaxrl_planner.simulation.model_numbers import model_numbers
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator, slot_counts
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.workload import LengthDistribution, Workload

# Every rate is reached, nothing hides, nothing has a latency: numbers that can be computed on paper.
PLAIN = Assumptions(
    flops_rate=1.0,
    weights_rate=1.0,
    cache_rate=1.0,
    link_rate=1.0,
    overlap=0.0,
    memory_share=1.0,
    scratch_gb=0.0,
    latency_scale=0.0,
    step_s=0.0,
    call_s=0.0,
    host_s=0.0,
)
# Reading weights takes no time beside 1 TFLOP/s.
CLUSTER = Cluster(toy(memory_gbs=1e4), (4, 4), whole_hosts=True)
# 16 sequences of 128 + 128 tokens.
WORK = toy_work(
    prompts=16,
    samples=1,
    prompt_lengths=LengthDistribution.exactly(128),
    response_lengths=LengthDistribution.exactly(128),
    updates=2,
    microbatch_tokens=512,
)
MODEL = toy_model(4)


def passes(assume=PLAIN, work=WORK, cluster=CLUSTER):
    return PassSimulator(cluster, work, assume)


# Numbers of a model


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name):
    model = model_shapes(name)
    numbers = model_numbers(model)
    assert numbers.dense + numbers.experts + numbers.outside + model.d_model == model.num_params
    assert numbers.cache_values_of_shard(1, 1) * 2 == model.kv_bytes_per_token(2)
    assert numbers.params_of_shard(1, 1) == model.num_params - model.d_model


def test_every_stage_holds_the_first_dense_layers():
    numbers = model_numbers(model_shapes("moonlight-16b-a3b"))
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    first = attention + 3 * 2048 * 11_264 + 2 * 2048
    assert numbers.outside == 2 * 163_840 * 2048 + first


# Training and inference


# 16 texts of 256 tokens fill 8 rows of 512, which end with a tile of 128 tokens as the texts do.
@pytest.mark.parametrize(
    ("kernel", "pairs", "backward"),
    [("xla", 6 * 128**2, 2.5), ("cudnn", 512 * 513 / 2, 2.5), ("splash", 10 * 128**2, 3.5)],
)
def test_compute_is_what_the_model_asks_for(kernel, pairs, backward):
    assume = dataclasses.replace(PLAIN, attention=kernel)
    weights = 16 * 256 * token_flops(MODEL).weights
    attention = 8 * pairs * model_numbers(MODEL).pair_flops
    for strategy in (split(1, 1, 1), split(1, 2, 4, 2), split(2, 2, 2)):
        terms = passes(assume).training(MODEL, strategy)
        whole = 3 * weights + (1 + backward) * attention
        assert terms.seconds["compute"] == pytest.approx(whole / 1e12 / strategy.num_devices)
        again = terms.seconds["layers computed again"]
        # Not the last product of a layer, 1,026 x 4,098: what it gives is part of no gradient.
        down = 16 * 256 * 2 * 4 * 1026 * 4098
        assert again == pytest.approx((weights + attention - down) / 1e12 / strategy.num_devices)
        forward = passes(assume).inference(MODEL, strategy)
        whole = weights + attention
        assert forward.seconds["compute"] == pytest.approx(whole / 1e12 / strategy.num_devices)


def test_a_text_in_a_row_of_its_own_has_the_same_pairs_for_all_kernels_with_tiles():
    alone = dataclasses.replace(WORK, microbatch_tokens=128)
    splash = dataclasses.replace(PLAIN, attention="splash")
    one, two = (passes(a, alone).inference(MODEL, split(1, 1, 1)) for a in (PLAIN, splash))
    assert one.total_s == two.total_s


@pytest.mark.parametrize("pattern", [("sliding",), ("sliding", "full")])
@pytest.mark.parametrize("kernel", ["xla", "cudnn", "splash"])
def test_pairs_before_a_window_are_computed_only_by_cudnn_with_mixed_layers(kernel, pattern):
    model = dataclasses.replace(MODEL, sliding_window=100, layer_pattern=pattern)
    assume = dataclasses.replace(PLAIN, attention=kernel)
    found = passes(assume).inference(model, split(1, 1, 1)).seconds["compute"]
    if kernel == "cudnn":
        seen = MODEL if len(pattern) == 2 else model
        attention = attention_flops(seen, np.full(8, 512)).sum()
    else:
        # A window of 100 tokens reaches one block back.
        full, sliding = (6, 6) if kernel == "xla" else (10, 7)
        tiles = 8 * np.mean([sliding if kind == "sliding" else full for kind in pattern])
        attention = tiles * 128**2 * model_numbers(model).pair_flops
    flops = 16 * 256 * token_flops(model).weights + attention
    assert found == pytest.approx(flops / 1e12)


def test_without_remat_nothing_is_computed_again():
    assume = dataclasses.replace(PLAIN, remat="none")
    one, two = (passes(a).training(MODEL, split(1, 1, 1)) for a in (assume, PLAIN))
    assert one.seconds["layers computed again"] == 0
    assert one.transient["kept of the layers"] > two.transient["kept of the layers"]


def test_a_pipeline_idles_for_its_share():
    # 8 sequences an update and replica, two of them a microbatch: 4 of these through 2 stages.
    work = dataclasses.replace(WORK, pipeline_microbatches=4)
    terms = passes(work=work).training(MODEL, split(2, 1, 1))
    busy = terms.seconds["compute"] + terms.seconds["layers computed again"]
    assert terms.seconds["pipeline bubble"] == pytest.approx(busy * (2 - 1) / 4)
    # As many microbatches as stages by default.
    assert passes().training(MODEL, split(2, 1, 1)).seconds["pipeline bubble"] == pytest.approx(
        busy / 2
    )


def test_tensor_parallelism_reduces_twice_a_layer_and_pass():
    # Forward, again, backward: 3 x 2 x 4 layers; 8 microbatches of 512 tokens; 2 (t - 1) / t of the bytes
    # over 4 GB/s.
    terms = passes().training(MODEL, split(1, 2, 1))
    nbytes = 512 * MODEL.d_model * 2
    assert terms.seconds["tensor all-reduces"] == pytest.approx(3 * 2 * 4 * 8 * nbytes / 4e9)


def test_replicas_sum_gradients():
    # 2 replicas of 4 sequences an update: 2 microbatches, so 4 sums of float32 gradients.
    values = model_numbers(MODEL).params_of_shard(1, 1)
    terms = passes().training(MODEL, split(1, 1, 2))
    assert terms.seconds["gradients summed"] == pytest.approx(4 * values * 4 / 4e9)
    assert terms.seconds["weights gathered"] == 0
    once = dataclasses.replace(PLAIN, reduce_each_microbatch=False)
    terms = passes(once).training(MODEL, split(1, 1, 2))
    assert terms.seconds["gradients summed"] == pytest.approx(2 * values * 4 / 4e9)


def test_fsdp_gathers_weights_and_scatters_gradients():
    values = model_numbers(MODEL).params_of_shard(1, 1)
    terms = passes().training(MODEL, split(1, 1, 2, 2))
    # Half of the weights in bfloat16, twice; half of the gradients in float32: four microbatches.
    assert terms.seconds["weights gathered"] == pytest.approx(4 * 2 * values * 2 / 2 / 4e9)
    assert terms.seconds["gradients summed"] == pytest.approx(4 * values * 4 / 2 / 4e9)
    half = dataclasses.replace(PLAIN, overlap=0.5)
    hidden = passes(half).training(MODEL, split(1, 1, 2, 2)).seconds["hidden behind compute"]
    exchanged = terms.seconds["weights gathered"] + terms.seconds["gradients summed"]
    busy = terms.seconds["compute"] + terms.seconds["layers computed again"]
    assert hidden == pytest.approx(-min(exchanged, busy / 2))


def test_a_groups_links_are_those_it_crosses():
    # 16 replicas on four hosts of four: 2 GB/s leave a host, for one ring.
    fast, slow = (
        passes(work=dataclasses.replace(WORK, updates=1)).training(MODEL, split(1, 1, d, d))
        for d in (4, 16)
    )
    # The same microbatch on each device; 3/4 of the bytes at 4 GB/s, 15/16 at 2.
    ratio = slow.seconds["weights gathered"] / fast.seconds["weights gathered"]
    assert ratio == pytest.approx((15 / 16 / 2) / (3 / 4 / 4 * 2))


def test_states_take_their_bytes():
    values = model_numbers(MODEL).params_of_shard(2, 2) / 2
    terms = passes().training(MODEL, split(2, 2, 2, 2))
    assert terms.resident_bytes == pytest.approx(12 * values)
    # With stages the ticks add to a sum of their own; replicas get theirs back in another.
    assert terms.transient["gradients"] == pytest.approx(2 * 4 * values)
    of_shard = 4 * model_numbers(MODEL).params_of_shard(1, 4)
    for fsdp, sums in ((4, 1), (2, 2), (1, 2)):
        found = passes().training(MODEL, split(1, 4, 4, fsdp)).transient["gradients"]
        assert found == pytest.approx(sums * of_shard / fsdp)
    assert passes().inference(MODEL, split(2, 2, 2, 2)).resident_bytes == pytest.approx(4 * values)
    # Inputs of four layers of a microbatch of 512 tokens, in bfloat16; of two stages, three ticks of two, and
    # twice those of the tick that is computed again.
    alone = passes().training(MODEL, split(1, 1, 1)).transient
    assert alone["kept of the layers"] == 512 * MODEL.d_model * 2 * 4
    staged = passes().training(MODEL, split(2, 1, 1)).transient
    assert staged["kept of the layers"] == (3 + 2) * 512 * MODEL.d_model * 2 * 2


def test_greedy_answers_are_scored_too():
    work = dataclasses.replace(WORK, prompts=8, samples=2)
    one, more = (passes(work=work).inference(MODEL, split(1, 1, 1), share=s) for s in (1, 1.5))
    assert more.seconds["compute"] == pytest.approx(1.5 * one.seconds["compute"])


@hypothesis.given(
    name=st.sampled_from(["qwen2.5-0.5b", "gemma-3-1b", "qwen3-0.6b"]),
    devices=st.sampled_from([2, 4, 6, 8]),
)
@hypothesis.settings(max_examples=8)
def test_the_real_rules_accept_every_strategy(name, devices):
    model = model_shapes(name)
    _, shapes, axes = decoder_graph(model)
    for layout in layouts_of(model, devices, 8, SearchLimits()):
        text = f"{layout.p}-{layout.t}-{layout.d}"
        names = ("generate", "fsdp", "expert", "context", "sharding")
        config = LayoutConfig(train=text, **{name: getattr(layout, name) for name in names})
        assert ParallelLayout.from_config(config) == layout
        shardings(axes, evened(shapes, layout.p), TRAIN_RULES, abstract_mesh(layout))


def test_absent_layers_cost_as_much_as_others():
    """Two stages of three layers, whether or not the last one has its third."""
    five, six = (
        passes().training(dataclasses.replace(MODEL, num_layers=layers), split(2, 1, 1))
        for layers in (5, 6)
    )
    assert five.resident_bytes == six.resident_bytes
    assert five.transient["kept of the layers"] == six.transient["kept of the layers"]
    # The head counts as if it were in the stack too.
    assert six.seconds["compute"] <= five.seconds["compute"] < 1.2 * six.seconds["compute"]


# Latencies and fixed costs

H100 = Cluster.parse("h100:16x8")
V5P = Cluster.parse("v5p:4x4x8")
FULL = dataclasses.replace(PLAIN, latency_scale=1.0)


def tensor_ring(cluster, t, d=None, *, axes=GENERATE_RULES["heads"]):
    """Links of tensor groups of t devices, or of another axis, on the whole cluster or on t x d devices."""
    layout = ParallelLayout(1, t, d or cluster.num_devices // t, 1, t)
    return Collectives(cluster, FULL).ring(layout, *axes)


def test_small_reductions_take_the_protocol_with_the_lowest_latency():
    # NCCL's LL: 6.6 us, and 2 x 7 hops of .6 us; half of 450 GB/s for data.
    eight = tensor_ring(H100, 8)
    reduced = Collectives(H100, FULL).reduce_s(1e3, eight)
    assert reduced == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 2 * 7 / 8 * 1e3 / 225e9)
    # A TPU's ring goes both ways: 8 hops of 1 us, and 5 us before the first.
    assert Collectives(V5P, FULL).reduce_s(0.0, tensor_ring(V5P, 8)) == pytest.approx(13e-6)
    # Large arrays go by Simple, at the whole rate: 8.4 us, 14 hops of 3.4.
    large = Collectives(H100, FULL).reduce_s(1e9, eight)
    assert large == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 2 * 7 / 8 * 1e9 / 450e9)
    # Arrays of several sizes at once.
    both = Collectives(H100, FULL).reduce_s(np.array([1e3, 1e9]), eight)
    assert both.tolist() == pytest.approx([reduced, large])


def test_hops_between_hosts_cost_more():
    # 32 devices of four hosts: 28 hops inside and 3 between; 16 replicas eight apart: 15 between hosts.
    latency = {
        tensor_ring(H100, 32): 6.6e-6 + 28 * 0.6e-6 + 3 * 2.7e-6,
        tensor_ring(H100, 8, axes=("data",)): 6.6e-6 + 15 * 2.7e-6,
        tensor_ring(H100, 8): 6.6e-6 + 7 * 0.6e-6,
    }
    for ring, seconds in latency.items():
        assert Collectives(H100, FULL).gather_s(0.0, ring) == pytest.approx(seconds)
        ten = Collectives(H100, FULL).gather_s(0.0, ring, calls=10)
        assert ten == pytest.approx(10 * seconds)
    assert Collectives(H100, FULL).gather_s(1e9, tensor_ring(H100, 1)) == 0


def test_a_tensor_group_over_the_halves_of_two_hosts_pays_for_the_network():
    # A pool of 64 devices has four of each of 16 hosts: groups of eight have two hosts, of four one.
    halves, four = tensor_ring(H100, 8, 8), tensor_ring(H100, 4, 16)
    assert (halves.near, halves.far, halves.gbs) == (6, 1, 200)
    assert (four.near, four.far, four.gbs) == (3, 0, 450)
    work = toy_work(prompts=64)
    strategy = split(1, 8, 8)
    apart = passes(FULL, work, H100).training(MODEL, strategy).seconds["tensor all-reduces"]
    whole = dataclasses.replace(H100, whole_hosts=True)
    inside = passes(FULL, work, whole).training(MODEL, strategy).seconds["tensor all-reduces"]
    assert apart > 1.5 * inside


def test_groups_of_generation_are_those_of_the_mesh():
    # Two hosts, a pool with four devices of each, trained with t = 8. A group of t_g = 4 has every other one.
    cluster = Cluster(toy(per_host=8), (2, 8))
    halves = generator(FULL, cluster=cluster).groups(split(1, 8, 1, t_g=4))
    assert (halves.tensor.near, halves.tensor.far) == (2, 1)
    whole = generator(FULL, cluster=cluster).groups(split(1, 4, 2))
    assert (whole.tensor.near, whole.tensor.far) == (3, 0)


def test_gathers_and_gradient_sums_have_a_latency_per_layer():
    none, all_of_it = (passes(a).training(MODEL, split(1, 1, 2, 2)) for a in (PLAIN, FULL))
    # Four microbatches, two gathers of four layers and the embedding; one hop of NVLink.
    start = min(p.start_s + p.near_s for p in protocols_of(CLUSTER.accelerator))
    for cause, gathers in (("weights gathered", 2), ("gradients summed", 1)):
        more = all_of_it.seconds[cause] - none.seconds[cause]
        assert 4 * gathers * 5 * start <= more <= 4 * gathers * 5 * 20e-6


def test_every_program_call_costs_the_host():
    work = dataclasses.replace(WORK, prefill_prompts=8)
    calls = dataclasses.replace(PLAIN, call_s=1.0)
    one = split(1, 1, 1)
    for assume, times in ((PLAIN, 0), (calls, 1)):
        assert passes(assume).training(MODEL, one).seconds["program call"] == times
        assert passes(assume).inference(MODEL, one).seconds["program call"] == times
    free, paid = (generator(a, work).generation(MODEL, one, 16).seconds for a in (PLAIN, calls))
    # 128 tokens in dispatches of 64; 16 prompts in batches of 8, which two programs prefill and insert.
    assert paid["host between dispatches"] - free["host between dispatches"] == 2
    for cause in ("prefill", "prompts to slots"):
        assert paid[cause] - free[cause] == pytest.approx(2)


@pytest.mark.parametrize(("prompts", "rows"), [(2, 2), (3, 8)])
def test_prefills_compute_the_padding_of_their_programs(prompts, rows):
    """Batches of 2 or 8 prompts, of 64, 96, 128 or 200 tokens; longer prompts in chunks."""
    work = dataclasses.replace(
        WORK,
        prompts=prompts,
        prompt_lengths=LengthDistribution.exactly(450),
        prefill_prompts=8,
        prefill_chunk_tokens=200,
    )
    chosen = split(1, 1, 1, p_g=1, t_g=1), 8
    found = generator(work=work).generation(MODEL, *chosen).seconds["prefill"]
    tokens = 200 + 200 + 64
    attention = model_numbers(MODEL).pair_flops * tokens * (tokens + 1) / 2
    flops = tokens * token_flops(MODEL).weights + attention
    assert found == pytest.approx(rows * flops / 1e12)


def test_the_host_looks_at_the_slots_of_all_replicas():
    hosts = dataclasses.replace(PLAIN, host_s=1.0)
    # Four replicas of four slots, two dispatches.
    found = generator(hosts).generation(MODEL, split(1, 1, 4, p_g=1, t_g=1), 4)
    assert found.seconds["host between dispatches"] == pytest.approx(2 * 16)
    # The measurement that it comes from: 0.8 ms for 4,096 slots.
    assert Assumptions().host_s * 4096 == pytest.approx(0.8e-3)


def test_a_shared_prompt_is_computed_once_for_its_answers_in_a_row():
    # Six answers of 32 tokens after a prompt of 64, whose last token each repeats: a row of 162 tokens holds
    # three of them, so a prompt has two copies.
    lengths = {
        "prompt_lengths": LengthDistribution.exactly(64),
        "response_lengths": LengthDistribution.exactly(32),
    }
    alone = toy_work(prompts=4, samples=6, microbatch_tokens=162, **lengths)
    alone = dataclasses.replace(alone, response_lengths=LengthDistribution(32, 98))
    shared = dataclasses.replace(alone, shares_prompts=True)
    assert [sum(filled_rows(work).rows_U) for work in (alone, shared)] == [24, 8]
    one = split(1, 1, 1)
    # Tiles of 32 tokens over a prompt, tokens 0 to 62, and answers at 63 to 95, 96 to 128 and 129 to 161. The
    # last three blocks see the two of the prompt, themselves, and the one before if it shares an answer.
    numbers = model_numbers(MODEL)
    tiles = 1 + 2 + 3 + 3 + 4 + 4
    flops = 8 * (162 * numbers.token_flops + tiles * 32**2 * numbers.pair_flops)
    found = PassSimulator(CLUSTER, shared, PLAIN).inference(MODEL, one).seconds["compute"]
    assert found == pytest.approx(flops / 1e12)
    assert found < PassSimulator(CLUSTER, alone, PLAIN).inference(MODEL, one).seconds["compute"]


# Generation


def generator(assume=PLAIN, work=WORK, cluster=CLUSTER):
    return GenerationSimulator(cluster, work, assume)


def test_a_step_reads_weights_and_cache():
    # 4 replicas of 4 samples, all in flight, 128 steps; 1 GB/s.
    cluster = Cluster(toy(memory_gbs=1.0, bfloat16_tflops=1e4), (1, 4))
    terms = generator(cluster=cluster).generation(MODEL, split(1, 1, 4, p_g=1, t_g=1), 4)
    weights = model_numbers(MODEL).params_of_shard(1, 1) * 2
    assert terms.seconds["weights read"] == pytest.approx(128 * weights / 1e9)
    # 4 samples of 128 + 64 tokens on average.
    cached = 4 * (128 + 64) * MODEL.kv_bytes_per_token(2)
    assert terms.seconds["cache read"] == pytest.approx(128 * cached / 1e9)
    assert terms.transient["weights of generation"] == weights
    slot = (128 + 128 + 64) * MODEL.kv_bytes_per_token(2)
    assert terms.transient["cache"] == 4 * slot


def test_layers_in_8_bits_take_and_read_and_move_half():
    numbers, narrow = model_numbers(MODEL), dataclasses.replace(PLAIN, sampled_bytes=1)
    wide, found = (
        generator(a).generation(MODEL, split(1, 4, 1, p_g=1, t_g=2), 4) for a in (PLAIN, narrow)
    )
    expected = (numbers.dense + numbers.experts + 2 * numbers.outside) / 2
    assert found.transient["weights of generation"] == expected
    share = expected / wide.transient["weights of generation"]
    for term in ("weights read", "resharding"):
        assert found.seconds[term] == pytest.approx(share * wide.seconds[term])
    assert found.seconds["cache read"] == wide.seconds["cache read"]


def test_waves_of_samples_take_turns():
    one, two = (
        generator().generation(MODEL, split(1, 1, 4, p_g=1, t_g=1), slots).seconds
        for slots in (4, 2)
    )
    assert two["weights read"] == pytest.approx(2 * one["weights read"])
    assert two["cache read"] == pytest.approx(one["cache read"])


def test_heads_are_split_as_far_as_they_divide():
    model = dataclasses.replace(MODEL, num_heads=4, num_kv_heads=2)
    numbers = model_numbers(model)
    assert numbers.cache_values_of_shard(1, 4) == numbers.cache_values_of_shard(1, 1) / 2
    assert numbers.cache_values_of_shard(2, 2) == numbers.cache_values_of_shard(1, 1) / 4


@pytest.mark.parametrize(("t", "t_g"), [(4, 4), (4, 2), (4, 1), (2, 1)])
@pytest.mark.parametrize("p", [1, 2])
def test_resharding_moves_what_table_2_says(t, t_g, p):
    layout = split(p, t, 16 // (p * t), t_g=t_g)
    numbers = model_numbers(MODEL)
    # An even split: what lies outside the layers is not split over stages, in the paper all is.
    nbytes = (numbers.dense + numbers.experts + p * numbers.outside) * 2
    expected = table_2(layout, round(nbytes))["hybrid"].received
    found = generator().resharding_s(MODEL, layout)
    assert found * 4e9 == pytest.approx(float(expected), rel=1e-6)


def test_more_memory_for_slots_is_never_slower():
    work = toy_work(prompts=64, samples=4)
    simulator = generator(work=work)
    four = simulator.groups(split(1, 1, 4))
    room, slots, seconds = simulator.best_seconds(MODEL, four, budget=1e12)
    assert room[-1] == 64 and (np.diff(seconds) <= 0).all() and (slots <= room).all()
    for n, best, s in zip(room, slots, seconds, strict=True):
        assert simulator.generation(MODEL, split(1, 1, 4), int(best)).total_s == pytest.approx(s)
        budget = simulator.weight_bytes(MODEL, 1, 1) + (n + 0.5) * simulator.slot_bytes(MODEL, 1, 1)
        assert simulator.best_seconds(MODEL, four, budget=budget)[2][-1] == pytest.approx(s)
    nothing = simulator.best_seconds(MODEL, four, budget=1e3)
    assert [len(x) for x in nothing] == [0, 0, 0]


def test_slot_counts_end_with_the_most():
    assert slot_counts(0) == ()
    assert slot_counts(1) == (1,)
    assert slot_counts(23) == tuple(range(1, 24))
    assert slot_counts(93) == (*range(1, 65), 72, 80, 88, 93)
    # Rounds of 75, 100, ...; 150 are more than the most.
    assert slot_counts(140, equal_samples=300)[64:] == (
        72,
        75,
        80,
        88,
        96,
        100,
        104,
        112,
        120,
        128,
        140,
    )


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    samples=st.integers(65, 800),
    share=st.floats(0.1, 1.0),
    t_g=st.sampled_from([1, 2]),
    dispatch=st.sampled_from([1, 64]),
)
def test_of_equal_samples_no_other_number_of_slots_is_faster(samples, share, t_g, dispatch):
    # Brute force over all numbers of slots, also above those of which every one is tried.
    work = toy_work(
        prompts=samples,
        samples=1,
        response_lengths=LengthDistribution.exactly(128),
        tokens_per_dispatch=dispatch,
    )
    simulator = generator(dataclasses.replace(Assumptions(), fixed_slots=True), work)
    groups = simulator.groups(split(1, t_g, 1))
    most = max(1, int(samples * share))
    every = [simulator.seconds_of(MODEL, groups, n) for n in range(1, most + 1)]
    room = simulator.weight_bytes(MODEL, 1, t_g) + (most + 0.5) * simulator.slot_bytes(
        MODEL, 1, t_g
    )
    found = simulator.best_seconds(MODEL, groups, budget=room)
    assert found.room[-1] == most
    assert found.seconds[-1] == pytest.approx(min(every), rel=1e-9)


# The trace of decoding


def test_samples_of_one_length_go_in_waves():
    trace = trace_decoding(10.0, LengthDistribution.exactly(4), 5, 2, 2, fewest_slots=2)
    # 2 + 2 + 1 samples, 4 steps each; cached are the prompt and half of the steps.
    assert trace.steps.tolist() == [4, 4, 4]
    assert trace.slots.tolist() == [2, 2, 2]  # too few for a smaller program
    assert trace.cached.tolist() == [24, 24, 12]
    assert (trace.samples, trace.dispatches) == (pytest.approx(20 / 12), 6)


@hypothesis.given(
    st.integers(1, 60), st.integers(1, 20), st.sampled_from(["constant", "log-normal"])
)
def test_every_token_is_decoded_once(samples, slots, kind):
    lengths = LengthDistribution(20, 50, kind)
    trace = trace_decoding(5.0, lengths, samples, min(slots, samples), 4)
    tokens = lengths.quantiles(samples).sum()
    assert trace.samples * trace.steps.sum() == pytest.approx(tokens)
    # What is read: each token's prompt, and those before it.
    reads = (5 * lengths.quantiles(samples) + lengths.quantiles(samples) ** 2 / 2).sum()
    assert (trace.steps * trace.cached).sum() == pytest.approx(reads)
    assert (trace.slots <= slots).all()


RAGGED = {"response_lengths": LengthDistribution(96, 512, "log-normal"), "samples": 4}


def test_slots_that_stay_full_take_less_time_and_prefill_again():
    drained = toy_work(prompts=64, **RAGGED)
    full = dataclasses.replace(drained, always_full=True)
    # Prefill costs nothing but operations.
    assume = dataclasses.replace(Assumptions(), call_s=0.0)
    chosen = split(1, 1, 4, p_g=1, t_g=1), 8
    once, again = (generator(assume, work).generation(MODEL, *chosen) for work in (drained, full))
    # Prompts are drawn a few at a time, and their prefills padded: much of this small model's time.
    decoding = [found.total_s - found.seconds["prefill"] for found in (again, once)]
    assert decoding[0] < 0.85 * decoding[1]
    assert again.idle_s < 1e-9 < once.idle_s
    assert again.seconds["prefill"] > once.seconds["prefill"]


def test_pages_hold_more_samples_in_the_memory_of_as_many_tokens():
    work = toy_work(prompts=64, **RAGGED)
    few, many = (8,), (24, 8 * int(work.slot_tokens))
    contiguous, paged = (
        generator(work=work).generation(MODEL, split(1, 1, 4), *slots) for slots in (few, many)
    )
    assert paged.transient["cache"] == contiguous.transient["cache"]
    assert paged.seconds["weights read"] < 0.7 * contiguous.seconds["weights read"]


def test_slots_of_a_paged_cache_need_memory_for_one_sample_of_full_length():
    work = toy_work(prompts=64, paged=True, **RAGGED)
    simulator = generator(work=work)
    weights, token = simulator.weight_bytes(MODEL, 1, 1), MODEL.kv_bytes_per_token(2)
    assert work.slot_tokens == 64 / 2 + 512 / 4 and work.least_pool_tokens == 1024
    budget = weights + token * np.array([1023.0, 1024.0])
    groups = simulator.groups(split(1, 1, 1))
    assert simulator.fitting_slots(MODEL, groups, budget).tolist() == [0, 1024 // 160]
    assert work.cache_tokens(2) == 1024 and work.cache_tokens(10) == 1600


def test_without_idle_slots_the_same_tokens_are_decoded_in_fewer_steps():
    lengths = LengthDistribution(96, 256, "log-normal")
    trace = trace_decoding(64.0, lengths, 48, 8, 4)
    full = trace.without_idle_slots(8, 4)
    tokens = lengths.quantiles(48).sum()
    assert full.steps.sum() * 8 == pytest.approx(tokens)
    assert full.steps.sum() < trace.steps.sum() and full.dispatches < trace.dispatches
    assert full.cached * full.steps == pytest.approx((trace.cached * trace.steps).sum())


# Workloads


def test_lengths_have_their_mean_and_longest():
    lengths = LengthDistribution(3950, 20_480, "log-normal")
    found = lengths.quantiles(4096)
    assert found.mean() == pytest.approx(3950, rel=0.01)
    assert found[-1] == 20_480 and (np.diff(found) >= 0).all()
    assert np.median(found) == pytest.approx(2630, rel=0.05)
    assert LengthDistribution.exactly(7).quantiles(3).tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LengthDistribution(30, 20),
            "mean length 30 is not above 0 and up to the longest, 20",
        ),
        (lambda: LengthDistribution(0, 20), "mean length 0 is not above 0"),
        (lambda: toy_work(updates=100), "100 updates are more than the 24 sequences"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_all_strategies_use_all_devices_and_divide_the_model():
    model = model_shapes("qwen2.5-7b")
    found = list(layouts_of(model, 16, 8, SearchLimits()))
    assert len(found) == len(set(found))
    for s in found:
        assert s.num_devices == 16 and s.d % s.fsdp == 0
        assert model.num_layers % s.p == 0 and model.num_heads % s.t == 0
    # 28 heads and 28 layers: 8 divides neither. All that divides both numbers is there.
    sizes = {(s.p, s.t) for s in found}
    assert sizes == set(itertools.product((1, 2, 4), (1, 2, 4)))
    assert {s.t for s in layouts_of(model, 16, 2, SearchLimits())} == {1, 2}
    assert {s.fsdp for s in layouts_of(model, 16, 8, SearchLimits(fsdp=False))} == {1}
    assert isinstance(WORK, Workload)
