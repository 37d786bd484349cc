"""A curriculum: problems that are solved always or never are drawn rarely, and a restart changes nothing."""

import collections
import itertools
import json

import numpy as np
import pytest

from jaxrl.data import PromptStream
from jaxrl.data.pass_rates import Curriculum, PassRates, is_drawn
from jaxrl.types import Prompts

G = 8


def rates(*groups, num_problems=3, **changes) -> PassRates:
    """After graded groups, (row, number right) each."""
    table = PassRates(
        num_problems, Curriculum(**{"group_size": G, "least_chance": 0.05, "decay": 0.75} | changes)
    )
    for row, num_right in groups:
        table.learn(row, num_right, G)
    return table


def stream(per_batch=4, sizes=(300,), weights=(1.0,), *, off=False, **changes) -> PromptStream:
    """Prompt n of source s is the token 1000 s + n."""
    sources = [
        Prompts(
            ids_N=np.arange(size),
            tokens=tuple(np.array([1000 * s + n], np.int32) for n in range(size)),
            texts=("?",) * size,
            answers=("!",) * size,
            sources=(f"source {s}",) * size,
        )
        for s, size in enumerate(sizes)
    ]
    options = {"group_size": G, "least_chance": 0.05, "decay": 0.75, **changes}
    return PromptStream(
        sources,
        prompts_per_batch=per_batch,
        seed=3,
        weights=weights,
        curriculum=None if off else Curriculum(**options),
    )


def graded(batch: Prompts, pass_rate) -> np.ndarray:
    """Answers to prompts, of which each has a share right: [N, G], a pure function of prompt and id."""
    right = []
    for token, prompt_id in zip(batch.tokens, batch.ids_N.tolist(), strict=True):
        draws = np.random.default_rng((int(token[0]), prompt_id)).random(G)
        right.append(draws < pass_rate(int(token[0])))
    return np.array(right)


def walk(prompts: PromptStream, num_batches: int, pass_rate) -> list[int]:
    """Draws batches and learns from each; the tokens that were drawn."""
    drawn = []
    for batch in itertools.islice(prompts, num_batches):
        prompts.learn(batch.ids_N, graded(batch, pass_rate))
        drawn += [int(token[0]) for token in batch.tokens]
    return drawn


def by_thirds(token: int) -> float:
    """Of three problems one is solved always, one never, one half of the time."""
    return (0.0, 0.5, 1.0)[token % 3]


# The chance of a draw


def test_a_problem_is_worth_the_chance_that_its_next_group_is_mixed():
    # By hand, G = 2: after 8 of 8 right the next two are alike with the probability of both right,
    # (8.25 / 8.5) (9.25 / 9.5), or both wrong, (0.25 / 8.5) (1.25 / 9.5); the most is 1/2.
    alike = (8.25 / 8.5) * (9.25 / 9.5) + (0.25 / 8.5) * (1.25 / 9.5)
    assert rates((0, 8), group_size=2).chance(0) == pytest.approx(2 * (1 - alike))
    assert rates((0, 0), group_size=2).chance(0) == pytest.approx(2 * (1 - alike))


