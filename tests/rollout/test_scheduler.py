import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.engine_sizes import bucket_sizes, coarse_bucket_sizes, next_below, round_up
from jaxrl.rollout.scheduler import Admission, Scheduler


def requests(num_prompts, num_samples):
    return [((p, k), p) for p in range(num_prompts) for k in range(num_samples)]


def scheduler_of(wanted, slots, prefill_batch, shards=1):
    sizes = [n * shards for n in bucket_sizes(slots, 1)]
    return Scheduler(wanted, slot_sizes=sizes, prefill_batch=prefill_batch, shards=shards)


def running_in(scheduler) -> dict:
    return {slot: owner for slot, owner in enumerate(scheduler.owners) if owner is not None}


def run(num_prompts, num_samples, slots, prefill_batch, shards, luck: random.Random):
    """Plays a whole run: everything admitted, then some running samples finish, and again.

    Returns:
      Admissions in order, and the finished owners in order.
    """
    scheduler = scheduler_of(requests(num_prompts, num_samples), slots, prefill_batch, shards)
    admissions: list[Admission] = []
    finished: list = []
    while scheduler.num_unfinished:
        before, size = running_in(scheduler), len(scheduler.owners)
        moves = scheduler.resize()
        check_moves(moves, before, size, scheduler, shards)
        before = running_in(scheduler)
        while (admission := scheduler.admit()) is not None:
            assert not {slot for slot, *_ in admission.slots} & set(before)
            admissions.append(admission)
            before = running_in(scheduler)
        running = running_in(scheduler)
        assert 0 <= scheduler.enough_active < len(running)
        # Nothing waits while a slot is free.
        waiting = num_prompts * num_samples - len(finished) - len(running)
        assert not waiting or len(running) == slots * shards
        done = sorted(luck.sample(sorted(running), luck.randint(1, len(running))))
        owners = scheduler.finish(done)
        assert owners == [running[slot] for slot in done]
        finished += owners
    return admissions, finished


def check_moves(moves, before, size, scheduler, shards):
    """Everyone who ran runs on, on the same shard, in the slot that the moves say."""
    if moves is None:
        assert running_in(scheduler) == before
        return
    assert len(moves) == len(scheduler.owners)
    old_each, each = size // shards, len(moves) // shards
    arrived = {
        slot: before[slot // each * old_each + old] for slot, old in enumerate(moves) if old >= 0
    }
    assert arrived == running_in(scheduler)
    assert sorted(arrived.values()) == sorted(before.values())


runs = st.tuples(
    st.integers(0, 6),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 10),
)


@given(runs)
def test_every_sample_runs_exactly_once_in_order(case):
    *sizes, seed = case
    admissions, finished = run(*sizes, random.Random(seed))
    everything = [owner for owner, _ in requests(*sizes[:2])]
    # Served in order, whatever order they finish in.
    assert [owner for a in admissions for _, _, owner in a.slots] == everything
    assert sorted(finished) == everything


@given(runs)
def test_every_prompt_is_prefilled_once_in_full_batches(case):
    *sizes, seed = case
    admissions = run(*sizes, random.Random(seed))[0]
    batches = [a.sources for a in admissions if a.needs_prefill]
    assert [p for batch in batches for p in batch] == list(range(sizes[0]))
    assert all(len(batch) == sizes[3] for batch in batches[:-1])
    latest: tuple = ()
    for admission in admissions:
        latest = admission.sources if admission.needs_prefill else latest
        assert admission.sources == latest
        assert all(latest[index] == owner[0] for _, index, owner in admission.slots)


@given(runs)
def test_the_order_depends_on_nothing_but_requests_and_lengths(case):
    *sizes, seed = case
    assert run(*sizes, random.Random(seed)) == run(*sizes, random.Random(seed))


def test_the_samples_of_a_prompt_share_a_prefill():
    """Two prompts, three samples each, four slots: by hand."""
    scheduler = scheduler_of(requests(2, 3), 4, prefill_batch=2)
    assert scheduler.resize() == [-1] * 4
    first = ((0, 0, (0, 0)), (1, 0, (0, 1)), (2, 0, (0, 2)), (3, 1, (1, 0)))
    assert scheduler.admit() == Admission((0, 1), True, first)
    assert scheduler.admit() is None
    assert scheduler.finish([3, 1]) == [(1, 0), (0, 1)]
    assert scheduler.resize() is None
    assert scheduler.admit() == Admission((0, 1), False, ((1, 1, (1, 1)), (3, 1, (1, 2))))
    assert scheduler.finish([0, 1]) == [(0, 0), (1, 1)]
    # Two run on, in two slots.
    assert scheduler.resize() == [2, 3]
    assert scheduler.finish([0, 1]) == [(0, 2), (1, 2)]
    assert not scheduler.num_unfinished


