"""The seconds of a token and of an update: what one H200 took on 26 November 2026, and sums by hand."""

import pytest
from toy_clusters import split, toy_work

from jaxrl.models.shapes import model_shapes
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.kernel_times import TABLES, KernelTable, TokenCounts
from jaxrl_planner.simulation.model_numbers import model_numbers
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.workload import LengthDistribution

H200 = Cluster.parse("h200:1x1")
MODEL = model_shapes("qwen2.5-1.5b")
# The layers, which the scan of that day copied out of their stack: 28 x 46.8 million values of two bytes.
LAYERS = 2.62e9
# GB of kernels that neither multiply nor attend, and of what those write: counted in that day's programs.
MOVED = {16: 0.40 + 0.155, 64: 1.54 + 0.62, 256: 5.25 + 1.71}


def ms_a_token(rows, kernels, *, prompt=16, response=256, dispatch=16, rounds=3, visits=4):
    """Milliseconds of a token of Qwen2.5-1.5B: all rows begin and end together."""
    counts = TokenCounts(kernels, LAYERS, MOVED[rows] * 1e9 / rows, visits, rounds)
    work = toy_work(
        prompts=rows,
        samples=1,
        prompt_lengths=LengthDistribution.exactly(prompt),
        response_lengths=LengthDistribution.exactly(response),
        tokens_per_dispatch=dispatch,
    )
    assume = Assumptions.on(H200.accelerator, fixed_slots=True, token=counts)
    costs = GenerationSimulator(H200, work, assume).generation(MODEL, split(1, 1, 1), rows)
    return 1e3 * costs.total_s / response


@pytest.mark.parametrize(
    ("measured", "counted"),
    [
        (4.4, {"rows": 16, "kernels": 1017}),
        (5.5, {"rows": 64, "kernels": 1017}),
        (9.5, {"rows": 256, "kernels": 1104}),
        # Contiguous: each slot is written once and not in two pages.
        (8.9, {"rows": 256, "kernels": 1104, "rounds": 2}),
        # Loops are part of CUDA graphs, and the host is not asked.
        (8.3, {"rows": 256, "kernels": 1104, "rounds": 0, "visits": 0}),
        # Sampling of a step: 512 tokens in 4.83 s, after prompts of 88.
        (9.43, {"rows": 256, "kernels": 1104, "prompt": 88, "response": 512, "dispatch": 64}),
    ],
    ids=["16", "64", "256", "contiguous", "graphs", "step"],
)
def test_a_token_takes_what_was_measured(measured, counted):
    assert ms_a_token(**counted) == pytest.approx(measured, rel=0.15)


def test_an_update_takes_what_was_measured():
    """19 rows of 8,192 tokens in 6.63 s, with the head in TF32 and attention with a mask."""
    table = TABLES["gpu"]
    products = 83.4 / 640 + 11.47 / 346
    moved = table.moved_s(333e9, H200.accelerator.memory_gbs)
    assert 19 * table.together_s(products, 0.135, moved) == pytest.approx(6.63, rel=0.15)


def test_a_token_by_hand():
    """Costs of one second, one of each kind."""
    table = KernelTable(kernel_s=1, visit_s=10, round_s=100, copy_rate=0.5)
    counts = TokenCounts(kernels=7, copied=3e9, row_bytes=1e9, visits=2, row_rounds=4)
    # Of 2 GB/s half: copies are read and written. 5 rows x 4 rounds in dispatches of 10 tokens.
    assert table.token_s(counts, 5, 10, 2.0) == {
        "small kernels": 7,
        "layers copied out of their stack": 6,
        "activations and logits": 5,
        "visits of the host": 2 * 10 + 2 * 100,
    }


def small(layout, cluster=H200, **changes):
    work = toy_work(prompts=4, samples=1, response_lengths=LengthDistribution.exactly(600))
    assume = Assumptions.on(H200.accelerator, **changes)
    return GenerationSimulator(cluster, work, assume).generation(MODEL, layout, 4).seconds


