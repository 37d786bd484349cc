"""Samplers without a model: what they take from the prompts, when, and with which weights."""

import threading

import numpy as np
import pytest
from arithmetic_backend import counting
from steps import STOP, CountingGrader, NumberedPrompts, SamplingPolicy, make_backend, saved

from jaxrl.dataflows.dynamic_sampling import DynamicSampling
from jaxrl.dataflows.rewarding import OverlongPunishment, Rewards
from jaxrl.dataflows.samplers import Generation, GreedySampling, PartialSampling, Sampling
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.errors import UserError
from jaxrl.rewards import Graders
from jaxrl.rewards.grading import FunctionGrader
from jaxrl.rollout.backend import SamplingOptions

OPTIONS = SamplingOptions(num_samples=2, seed=0, step=0, temperature=1.0)
NO_PUNISHMENT = OverlongPunishment(12, 0, 0.0)


def first_sample_of_even_prompts(number: int, response: str) -> bool:
    """Mixed are the groups of even prompts: their first sample, which is the shorter one, is right."""
    return number % 2 == 0 and len(response.split()) == 2


class Bench:
    """A sampler with all that is around it."""

    def __init__(self, kind, *, grader=None, per_batch=4, respond=None, **settings):
        self.timer = NoTimer()
        self.policy = SamplingPolicy(make_backend(respond))
        self.generation = Generation(self.policy, OPTIONS, self.timer)
        self.grader = grader or CountingGrader()
        graders = Graders.of(FunctionGrader(self.grader))
        self.rewards = Rewards(graders, NO_PUNISHMENT, self.timer)
        self.prompts = NumberedPrompts(per_batch)
        self.sampler = kind(self.generation, self.rewards, **settings)

    def step(self, sampler=None, **arguments):
        """Samples, and then learns: the weights change, and the timer goes on."""
        sampled = (sampler or self.sampler).sample(self.prompts, **arguments)
        self.policy.update()
        self.timer.step += 1
        return sampled


def ids_of(sampled) -> list[int]:
    return sampled.completions.prompts.ids_N.tolist()


