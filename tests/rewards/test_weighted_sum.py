"""Several rewards in one."""

import numpy as np
import pytest

from jaxrl.errors import UserError
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
        ([0, 1, np.nan, 0], "reward 'odd' returned nan for response 2 and 1 of 4"),
        ([0, -np.inf, 1e39, 0], "returned -inf for response 1 and 2 of 4"),
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
