"""A user's sampler of prompts is told every graded group, whichever sampler of answers it comes from."""

import pickle

import numpy as np
import pytest
from steps import CountingGrader, saved
from test_samplers import Bench, dynamic, ids_of

from jaxrl.data.curriculum import CurriculumStream
from jaxrl.dataflows.samplers import CurriculumSampling, PartialSampling, Sampling
from jaxrl.types import Prompts

SIZE = 60
EXAMPLE = "shared/by_pass_rate.py:ByPassRate"


def right(number: int, response: str) -> bool:
    """Problems come in threes: solved always, never, and by the shorter of two samples."""
    return number % 3 == 0 or (number % 3 == 2 and len(response.split()) == 2)


def stream(per_batch: int) -> CurriculumStream:
    prompts = Prompts(
        ids_N=np.arange(SIZE),
        tokens=tuple(np.array([n + 2], np.int32) for n in range(SIZE)),
        texts=tuple(f"prompt {n}" for n in range(SIZE)),
        answers=tuple(str(n) for n in range(SIZE)),
        sources=("numbers",) * SIZE,
    )
    return CurriculumStream([prompts], path=EXAMPLE, prompts_per_batch=per_batch, seed=1)


class Course(Bench):
    """A sampler under a curriculum; `groups` puts dynamic sampling around it."""

    def __init__(self, kind, *, groups=0, per_batch=4, **settings):
        super().__init__(kind, grader=CountingGrader(right), per_batch=per_batch, **settings)
        self.prompts = stream(per_batch)
        self.told = []
        update = self.prompts._sampler.update
        self.prompts._sampler.update = lambda of_batch: (
            self.told.extend(of_batch),
            update(of_batch),
        )
        self.sampler = CurriculumSampling(self.sampler, self.prompts)
        if groups:
            self.sampler = dynamic(self, groups, batches=20)

    def steps(self, count: int) -> list[tuple]:
        """(ids, truths) of each step."""
        return [
            (ids_of(sampled), sampled.completions.prompts.answers)
            for sampled in (self.step() for _ in range(count))
        ]

    def resumed(self, *args, **settings) -> "Course":
        """Another one that goes on from here, as from a file."""
        again = Course(*args, **settings)
        record = pickle.loads(pickle.dumps(self.sampler.record(self.prompts)))
        again.sampler.restore(saved({"unfinished": None} | record), again.prompts)
        again.timer.step, again.policy.version = self.timer.step, self.policy.version
        return again


PARTIAL = {"groups": 3, "per_batch": 1, "prompts_per_batch": 6, "max_staleness": 8}
SAMPLERS = {
    "whole batches": (Sampling, {}),
    "dynamic": (Sampling, {"groups": 3}),
    "partial": (PartialSampling, PARTIAL),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(name):
    kind, settings = SAMPLERS[name]
    course = Course(kind, **settings)
    course.steps(12)
    resumed = course.resumed(kind, **settings)
    expected = course.steps(12)
    assert resumed.steps(12) == expected
    np.testing.assert_equal(resumed.prompts.state(), course.prompts.state())
    assert resumed.told == course.told[-len(resumed.told) :]


@pytest.mark.parametrize("name", SAMPLERS)
def test_later_batches_hold_more_of_what_is_mixed(name):
    kind, settings = SAMPLERS[name]
    course = Course(kind, **settings)
    course.steps(60)
    rows = [group.row for group in course.told]
    early, late = rows[:SIZE], rows[-100:]
    # A third of the problems, since each comes once before any comes again.
    assert sum(row % 3 == 2 for row in early) <= SIZE // 2
    assert sum(row % 3 == 2 for row in late) > 60


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_graded_group_is_told_once_with_its_verdicts(name):
    kind, settings = SAMPLERS[name]
    course = Course(kind, **settings)
    course.steps(20)
    # Two answers to each group, and every answer is graded once.
    assert 2 * len(course.told) == course.grader.calls
    for group in course.told:
        assert len(group.correct) == len(group.rewards) == len(group.lengths) == 2
        solved = {0: (True, True), 1: (False, False)}.get(group.row % 3)
        assert group.correct == solved or (solved is None and sum(group.correct) == 1)
        assert group.rewards == tuple(1.0 if x else -1.0 for x in group.correct)


def test_groups_that_dynamic_sampling_drops_are_told():
    course = Course(Sampling, groups=3)
    sampled = course.step()
    assert len(ids_of(sampled)) == 3
    assert len(course.told) == sampled.metrics["train/num_prompts_sampled"] > 3
    assert {group.row % 3 for group in course.told} == {0, 1, 2}


def test_dynamic_sampling_takes_fewer_batches():
    course = Course(Sampling, groups=3)
    batches = [course.step().metrics["train/num_gen_batches"] for _ in range(60)]
    assert np.mean(batches[30:]) < 0.7 * np.mean(batches[:5])
