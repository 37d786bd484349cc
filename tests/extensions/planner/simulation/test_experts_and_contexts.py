"""Seconds and bytes with experts and rows split over devices, by hand."""

import dataclasses
import math
import types
from typing import Any

import jax
import numpy as np
import pytest
from toy_clusters import split

from jaxrl.models.decoder import decoder_graph
from jaxrl.models.shapes import model_shapes
from jaxrl_planner.compiled import programs
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.workload import LengthDistribution, Workload

MIXTURE = model_shapes("qwen3-30b-a3b")
# Of 128 experts of 3 x 2,048 x 768 weights in 48 layers, and of all else.
EXPERTS = 48 * 128 * 3 * 2_048 * 768
REST = 30_532_122_624 - EXPERTS
H100 = Cluster.parse("h100:4x8")
# The vendor's rates, nothing hidden, and no latencies.
PLAIN = Assumptions(
    flops_rate=1.0, weights_rate=1.0, cache_rate=1.0, link_rate=1.0, overlap=0.0,
    latency_scale=0.0, call_s=0.0,
)  # fmt: skip
WORK = Workload(
    prompts=64,
    prompt_lengths=LengthDistribution.exactly(1_000),
    response_lengths=LengthDistribution.exactly(1_000),
    microbatch_tokens=2_000,
)


def passes(cluster=H100, work=WORK, **changes):
    return PassSimulator(cluster, work, dataclasses.replace(PLAIN, **changes))


def sampler(work=WORK):
    return GenerationSimulator(H100, work, PLAIN)


def test_a_device_reads_its_own_experts_in_a_decoding_step():
    """Qwen3-30B-A3B with t_g = 4 on 4 x 8 H100: 15.3 GB of weights, 4.4 with the experts over 4 replicas."""
    for expert, gigabytes in ((1, 15.3), (4, 4.4)):
        read = (EXPERTS / expert + REST) * 2 / 4
        assert read / 1e9 == pytest.approx(gigabytes, abs=0.06)
        strategy = split(1, 4, 8, 2, expert)
        # The norms of the last layer are not counted.
        assert sampler().weight_bytes(MIXTURE, 1, 4, expert) == pytest.approx(read, rel=1e-5)
        costs = sampler().generation(MIXTURE, strategy, 8)
        assert costs.transient["weights of generation"] == pytest.approx(read, rel=1e-5)
        # 64 samples in 64 slots of 8 replicas: 1,000 steps, at 3,350 GB/s.
        expected = 1_000 * read / (H100.accelerator.memory_gbs * 1e9)
        assert costs.seconds["weights read"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_few_tokens_leave_experts_unread(tokens):
    """8 of 128 experts a token: one token leaves 120 / 128, two the square of that, if all are as likely."""
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), decoder_graph(MIXTURE)[1]
    )
    mesh = types.SimpleNamespace(shape={"expert": 4})
    engine: Any = types.SimpleNamespace(model=MIXTURE, shards=4, mesh=mesh)
    unread = 4 * EXPERTS * (120 / 128) ** tokens
    assert programs._unread_experts(engine, params, tokens) == pytest.approx(unread, rel=1e-9)


@pytest.mark.parametrize(("slots", "experts"), [(128, 128), (1_024, 8)])
def test_a_gpu_applies_all_experts_to_2_048_tokens(slots, experts):
    """Four replicas of 128 slots share the experts; of 1,024 slots each token takes its 8 alone."""
    strategy = split(1, 4, 8, 2, 4)
    work = dataclasses.replace(WORK, prompts=8 * slots)
    found = sampler(work).generation(MIXTURE, strategy, slots).seconds["matmuls beyond that"]
    # Attention has 2,048 x 128 x (2 x 32 + 2 x 4) weights, the router 2,048 x 128, the head 2,048 x 151,936.
    used = 48 * (2_048 * 128 * (2 * 32 + 2 * 4) + 2_048 * 128) + 2_048 * 151_936
    flops = slots * 2 * (used + EXPERTS * experts / 128) / 4
    read = (EXPERTS / 4 + REST) * 2 / 4
    beyond = flops / 989e12 - read / (H100.accelerator.memory_gbs * 1e9)
    assert found == pytest.approx(1_000 * beyond, rel=0.01)


