"""Sequences that begin alike: what they share is laid out once, and each still sees all of its own tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.roles.packing import PackedShape, PrefixGroups, RowLimits, plan_packing


@st.composite
def grouped_batches(draw):
    """Lengths, prefix groups, and a shape that holds any such lengths."""
    tokens = draw(st.integers(2, 40))
    longest = draw(st.integers(1, tokens))
    minibatches, kin, each = (draw(st.integers(1, 3)) for _ in range(3))
    shared, lengths = [], []
    for _ in range(minibatches * kin):
        head = draw(st.integers(0, longest - 1))
        lengths += draw(st.lists(st.integers(head + 1, longest), min_size=each, max_size=each))
        shared += [head] * each
    count = minibatches * kin * each
    shape = RowLimits(draw(st.integers(1, 4)), tokens, longest).shape(
        count, minibatches=minibatches
    )
    return lengths, PrefixGroups(np.arange(count) // each, np.array(shared)), shape


def values_of(lengths, groups) -> list[np.ndarray]:
    """A number for each token, the same where tokens are shared."""
    return [
        np.where(np.arange(n) < shared, 1000 * group, 1_000_000 * (i + 1)) + np.arange(n)
        for i, (n, group, shared) in enumerate(
            zip(lengths, groups.group_B, groups.shared_B, strict=True)
        )
    ]


def test_by_hand():
    # Two answers to a prompt, of which two tokens are shared, and one to another.
    groups = PrefixGroups(np.array([0, 0, 1]), np.array([2, 2, 1]))
    packing = plan_packing([5, 6, 3], PackedShape(1, 1, 1, 14), prefix_groups=groups)
    np.testing.assert_array_equal(
        packing.fields()["segment_ids"][0, 0, 0], [1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 0, 0]
    )
    np.testing.assert_array_equal(
        packing.fields()["prefix_ids"][0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    )
    np.testing.assert_array_equal(
        packing.fields()["positions"][0, 0, 0], [0, 1, 2, 3, 4, 5, 2, 3, 4, 0, 1, 2, 0, 0]
    )


def test_an_answer_that_lies_alone_shares_nothing():
    groups = PrefixGroups(np.array([0, 0]), np.array([3, 3]))
    packing = plan_packing([5, 5], PackedShape(1, 1, 2, 6), prefix_groups=groups)
    np.testing.assert_array_equal(packing.fields()["prefix_ids"], 0)
    np.testing.assert_array_equal(packing.shared, 0)
    np.testing.assert_array_equal(packing.fields()["positions"][0, 0, :, :5], [np.arange(5)] * 2)


@given(grouped_batches())
def test_every_token_sees_what_came_before_it(batch):
    lengths, groups, shape = batch
    packing = plan_packing(lengths, shape, prefix_groups=groups)
    values = values_of(lengths, groups)
    packed = packing.pack(values, np.int64)
    for value, back in zip(values, packing.unpack(packed), strict=True):
        np.testing.assert_array_equal(back, value)
    T = shape.tokens
    rows = [
        x.reshape(-1, T)
        for x in (
            packed,
            packing.fields()["segment_ids"],
            packing.fields()["prefix_ids"],
            packing.fields()["positions"],
        )
    ]
    for i, value in enumerate(values):
        r, last = divmod(int(packing.starts[i] + lengths[i] - packing.shared[i] - 1), T)
        row, ids, prefix, positions = (x[r] for x in rows)
        places = np.arange(T) <= last
        seen = places & ((ids == ids[last]) | ((ids == prefix[last]) & (prefix[last] > 0)))
        np.testing.assert_array_equal(row[seen], value)
        np.testing.assert_array_equal(positions[seen], np.arange(len(value)))
        assert packing.starts[i] // (T * shape.rows * shape.microbatches) == i // (
            len(lengths) // shape.minibatches
        ), "in its own minibatch"


@given(grouped_batches())
def test_sharing_never_takes_more_places(batch):
    lengths, groups, shape = batch
    plain = plan_packing(lengths, shape)
    shared = plan_packing(lengths, shape, prefix_groups=groups)
    assert (shared.fields()["segment_ids"] > 0).sum() <= (plain.fields()["segment_ids"] > 0).sum()


def test_a_long_prompt_is_laid_out_once_a_row():
    lengths, groups = [100] * 16, PrefixGroups(np.arange(16) // 8, np.full(16, 90))
    shape = RowLimits(1, 200, 100).shape(16, minibatches=1)
    packing = plan_packing(lengths, shape, prefix_groups=groups)
    # Eight answers of ten tokens and their prompt: a row each, of 16 rows without sharing 8.
    assert (packing.fields()["segment_ids"] > 0).sum() == 2 * (90 + 8 * 10)
    assert packing.num_micro_U[0] == 2
    assert plan_packing(lengths, shape).num_micro_U[0] == 8


def test_prefix_groups_and_exchanged_minibatches_exclude_each_other():
    groups = PrefixGroups(np.zeros(2, int), np.zeros(2, int))
    with pytest.raises(AssertionError, match="split prefix groups"):
        plan_packing([1, 1], PackedShape(2, 1, 1, 4), fill_minibatches=True, prefix_groups=groups)
