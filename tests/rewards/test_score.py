"""Completions -> Scored."""

import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.rewards import (
    FunctionGrader,
    Grade,
    Graders,
    grade_answer,
    score_completions,
    verdicts_of,
)
from jaxrl.types import Completions, Prompts


def completions_of(answers: list[str], texts: list[str], lengths: list[int]) -> Completions:
    """Groups of equal size, one for each ground truth; tokens and log-probabilities are zeros."""
    n = len(answers)
    return Completions(
        prompts=Prompts(
            ids_N=100 + np.arange(n, dtype=np.int64),
            tokens=tuple(np.zeros(1, np.int32) for _ in range(n)),
            texts=("?",) * n,
            answers=tuple(answers),
            sources=("toy",) * n,
        ),
        num_samples=len(texts) // n,
        tokens=tuple(np.zeros(length, np.int32) for length in lengths),
        rollout_logprob=tuple(np.zeros(length, np.float32) for length in lengths),
        entropy=tuple(np.zeros(length, np.float32) for length in lengths),
        truncated_B=np.zeros(len(texts), np.bool_),
        texts=tuple(texts),
    )


def no_shaping(lengths_B):
    return np.zeros(lengths_B.shape)


def scored_by(function, completions, overlong=no_shaping):
    verdicts = verdicts_of(Graders.of(FunctionGrader(function)), completions)
    return score_completions(completions, verdicts, overlong=overlong)


def test_right_is_one_wrong_is_minus_one_and_length_is_kept_apart():
    completions = completions_of(
        ["42", "7"], ["Answer: 42", "Answer: 7", "Answer: 007", "no idea"], [3, 5, 9, 1]
    )
    scored = scored_by(grade_answer, completions, lambda lengths_B: -lengths_B / 10)
    np.testing.assert_array_equal(scored.correct_NG, [[True, False], [True, False]])
    np.testing.assert_array_equal(scored.score_B, [1, -1, 1, -1])
    np.testing.assert_allclose(scored.shaping_B, [-0.3, -0.5, -0.9, -0.1])
    np.testing.assert_allclose(scored.reward_B, [0.7, -1.5, 0.1, -1.1], rtol=1e-6)
    assert scored.predictions == ("42", "7", "7", None)
    assert scored.completions is completions
    assert scored.correct_B.dtype == np.bool_
    assert scored.score_B.dtype == scored.shaping_B.dtype == scored.reward_B.dtype == np.float32


def test_a_grader_is_any_function_of_two_texts():
    completions = completions_of(["ab"], ["ab", "ba"], [1, 1])
    scored = scored_by(lambda response, answer: Grade(response == answer, response), completions)
    assert scored.correct_B.tolist() == [True, False]
    assert scored.predictions == ("ab", "ba")


@pytest.mark.parametrize("answer", ["", "  ", r"\boxed{}"])
def test_an_empty_ground_truth_names_its_prompt(answer):
    completions = completions_of(["1", answer], ["Answer: 1"] * 4, [1] * 4)
    with pytest.raises(UserError, match="prompt 101 of 'toy'"):
        verdicts_of(Graders(("answer", {})), completions)


def test_a_ground_truth_the_grader_cannot_read_names_its_prompt():
    completions = completions_of(["six"], ["Answer: 6"], [1])
    with pytest.raises(UserError, match=r"prompt 100 of 'toy'.*####"):
        verdicts_of(Graders(("gsm8k", {})), completions)
