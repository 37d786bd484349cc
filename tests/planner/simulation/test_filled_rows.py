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
from jaxrl.planner.simulation.filled_rows import filled_rows
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
    assert filled.unused_square == pytest.approx((unused.astype(float) ** 2).mean())


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