def test_tokens_go_to_their_experts_and_back():
    strategy = split(1, 4, 8, 2, 4)
    decoding = sampler().generation(MIXTURE, strategy, 8).seconds
    gbs = H100.ring(groups_of(strategy, "expert")).gbs * 1e9
    # In each of 48 layers 4 replicas of 8 slots gather 2,048 numbers of 2 bytes, and scatter the sums.
    each = 2 * 48 * (3 / 4) * (4 * 8 * 2_048 * 2) / gbs
    assert decoding["tokens to experts"] == pytest.approx(1_000 * each, rel=1e-6)
    assert (
        "tokens to experts"
        not in sampler().generation(MIXTURE, split(1, 4, 8, 2, p_g=1, t_g=4), 8).seconds
    )
    # 64 rows of 2,000 tokens over 8 replicas: 8 microbatches of one row each. Forward, again, backward.
    update = passes().training(MIXTURE, strategy).seconds
    row = 2 * 48 * (3 / 4) * (4 * 2_000 * 2_048 * 2) / gbs
    assert update["tokens to experts"] == pytest.approx(3 * 8 * row, rel=1e-6)


def groups_of(strategy, axis):
    """Positions of the devices of each group along an axis: data, fsdp, expert, context, tensor."""
    sizes = {"fsdp": strategy.fsdp, "expert": strategy.expert, "context": strategy.context}
    data = strategy.d // (strategy.fsdp * strategy.expert * strategy.context)
    places = np.arange(strategy.num_devices).reshape(data, *sizes.values(), strategy.t)
    moved = np.moveaxis(places, 1 + list(sizes).index(axis), -1)
    return moved.reshape(-1, sizes[axis])


def test_a_mixture_has_the_same_operations_however_its_experts_are_split():
    # Enough tokens, or reading the weights would take longer.
    work = dataclasses.replace(WORK, microbatch_tokens=32_000)
    one, four = (passes(work=work).training(MIXTURE, split(1, 4, 8, 2, e)) for e in (1, 4))
    assert four.seconds["compute"] == pytest.approx(one.seconds["compute"])


def test_no_device_holds_or_gathers_the_experts_of_others():
    costs = passes().training(MIXTURE, split(1, 4, 8, 2, 4))
    shard = (EXPERTS / 4 + REST) / 4 / 2
    assert costs.resident["master weights"] == pytest.approx(4 * shard, rel=1e-5)
    assert costs.resident["optimiser state"] == pytest.approx(8 * shard, rel=1e-5)
    gbs = H100.ring(groups_of(split(1, 4, 8, 2, 4), "fsdp")).gbs * 1e9
    # Forward and backward, 8 microbatches: half of what a device needs in bfloat16 is with another.
    gathered = 2 * 8 * 2 * shard / gbs
    assert costs.seconds["weights gathered"] == pytest.approx(gathered, rel=1e-5)


def test_replicas_of_experts_sum_the_gradients_of_the_rest_alone():
    """Four replicas, each with a quarter of the experts, and whole copies of everything else."""
    cluster, strategy = Cluster.parse("h100:1x4"), split(1, 1, 4, 1, 4)
    summed = passes(cluster).training(MIXTURE, strategy).seconds["gradients summed"]
    # 64 rows over 4 replicas, summed after each of 16 microbatches; a ring sends 3 / 4 twice.
    once = 2 * (3 / 4) * 4 * REST / (cluster.accelerator.link_gbs * 1e9)
    assert summed == pytest.approx(16 * once, rel=1e-4)


LONG = Workload(
    prompts=8,
    prompt_lengths=LengthDistribution.exactly(8_000),
    response_lengths=LengthDistribution.exactly(120_000),
    microbatch_tokens=128_000,
)
SEVEN_B = model_shapes("qwen2.5-7b")
# 28 layers of q, o, k, v and three matrices of 18,944, and the logits.
WEIGHTS_7B = 28 * (2 * 3_584**2 + 2 * 3_584 * 512 + 3 * 3_584 * 18_944) + 3_584 * 152_064