def test_a_dispatch_goes_on_until_the_host_could_do_something():
    scheduler = scheduler_of(requests(20, 1), 16, prefill_batch=16)
    scheduler.resize()
    scheduler.admit()
    # Four wait: two free slots of sixteen are worth a look.
    assert scheduler.enough_active == 14
    scheduler.finish(range(4))
    scheduler.admit()
    # None waits: twelve slots are the next smaller state.
    assert scheduler.enough_active == 12
    # What two shards would do without may still be too much for one of them.
    lopsided = scheduler_of(requests(12, 1), 8, prefill_batch=16, shards=2)
    lopsided.resize()
    lopsided.admit()
    lopsided.finish([slot for slot in running_in(lopsided) if slot < 6])
    lopsided.resize()
    assert (len(lopsided.owners), len(running_in(lopsided)), lopsided.enough_active) == (12, 6, 0)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 10))
def test_requests_that_are_added_in_time_keep_all_slots_busy(slots, shards, seed):
    """As many as there are places, while a dispatch runs that frees no more slots than it may."""
    luck, num_slots, added = random.Random(seed), slots * shards, 0
    scheduler = scheduler_of([], slots, 4, shards)
    for _ in range(20):
        for _ in range(scheduler.places):
            scheduler.add(added, added)
            added += 1
        assert scheduler.places == 0
        if scheduler.resize() is not None:
            list(iter(scheduler.admit, None))
            continue
        list(iter(scheduler.admit, None))
        assert len(running_in(scheduler)) == num_slots
        # More wait, so the dispatch ends as soon as it is worth to fill slots.
        least = num_slots - max(1, num_slots // 8)
        assert scheduler.enough_active == (least if num_slots > 1 else 0)
        scheduler.finish(luck.sample(range(num_slots), luck.randint(0, max(1, num_slots // 8))))


def test_slots_without_memory_want_no_requests():
    scheduler = Scheduler(
        requests(5, 1), slot_sizes=(8,), prefill_batch=8, may_start=lambda slot, owner: slot < 3
    )
    # Before anything runs nobody knows: eight may start, and two wait.
    assert scheduler.places == 5
    scheduler.resize()
    list(iter(scheduler.admit, None))
    assert (len(running_in(scheduler)), scheduler.num_unfinished, scheduler.places) == (3, 5, 0)
    scheduler.finish([0])
    list(iter(scheduler.admit, None))
    assert (len(running_in(scheduler)), scheduler.num_unfinished, scheduler.places) == (3, 4, 1)


def test_a_cancelled_request_frees_its_slot_or_its_place_in_the_queue():
    scheduler = scheduler_of(requests(1, 4), 2, prefill_batch=1)
    scheduler.resize()
    scheduler.admit()
    assert scheduler.cancel((0, 3)) is None
    assert scheduler.cancel((0, 0)) == 0
    assert scheduler.admit() == Admission((0,), False, ((0, 0, (0, 2)),))
    with pytest.raises(KeyError):
        scheduler.cancel((0, 3))
    scheduler.finish([0, 1])
    assert not scheduler.num_unfinished


@given(st.integers(1, 5000), st.integers(1, 300))
def test_sizes_are_few_and_close(largest, smallest):
    octaves = np.log2(max(1, largest / smallest))
    sizes, coarse = bucket_sizes(largest, smallest), coarse_bucket_sizes(largest, smallest)
    assert sizes[-1] == coarse[-1] == largest
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(sizes))
    assert all(a < b <= 3 * a for a, b in itertools.pairwise(coarse))
    assert len(sizes) <= 2 * octaves + 3 and len(coarse) <= octaves + 2
    assert set(coarse) <= set(sizes)
    for need in range(1, largest + 1, 7):
        size = round_up(sizes, need)
        assert need <= size and next_below(sizes, size) < need


def test_sizes_by_hand():
    assert bucket_sizes(20, 8) == (8, 12, 20)
    assert bucket_sizes(64, 16) == (16, 24, 32, 48, 64)
    assert bucket_sizes(5, 8) == (5,)
    assert coarse_bucket_sizes(128, 16) == (16, 32, 64, 128)
    assert coarse_bucket_sizes(40, 3) == (4, 8, 16, 40)
    assert coarse_bucket_sizes(5, 8) == (5,)


def test_a_sample_starts_on_its_preferred_shard_while_the_load_stays_even():
    """Two shards of eight slots; all want the second, which may have two samples more than the first."""
    queue = requests(7, 1)
    scheduler = Scheduler(
        queue, slot_sizes=(16,), prefill_batch=8, shards=2, preferred=lambda owner: {1}
    )
    scheduler.resize()
    admission = scheduler.admit()
    assert admission is not None
    # The free slots alternate between shards, from the emptiest on.
    assert [slot // 8 for slot, _, _ in admission.slots] == [1, 1, 0, 1, 0, 1, 0]


def test_a_sample_goes_elsewhere_if_its_preferred_shard_has_no_slot_or_no_memory():
    asked = []

    def may_start(slot, owner):
        asked.append(slot)
        return slot < 2 or owner == (0, 0)

    scheduler = Scheduler(
        requests(3, 1),
        slot_sizes=(4,),
        prefill_batch=4,
        shards=2,
        may_start=may_start,
        preferred=lambda owner: {1},
    )
    scheduler.resize()
    admission = scheduler.admit()
    assert admission is not None
    assert [slot for slot, _, _ in admission.slots] == [2, 0, 1]
    # A shard that has refused is not asked again for the same sample.
    assert asked == [2, 0, 3, 1]
