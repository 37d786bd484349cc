"""The rows that the planner counts are those that a run packs."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from toy_clusters import toy, toy_model, toy_work

from jaxrl.data.packing import PackedShape, PrefixGroups, plan_packing
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.filled_rows import computed_pairs, filled_rows, pairs_of_one_text
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.workload import LengthDistribution, Strategy

MODEL = toy_model()


def packed(work, rows):
    """The batch of a step as a run packs it, with `rows` rows of a microbatch."""
    prompts, responses = work.lengths_of(work.prompts, work.samples)
    prompts = prompts.repeat(work.samples)
    shape = PackedShape.for_sequences(
        work.sequences,
        longest=work.longest_tokens,
        minibatches=work.updates,
        rows=rows,
        tokens=work.row_tokens,
    )
    groups = PrefixGroups(np.arange(work.sequences) // work.samples, prompts - 1)
    return plan_packing(
        prompts + responses.ravel(),
        shape,
        fill_minibatches=work.fill_minibatches,
        prefix_groups=groups if work.shares_prompts else None,
    )


@hypothesis.given(
    prompts=st.sampled_from((6, 12, 42)),
    mean=st.floats(20, 200),
    tokens=st.integers(320, 2000),
    rows=st.integers(1, 24),
    shares=st.booleans(),
)
def test_microbatches_are_those_of_a_packed_batch(prompts, mean, tokens, rows, shares):
    work = toy_work(
        prompts=prompts,
        response_lengths=LengthDistribution(mean, 256, "log-normal"),
        updates=3,
        microbatch_tokens=tokens,
        shares_prompts=shares,
    )
    real, filled = packed(work, rows), filled_rows(work)
    found = filled.microbatches(rows, fill_minibatches=False)
    assert found == pytest.approx(real.num_micro_U.mean())
    some = (real.segment_ids > 0).sum(-1)
    assert filled.total == (some > 0).sum()
    unused = work.row_tokens - some[some > 0]
    assert filled.unused == pytest.approx(unused.mean())


@hypothesis.given(
    mean=st.floats(20, 200),
    tokens=st.integers(320, 1000),
    block=st.sampled_from((32, 100, 512)),
    reach=st.sampled_from((None, 150)),
    shares=st.booleans(),
)
def test_computed_pairs_are_those_of_the_tiles_with_a_visible_pair(
    mean, tokens, block, reach, shares
):
    work = toy_work(
        response_lengths=LengthDistribution(mean, 256, "log-normal"),
        microbatch_tokens=tokens,
        shares_prompts=shares,
    )
    real = packed(work, 1)
    prefix = np.zeros_like(real.segment_ids) if real.prefix_ids is None else real.prefix_ids
    pairs = 0
    for own, before in zip(
        rows_in_use(real.segment_ids, real), rows_in_use(prefix, real), strict=True
    ):
        distance = np.arange(tokens_of := len(own))[:, None] - np.arange(tokens_of)
        seen = (own[:, None] == own) | ((before[:, None] == own) & (before[:, None] > 0))
        seen &= (distance >= 0) & (distance < (reach or tokens_of))
        starts = range(0, tokens_of, block)
        tiles = sum(seen[i : i + block, j : j + block].any() for i in starts for j in starts)
        pairs += tiles * min(block, tokens_of) ** 2
    found = computed_pairs(work, 1, block, reach)
    if shares or reach:
        # The ranges of ids, and the distance of blocks, may meet without a visible pair.
        assert pairs <= found <= 2 * pairs
    else:
        assert found == pairs


def rows_in_use(field, packing):
    """The rows of a packed field that hold tokens."""
    return field[(packing.segment_ids > 0).any(-1)]


def test_rows_that_are_computed_at_once_share_their_tiles():
    # Rows of 320 tokens hold two texts of 160, in tiles of 80: 3 + 3 of 10 pairs of blocks for each text.
    work = toy_work(prompts=8, samples=2, response_lengths=LengthDistribution.exactly(96))
    work = dataclasses.replace(work, microbatch_tokens=320)
    assert computed_pairs(work, 1, 80, None) == 8 * 6 * 80**2
    assert computed_pairs(work, 2, 80, None) == 8 * 6 * 80**2
    assert pairs_of_one_text(320, 80, None) == 10 * 80**2
    assert pairs_of_one_text(320, 80, 81) == 7 * 80**2
    # With one row of two texts and one of one text, both compute all tiles.
    mixed = dataclasses.replace(
        work,
        prompts=3,
        samples=1,
        updates=1,
        prompt_lengths=LengthDistribution.measured([64, 64, 224], 224),
    )
    assert filled_rows(mixed).rows_U == (2,)
    assert computed_pairs(mixed, 1, 80, None) == (10 + 6) * 80**2
    assert computed_pairs(mixed, 2, 80, None) == 2 * 10 * 80**2


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_minibatches_that_exchange_sequences_have_one_partly_filled_microbatch(rows):
    work = toy_work(prompts=200, updates=8, microbatch_tokens=1024, fill_minibatches=True)
    found = filled_rows(work).microbatches(rows, fill_minibatches=True)
    # One microbatch of the step more or less, or 5%: some gaps remain.
    real = packed(work, rows).num_micro_U.mean()
    assert abs(found - real) <= max(1 / work.updates, 0.05 * real)
    assert found <= filled_rows(work).microbatches(rows, fill_minibatches=False)


def test_empty_rows_cost_as_much_as_full_ones():
    # Eight texts of 160 tokens in an update, in four rows of 320 or in a microbatch of 16.
    work = toy_work(prompts=8, samples=2, response_lengths=LengthDistribution.exactly(96))
    work = dataclasses.replace(work, microbatch_tokens=320)
    kernels = (Assumptions(overlap=0.0), Assumptions(overlap=0.0, attention="splash"))
    cluster, one = Cluster(toy(memory_gbs=1e4), (1, 4)), Strategy(1, 1, 1)
    for assume in kernels:
        of_rows = {
            rows: PassSimulator(
                cluster, dataclasses.replace(work, microbatch_rows=rows), assume
            ).training(MODEL, one)
            for rows in (1, 4, 16)
        }
        compute = {rows: found.seconds["compute"] for rows, found in of_rows.items()}
        assert compute[1] == pytest.approx(compute[4])
        # Empty rows of "xla" are one segment, with more pairs than two texts.
        assert 4 * compute[4] <= compute[16] * (1 + 1e-9)
        assert compute[16] < 4.2 * compute[4]