@pytest.mark.parametrize("context", [1, 2, 4])
def test_replicas_of_a_context_share_each_row(context):
    """7B at 128k on 8 H100: 8 rows, 8 replicas of one row, or fewer with a part of more rows each."""
    cluster = Cluster.parse("h100:1x8")
    found = passes(cluster, LONG, attention="splash").inference(
        SEVEN_B, split(1, 1, 8, 1, 1, context)
    )
    # Whatever the split, a device computes an eighth of 8 rows: 128,000 tokens, and pairs in causal tiles.
    matmuls = 2 * WEIGHTS_7B * 128_000
    pairs = 4 * 28 * 28 * 128 * 128_000**2 / 2
    rate = cluster.accelerator.roof.tflops("bfloat16") * 1e12
    assert found.seconds["compute"] == pytest.approx((matmuls + pairs) / rate, rel=5e-3)
    # 28 heads of q and of the output, 4 of k and of v, 128 wide in bfloat16, of a device's part of each row.
    sent = context * (128_000 / context) * (2 * 28 + 2 * max(4, context)) * 128 * 2
    expected = 28 * (1 - 1 / context) * sent / (cluster.accelerator.link_gbs * 1e9)
    assert found.seconds.get("parts of rows", 0.0) == pytest.approx(expected, rel=1e-6)


def test_a_context_divides_activations_and_not_weights():
    cluster = Cluster.parse("h100:1x8")
    one, four = (passes(cluster, LONG).training(SEVEN_B, split(1, 1, 8, 2, 1, c)) for c in (1, 4))
    assert four.resident == one.resident
    assert four.transient["kept of the layers"] == one.transient["kept of the layers"] / 4


@pytest.mark.parametrize(
    ("sharding", "weights", "moments"),
    [("replicated", 1, 1), ("ZeRO-1", 1, 8), ("FSDP", 2, 2), ("ZeRO-3", 8, 8)],
)
def test_replicas_hold_and_move_what_their_sharding_says(sharding, weights, moments):
    """7B on 8 H100, pairs of FSDP and four devices of a row: 8 rows of one microbatch each, two at a time."""
    cluster = Cluster.parse("h100:1x8")
    layout = dataclasses.replace(split(1, 1, 8, 2, 1, 4), sharding=sharding)
    found = passes(cluster, LONG).training(SEVEN_B, layout)
    params = SEVEN_B.num_params
    assert found.resident["master weights"] == pytest.approx(4 * params / weights, rel=1e-5)
    assert found.resident["optimiser state"] == pytest.approx(8 * params / moments, rel=1e-5)
    ring = {n: (n - 1) / n * params / (cluster.accelerator.link_gbs * 1e9) for n in (1, 2, 4, 8)}
    # Four microbatches, forward and backward, in bfloat16; or the changed weights, in float32.
    gathered = 4 * ring[8] if sharding == "ZeRO-1" else 4 * 2 * 2 * ring[weights]
    assert found.seconds["weights gathered"] == pytest.approx(gathered, rel=1e-5)
    # In float32: scattered over those that split them, and shards summed over the others, both ways.
    summed = 4 * 4 * (ring[weights] + 2 * ring[8 // weights] / weights)
    assert found.seconds["gradients summed"] == pytest.approx(summed, rel=1e-5)


def test_tokens_are_exchanged_where_a_run_exchanges_them():
    """gpt-oss-20b, 4 of 32 experts, over 8 replicas: 6.0 rows of a token in place of 14 (docs/models.md)."""
    model, layout = model_shapes("gpt-oss-20b"), split(1, 1, 8, 1, 8)
    cluster = Cluster.parse("h100:1x8")
    # 64 rows of 2,000 tokens over 8 replicas; 24 layers of 2,880 numbers; forward, again, backward.
    row = 2_000 * 2_880 * 2 / (cluster.accelerator.link_gbs * 1e9)
    hit = 1 - math.comb(28, 4) / math.comb(32, 4)
    update = passes(cluster).training(model, layout).seconds
    assert update["tokens to experts"] == pytest.approx(3 * 8 * 24 * 14 * hit * row, rel=1e-6)
    assert 14 * hit == pytest.approx(6.0, abs=0.05)
    # A run on CPU has no exchange.
    cpu = dataclasses.replace(cluster.accelerator, platform="cpu")
    update = passes(Cluster(cpu, (1, 8))).training(model, layout).seconds
    assert update["tokens to experts"] == pytest.approx(3 * 8 * 24 * 14 * row, rel=1e-6)


def test_few_long_rows_are_faster_shared_than_padded():
    """Two rows and eight replicas: six would compute padding, and a context of four leaves none idle."""
    cluster, two = Cluster.parse("h100:1x8"), dataclasses.replace(LONG, prompts=2)
    alone, shared = (
        passes(cluster, two).inference(SEVEN_B, split(1, 1, 8, 1, 1, c)).total_s for c in (1, 4)
    )
    assert shared < alone / 3