def test_a_generation_batch_with_the_weights_and_keys_of_its_step():
    bench = Bench(Sampling)
    assert ids_of(bench.step()) == [0, 1, 2, 3]
    assert ids_of(bench.step()) == [4, 5, 6, 7]
    # (prompt, version of the weights, step)
    assert bench.policy.sampled == [(n, n // 4, n // 4) for n in range(8)]


@pytest.mark.parametrize("inside_dynamic_sampling", [False, True])
def test_grading_begins_before_the_last_prompt_is_sampled(inside_dynamic_sampling):
    graded = threading.Event()

    def right(number, response):
        graded.set()
        return first_sample_of_even_prompts(number, response)

    def respond(prompt, index):
        # Prompts 4 to 7 have no slots before 0 to 3 are finished.
        assert prompt[0] - 2 < 4 or graded.wait(60), "nothing was graded beside"
        return counting((STOP,))(prompt, index)

    bench = Bench(Sampling, grader=CountingGrader(right), per_batch=8, respond=respond)
    sampled = bench.step(dynamic(bench, 4) if inside_dynamic_sampling else None)
    assert sampled.scored.correct_NG.sum() == 4
    assert bench.grader.calls == 16


def test_what_is_graded_beside_is_what_is_graded_after():
    def bench():
        return Bench(Sampling, grader=CountingGrader(first_sample_of_even_prompts), per_batch=7)

    beside = bench().step()
    other = bench()
    other.generation.load_weights()
    completions = other.policy.generate(next(other.prompts), OPTIONS, expected_tokens_N=np.zeros(7))
    after = other.rewards(completions)
    assert beside.metrics == after.metrics
    assert beside.completions.texts == after.completions.texts
    assert beside.scored.predictions == after.scored.predictions
    for name in ("correct_B", "score_B", "shaping_B", "term_BK", "reward_B"):
        ours, theirs = (getattr(s.scored, name) for s in (beside, after))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_what_a_grader_fails_on_is_counted_and_stays_with_its_response():
    class Failing(CountingGrader):
        def __call__(self, response, answer):
            if answer == "2":
                raise ZeroDivisionError("2")
            return super().__call__(response, answer)

    sampled = Bench(Sampling, grader=Failing()).step()
    kinds = [f and f.kind for f in sampled.scored.failures]
    assert kinds == [None] * 4 + ["raised"] * 2 + [None] * 2
    assert sampled.scored.correct_B.tolist() == [kind is None for kind in kinds]
    assert sampled.metrics["reward/grader/failed"] == 2
    assert sampled.metrics["reward/grader/failed_raised"] == 2


def test_a_truth_that_cannot_be_graded_names_its_prompt():
    class Refusing(CountingGrader):
        def __call__(self, response, answer):
            if answer == "2":
                raise UserError("no truth; fix the row")
            return super().__call__(response, answer)

    with pytest.raises(UserError, match="prompt 2 of 'numbers': no truth; fix the row"):
        Bench(Sampling, grader=Refusing()).step()


def test_rewards_come_with_the_groups():
    bench = Bench(Sampling, grader=CountingGrader(first_sample_of_even_prompts))
    sampled = bench.step()
    assert sampled.scored.correct_NG.tolist() == [[True, False], [False] * 2] * 2
    assert sampled.scored.reward_B.tolist() == [1, -1, -1, -1] * 2
    assert sampled.metrics["reward/grader/mean"] == pytest.approx(-0.5)


def test_the_greedy_response_is_one_for_each_prompt():
    bench = Bench(Sampling)
    greedy = GreedySampling(bench.generation, bench.rewards)(next(bench.prompts))
    assert greedy.completions.num_samples == 1 and len(greedy.completions) == 4


def test_lengths_that_were_met_decide_who_starts_first():
    bench = Bench(Sampling)
    sampled = bench.step()
    expected_N = bench.generation.expected_tokens(sampled.completions.prompts)
    # Two samples of 2 and 3 tokens: 2.5, rounded to even; the rest is the prompt's own length.
    assert np.floor(expected_N).tolist() == [2, 2, 2, 2]
    unknown = NumberedPrompts()
    unknown.restore({"next": 100})
    assert np.floor(bench.generation.expected_tokens(next(unknown))).tolist() == [3] * 4


# Partial rollouts


def ragged(prompt, index):
    """Responses of 2 to 11 tokens."""
    length = 1 + (3 * int(prompt[0]) + 5 * index) % 10
    return np.array([2] * length + [STOP], np.int32)


def partial_bench(respond=ragged, *, prompts_per_batch=4, max_staleness=8, **settings) -> Bench:
    return Bench(
        PartialSampling,
        per_batch=1,
        prompts_per_batch=prompts_per_batch,
        max_staleness=max_staleness,
        respond=respond,
        **settings,
    )


def test_a_step_ends_when_there_is_enough_and_the_rest_goes_on():
    bench = partial_bench()
    first = bench.step(enough=lambda group: True)
    assert first.counts == {
        "rollout/unfinished_groups": 0,
        "rollout/dropped_stale_groups": 0,
        "rollout/stale_tokens": 0,
    }
    left = bench.policy.rollouts[-1].unfinished.prompts.ids_N.tolist()
    assert sorted(ids_of(first) + left) == list(range(4)) and left
    second = bench.step(enough=lambda group: False)
    assert second.counts["rollout/unfinished_groups"] == len(left)
    assert set(left) <= set(ids_of(second))
    # Nothing is lost or done twice.
    rest = bench.policy.rollouts[-1].unfinished.prompts.ids_N.tolist()
    drawn = [n for n, _, _ in bench.policy.sampled]
    assert sorted(ids_of(first) + ids_of(second) + rest) == drawn == list(range(len(drawn)))


def test_a_finished_group_is_graded_once_and_a_generation_batch_has_an_end():
    bench = partial_bench()
    seen = []
    sampled = bench.step(enough=lambda group: seen.append(group) or False)
    assert len(seen) >= 4 and all(len(group) == 2 for group in seen)
    assert bench.grader.calls == len(sampled.completions) == 2 * len(seen)


def test_unfinished_groups_go_through_a_record():
    def cut_short(kind):
        bench = partial_bench()
        bench.step(enough=lambda group: True)
        return bench

    bench, again = (
        cut_short(0),
        partial_bench(),
    )
    again.sampler.restore(saved(bench.sampler.record(bench.prompts)), again.prompts)
    again.timer.step, again.policy.version = bench.timer.step, bench.policy.version
    ours, theirs = again.step(), bench.step()
    assert ids_of(ours) == ids_of(theirs)
    assert ours.completions.texts == theirs.completions.texts
    assert ours.counts == theirs.counts


# Dynamic sampling around another sampler


def dynamic(bench: Bench, groups: int, batches: int = 3) -> DynamicSampling:
    return DynamicSampling(bench.sampler, groups, max_generation_batches=batches)


def test_batches_are_taken_until_enough_groups_are_mixed():
    bench = Bench(Sampling, grader=CountingGrader(first_sample_of_even_prompts))
    sampled = bench.step(dynamic(bench, 3))
    # Of 0 1 2 3 and 4 5 6 7 the even ones are mixed; the surplus, 6, is thrown away.
    assert ids_of(sampled) == [0, 2, 4]
    assert sampled.metrics["train/num_gen_batches"] == 2
    assert sampled.metrics["training/filter_groups/discarded_surplus_prompts"] == 1


def test_partial_sampling_stops_once_the_step_is_full():
    bench = partial_bench(
        None, prompts_per_batch=6, grader=CountingGrader(first_sample_of_even_prompts)
    )
    sampled = bench.step(dynamic(bench, 3))
    assert len(ids_of(sampled)) == 3 and all(n % 2 == 0 for n in ids_of(sampled))
    # Every group was looked at once, in all that was sampled.
    assert bench.grader.calls == 2 * sampled.metrics["train/num_prompts_sampled"]
