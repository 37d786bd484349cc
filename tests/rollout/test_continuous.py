"""Sampling that outlives changes of the weights: the same samples whatever happens between two dispatches."""

import numpy as np
import pytest
from byte_engine import OPTIONS, assert_same_samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_paged import G, backend_of, expected, greedy, prompts_of

from jaxrl.rollout import speculation
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.types import Completions

CASES = {
    "contiguous": {},
    "paged": {"cache": "paged", "cache_tokens": 160},
    "speculation": {"speculate": 3},
    # Three replicas, as two processes would have them; no pages for all samples at once.
    "groups": {"layout": ("1-1-3",), "slots": 9, "cache": "paged", "cache_tokens": 3 * 128},
}
MEMBERS = {"groups": (0, 1, 0)}
EVENTS = ("nothing", "other weights", "pause", "checkpoint", "evaluation", "beside", "look")


class Source:
    """Prompts, one at a time."""

    def __init__(self, seed: int):
        self._prompts, self._next = prompts_of(seed), 0

    def __call__(self, places: int, unfinished: int):
        here = self._next
        self._next = min(len(self._prompts), here - (-places // G))
        return self._prompts.take(np.arange(here, self._next))


@pytest.mark.parametrize(
    "case",
    [
        "paged",
        *(pytest.param(c, marks=pytest.mark.long) for c in ("contiguous", "speculation", "groups")),
    ],
)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 3), events=st.lists(st.sampled_from(EVENTS), max_size=12))
def test_samples_are_those_of_one_call(case, seed, events):
    with pytest.MonkeyPatch.context() as monkeypatch:
        greedy(monkeypatch)
        monkeypatch.setattr(speculation, "OFF_ON", ())
        backend = backend_of(**CASES[case])
        options, draw = OPTIONS.replace(num_samples=G), Source(seed)
        alone = OPTIONS.replace(num_samples=1)
        members = MEMBERS.get(case)
        rollout, finished = backend.continuous(options, members=members), []
        coming, asked, answered = iter(events), False, []
        while rollout.dispatch(options, draw):
            finished += rollout.take_finished()
            event = next(coming, "nothing")
            if event == "other weights":
                backend.load(backend.unload())
            elif event == "pause":
                rollout.pause()
            elif event == "evaluation":
                backend.generate(prompts_of(seed + 1), alone)
            elif event == "beside" and not asked:
                asked = True
                rollout.evaluate(
                    prompts_of(seed + 1), alone, lambda group, _: answered.append(group)
                )
            elif event == "look":
                rollout.unfinished()
            elif event == "checkpoint" and not asked:
                stored = UnfinishedGroups.of_record(rollout.unfinished().whole(True).record())
                finished += rollout.take_finished()
                rollout = backend.continuous(options, stored, members=members)
        finished += rollout.take_finished()
        if asked:
            answers = rollout.take_evaluation()
            drained = backend.generate(prompts_of(seed + 1), alone)
            assert_same_samples(answers, drained)
            assert len(answered) == len(drained)
    whole = Completions.concatenate([group.completions for group in finished])
    assert_same_samples(whole.take(np.argsort(whole.prompts.ids_N)), expected(seed))
    assert rollout.num_unfinished == 0


@pytest.mark.parametrize("case", ["contiguous", "paged"])
def test_groups_with_old_tokens_are_dropped_and_their_slots_are_free(case):
    backend = backend_of(**CASES[case])
    options, draw = OPTIONS.replace(num_samples=G), Source(0)
    rollout = backend.continuous(options)
    assert rollout.dispatch(options, draw) and rollout.dispatch(options, draw)
    begun = rollout.num_unfinished
    assert rollout.drop_older(options.step) == 0
    later = options.replace(step=options.step + 1)
    assert rollout.drop_older(later.step) > 0
    left = [group.completions.prompts.ids_N[0] for group in rollout.take_finished()]
    assert rollout.num_unfinished < begun
    while rollout.dispatch(later, draw):
        pass
    groups = rollout.take_finished()
    # The groups without tokens go on, and new ones take the slots of those that are gone.
    assert groups and all(group.oldest_version == later.step for group in groups)
    left += [group.completions.prompts.ids_N[0] for group in groups]
    assert len(set(left)) == len(left) and rollout.num_unfinished == 0


def test_finished_groups_of_a_checkpoint_are_handed_out_again():
    backend = backend_of()
    options, draw = OPTIONS.replace(num_samples=G), Source(1)
    rollout = backend.continuous(options)
    taken = []
    while not taken:
        rollout.dispatch(options, draw)
        taken = rollout.take_finished()
    stored = UnfinishedGroups.concatenate([*(t.samples for t in taken), rollout.unfinished()])
    again = backend.continuous(options, UnfinishedGroups.of_record(stored.record()))
    repeated = again.take_finished()
    assert_same_samples(
        Completions.concatenate([group.completions for group in repeated]),
        Completions.concatenate([group.completions for group in taken]),
    )
    assert again.num_unfinished == rollout.num_unfinished