def test_unknown_problems_are_always_drawn_and_half_solved_ones_nearly():
    table = rates((1, G // 2))
    assert table.chance(0) == 1.0
    assert 0.9 < table.chance(1) <= 1.0


def test_the_more_groups_are_all_right_the_rarer_until_the_least():
    chances = [rates(*[(0, G)] * n, least_chance=0.06).chance(0) for n in range(12)]
    assert chances == sorted(chances, reverse=True)
    assert chances[1] < 0.2 and chances[11] == 0.06
    assert [rates(*[(0, 0)] * n, least_chance=0.06).chance(0) for n in range(12)] == chances


def test_what_was_learned_long_ago_counts_less():
    turned = [(0, 0)] * 6 + [(0, G)]
    assert rates(*turned).chance(0) > 5 * rates(*[(0, 0)] * 7).chance(0)
    # With no decay every group counts alike, with a whole one the last alone does.
    assert rates(*turned, decay=0.0).chance(0) == rates((0, G)).chance(0)
    assert rates(*turned, decay=1.0).metrics([rates(*turned, decay=1.0)])[
        "curriculum/mean_pass_rate"
    ] == pytest.approx(1 / 7)


def test_groups_of_one_answer_go_by_two_that_might_differ():
    assert rates((0, 4), group_size=1).chance(0) == rates((0, 4), group_size=2).chance(0) > 0.05


def test_draws_are_fair_and_repeat():
    draws = [is_drawn(0.3, 7, turn) for turn in range(20_000)]
    assert np.mean(draws) == pytest.approx(0.3, abs=0.01)
    assert draws == [is_drawn(0.3, 7, turn) for turn in range(20_000)]
    assert not any(is_drawn(0.0, 7, turn) for turn in range(100))
    assert all(is_drawn(1.0, 7, turn) for turn in range(100))


# The stream


def test_problems_that_are_solved_always_or_never_are_drawn_rarely():
    counts = collections.Counter(token % 3 for token in walk(stream(per_batch=32), 100, by_thirds))
    never, half, always = (counts[kind] for kind in range(3))
    # A hundred problems of each kind; without the curriculum each kind has a third of the draws.
    assert half > 0.7 * sum(counts.values())
    assert 0 < never < 0.2 * half and 0 < always < 0.2 * half


def test_without_a_curriculum_nothing_is_passed_over():
    prompts = stream(off=True)
    counts = collections.Counter(walk(prompts, 225, by_thirds))
    assert set(counts.values()) == {3}
    assert (prompts.metrics(), prompts.counts()) == ({}, {})
    assert prompts.state()["pass_rates"] == []


def test_a_problem_that_becomes_solvable_comes_back():
    prompts = stream(per_batch=50)
    walk(prompts, 20, lambda token: 0.0)
    before = prompts.metrics()["curriculum/solved_never"]
    late = collections.Counter(walk(prompts, 40, lambda token: 0.5 if token < 30 else 0.0))
    assert before == 1.0
    solved = [late[token] for token in range(300)]
    assert np.mean(solved[:30]) > 3 * np.mean(solved[30:])


@pytest.mark.parametrize("pass_rate", [0.0, 1.0])
def test_where_nothing_is_worth_a_draw_the_stream_goes_on(pass_rate):
    prompts = stream(sizes=(20,), least_chance=0.001, decay=1.0)
    for _ in range(9):
        prompts.learn(np.arange(20), np.full((20, 1000), bool(pass_rate)))
    drawn = walk(prompts, 10, lambda token: pass_rate)
    # At most an epoch is passed over for each prompt.
    assert len(drawn) == 40 and 200 < prompts.counts()["curriculum/skipped"] <= 20 * 40


def test_every_source_keeps_its_share_whatever_is_passed_over():
    prompts = stream(sizes=(100, 300), weights=(3.0, 1.0))
    drawn = walk(prompts, 100, lambda token: 1.0 if token < 1000 else 0.5)
    assert sum(token < 1000 for token in drawn) == 300
    # Every prompt has an id of its own, by which its grading finds back to it.
    ids = np.concatenate([next(prompts).ids_N for _ in range(50)])
    assert len(set(ids.tolist())) == len(ids)


def test_metrics_say_what_is_known():
    prompts = stream(sizes=(4, 2), weights=(2.0, 1.0), per_batch=6)
    assert prompts.metrics() == {"curriculum/known": 0.0}
    batch = next(prompts)
    correct_NG = np.zeros((6, G), bool)
    for n, token in enumerate(batch.tokens):
        correct_NG[n, : {0: G, 1: G // 2, 1000: G}.get(int(token[0]), 0)] = True
    prompts.learn(batch.ids_N, correct_NG)
    assert prompts.metrics() == {
        "curriculum/known": 6.0,
        "curriculum/mean_pass_rate": pytest.approx(2.5 / 6),
        "curriculum/solved_always": pytest.approx(2 / 6),
        "curriculum/solved_never": pytest.approx(3 / 6),
    }


# Resuming


@pytest.mark.parametrize("num_batches", [0, 1, 30])
def test_a_resumed_run_draws_what_it_would_have_drawn(num_batches):
    settings = {"sizes": (100, 60), "weights": (2.0, 1.0)}
    prompts = stream(**settings)
    walk(prompts, num_batches, by_thirds)
    state = json.loads(json.dumps(prompts.state()))
    expected = walk(prompts, 50, by_thirds)

    restored = stream(**settings)
    walk(restored, 5, by_thirds)  # wherever it stood before
    restored.restore(state)
    assert restored.state() == state
    assert walk(restored, 50, by_thirds) == expected
    assert restored.state() == prompts.state()
    assert restored.metrics() == prompts.metrics()


def test_a_curriculum_may_begin_and_end_in_the_midst_of_a_run():
    plain = stream(off=True)
    next(plain)
    prompts = stream()
    prompts.restore(plain.state())
    assert walk(prompts, 1, by_thirds) == walk(plain, 1, by_thirds)
    ended = stream(off=True)
    ended.restore(prompts.state())
    next(ended)
