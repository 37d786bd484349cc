"""Partial sampling, with the decode loop around an engine without a model: slots, ages, order of draws."""

import functools
import itertools
import pickle

import numpy as np
import pytest
from fake_engine import FakeEngine, lognormal_lengths
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import mesh_of
from steps import STOP, CountingGrader, NumberedPrompts, SamplingPolicy, saved

from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.dataflows.rewarding import OverlongPunishment, Rewards
from jaxrl.dataflows.samplers import Generation, PartialSampling
from jaxrl.dataflows.schedule import SamplingSchedule
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.errors import UserError
from jaxrl.mesh.replica_groups import replica_groups
from jaxrl.rewards import Graders
from jaxrl.rewards.grading import FunctionGrader
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.samples import Sample, UnfinishedGroups
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Prompts, Stretch

LONGEST = 300


def enough_after(groups):
    """A stop condition that holds from so many groups on."""
    missing = itertools.count(groups - 1, -1)
    return lambda group: next(missing) <= 0


class FullRun:
    """Steps of partial sampling that take `groups` groups each. `members` are those of replicas."""

    def __init__(
        self,
        *,
        slots,
        groups,
        per_batch,
        G=4,
        max_staleness=8,
        mean=30,
        sigma=0.9,
        W=4,
        members=(0,),
    ):
        config = EngineConfig(
            slots=slots,
            smallest_bucket=slots,
            prefill_prompts=4,
            tokens_per_dispatch=W,
            max_prompt_tokens=4,
            max_response_tokens=LONGEST,
            stop_ids=(STOP,),
        )
        mesh = mesh_of(f"1-1-{len(members)}")
        lengths = lognormal_lengths(mean, sigma=sigma)
        self.engine = FakeEngine(config, lengths, shards=len(members), mesh=mesh)
        replicas = replica_groups(mesh, members=members)
        backend = OfflineBackend(self.engine, functools.partial(map, lambda tokens: ""), replicas)
        backend.load({})
        self.timer, self.policy = NoTimer(), SamplingPolicy(backend)
        options = SamplingOptions(num_samples=G, seed=0, step=0, temperature=1.0)
        generation = Generation(self.policy, options, self.timer)
        graders = Graders.of(FunctionGrader(CountingGrader()))
        rewards = Rewards(graders, OverlongPunishment(LONGEST, 0, 0.0), self.timer)
        limits = {"prompts_per_batch": per_batch, "max_staleness": max_staleness}
        self.sampler = self.build(generation, rewards, groups, limits)
        self.prompts = NumberedPrompts(1)
        self._groups = groups

    def build(self, generation, rewards, groups, limits):
        return PartialSampling(generation, rewards, **limits)

    def step(self):
        """The groups of a step, with their versions and counts."""
        sampled = self.sampler.sample(self.prompts, enough=enough_after(self._groups))
        self.policy.update()
        self.timer.step += 1
        ids = sampled.completions.prompts.ids_N.tolist()
        versions = [v.tolist() for v in self.policy.rollouts[-1].completions.version]
        return ids, versions, dict(sampled.counts)

    def occupancy(self, begin=0) -> float:
        """Share of the slots that decode, on average over all decoding steps since a dispatch."""
        calls = self.engine.calls[begin:]
        return sum(c.tokens for c in calls) / sum(c.steps * c.slots for c in calls)


def test_all_slots_are_busy_in_every_step():
    run = FullRun(slots=64, groups=32, per_batch=64, W=16)
    for _ in range(5):
        run.step()
    assert run.occupancy() > 0.9
    # The same samples as batches that are drained: the longest of a batch decode nearly alone.
    drained = FullRun(slots=64, groups=32, per_batch=64, W=16)
    for _ in range(5):
        prompts = [next(drained.prompts) for _ in range(32)]
        drained.policy.for_sampling()
        batch = type(prompts[0]).concatenate(prompts)
        drained.policy.generate(
            batch, SamplingOptions(4, 0, 0, 1.0), expected_tokens_N=np.zeros(len(batch))
        )
    assert drained.occupancy() < 0.7


def test_no_more_samples_decode_than_a_generation_batch_has():
    run = FullRun(slots=256, groups=2, per_batch=4)
    for _ in range(4):
        run.step()
    # Whole groups are drawn, so the last one may exceed 4 x 4 by 3.
    assert max(call.active for call in run.engine.calls) <= 4 * 4 + 3


