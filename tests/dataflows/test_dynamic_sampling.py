"""Dynamic sampling. A prompt's id says which answers are right: see `make_scored`; 0 and 15 teach nothing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.dataflows.dynamic_sampling import GroupBuffer, NotEnoughGroups, kept_groups

MIXED = range(1, 15)


def ids_of(scored) -> list[int]:
    return scored.completions.prompts.ids_N.tolist()


def keep_mixed_groups(scored):
    return scored.take(np.flatnonzero(kept_groups(scored, "correctness")))


def buffer_of(num_prompts: int, batches: int, **options) -> GroupBuffer:
    return GroupBuffer(num_prompts, max_generation_batches=batches, **options)


def fill(buffer: GroupBuffer, *batches) -> list[bool]:
    return [buffer.add(batch) for batch in batches]


# Which groups are kept


@given(ids=st.lists(st.integers(0, 15), min_size=1, max_size=12))
def test_mixed_groups_are_kept_in_order_with_everything_they_hold(make_scored, ids):
    kept = keep_mixed_groups(make_scored(ids))
    assert ids_of(kept) == [i for i in ids if i in MIXED]
    # Whole groups: one mixed group of four is four rows.
    assert len(kept) == 4 * len(ids_of(kept))
    assert all(0 < n < 4 for n in kept.correct_NG.sum(axis=1))
    assert kept.completions.texts == make_scored(ids_of(kept)).completions.texts


def test_a_spread_of_rewards_does_not_keep_a_group(make_scored):
    # Length shaping makes the rewards of these groups differ, yet all answers are wrong, or all right.
    scored = make_scored([0, 15])
    assert np.all(np.std(scored.reward_B.reshape(2, 4), axis=1) > 0)
    assert ids_of(keep_mixed_groups(scored)) == []


def test_equal_rewards_do_not_drop_a_mixed_group(make_scored):
    scored = make_scored([5])
    equal = dataclasses.replace(scored, shaping_B=-scored.score_B)
    assert np.all(equal.reward_B == 0)
    assert ids_of(keep_mixed_groups(equal)) == [5]


def test_an_only_sample_is_never_mixed(make_scored):
    assert ids_of(keep_mixed_groups(make_scored([0, 1], num_samples=1))) == []


def test_scores_that_differ_keep_a_group_whatever_is_right(make_scored):
    scored = make_scored([0, 15, 5])
    score_NG = np.array([[0.1, 0.1, 0.4, 0.1], [0.9, 0.9, 0.9, 0.9], [0.0, 0.2, 0.2, 0.2]])
    scored = dataclasses.replace(scored, score_B=score_NG.reshape(-1).astype(np.float32))
    assert kept_groups(scored, "score").tolist() == [True, False, True]


# The buffer


def test_a_short_step_is_filled_with_what_was_dropped_if_asked(make_scored):
    buffer = buffer_of(3, 2, fills_up=True)
    assert fill(buffer, make_scored([0, 6, 15]), make_scored([15, 0, 0])) == [False, True]
    groups, stats = buffer.take()
    assert ids_of(groups) == [6, 0, 15], "what is kept comes first"
    assert stats.metrics()["training/filter_groups/filled_prompts"] == 2
    with pytest.raises(NotEnoughGroups):
        fill(buffer_of(3, 1, fills_up=True), make_scored([1, 0]))


def test_taking_empties_the_buffer(make_scored):
    buffer = buffer_of(2, 2)
    fill(buffer, make_scored([1, 2, 3]))
    buffer.take()
    # The surplus is gone, and the count of batches starts again.
    assert fill(buffer, make_scored([0, 4]), make_scored([5, 15])) == [False, True]
    groups, stats = buffer.take()
    assert ids_of(groups) == [4, 5]
    assert (stats.generation_batches, stats.prompts) == (2, 4)


@given(
    batches=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=5), min_size=1, max_size=6),
    wanted=st.integers(1, 8),
)
def test_a_full_step_is_the_first_mixed_groups_in_the_order_they_came(make_scored, batches, wanted):
    buffer = buffer_of(wanted, 100)
    sampled = []
    for ids in batches:
        sampled += ids
        mixed = [i for i in sampled if i in MIXED]
        full = fill(buffer, make_scored(ids)) == [True]
        assert full == (len(mixed) >= wanted)
        if full:
            groups, stats = buffer.take()
            assert ids_of(groups) == mixed[:wanted]
            assert stats.surplus_prompts == len(mixed) - wanted
            assert stats.prompts == len(sampled)
            return


# What is reported


def test_stats_are_of_everything_sampled(make_scored):
    buffer = buffer_of(2, 3)
    batches = [make_scored([0, 15, 1]), make_scored([0, 7])]
    fill(buffer, *batches)
    _, stats = buffer.take()
    # Right answers by prompt: 0, 4, 1, 0, 3 of 4 each.
    assert stats.accuracy == pytest.approx(8 / 20)
    assert stats.all_correct == pytest.approx(1 / 5)
    assert stats.all_wrong == pytest.approx(2 / 5)
    assert stats.prompts == 5
    tokens = sum(len(t) for batch in batches for t in batch.completions.tokens)
    assert stats.response_tokens == tokens
    metrics = stats.metrics()
    assert metrics["train/num_gen_batches"] == 2
    assert metrics["train/num_prompts_sampled"] == 5
    assert metrics["train/accuracy"] == stats.accuracy
    assert metrics["training/filter_groups/all_correct"] == stats.all_correct
    assert metrics["training/filter_groups/all_wrong"] == stats.all_wrong
    assert metrics["training/filter_groups/discarded_surplus_prompts"] == 0
    assert metrics["train/num_response_tokens_sampled"] == tokens


def test_without_a_limit_a_step_takes_as_many_batches_as_it_takes(make_scored):
    buffer = buffer_of(2, 0)
    assert fill(buffer, *[make_scored([0, 15])] * 40, make_scored([5, 0])) == [False] * 41
    # What came to nothing is not held, however long it takes.
    assert not buffer._sampled and not buffer._dropped
    assert buffer.add(make_scored([6]))
    groups, stats = buffer.take()
    assert ids_of(groups) == [5, 6]
    assert (stats.generation_batches, stats.prompts) == (42, 83)
    assert stats.all_correct == pytest.approx(40 / 83)


def test_too_few_groups_end_with_what_was_seen_and_what_to_do(make_scored):
    buffer = buffer_of(3, 2)
    fill(buffer, make_scored([0, 15, 0, 0]))
    with pytest.raises(NotEnoughGroups) as error:
        fill(buffer, make_scored([0, 0, 15, 6]))
    assert ids_of(error.value.sampled) == [0, 15, 0, 0, 0, 0, 15, 6]
    message = str(error.value)
    assert "2 generation batches (8 prompts) gave 1 of the 3 groups" in message
    assert "25% of the prompts were answered all right, 62% all wrong" in message
    for remedy in (
        "easier or harder prompts",
        "rollout.num_samples",
        "rollout.max_generation_batches",
        "rollout.on_shortage=fill",
    ):
        assert remedy in message
