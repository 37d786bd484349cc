"""Pages of slots: nobody's page is given away, and all come back."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.page_pool import PagePool

PAGE = 4


def pool_of(slots=4, shards=1, num_pages=20, pages_per_slot=6) -> PagePool:
    return PagePool(PageSizes(shards, PAGE, num_pages, pages_per_slot), slots)


def tokens(n, first=0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def test_the_example_of_the_docstring():
    pool = pool_of(slots=3)
    for slot in range(3):
        pool.start(slot, tokens(9), 9)
    assert pool.table_nP.tolist() == [[1, 2, 3, 0, 0, 0], [1, 2, 4, 0, 0, 0], [1, 2, 5, 0, 0, 0]]
    assert pool.shared_n.tolist() == [0, 2, 2]
    pool.grow(np.array([0, 2]), np.array([13, 12]))
    assert pool.table_nP[:, :4].tolist() == [[1, 2, 3, 6], [1, 2, 4, 0], [1, 2, 5, 0]]
    pool.release(np.array([0, 1]))
    assert pool.num_free_S[0] == 19 - 3 and pool.table_nP[2].tolist() == [1, 2, 5, 0, 0, 0]
    pool.release(np.array([2]))
    assert pool.num_free_S[0] == 19 and not pool.table_nP.any()
    # What free pages hold is known until they hold something else.
    pool.start(1, tokens(9), 9)
    assert pool.shared_n.tolist() == [0, 2, 0] and pool.num_free_S[0] == 19 - 3


def test_only_equal_beginnings_on_the_same_shard_are_shared():
    pool = pool_of(shards=2)
    pool.start(0, tokens(12), 12)
    # The second page is the same, but it follows another one.
    pool.start(1, np.concatenate([tokens(4, 50), tokens(8, 4)]), 12)
    pool.start(2, tokens(12), 12)
    assert pool.shared_n.tolist() == [0, 0, 0, 0]
    pool.start(3, np.concatenate([tokens(8), tokens(4, 70)]), 16)
    assert pool.shared_n.tolist() == [0, 0, 0, 2]
    assert pool.table_nP[3, :2].tolist() == pool.table_nP[2, :2].tolist()


def test_a_page_that_follows_a_freed_one_is_not_taken_for_its_successor():
    pool = pool_of(slots=4, num_pages=7)
    pool.start(0, tokens(8), 8)
    pool.release(np.array([0]))
    # The same two page numbers now hold other tokens.
    pool.start(1, np.concatenate([tokens(4, 30), tokens(4, 40)]), 8)
    pool.start(2, np.concatenate([tokens(4, 30), tokens(4, 4)]), 8)
    assert pool.shared_n.tolist() == [0, 0, 1, 0]


def test_the_least_recently_used_pages_are_forgotten_first_and_ends_before_beginnings():
    pool = pool_of(slots=2, num_pages=7)
    sequences = [tokens(8), tokens(8, 100)]
    for sequence in sequences:
        pool.start(0, sequence, 8)
        pool.release(np.array([0]))
    # The first is used once more.
    pool.start(0, sequences[0], 8)
    pool.release(np.array([0]))
    pool.start(1, tokens(12, 50), 12)
    pool.settle()
    # Two pages were empty, and one comes from the second sequence.
    assert [len(pool.holders(s)[1]) for s in sequences] == [2, 1]
    pool.grow(np.array([1]), np.array([20]))
    assert [len(pool.holders(s)[1]) for s in sequences] == [1, 0]


def test_decoded_pages_are_known_to_all_shards_once_written():
    pool = pool_of(slots=4, shards=2)
    pool.start(2, tokens(6), 12)
    pool.settle()
    pool.grow(np.array([2]), np.array([16]))
    pool.remember(2, tokens(13))
    held = pool.table_nP[2, :3].tolist()
    pool.release(np.array([2]))
    # The first page was written before the call of `settle`, the others after it.
    assert pool.holders(tokens(13)) == ([1], held[:1])
    pool.settle()
    assert pool.holders(tokens(13)) == ([1], held)
    assert pool.holders(tokens(13, 100)) == ([], [])
    # On the other shard they cannot be shared, only copied.
    before = pool.num_free_S.tolist()
    assert pool.start(0, tokens(13), 13) and not pool.shared_n[0]
    assert pool.start(3, tokens(13), 13)
    assert pool.num_free_S.tolist() == [before[0] - 4, before[1] - 4]
    assert pool.shared_n[3] == 3 and pool.table_nP[3, :3].tolist() == held


def test_too_few_pages_are_counted_and_never_taken():
    pool = pool_of(slots=2, num_pages=7, pages_per_slot=6)
    pool.start(0, tokens(3), 16)
    assert pool.lacking(np.array([0]), np.array([24])).tolist() == [0]
    assert not pool.start(1, tokens(3), 12) and not pool.table_nP[1].any()
    assert pool.num_free_S[0] == 2
    assert pool.start(1, tokens(3), 8)
    assert pool.lacking(np.array([0, 1]), np.array([24, 9])).tolist() == [3]
    with pytest.raises(AssertionError, match="not enough free pages"):
        pool.grow(np.array([0, 1]), np.array([24, 9]))
    assert pool.num_free_S[0] == 0


@given(st.data())
def test_no_page_has_two_writers_and_all_are_free_in_the_end(data):
    shards = data.draw(st.integers(1, 3))
    per_shard = data.draw(st.integers(1, 4))
    pages_per_slot = data.draw(st.integers(1, 5))
    num_pages = 1 + data.draw(st.integers(pages_per_slot, 3 * pages_per_slot))
    n = shards * per_shard
    pool = pool_of(n, shards, num_pages, pages_per_slot)
    luck = random.Random(data.draw(st.integers(0, 2**32)))
    sequences: dict[int, np.ndarray] = {}
    lengths: dict[int, int] = {}

    def check():
        for shard in range(shards):
            holders: dict[int, list[int]] = {}
            for slot in range(shard * per_shard, (shard + 1) * per_shard):
                held = -(-lengths.get(slot, 0) // pool.page_tokens)
                row = pool.table_nP[slot].tolist()
                assert all(row[:held]) and not any(row[held:])
                assert len(set(row[:held])) == held
                for page in row[:held]:
                    holders.setdefault(page, []).append(slot)
            assert pool.num_free_S[shard] == num_pages - 1 - len(holders)
            for page, slots in holders.items():
                places = {pool.table_nP[slot].tolist().index(page) for slot in slots}
                assert len(places) == 1
                if len(slots) > 1:
                    # Full, and the same tokens up to its end in all of them.
                    end = (places.pop() + 1) * PAGE
                    starts = {sequences[slot][:end].tobytes() for slot in slots}
                    assert len(starts) == 1 and len(sequences[slots[0]][:end]) == end

    for _ in range(30):
        idle = [slot for slot in range(n) if slot not in lengths]
        choice = luck.random()
        if idle and choice < 0.4:
            slot = luck.choice(idle)
            size = luck.randint(0, pages_per_slot * PAGE)
            room = luck.randint(size, pages_per_slot * PAGE)
            sequence = np.zeros(size, np.int32)
            sequence[luck.randint(0, size) :] = luck.randint(0, 2)
            free = pool.num_free_S[pool.shard_n[slot]]
            if pool.start(slot, sequence, room):
                sequences[slot], lengths[slot] = sequence, room
            else:
                assert -(-room // pool.page_tokens) > free == pool.num_free_S[pool.shard_n[slot]]
        elif lengths and choice < 0.7:
            slots = np.array(sorted(luck.sample(sorted(lengths), luck.randint(1, len(lengths)))))
            grown = np.array([luck.randint(lengths[s], pages_per_slot * PAGE) for s in slots])
            if not pool.lacking(slots, grown).any():
                pool.grow(slots, grown)
                lengths |= dict(zip(slots.tolist(), grown.tolist(), strict=True))
        elif lengths:
            gone = luck.sample(sorted(lengths), luck.randint(1, len(lengths)))
            for slot in gone:
                if luck.random() < 0.5:
                    held = lengths[slot] - luck.randint(0, lengths[slot])
                    filled = np.full(lengths[slot], luck.randint(0, 1), np.int32)
                    filled[: len(sequences[slot])] = sequences[slot]
                    pool.remember(slot, filled[:held])
            pool.release(np.array(gone))
            for slot in gone:
                del lengths[slot], sequences[slot]
        check()
    pool.release(np.array(sorted(lengths), int))
    lengths.clear()
    check()
    assert all(pool.num_free_S[shard] == num_pages - 1 for shard in range(shards))
