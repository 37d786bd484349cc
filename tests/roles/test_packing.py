"""Packing: every sequence in one piece, in its own minibatch, in a shape that is always large enough."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.errors import UserError
from jaxrl.roles.packing import PackedShape, RowLimits, plan_packing


@st.composite
def batches(draw) -> tuple[list[int], PackedShape]:
    """Lengths of a step's sequences, and the shape that was made for any such lengths."""
    tokens = draw(st.integers(1, 40))
    longest = draw(st.integers(1, tokens))
    minibatches = draw(st.integers(1, 3))
    each = draw(st.integers(1, 8))
    # Around a half and a third of a row is where first-fit is at its worst.
    lengths = st.one_of(
        st.integers(1, longest),
        st.sampled_from([tokens // k + more for k in (1, 2, 3) for more in (-1, 0, 1, 2)]).filter(
            lambda n: 1 <= n <= longest
        ),
    )
    count = minibatches * each
    shape = RowLimits(draw(st.integers(1, 5)), tokens, longest).shape(
        count, minibatches=minibatches
    )
    return draw(st.lists(lengths, min_size=count, max_size=count)), shape


def dims(shape: PackedShape) -> tuple[int, int, int, int]:
    return shape.minibatches, shape.microbatches, shape.rows, shape.tokens


def rows_in_use(packing) -> np.ndarray:
    """Which rows hold anything, bool [U, M * R]."""
    U, M, R, _ = dims(packing.shape)
    return (packing.fields()["segment_ids"] > 0).any(axis=-1).reshape(U, M * R)


def test_by_hand():
    # The longest first; 3 fits beside 5, the next 3 and the 1 open a second row.
    packing = plan_packing([3, 5, 1, 3], PackedShape(1, 2, 1, 8))
    expected = [[[2, 2, 2, 2, 2, 1, 1, 1]], [[4, 4, 4, 3, 0, 0, 0, 0]]]
    values = [np.full(n, i) for i, n in enumerate([3, 5, 1, 3], start=1)]
    np.testing.assert_array_equal(packing.pack(values, np.int32), [expected])
    np.testing.assert_array_equal(
        packing.fields()["segment_ids"], [[[[1, 1, 1, 1, 1, 2, 2, 2]], [[1, 1, 1, 2, 0, 0, 0, 0]]]]
    )
    np.testing.assert_array_equal(
        packing.fields()["positions"], [[[[0, 1, 2, 3, 4, 0, 1, 2]], [[0, 1, 2, 0, 0, 0, 0, 0]]]]
    )
    np.testing.assert_array_equal(packing.num_micro_U, [2])


@given(batches())
def test_every_sequence_lies_in_one_piece_in_its_own_minibatch(batch):
    lengths, shape = batch
    packing = plan_packing(lengths, shape)
    U, M, R, T = dims(shape)
    owner = np.full(U * M * R * T, -1)
    for i, (start, length) in enumerate(zip(packing.starts, lengths, strict=True)):
        assert start // T == (start + length - 1) // T, "in one row"
        assert np.all(owner[start : start + length] == -1), "on nobody else's place"
        owner[start : start + length] = i
        # Sequences go to minibatches in order, as many to each.
        assert start // (M * R * T) == i // (len(lengths) // U)
        np.testing.assert_array_equal(
            packing.fields()["positions"].reshape(-1)[start : start + length], np.arange(length)
        )
    segment = packing.fields()["segment_ids"].reshape(-1, T)
    for owners, segments in zip(owner.reshape(-1, T), segment, strict=True):
        real = owners >= 0
        np.testing.assert_array_equal(segments > 0, real)
        # One number for each sequence of the row, counted from 1, and no gap before the padding.
        pairs = set(zip(owners[real].tolist(), segments[real].tolist(), strict=True))
        assert sorted(s for _, s in pairs) == list(range(1, len(set(owners[real])) + 1))
        assert np.all(np.diff(real.astype(int)) <= 0)
    assert np.all(packing.fields()["positions"].reshape(-1)[owner == -1] == 0)


def test_last_sequences_lie_in_the_last_rows_by_hand():
    packing = plan_packing([2, 8, 4, 4], PackedShape(1, 4, 1, 8), last_B=np.arange(4) < 2)
    values = [np.full(n, i) for i, n in enumerate([2, 8, 4, 4], start=1)]
    rows = packing.pack(values, np.int32)[0, :, 0]
    assert [sorted(set(row)) for row in rows.tolist()] == [[3, 4], [2], [0, 1], [0]]
    # Without the wish the 2 has no place of its own.
    assert list(plan_packing([2, 8, 4, 2], PackedShape(1, 2, 1, 8)).num_micro_U) == [2]


@given(batches(), st.integers(0, 2**32 - 1))
def test_last_sequences_are_behind_all_others_if_there_is_room(batch, seed):
    lengths, shape = batch
    last_B = np.random.default_rng(seed).random(len(lengths)) < 0.5
    packing = plan_packing(lengths, shape, last_B=last_B)
    numbers = packing.pack([np.full(n, i + 1) for i, n in enumerate(lengths)], np.int32)
    assert (np.bincount(numbers.reshape(-1), minlength=len(lengths) + 1)[1:] == lengths).all()
    for rows in numbers.reshape(shape.minibatches, -1, shape.tokens):
        kinds = [set(last_B[row[row > 0] - 1]) for row in rows if row.any()]
        # Rows of others, then rows of last ones; all mixed as before where two kinds of rows are too many.
        mixed = any(len(kind) > 1 for kind in kinds)
        assert mixed or kinds == sorted(kinds, key=lambda kind: True in kind)


@given(batches(), st.integers(0, 2**32 - 1))
def test_unpacking_is_the_inverse_of_packing(batch, seed):
    lengths, shape = batch
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=n).astype(np.float32) for n in lengths]
    packing = plan_packing(lengths, shape)
    packed = packing.pack(values, np.float32)
    assert packed.shape == dims(shape)
    assert packed.dtype == np.float32
    assert np.all(packed[packing.fields()["segment_ids"] == 0] == 0), "padding is 0"
    for original, back in zip(values, packing.unpack(packed), strict=True):
        np.testing.assert_array_equal(back, original)