class FreeRun(FullRun):
    """The same with a sampler that goes on while a step learns.

    Attributes:
      rows: the recorded schedule.
    """

    def __init__(self, *, recorded=None, **settings):
        self.rows = []
        self._recorded = recorded
        super().__init__(**settings)

    def build(self, generation, rewards, groups, limits):
        schedule = SamplingSchedule(self.rows.append, self._recorded)
        return FreeRunning(generation, rewards, schedule, prompts_per_step=groups, **limits)

    def step(self, dispatches=0):
        """The groups of a step, during which the sampler may make some dispatches more."""
        sampled = self.sampler.sample(self.prompts, enough=enough_after(self._groups))
        left = iter(range(dispatches))
        self.sampler.meanwhile(FakeResults(lambda: next(left, None) is None))
        self.sampler.record(self.prompts)
        self.policy.update()
        self.timer.step += 1
        return sampled


class FakeResults:
    def __init__(self, is_ready):
        self.is_ready = is_ready


runs = st.fixed_dictionaries(
    {
        "slots": st.sampled_from([4, 8, 24]),
        "groups": st.integers(1, 5),
        "per_batch": st.integers(1, 12),
        "G": st.integers(1, 4),
        "max_staleness": st.integers(1, 3),
        "mean": st.sampled_from([5, 40]),
        "sigma": st.sampled_from([0.1, 1.2]),
    }
)


@settings(max_examples=25)
@given(runs, st.integers(2, 7))
def test_no_token_is_older_than_the_limit_and_every_group_is_trained_on_or_dropped_once(
    case, num_steps
):
    run = FullRun(**case)
    trained, dropped, stale = [], 0, 0
    for step in range(num_steps):
        ids, versions, counts = run.step()
        assert all(step - min(of_sample) <= case["max_staleness"] for of_sample in versions)
        assert counts["rollout/stale_tokens"] == sum(v < step for v in itertools.chain(*versions))
        trained += ids
        dropped += counts["rollout/dropped_stale_groups"]
        stale += counts["rollout/stale_tokens"]
    left = run.policy.rollouts[-1].unfinished.prompts.ids_N.tolist()
    drawn = [n for n, _, _ in run.policy.sampled]
    assert drawn == list(range(len(drawn)))
    assert len(set(trained + left)) == len(trained + left) and set(trained + left) <= set(drawn)
    assert len(drawn) == len(trained) + len(left) + dropped


def test_the_group_with_the_oldest_tokens_starts_first():
    run = FullRun(slots=1, groups=1, per_batch=4)
    samples = []
    for n, version in enumerate([5, 3, None, 4]):
        samples += [Sample(n, 0, 1), Sample(n, 1, 1)]
        if version is not None:
            half = np.full(1, -0.5, np.float32)
            samples[-1].add(Stretch(np.array([7], np.int32), half, half, version))
    prompts = Prompts.concatenate([next(run.prompts) for _ in range(4)])
    unfinished = UnfinishedGroups(prompts, 2, tuple(samples))
    assert unfinished.oldest_version_N[[0, 1, 3]].tolist() == [5, 3, 4]
    ended = []
    run.policy.backend.resume(
        prompts.take([]),
        SamplingOptions(num_samples=2, seed=0, step=6, temperature=1.0),
        unfinished=unfinished,
        on_group=lambda group: ended.extend(group.prompts.ids_N.tolist()),
    )
    # With one slot they end as they start. Without tokens a group is as new as can be.
    assert ended == [1, 3, 0, 2]


def test_a_group_past_the_limit_is_dropped():
    """One slot of two groups, by hand: a group of 100 tokens takes 13 dispatches of 8 tokens."""
    lengths = {0: 100, 1: 4, 2: 4, 3: 4, 4: 4}
    run = FullRun(slots=2, groups=1, per_batch=2, G=1, max_staleness=2, W=8)
    run.engine._lengths = lambda ids, index: np.array([lengths.get(int(n), 4) for n in ids])
    seen = [run.step() for _ in range(5)]
    assert all(0 not in ids for ids, *_ in seen)
    # Prompt 0 begins in step 0, may be trained on in step 2, and is gone in step 3.
    assert [counts["rollout/dropped_stale_groups"] for *_, counts in seen] == [0, 0, 0, 1, 0]


CASE = {"slots": 24, "groups": 3, "per_batch": 8, "max_staleness": 1, "mean": 40, "sigma": 1.2}


def schedule(run: FullRun) -> list[tuple]:
    """For each dispatch how many slots were active and what they decoded, and the prompts in their order."""
    return [(c.steps, c.active, c.tokens) for c in run.engine.calls] + run.policy.sampled


