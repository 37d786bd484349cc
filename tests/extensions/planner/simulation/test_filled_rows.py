"""The rows that the planner counts are those that a run packs."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_clusters import split, toy, toy_model, toy_work

from jaxrl.models import xla_attention
from jaxrl.models.attention_kind import FULL
from jaxrl.roles.packing import PrefixGroups, RowLimits, plan_packing
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.filled_rows import filled_rows, pairs_of_a_row, pairs_of_one_text
from jaxrl_planner.simulation.simulate_passes import BACKWARD_ATTENTION, PassSimulator
from jaxrl_planner.simulation.workload import LengthDistribution

MODEL = toy_model()


def packed(work, rows, shards=1):
    """The batch of a step as a run packs it, with `rows` rows of a microbatch."""
    prompts, responses = work.lengths_of(work.prompts, work.samples)
    prompts = prompts.repeat(work.samples)
    shape = RowLimits(rows, work.row_tokens, work.longest_tokens).shape(
        work.sequences, minibatches=work.updates
    )
    groups = PrefixGroups(np.arange(work.sequences) // work.samples, prompts - 1)
    return plan_packing(
        prompts + responses.ravel(),
        shape,
        shards=shards,
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
    some = (real.fields()["segment_ids"] > 0).sum(-1)
    assert sum(filled.rows_U) == (some > 0).sum()
    unused = work.row_tokens - some[some > 0]
    assert filled.unused == pytest.approx(unused.mean())


@hypothesis.given(
    mean=st.floats(20, 200),
    tokens=st.integers(320, 1000),
    block=st.sampled_from((32, 100, 512)),
    reach=st.sampled_from((None, 150)),
    shares=st.booleans(),
    fills=st.booleans(),
    replicas=st.integers(1, 3),
    parts=st.integers(1, 2),
    together=st.integers(1, 2),
)
def test_pairs_are_those_of_the_tiles_with_a_visible_pair_on_the_busiest_replica(
    mean, tokens, block, reach, shares, fills, replicas, parts, together
):
    work = toy_work(
        response_lengths=LengthDistribution(mean, 256, "log-normal"),
        microbatch_tokens=tokens,
        updates=2,
        shares_prompts=shares,
        # An exchange would split groups.
        fill_minibatches=fills and not shares,
    )
    rows = replicas * parts * together
    real, T = packed(work, rows, replicas), work.row_tokens
    ids = real.fields()["segment_ids"]
    prefix = real.fields().get("prefix_ids", np.zeros_like(ids))
    distance = np.arange(T)[:, None] - np.arange(T)
    before = (distance >= 0) & (distance < (reach or T))
    starts = range(0, T, block)
    busiest = []
    for u, used in enumerate(real.num_micro_U):
        for m in range(used):
            of_replica = np.zeros(replicas)
            for part in range(replicas * parts):
                here = slice(part * together, (part + 1) * together)
                seen = np.zeros((T, T), bool)
                for own, of_prefix in zip(ids[u, m, here], prefix[u, m, here], strict=True):
                    seen |= (own[:, None] == own) & (own > 0)
                    seen |= (of_prefix[:, None] == own) & (of_prefix[:, None] > 0)
                seen &= before
                # Padding is computed with itself alone.
                tiles = sum(
                    i == j or seen[i : i + block, j : j + block].any()
                    for i in starts
                    for j in starts
                )
                of_replica[part // parts] += tiles * min(block, T) ** 2 / parts
            busiest.append(of_replica.max())
    found = pairs_of_a_row(work, rows, replicas, block, reach, parts)
    if shares or reach:
        # The ranges of ids, and the distance of blocks, may meet without a visible pair.
        assert np.mean(busiest) <= found <= 2 * np.mean(busiest)
    else:
        assert found == pytest.approx(np.mean(busiest))


@dataclasses.dataclass(frozen=True)
class ListedLengths(LengthDistribution):
    """Three lengths."""

    def quantiles(self, count: int) -> np.ndarray:
        return np.array([64, 64, 224])[:count]


def test_a_row_costs_the_tiles_of_the_rows_beside_it_and_of_the_busiest_replica():
    # Rows of 320 tokens hold two texts of 160, in tiles of 80: 3 + 3 of 10 pairs of blocks for each text.
    work = toy_work(prompts=8, samples=2, response_lengths=LengthDistribution.exactly(96))
    work = dataclasses.replace(work, microbatch_tokens=320)
    assert pairs_of_a_row(work, 1, 1, 80, None) == 6 * 80**2
    assert pairs_of_a_row(work, 2, 1, 80, None) == 6 * 80**2
    assert pairs_of_one_text(320, 80, None) == 10 * 80**2
    assert pairs_of_one_text(320, 80, 81) == 7 * 80**2
    # A row of two texts and one of one text.
    mixed = dataclasses.replace(
        work, prompts=3, samples=1, updates=1, prompt_lengths=ListedLengths(120, 224)
    )
    assert filled_rows(mixed).rows_U == (2,)
    assert pairs_of_a_row(mixed, 1, 1, 80, None) == (10 + 6) / 2 * 80**2
    # On two replicas one waits for the other; computed at once, both compute all tiles.
    assert pairs_of_a_row(mixed, 2, 2, 80, None) == 10 * 80**2
    assert pairs_of_a_row(mixed, 2, 1, 80, None) == 10 * 80**2
    assert pairs_of_a_row(mixed, 2, 1, 80, None, parts=2) == (10 + 6) / 2 * 80**2


def test_tiles_and_flops_are_those_of_the_compiled_program(monkeypatch):
    work = toy_work(
        prompts=4,
        updates=1,
        response_lengths=LengthDistribution(60, 256, "log-normal"),
        microbatch_tokens=500,
    )
    block, together, heads, size, ran = 64, 2, 2, 256, []
    scores = xla_attention._scores

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: ran.append(1))
        return scores(*args, **kwargs)

    def attend(q, k, v, ids):
        return xla_attention.xla_attention(q, k, v, ids, FULL, block_tokens=block)

    def learn(q, k, v, ids):
        # Its result is the gradient that it is given: a constant one would save a matmul.
        out, backward = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
        return backward(out)

    def arrays(tokens):
        return [jnp.ones((together, tokens, heads, size))] * 3

    # XLA counts the body of a loop once: one tile. With a single block there is no loop, and the backward
    # pass would use the scores of the forward pass.
    one = [*arrays(3 * block), jnp.ones((together, 3 * block), jnp.int32)]
    forward, both = (
        dict(jax.jit(f).lower(*one).compile().cost_analysis() or {})["flops"]
        for f in (attend, learn)
    )
    of_tile = 4 * heads * size * together * block**2
    assert forward == pytest.approx(of_tile, rel=0.05)
    assert both - forward == pytest.approx(BACKWARD_ATTENTION["xla"] / 2 * of_tile, rel=0.05)
    # The rounds of its loops.
    monkeypatch.setattr(xla_attention, "_scores", counted)
    real = packed(work, together)
    program = jax.jit(attend)
    micros = int(real.num_micro_U[0])
    for ids in real.fields()["segment_ids"][0, :micros]:
        jax.block_until_ready(program(*arrays(work.row_tokens), jnp.asarray(ids)))
    jax.effects_barrier()
    found = pairs_of_a_row(work, together, 1, block, None)
    assert micros > 1
    assert len(ran) * block**2 == pytest.approx(found * micros)


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
    cluster, one = Cluster(toy(memory_gbs=1e4), (1, 4)), split(1, 1, 1)
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