@given(batches())
def test_microbatches_in_use_are_counted_and_come_first(batch):
    lengths, shape = batch
    packing = plan_packing(lengths, shape)
    U, M, R, _ = dims(shape)
    used = rows_in_use(packing)
    assert packing.num_micro_U.dtype == np.int32
    np.testing.assert_array_equal(packing.num_micro_U, used.reshape(U, M, R).any(-1).sum(-1))
    for rows in used:
        # Full rows, then empty ones: only the last microbatch in use may have any.
        assert np.all(np.diff(rows.astype(int)) <= 0)


@given(batches())
def test_at_most_one_row_of_a_minibatch_is_half_empty(batch):
    lengths, shape = batch
    filled = (plan_packing(lengths, shape).fields()["segment_ids"] > 0).sum(-1)
    for rows in filled.reshape(shape.minibatches, -1):
        assert np.sum(rows[rows > 0] * 2 <= shape.tokens) <= 1


# Balance

SHARDED = PackedShape(minibatches=1, microbatches=4, rows=4, tokens=100)


def work_of(packing, shards: int) -> np.ndarray:
    """Sums of squared lengths on each shard, [U, M, shards]."""
    U, M, R, T = dims(packing.shape)
    work = np.bincount(packing.starts // T, packing.lengths**2, minlength=U * M * R)
    return work.reshape(U, M, shards, -1).sum(-1)


def test_rows_of_one_work_share_a_microbatch_by_hand():
    # Full rows of one, two, five and ten sequences, four of each.
    lengths = [100] * 4 + [50] * 8 + [20] * 20 + [10] * 40
    lengths = np.random.default_rng(0).permutation(lengths)
    work = work_of(plan_packing(lengths, SHARDED, shards=4), 4)
    np.testing.assert_array_equal(work, [[[n] * 4 for n in (10_000, 5_000, 2_000, 1_000)]])


def test_shards_of_several_rows_get_as_much_work_by_hand():
    # One microbatch: rows of one, two, five and ten sequences; the heaviest two are apart.
    lengths = [100] + [50] * 2 + [20] * 5 + [10] * 10
    work = work_of(plan_packing(lengths, SHARDED, shards=2), 2)
    np.testing.assert_array_equal(work[0, 0], [10_000 + 1_000, 5_000 + 2_000])


@given(batches(), st.sampled_from([1, 2, 4]))
def test_shards_change_nothing_but_the_order_of_rows(batch, shards):
    lengths, shape = batch
    shape = dataclasses.replace(shape, rows=shape.rows * 4)
    plain, dealt = plan_packing(lengths, shape), plan_packing(lengths, shape, shards=shards)
    np.testing.assert_array_equal(plain.num_micro_U, dealt.num_micro_U)
    U, M, R, T = dims(shape)
    for one, other in zip(
        plain.fields()["segment_ids"].reshape(-1, R, T),
        dealt.fields()["segment_ids"].reshape(-1, R, T),
        strict=True,
    ):
        assert sorted(map(tuple, one)) == sorted(map(tuple, other)), "the same rows in a microbatch"
    used = (dealt.fields()["segment_ids"] > 0).any(-1).reshape(U, M, shards, -1).sum(-1)
    assert np.all(used.max(-1) - used.min(-1) <= R // shards), "no shard has more than its rows"


def log_normal(num: int, *, mean: int, longest: int, seed: int) -> np.ndarray:
    """Lengths as of DAPO's samples: a long tail, some of them cut at the limit."""
    spread = 0.9
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, num)
    return np.clip(drawn, 50, longest).astype(int)


def useful(packing) -> float:
    """Share of the places of microbatches in use that hold a token."""
    _, _, R, T = dims(packing.shape)
    return packing.lengths.sum() / (packing.num_micro_U.sum() * R * T)


# A step of DAPO: 512 prompts x 16 samples in 16 minibatches.
@pytest.mark.parametrize(
    ("tokens", "rows", "mean", "minibatches"),
    [
        (20_480, 8, 5_000, 4),
        (22_528, 16, 5_000, 8),
        (20_480, 64, 2_500, 4),
        pytest.param(20_480, 16, 2_500, 16, marks=pytest.mark.long),
        pytest.param(20_480, 32, 5_000, 16, marks=pytest.mark.long),
    ],
)
def test_97_percent_of_the_places_of_a_dapo_step_are_used(tokens, rows, mean, minibatches):
    num = 512 * minibatches
    lengths = log_normal(num, mean=mean, longest=20_480, seed=rows)
    shape = RowLimits(rows, tokens, 20480).shape(num, minibatches=minibatches)
    plain = plan_packing(lengths, shape)
    started_s = time.process_time()
    filled = plan_packing(lengths, shape, shards=rows, fill_minibatches=True)
    assert time.process_time() - started_s < 5
    assert useful(filled) >= useful(plain)
    # A minibatch of one or two microbatches has no choice: its number of sequences is given.
    few = plain.num_micro_U.mean() < 2.5
    assert useful(filled) >= (0.85 if few else 0.97)
    # Rows themselves are full: what is lost without the exchange are rows of the last microbatches.
    assert lengths.sum() / rows_in_use(plain).sum() / tokens > 0.985


def test_work_is_even_over_the_shards_of_a_dapo_step():
    lengths = log_normal(8192, mean=5_000, longest=20_480, seed=0)
    shape = RowLimits(16, 20480, 20480).shape(8192, minibatches=16)
    work = work_of(plan_packing(lengths, shape, shards=16, fill_minibatches=True), 16)
    assert work.max(-1).sum() / work.mean(-1).sum() < 1.35


@given(batches())
def test_filled_minibatches_hold_as_many_and_run_no_more_microbatches(batch):
    lengths, shape = batch
    plain = plan_packing(lengths, shape)
    filled = plan_packing(lengths, shape, fill_minibatches=True)
    assert filled.num_micro_U.sum() <= plain.num_micro_U.sum()
    U, M, R, T = dims(shape)
    counts = np.bincount(filled.starts // (M * R * T), minlength=U)
    assert np.all(counts == len(lengths) // U)
    values = [np.full(n, i) for i, n in enumerate(lengths)]
    for i, back in enumerate(filled.unpack(filled.pack(values, np.int32))):
        assert np.all(back == i) and len(back) == lengths[i]


def test_minibatches_are_filled_by_hand():
    # Rows of 10, a microbatch each: 12 and 8 tokens in three; once the 4 and a 2 change places, in two.
    shape, lengths = PackedShape(2, 2, 1, 10), [6, 4, 1, 1, 3, 2, 2, 1]
    assert plan_packing(lengths, shape).num_micro_U.tolist() == [2, 1]
    filled = plan_packing(lengths, shape, fill_minibatches=True)
    assert filled.num_micro_U.tolist() == [1, 1]
    np.testing.assert_array_equal(filled.starts // 20, [0, 1, 0, 0, 1, 0, 1, 1])


# The worst case


@pytest.mark.parametrize("tokens", range(1, 8))
def test_the_shape_holds_the_worst_case_and_nothing_spare(tokens):
    """All multisets of up to five lengths: first-fit never needs more rows, and sometimes needs all."""
    for longest, count in itertools.product(range(1, tokens + 1), range(1, 6)):
        shape = RowLimits(1, tokens, longest).shape(count, minibatches=1)
        needed = [
            int(plan_packing(lengths, shape).num_micro_U[0])
            for lengths in itertools.combinations_with_replacement(range(1, longest + 1), count)
        ]
        assert max(needed) == shape.microbatches


def test_a_shape_by_hand():
    # 512 sequences in 16 updates: 32 each. Two of at most 60 fit into 128: 16 rows, 4 at a time.
    shape = RowLimits(4, 128, 60).shape(512, minibatches=16)
    assert dims(shape) == (16, 4, 4, 128)
    # With 65 only one fits; 32 rows of 5 leave the seventh microbatch partly empty.
    shape = RowLimits(5, 128, 65).shape(512, minibatches=16)
    assert dims(shape) == (16, 7, 5, 128)


# Errors


def test_sequences_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="100 sequences do not divide into 3 minibatches; choose"):
        RowLimits(1, 8, 4).shape(100, minibatches=3)


def test_a_row_shorter_than_a_sequence_is_refused():
    with pytest.raises(UserError, match="rows of 8 tokens cannot hold a sequence of 9; raise"):
        RowLimits(1, 8, 9).shape(4, minibatches=1)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2, 3], "3 sequences do not divide into 2 minibatches"),
        ([1, 9], "1 to 8 tokens"),
        ([1, 0], "1 to 8 tokens"),
        ([8, 8, 8, 8, 8, 8], "minibatch 0 fills 3 rows, the shape has 1 x 2"),
    ],
)
def test_sequences_the_shape_was_not_made_for_are_noticed(lengths, message):
    with pytest.raises(AssertionError, match=message):
        plan_packing(lengths, PackedShape(2, 1, 2, 8))
