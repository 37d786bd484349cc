"""Completions -> Scored."""

import dataclasses
import threading

import numpy as np
import pytest
from beside import of_extension

from jaxrl.errors import UserError
from jaxrl.rewards import Graders
from jaxrl.rewards.answer import grade_answer
from jaxrl.rewards.grading import FunctionGrader, Grader, Verdict
from jaxrl.rewards.score import AskedVerdicts, score_completions
from jaxrl.rollout.samples import Sample
from jaxrl.rollout.samples import completions_of as sampled
from jaxrl.types import Branch, Completions, Prompts, Stretch

Talk = of_extension("jaxrl_agents.agent_rows:Talk")
group_of = of_extension("jaxrl_agents.agent_rows:group_of")


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
    verdicts = AskedVerdicts(Graders.of(FunctionGrader(function)), completions).result()
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


def conversation(*turns: tuple[bool, str]) -> Completions:
    """A conversation about a prompt whose answer is 5, as agents leave it; characters are tokens."""
    prompts = completions_of(["5"], ["?"], [1]).prompts
    prompt = prompts.tokens[0]
    said = [np.array([ord(character) for character in text], np.int32) for _, text in turns]
    masks = [np.full(len(text), by_policy, np.float32) for by_policy, text in turns]
    tokens = np.concatenate([prompt, *said])
    mask = np.concatenate([np.zeros(len(prompt), np.float32), *masks])
    talk = Talk((Branch(tokens, 0 * mask, 0 * mask, 0, mask),), None)
    return group_of(
        prompts, [talk], 1, lambda sequences: ["".join(map(chr, tokens)) for tokens in sequences]
    )


@pytest.mark.parametrize(
    ("turns", "correct"),
    [
        ([(True, "I do not know."), (False, "Answer: 5"), (True, "\nBye.")], False),
        ([(True, "I do not know."), (False, "Answer: 5")], False),
        ([(True, "Answer: "), (False, "5"), (True, "hm")], False),
        ([(True, "Answer: 5"), (False, "Answer: 6"), (True, "\nSo it is.")], True),
        ([(True, "What is 2 + 3?"), (False, "5"), (True, "\nAnswer: 5")], True),
    ],
)
def test_the_words_of_an_environment_are_not_graded(turns, correct):
    completions = conversation(*turns)
    assert completions.turns == (tuple(turns),)
    assert completions.texts == ("".join(text for _, text in turns),)
    (verdict,) = AskedVerdicts(Graders(("answer", {})), completions).result()
    assert verdict.correct is correct
    # Tokens neither, for graders that look at them.
    seen = []

    class Sees(Grader):
        def grade(self, samples):
            seen.extend(samples)
            return [Verdict(0.0, False)]

    AskedVerdicts(Graders.of(Sees()), completions).result()
    (sample,) = seen
    said = "".join(text for by_policy, text in turns if by_policy)
    assert sample.tokens.tolist() == [ord(character) for character in said]
    both = Completions.concatenate([completions, completions]).take([1])
    assert both.turns == completions.turns


def test_texts_are_made_on_the_thread_of_the_graders():
    sample, threads = Sample(0, 0, 1), []
    sample.add(Stretch(np.arange(3, dtype=np.int32), *np.zeros((2, 3), np.float32), 1))

    def decode_texts(sequences):
        threads.append(threading.get_ident())
        return ["Answer: 5"] * len(sequences)

    prompts = completions_of(["5"], ["?"], [1]).prompts
    completions = sampled(prompts, [sample], 1, decode_texts)
    (verdict,) = AskedVerdicts(Graders(("answer", {})), completions).result()
    assert verdict.correct and completions.texts == ("Answer: 5",)
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_completions_that_an_environment_spoke_in_have_turns():
    completions = conversation((True, "I do not know."), (False, "Answer: 5"))
    with pytest.raises(AssertionError, match="give the turns"):
        dataclasses.replace(completions, turns=())


@pytest.mark.parametrize("answer", ["", "  ", r"\boxed{}"])
def test_an_empty_ground_truth_names_its_prompt(answer):
    completions = completions_of(["1", answer], ["Answer: 1"] * 4, [1] * 4)
    with pytest.raises(UserError, match="prompt 101 of 'toy'"):
        AskedVerdicts(Graders(("answer", {})), completions).result()


def test_a_grader_that_gives_no_number_ends_the_run_in_an_evaluation_too(make_scored):
    verdicts = [Verdict(1.0, True), Verdict(float("nan"), False)]
    completions = make_scored([5], num_samples=2).completions
    message = "the grader returned nan for response 1 .sample 1 of the prompt 'prompt 5'"
    with pytest.raises(UserError, match=message):
        score_completions(completions, verdicts, overlong=np.zeros_like)
