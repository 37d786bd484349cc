"""Samples of a paged cache start, grow and give way, without a device."""

import numpy as np
import pytest

from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.scheduler import Scheduler
from jaxrl.rollout.slot_pages import LengthRecord, SlotPages

W = 8


def pages_of(num_pages, shards=1, slots=4, longest=64) -> SlotPages:
    sizes = PageSizes(shards, page_tokens=8, num_pages=1 + num_pages, pages_per_slot=160)
    return SlotPages(sizes, num_slots=slots, tokens_per_dispatch=W, most_response_tokens=longest)


def tokens(n: int, first: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def test_the_newest_sample_of_a_full_shard_gives_way():
    pages = pages_of(6, shards=2)
    pages._will_last = lambda *_: True
    for slot in (1, 0, 2):
        # 9 tokens, of which 8 are cached: a page, and one for the next 8.
        assert pages.take(slot, tokens(9, 100 * slot), 40, 0)
    pages.advance(np.array([8, 8, 3, 8]))
    assert pages.grow() == []
    pages.advance(np.array([8, 8, 8, 0]))
    # Slots 0 and 1 need four pages each, and their shard has six. Slot 0 started last.
    assert pages.grow() == [0]
    assert pages.pool.num_free_S[0] == 2
    assert not pages.pool.table_nP[0].any()
    # It may start again where there is room for what it has.
    again = tokens(25, 0)
    assert not pages.take(0, again, 40, 16)
    pages.release([2])
    assert pages.take(3, again, 40, 16)
    pages.release([1])
    assert pages.take(0, again, 40, 16)


def test_samples_of_several_shards_give_way_newest_first():
    pages = pages_of(4, shards=2, slots=6)
    pages._will_last = lambda *_: True
    for slot in (0, 3, 1, 4):
        assert pages.take(slot, tokens(9, 100 * slot), 40, 0)
    pages.advance(np.full(6, W))
    # Both shards are full, and the newest of each waits: slot 4 started after slot 1.
    assert pages.grow() == [4, 1]


def test_a_sample_near_its_limit_takes_no_page_beyond_it():
    pages = pages_of(4)
    assert pages.take(0, tokens(9, 0), 10, 0)
    assert pages.pool.num_free_S[0] == 4 - 2
    pages.advance(np.array([1, 0, 0, 0]))
    assert pages.grow() == [] and pages.pool.num_free_S[0] == 2


def test_a_sample_waits_while_others_are_expected_to_need_the_pages():
    """One page each now, but four each in the end."""
    pages = pages_of(8, longest=24)
    for _ in range(200):
        pages._lengths.add_decoded(np.array([0, 8, 16]), np.array([8, 8, 8]))
        pages._lengths.add_ended(np.array([24]))
    assert pages.grow() == []
    started = [pages.take(slot, tokens(2, 10 * slot), 26, 0) for slot in range(3)]
    assert started == [True, True, False] and pages.pool.num_free_S[0] == 4
    # One of them is about to end.
    pages._cached_n[1] += 22
    assert pages.grow() == [] and pages.pool.num_free_S[0] == 2
    assert pages.take(2, tokens(2, 90), 26, 0)


def test_the_mean_over_time_is_that_of_the_distribution():
    """Also while only short responses have ended."""
    rng = np.random.default_rng(0)
    longest, slots = 4000, 300
    record = LengthRecord(longest, 16)
    lengths = np.minimum(rng.lognormal(np.log(400), 0.9, 4000).astype(int) + 1, longest)
    truth = (lengths**2 / 2).sum() / lengths.sum()
    done, running, waiting = np.zeros_like(lengths), list(range(slots)), slots
    means = []
    while running:
        ids = np.array(running)
        count = np.minimum(16, lengths[ids] - done[ids])
        record.add_decoded(done[ids], count)
        done[ids] += count
        ended = ids[done[ids] == lengths[ids]]
        record.add_ended(lengths[ended])
        fresh = range(waiting, min(waiting + len(ended), len(lengths)))
        waiting += len(ended)
        running = [*(i for i in running if done[i] < lengths[i]), *fresh]
        alive_K = record.still_running()[0]
        middle_K = (np.arange(len(alive_K)) + 0.5) * record.width
        means.append((middle_K * alive_K).sum() / alive_K.sum())
    assert abs(means[-1] / truth - 1) < 0.15
    # After 20 dispatches nothing is longer than 320, and the mean over ended responses is far below.
    assert means[20] > 0.8 * truth


def simulate(lengths, limited: bool) -> tuple[float, float]:
    """Runs samples of these lengths; returns the share of tokens prefilled again, and of pages in use."""
    pages = pages_of(600, shards=2, slots=256, longest=1200)
    if not limited:
        pages._will_last = lambda *_: True
    done = np.zeros_like(lengths)

    def may_start(slot, i):
        return pages.take(slot, tokens(20 + done[i], 10_000 * i), 1220, done[i])

    requests = [(i, i) for i in range(len(lengths))]
    scheduler = Scheduler(
        requests, slot_sizes=[256], prefill_batch=16, shards=2, may_start=may_start
    )
    again, used = 0, []
    while scheduler.num_unfinished:
        scheduler.resize()
        for i in scheduler.finish(pages.grow()):
            again += 20 + done[i]
            scheduler.add_first(i, (i, done[i]))
        while scheduler.admit() is not None:
            pass
        slots = scheduler.busy_slots
        assert len(slots), "somebody always runs"
        ids = np.array([scheduler.owners[slot] for slot in slots])
        count = np.minimum(W, lengths[ids] - done[ids])
        pages.advance(np.bincount(slots, count, 256).astype(int))
        done[ids] += count
        ended = slots[done[ids] == lengths[ids]].tolist()
        scheduler.finish(ended)
        pages.end(ended)
        used.append(1 - sum(pages.pool.num_free_S[s] for s in range(2)) / 1200)
    assert (done == lengths).all()
    return again / lengths.sum(), float(np.mean(used[len(used) // 4 : len(used) // 2]))


@pytest.mark.parametrize("spread", [0.9, pytest.param(0.0, marks=pytest.mark.long)])
def test_samples_rarely_give_way_and_most_pages_are_used(spread):
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(np.log(150), spread, 2000).astype(int) + 1, 1200)
    again, used = simulate(lengths, limited=True)
    greedily, _ = simulate(lengths, limited=False)
    # Nothing is known of the first samples, a tenth of all, when they start.
    assert again < 0.1 < 0.3 < greedily
    assert used > 0.55