def test_the_order_of_draws_depends_on_dispatches_alone():
    one, other = FullRun(**CASE), FullRun(**CASE)
    assert [one.step() for _ in range(6)] == [other.step() for _ in range(6)]
    assert schedule(one) == schedule(other)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_resumed_run_draws_and_drops_the_same(after):
    whole = FullRun(**CASE)
    for _ in range(after):
        whole.step()
    again = FullRun(**CASE)
    record = pickle.loads(pickle.dumps(saved(whole.sampler.record(whole.prompts))))
    again.sampler.restore(record, again.prompts)
    again.timer.step, again.policy.version = whole.timer.step, whole.policy.version
    whole.engine.calls.clear()
    whole.policy.sampled.clear()
    expected = [whole.step() for _ in range(4)]
    assert [again.step() for _ in range(4)] == expected
    assert schedule(again) == schedule(whole)
    assert any(counts["rollout/dropped_stale_groups"] for *_, counts in expected)


# One group of processes, or several that sample without each other.
MEMBERS = st.sampled_from([(0,), (0, 1), (0, 1, 1, 0), (1, 0, 2, 3)])


@settings(max_examples=25)
@given(runs, MEMBERS, st.lists(st.integers(0, 30), min_size=2, max_size=7))
def test_what_runs_free_is_never_too_old_and_is_trained_on_once(case, members, dispatches):
    # A call of `sample` returns a step's groups.
    case["per_batch"] = max(case["per_batch"], case["groups"])
    run = FreeRun(members=members, **case)
    trained = []
    for number in dispatches:
        sampled = run.step(number)
        completions = sampled.completions
        ids = completions.prompts.ids_N.tolist()
        assert len(ids) == case["groups"]
        waiting = run.sampler.record(run.prompts)["unfinished"]
        assert len(waiting.prompts) <= case["groups"] * (case["max_staleness"] + 1)
        trained += ids
        # Steps wait for long answers in time.
        assert sampled.counts["rollout/dropped_stale_groups"] == 0
        assert 0 <= sampled.metrics["rollout/staleness"] <= case["max_staleness"]
    drawn = [n for row in run.rows for _, n in row.drawn]
    assert drawn == list(range(len(drawn)))
    assert len(set(trained)) == len(trained)
    assert len(drawn) == len(trained) + len(waiting.prompts)


@settings(max_examples=12)
@given(runs, MEMBERS, st.lists(st.integers(0, 30), min_size=2, max_size=6))
def test_a_recorded_schedule_repeats_every_dispatch(case, members, dispatches):
    case["members"] = members
    run = FreeRun(**case)
    ids = [run.step(number).completions.prompts.ids_N.tolist() for number in dispatches]
    again = FreeRun(recorded={row.version: row for row in run.rows}, **case)
    # Its clock would let it make none.
    assert [again.step(0).completions.prompts.ids_N.tolist() for _ in dispatches] == ids
    assert again.rows == run.rows
    calls = [[(c.steps, c.active, c.tokens) for c in r.engine.calls] for r in (run, again)]
    assert calls[0] == calls[1]


def test_new_prompts_wait_while_the_learner_is_slow():
    run = FreeRun(slots=16, groups=2, per_batch=64, G=2, max_staleness=1, mean=5, sigma=0.1)
    run.step(500)
    # Two groups were trained on, and the next step takes two.
    waiting = run.sampler.record(run.prompts)["unfinished"]
    assert len(waiting.prompts) == 2 and run.rows[0].dispatches < 30
    later = run.step(500)
    assert later.counts["rollout/unfinished_groups"] == 2


@pytest.mark.parametrize("per_batch", [2, 3])
def test_the_sampler_stops_after_two_generation_batches_and_goes_on_when_some_are_taken(per_batch):
    """Also where a batch is finished and nothing is in the slots, as after the first step."""
    settings = {"slots": 16, "groups": 2, "G": 2, "max_staleness": 8, "mean": 5, "sigma": 0.1}
    run = FreeRun(per_batch=per_batch, **settings)
    for step in range(4):
        run.step(500)
        waiting = run.sampler.record(run.prompts)["unfinished"]
        assert len(waiting.prompts) == 2 * per_batch
        assert 0 < run.rows[step].dispatches < 30


def test_all_slots_are_busy_while_the_learner_works():
    run = FreeRun(slots=32, groups=16, per_batch=64, W=16)
    for _ in range(8):
        run.step(6)
    assert run.occupancy() > 0.9
    # Prompts have one token, and what a sample has decoded is not prefilled again.
    drawn = [n for row in run.rows for _, n in row.drawn]
    again = FullRun(slots=32, groups=16, per_batch=64, W=16)
    for _ in range(8):
        again.step()
    assert run.engine.prefilled_tokens <= 4 * len(drawn) < again.engine.prefilled_tokens / 4


def test_a_staleness_of_0_is_refused():
    with pytest.raises(UserError, match=r"max_staleness = -1: must be at least 0"):
        RolloutConfig(max_staleness=-1)
