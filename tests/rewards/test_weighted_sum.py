"""Several rewards in one."""

import numpy as np
import pytest

from jaxrl.dataflows.dynamic_sampling import GroupBuffer, NotEnoughGroups
from jaxrl.dataflows.step_metrics import batch_metrics
from jaxrl.errors import UserError
from jaxrl.rewards.evaluation_metrics import evaluation_metrics
from jaxrl.rewards.score import Term, weighted_sum
from jaxrl.types import Scored


def test_terms_add_up_with_their_weights(make_scored):
    scored = make_scored([5], num_samples=4)  # right, wrong, right, wrong
    model_B = np.array([0.5, 0.25, -0.5, 8.0], np.float32)
    terms = [Term("grader", 2.0, scored.score_B), Term("model", 0.5, model_B)]

    total, metrics = weighted_sum(scored, terms)

    np.testing.assert_array_equal(total.score_B, [2.25, -1.875, 1.75, 2.0])
    assert total.score_B.dtype == np.float32
    assert metrics == {
        "reward/grader/mean": 0.0,
        "reward/grader/std": 1.0,
        "reward/model/mean": pytest.approx(model_B.mean()),
        "reward/model/std": pytest.approx(model_B.std()),
    }


def test_terms_stay_apart_beside_their_sum(make_scored):
    scored = make_scored([5, 9, 15], num_samples=2)
    terms = [Term("grader", 2.0, scored.score_B), Term("place", 0.5, np.arange(6.0))]
    total, _ = weighted_sum(scored, terms)
    np.testing.assert_allclose(total.term_BK @ total.term_weight_K, total.score_B)
    # They go where their responses go.
    moved = Scored.concatenate([total.take([2]), total.take([]), total.take([0])])
    np.testing.assert_array_equal(moved.term_BK[:, 1], [4, 5, 0, 1])
    np.testing.assert_allclose(moved.term_BK @ moved.term_weight_K, moved.score_B)


def test_correctness_and_shaping_stay_the_graders(make_scored):
    # By the sum all four answers are good, and the groups still are mixed.
    scored = make_scored([5, 9])
    total, _ = weighted_sum(scored, [Term("kindness", 1.0, np.full(8, 3.0))])

    np.testing.assert_array_equal(total.correct_NG, scored.correct_NG)
    np.testing.assert_array_equal(total.shaping_B, scored.shaping_B)
    np.testing.assert_array_equal(total.reward_B, 3.0 + scored.shaping_B)
    assert total.predictions == scored.predictions


@pytest.mark.parametrize(
    ("score_B", "message"),
    [
        ([1.0, 2.0], r"reward 'odd' returned an array of shape \(2,\); it must return 4 numbers"),
        ([[1.0]] * 4, r"shape \(4, 1\)"),
        (
            [0, 1, np.nan, 0],
            "returned nan for response 2 .sample 2 of the prompt .prompt 5. of .source 1.. and 1 of 4",
        ),
        ([0, -np.inf, 1e39, 0], "returned -inf for response 1 .*and 2 of 4"),
        (["good"] * 4, "reward 'odd' returned list .*one for each response"),
        (None, r"shape \(\)"),
    ],
)
def test_scores_that_are_no_numbers_name_their_term(make_scored, score_B, message):
    with pytest.raises(UserError, match=message):
        weighted_sum(make_scored([5]), [Term("odd", 1.0, score_B)])


def test_terms_with_one_name_are_refused(make_scored):
    term = Term("mine", 1.0, np.zeros(4))
    with pytest.raises(UserError, match="share the names 'mine'"):
        weighted_sum(make_scored([5]), [term, term, Term("other", 1.0, np.zeros(4))])


def test_a_reward_that_abstains_leaves_the_sum_to_the_others(make_scored):
    scored = make_scored([5])  # right, wrong, right, wrong
    terms = [
        Term("grader", 0.0, scored.score_B),
        Term("one", 2.0, [1.0, None, 0.5, None]),
        Term("two", 0.5, [None, 3.0, 1.0, None]),
    ]
    total, metrics = weighted_sum(scored, terms)
    # Weights as they are: 2 * 1; 0.5 * 3; 2 * 0.5 + 0.5 * 1; and of the last nothing, though a grader
    # without a weight has a verdict.
    np.testing.assert_array_equal(total.score_B, [2.0, 1.5, 1.5, np.nan])
    np.testing.assert_array_equal(total.counts_B, [True, True, True, False])
    np.testing.assert_array_equal(total.term_BK[:, 1], [1.0, np.nan, 0.5, np.nan])
    assert total.left_out == {"reward/abstained": 1}
    assert metrics["reward/one/mean"] == 0.75 and metrics["reward/one/abstained"] == 2
    assert metrics["reward/two/mean"] == 2.0 and metrics["reward/two/abstained"] == 2
    assert "reward/grader/abstained" not in metrics
    # With a weight the grader decides all of them.
    terms[0] = Term("grader", 1.0, scored.score_B)
    np.testing.assert_array_equal(weighted_sum(scored, terms)[0].score_B, [3.0, 0.5, 2.5, -1.0])


def test_a_term_without_a_weight_may_abstain_from_everything(make_scored):
    scored = make_scored([5])
    terms = [Term("grader", 1.0, scored.score_B), Term("seen", 0.0, [None] * 4)]
    total, metrics = weighted_sum(scored, terms)
    np.testing.assert_array_equal(total.score_B, scored.score_B)
    assert metrics["reward/seen/abstained"] == 4 and "reward/seen/mean" not in metrics


def test_a_sample_without_a_score_counts_nowhere(make_scored):
    """In statistics of what was sampled, of a step, and of an evaluation."""
    scored = make_scored([5, 15])
    given = [None, 1.0, 0.0, None, 1.0, 1.0, None, 1.0]
    scored, _ = weighted_sum(scored, [Term("mine", 1.0, given)])
    buffer = GroupBuffer(1, max_generation_batches=1)
    assert buffer.add(scored)
    groups, stats = buffer.take()
    # Right are 1 of 2 of prompt 5, and all 3 of prompt 15.
    assert stats.accuracy == pytest.approx(4 / 5) and stats.all_correct == 1 / 2
    assert stats.metrics()["reward/abstained"] == 3
    assert groups.completions.prompts.ids_N.tolist() == [5]
    # Prompt 15 has right answers alone.
    assert batch_metrics(scored, max_prompt_tokens=9)["train/mixed_groups"] == 1 / 2
    metrics = batch_metrics(groups, max_prompt_tokens=9)
    assert metrics["critic/score/mean"] == 0.5 and metrics["reward/abstained"] == 2
    # Lengths are 1 + (3 * 5 + g) % 5.
    assert metrics["response_length/mean"] == (2 + 3) / 2
    metrics = evaluation_metrics(scored)
    assert metrics["val-core/source 1/acc/mean@4"] == (1 / 2 + 1) / 2
    assert metrics["val-aux/source 1/reward/abstained"] == 3


def test_a_shortage_says_how_many_have_no_score(make_scored):
    scored, _ = weighted_sum(make_scored([5]), [Term("mine", 1.0, [1.0, None, 1.0, None])])
    with pytest.raises(NotEnoughGroups, match=r"2 samples have no reward \(reward/abstained\)"):
        GroupBuffer(1, max_generation_batches=1).add(scored)
