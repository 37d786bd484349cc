"""A curriculum in a step: every graded group is learned from, whichever sampler it comes from."""

import json
import pickle

import numpy as np
import pytest
from steps import CountingGrader
from test_samplers import Bench, dynamic, ids_of

from jaxrl.data import PromptStream
from jaxrl.data.pass_rates import Curriculum
from jaxrl.dataflows.samplers import CurriculumSampling, PartialSampling, Sampling
from jaxrl.types import Prompts

SIZE = 60
SURPLUS = "training/filter_groups/discarded_surplus_prompts"


def right(number: int, response: str) -> bool:
    """Problems come in threes: solved always, never, and by the shorter of two samples."""
    return number % 3 == 0 or (number % 3 == 2 and len(response.split()) == 2)


def stream(per_batch=4) -> PromptStream:
    prompts = Prompts(
        ids_N=np.arange(SIZE),
        tokens=tuple(np.array([n + 2], np.int32) for n in range(SIZE)),
        texts=tuple(f"prompt {n}" for n in range(SIZE)),
        answers=tuple(str(n) for n in range(SIZE)),
        sources=("numbers",) * SIZE,
    )
    curriculum = Curriculum(group_size=2, least_chance=0.05, decay=0.75)
    return PromptStream([prompts], prompts_per_batch=per_batch, seed=1, curriculum=curriculum)


class Course(Bench):
    """A sampler under a curriculum; `groups` puts dynamic sampling around it."""

    def __init__(self, kind, *, groups=0, per_batch=4, **settings):
        super().__init__(kind, grader=CountingGrader(right), per_batch=per_batch, **settings)
        self.prompts = stream(per_batch)
        self.sampler = CurriculumSampling(self.sampler, self.prompts)
        if groups:
            self.sampler = dynamic(self, groups, batches=20)

    def steps(self, count: int) -> list[tuple]:
        return [told(self.step()) for _ in range(count)]

    def resumed(self, *args, **settings) -> "Course":
        """Another one that goes on from here, as from a file."""
        again = Course(*args, **settings)
        record = self.sampler.record(self.prompts)
        json.dumps(record, default=np.ndarray.tolist)  # what a checkpoint takes: JSON and arrays
        again.sampler.restore(pickle.loads(pickle.dumps(record)), again.prompts)
        again.timer.step, again.policy.version = self.timer.step, self.policy.version
        return again


def told(sampled) -> tuple:
    """What a step was made of, and what it says of the curriculum."""
    mine = {**sampled.metrics, **sampled.counts}
    return (
        ids_of(sampled),
        sampled.completions.prompts.answers,
        {name: value for name, value in mine.items() if name.startswith("curriculum/")},
    )


SAMPLERS = [
    (Sampling, {}),
    (Sampling, {"groups": 3}),
    (PartialSampling, {"groups": 3, "per_batch": 1, "prompts_per_batch": 6, "max_staleness": 8}),
]


@pytest.mark.parametrize(("kind", "settings"), SAMPLERS)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(kind, settings):
    course = Course(kind, **settings)
    course.steps(12)
    resumed = course.resumed(kind, **settings)
    expected = course.steps(12)
    assert resumed.steps(12) == expected
    assert resumed.prompts.state() == course.prompts.state()
    assert sum(metrics["curriculum/skipped"] for *_, metrics in expected) > 0


@pytest.mark.parametrize(("kind", "settings"), SAMPLERS)
def test_later_batches_hold_more_of_what_is_mixed(kind, settings):
    course = Course(kind, **settings)
    seen = [answer for _ in range(60) for answer in _sampled_answers(course)]
    late = seen[len(seen) // 2 :]
    assert sum(int(answer) % 3 == 2 for answer in late) > 0.6 * len(late)


def _sampled_answers(course: Course) -> list[str]:
    """Ground truths of all prompts that were sampled in a step, kept or not."""
    before = len(course.policy.sampled)
    course.step()
    state = course.prompts.state(again=[i for i, *_ in course.policy.sampled[before:]])
    again = stream(per_batch=len(state["again"]))
    again.restore(state)
    return list(next(again).answers)


def test_groups_that_dynamic_sampling_throws_away_count_too():
    course = Course(Sampling, groups=3)
    sampled = course.step()
    known = sampled.metrics["curriculum/known"]
    assert known == sampled.metrics["train/num_prompts_sampled"] > len(ids_of(sampled)) == 3
    solved = [sampled.metrics[f"curriculum/solved_{often}"] for often in ("always", "never")]
    assert sum(solved) * known == known - 3 - sampled.metrics[SURPLUS]


def test_dynamic_sampling_takes_fewer_batches():
    batches = []
    course = Course(Sampling, groups=3)
    for _ in range(60):
        batches.append(course.step().metrics["train/num_gen_batches"])
    assert np.mean(batches[30:]) < 0.7 * np.mean(batches[:5])