def test_layers_are_copied_in_stages_alone():
    listed = small(split(1, 1, 1))
    assert listed["layers copied out of their stack"] == 0
    # 11 kernels a layer, and 21 besides: 329 of 1.6 us.
    assert listed["small kernels"] == pytest.approx(600 * 329 * 1.6e-6)
    staged = small(split(2, 1, 1), Cluster.parse("h200:1x2"))
    # At least 600 tokens, of each stage 2 x 1.31 GB at .68 of 4.8 TB/s: .48 s.
    assert staged["layers copied out of their stack"] > 0.48
    table = TABLES["gpu"].token(model_numbers(MODEL), 2, 1, LAYERS / 2)
    # Of 14 layers 40 kernels each.
    assert (table.kernels, table.copied) == (14 * 40 + 21, LAYERS / 2)


def test_the_kernel_of_decoding_reads_the_cache_at_its_own_rate():
    kernel, plain = (
        small(split(1, 1, 1), fixed_slots=fixed)["cache read"] for fixed in (True, False)
    )
    assert kernel / plain == pytest.approx(0.7 / 0.27)


def test_on_a_tpu_operations_cost_a_microsecond_each():
    v5p = Cluster.parse("v5p:2x2x1")
    work = toy_work(prompts=4, samples=1, response_lengths=LengthDistribution.exactly(100))
    assume = Assumptions.on(v5p.accelerator)
    found = GenerationSimulator(v5p, work, assume).generation(MODEL, split(1, 1, 4), 1).seconds
    # 28 layers of 20, and 62 besides.
    assert found["small kernels"] == pytest.approx(100 * (28 * 20 + 62) * 1e-6)
    assert found["overhead of each step"] == found["activations and logits"] == 0


def test_other_bytes_of_an_update_are_those_that_were_counted():
    """One row of 8,192 tokens of Qwen2.5-1.5B, in chunks of 1,024 logits and of as many as on GPUs.

    232 and 226 GB, of which 49.4 are the optimiser's.
    """
    work = toy_work(
        prompts=1,
        samples=1,
        prompt_lengths=LengthDistribution.exactly(4096),
        response_lengths=LengthDistribution.exactly(4096),
        updates=1,
        microbatch_tokens=8192,
    )
    for logits, counted in ((1024, 232), (1766, 226.2)):
        assume = Assumptions.on(H200.accelerator, attention="cudnn", logits_tokens=logits)
        found = PassSimulator(H200, work, assume).training(MODEL, split(1, 1, 1)).seconds
        moved = found["activations, logits and casts"]
        assert moved == pytest.approx((counted - 49.4) / (0.68 * 4800), rel=0.05)
        parts = (found["compute"], found["layers computed again"], moved)
        assert found["run side by side"] == pytest.approx(-0.13 * sum(parts))


def test_the_last_product_of_experts_is_not_computed_again_either():
    """48 layers, 8 experts of 2,048 x 768 a token: 1.21 GFLOP."""
    found = model_numbers(model_shapes("qwen3-30b-a3b")).down_flops
    assert found == 2 * 48 * 8 * 2048 * 768 == 1_207_959_552


def test_layers_computed_again_of_the_32b_by_hand():
    """36.1 million tokens x 45.9 GFLOP without the down projection, and .55 EFLOP of attention: 29.3 s."""
    model = model_shapes("qwen2.5-32b")
    h100 = Cluster.parse("h100:16x8")
    rows = 36.1e6 / 22_528
    work = toy_work(
        prompts=round(rows / 16) * 16,
        samples=1,
        prompt_lengths=LengthDistribution.exactly(2048),
        response_lengths=LengthDistribution.exactly(20_480),
        updates=1,
        microbatch_tokens=22_528,
    )
    assume = Assumptions.on(h100.accelerator, attention="cudnn")
    found = PassSimulator(h100, work, assume).training(model, split(1, 8, 16, 16)).seconds
    assert found["layers computed again"] == pytest.approx(29.3, rel=0.03)
