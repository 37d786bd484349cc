import random

from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.scheduler import Admission, Scheduler


def run(num_prompts, num_samples, slots, prefill_prompts, luck: random.Random):
    """Plays a whole run: everything admitted, then some running samples finish, and again.

    Returns:
      Admissions in order, and the finished (prompt, sample) pairs in order.
    """
    scheduler = Scheduler(num_prompts, num_samples, slots=slots, prefill_prompts=prefill_prompts)
    admissions: list[Admission] = []
    finished: list[tuple[int, int]] = []
    while scheduler.unfinished:
        while (admission := scheduler.admit()) is not None:
            admissions.append(admission)
            assert len(scheduler.running) <= slots
        running = scheduler.running
        # Nothing waits while a slot is free.
        assert len(running) == min(slots, num_prompts * num_samples - len(finished))
        done = sorted(luck.sample(sorted(running), luck.randint(1, len(running))))
        owners = scheduler.finish(done)
        assert owners == [running[slot] for slot in done]
        finished += owners
    return admissions, finished


runs = st.tuples(
    st.integers(0, 6), st.integers(1, 5), st.integers(1, 7), st.integers(1, 4), st.integers(0, 10)
)


@given(runs)
def test_every_sample_runs_exactly_once(case):
    num_prompts, num_samples, slots, prefill, seed = case
    admissions, finished = run(num_prompts, num_samples, slots, prefill, random.Random(seed))
    everything = [(p, k) for p in range(num_prompts) for k in range(num_samples)]
    # Served in order of prompts and samples, whatever order they finish in.
    assert [(p, k) for a in admissions for _, _, p, k in a.slots] == everything
    assert sorted(finished) == everything


@given(runs)
def test_an_admission_is_one_prefill(case):
    num_prompts, num_samples, slots, prefill, seed = case
    for admission in run(num_prompts, num_samples, slots, prefill, random.Random(seed))[0]:
        assert 1 <= len(admission.prompts) <= prefill
        assert len(set(admission.prompts)) == len(admission.prompts)
        assert {p for _, _, p, _ in admission.slots} == set(admission.prompts)
        assert all(admission.prompts[source] == p for _, source, p, _ in admission.slots)
        used = [slot for slot, *_ in admission.slots]
        assert len(set(used)) == len(used)
        assert all(0 <= slot < slots for slot in used)


@given(runs)
def test_no_slot_is_given_away_while_it_runs(case):
    num_prompts, num_samples, slots, prefill, seed = case
    scheduler = Scheduler(num_prompts, num_samples, slots=slots, prefill_prompts=prefill)
    luck = random.Random(seed)
    while scheduler.unfinished:
        before = scheduler.running
        while (admission := scheduler.admit()) is not None:
            assert not {slot for slot, *_ in admission.slots} & set(before)
            before = scheduler.running
        scheduler.finish([luck.choice(sorted(before))])


@given(runs)
def test_the_order_depends_on_nothing_but_requests_and_lengths(case):
    *sizes, seed = case
    assert run(*sizes, random.Random(seed)) == run(*sizes, random.Random(seed))


def test_the_samples_of_a_prompt_share_a_prefill():
    """Two prompts, three samples each, four slots: by hand."""
    scheduler = Scheduler(2, 3, slots=4, prefill_prompts=2)
    first = scheduler.admit()
    assert first == Admission((0, 1), ((0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 0, 2), (3, 1, 1, 0)))
    assert scheduler.admit() is None
    assert scheduler.finish([3, 1]) == [(1, 0), (0, 1)]
    assert scheduler.admit() == Admission((1,), ((1, 0, 1, 1), (3, 0, 1, 2)))
    assert scheduler.finish([0, 1, 2, 3]) == [(0, 0), (1, 1), (0, 2), (1, 2)]
    assert not scheduler.unfinished


def test_the_prefill_limit_splits_an_admission():
    scheduler = Scheduler(3, 1, slots=3, prefill_prompts=2)
    assert scheduler.admit() == Admission((0, 1), ((0, 0, 0, 0), (1, 1, 1, 0)))
    assert scheduler.admit() == Admission((2,), ((2, 0, 2, 0),))
    assert scheduler.admit() is None


def test_nothing_asked_is_finished_at_once():
    scheduler = Scheduler(0, 4, slots=2, prefill_prompts=1)
    assert not scheduler.unfinished
    assert scheduler.admit() is None
