"""The rule grader: what counts as 42, what does not, and text written to break it."""

import json
import pathlib
import time

import pytest
from answer_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.errors import UserError
from jaxrl.rewards import Grade
from jaxrl.rewards.answer import extract_answer, grade_answer, grade_gsm8k, normalize_answer

DATA = pathlib.Path(__file__).parents[2] / "../shared/data"

# ---- by hand


@pytest.mark.parametrize("answer", cases("42"))
def test_spellings_of_42(answer):
    assert grade_answer(f"So we are done.\nAnswer: {answer}", "42") == Grade(True, "42")


@pytest.mark.parametrize("answer", cases("not 42"))
def test_not_42(answer):
    assert not grade_answer(f"Answer: {answer}", "42").correct


@pytest.mark.parametrize(("one", "other", "same"), cases("units"))
def test_units_may_be_left_out_but_not_changed(one, other, same):
    for said, truth in ((one, other), (other, one)):
        assert grade_answer(f"Answer: {said}", truth).correct == same


@pytest.mark.parametrize(("one", "other"), cases("spellings of one value"))
def test_one_value_has_one_spelling(one, other):
    assert normalize_answer(one) == normalize_answer(other) != ""


@pytest.mark.parametrize(("one", "other"), cases("different values"))
def test_different_values_differ(one, other):
    assert normalize_answer(one) != normalize_answer(other)


@pytest.mark.parametrize(("response", "answer"), cases("answer"))
def test_the_last_answer_counts(response, answer):
    assert extract_answer(response) == answer


def test_an_answer_stands_in_the_last_300_characters():
    assert extract_answer("Answer: 42" + " " * 290) == "42"
    assert extract_answer("Answer: 42" + " " * 291) is None


@pytest.mark.parametrize("response", cases("last sentence"))
def test_a_last_sentence_says_80(response):
    assert grade_answer(response, "80") == Grade(True, "80")


@pytest.mark.parametrize("response", cases("no last sentence"))
def test_a_sentence_that_says_something_else_is_no_answer(response):
    assert extract_answer(response) is None
    # What was said before still counts.
    assert extract_answer("Answer: 41\n" + response) == "41"
    assert extract_answer(r"\boxed{41}" + "\n" + response) == "41"


@pytest.mark.parametrize("spaces", range(280, 290))
def test_a_sentence_that_begins_before_the_window_is_no_answer(spaces):
    """With 283 spaces the last 300 characters begin at "the answer is 80."."""
    assert extract_answer("Suppose the answer is 80." + " " * spaces) is None


def test_a_sentence_in_math_mode_may_hold_any_answer():
    assert grade_answer(r"The answer is $\frac{\pi}2$.", r"\frac{\pi}{2}").correct
    assert not grade_answer(r"The answer is $\pm 80$.", "80").correct
    assert extract_answer(r"The answer is \frac{\pi}{2}.") is None


@pytest.mark.parametrize(("notation", "value"), cases("scientific notation"))
def test_scientific_notation_is_a_number(notation, value):
    assert grade_answer(f"Answer: {notation}", value) == Grade(True, value)


@pytest.mark.parametrize(("notation", "value"), cases("no scientific notation"))
def test_what_only_looks_like_scientific_notation_is_none(notation, value):
    assert not grade_answer(f"Answer: {notation}", value).correct


def test_no_answer_is_no_prediction():
    assert grade_answer("I do not know.", "42") == Grade(False, None)
    assert grade_answer("Answer: $$", "42") == Grade(False, None)


def test_gsm8k():
    solution = "He has 2*617 = <<2*617=1234>>1,234 apples.\n#### 1,234"
    assert grade_gsm8k("Answer: $1,234", solution) == Grade(True, "1234")
    # As the model is taught to answer, whatever of it the data's answer field holds.
    for grade in (grade_gsm8k, grade_answer):
        assert grade(solution, solution) == Grade(True, "1234")
        assert grade("#### 1234.", solution) == Grade(True, "1234")
        assert grade("#### 1235", solution) == Grade(False, "1235")
    assert grade_answer(solution, "1234") == Grade(True, "1234")
    for other in ("so ####  ", "x = 12", "twelve", "12 apples", "", "12 or 13"):
        with pytest.raises(UserError, match="no final answer"):
            grade_gsm8k("", other)


@pytest.mark.parametrize("number", ["1234", "1,234", " 1234 ", "1234.0"])
def test_gsm8k_takes_the_number_alone(number):
    assert grade_gsm8k("He has 1,234 apples.\n#### 1,234", number) == Grade(True, "1234")
    # Of answers no more is right than against the whole solution.
    solution = f"He has them.\n#### {number}"
    for response in ("1234", "#### 1234 or 5", "#### 1235", "Answer: not 1234", "Answer: $1234.00"):
        assert grade_gsm8k(response, number) == grade_gsm8k(response, solution)
    assert not grade_gsm8k("1234", number).correct


@pytest.mark.parametrize("answer", ["", " ", "$$", r"\boxed{}", "1" * 301])
def test_a_ground_truth_without_an_answer_is_refused(answer):
    with pytest.raises(UserError, match="cannot be graded"):
        grade_answer("Answer: 42", answer)


# ---- properties

# "~" stands for the sign, "#" for the digits.
NOTATIONS = (
    st.sampled_from(
        ["~#", "~#.", "~#.0", "~00#", "~#/1", " ~ # ", "$~#$", "$~#.$", "**~#**", "n=~#"]
    )
    | st.sampled_from([r"\boxed{~#}", r"\(~#\)", r"\text{~#}", r"~\dfrac{#}{1}", r"\frac{~#}{1}"])
    | st.sampled_from([r"~#^\circ", "~# points", "~# cm^2", r"~#\text{ feet}", "$n_1 = ~#$."])
)


def written(number: int, notation: str, plain: bool) -> str:
    """`number` in some notation; `plain` chooses between two spellings of its sign."""
    sign = ("-" if plain else "\u2212") if number < 0 else ("" if plain else "+")
    return notation.replace("~", sign).replace("#", str(abs(number)))


@given(st.integers(), NOTATIONS, st.booleans())
def test_notation_never_changes_the_verdict(number, notation, plain):
    assert grade_answer(f"Answer: {written(number, notation, plain)}", str(number)).correct


@given(st.integers(), st.integers(-3, 3), st.integers(), NOTATIONS, st.booleans())
def test_a_different_integer_is_never_accepted(number, step, far, notation, plain):
    for other in (number + step, far, -number, 10 * number, number * number):
        verdict = grade_answer(f"Answer: {written(other, notation, plain)}", str(number)).correct
        assert verdict == (other == number)


SEPARATORS = (
    st.sampled_from(
        ["\\", " ", "{", "}", "/", "=", ",", ".", ";", "-", "+", "$", "*", "^", "_", '"']
    )
    | st.sampled_from(
        [r"\boxed{", r"\frac", r"\sqrt", r"\text{", r"\,", r"\!", "{,}", r"\ ", r"\("]
    )
    | st.sampled_from(["x", "or", "cm", "square", "\u2212", "\u00b0", "\u3002", "\u00a0"])
)
PIECES = SEPARATORS | st.sampled_from(["Answer:", "\n", "42", "4", "2", "0", r"\dfrac12"])


@given(st.lists(SEPARATORS, min_size=1, max_size=5).map("".join))
def test_two_numbers_never_melt_into_one(between):
    assert not grade_answer(f"Answer: 4{between}2", "42").correct
    assert not grade_answer(f"Answer: 42{between}43", "42").correct
    assert not grade_answer(f"Answer: 43{between}42", "42").correct


@given(st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join))
def test_any_text_is_graded_without_an_error(text):
    grade = grade_answer(text, "42")
    assert grade.correct == (grade.prediction == "42")
    assert grade.prediction is None or 0 < len(grade.prediction) < 1000


# ---- text written to break it


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**6,
        "9**9**9",
        "9^{9^{9}}",
        "1/" + "9" * 280,
        "1e999999999",
        "{" * 10**6,
        r"\boxed{" * 10**5,
        r"\boxed{" * 30 + "42" + "}" * 30,
        r"\frac" * 60,
        r"\text{" * 10**5,
        ".," * 10**5,
        "x=" * 140,
        "Answer" + " " * 10**6,
        "Answer:" * 10**5,
        "Answer: " + " *" * 140,
        "," * 10**6,
        "1,111" * 50,
        "\nThe answer is" * 30,
        ". The answer is: " * 30,
        "The answer is $" + "x " * 150,
        "The answer is 1" + " " * 290 + ".",
        "**" * 200,
        r"\boxed{\ " + r"\ " * 300,
        "1e99/1e99" * 30,
        "__import__('os').system('true')",
        "\ud800\x00\u202e",
    ],
)
def test_hostile_text_is_cheap(text):
    start = time.process_time()
    for response in (text, f"Answer: {text}", rf"\boxed{{{text}}}", f"{text}\nAnswer: 43"):
        assert not grade_answer(response, "41").correct
    normalize_answer(text)
    assert time.process_time() - start < 1.0


def test_long_numbers_compare_exactly():
    number = "7" * 250
    assert grade_answer(f"Answer: {number}.0", number).correct
    assert not grade_answer(f"Answer: {number[:-1]}8", number).correct


# ---- the data sets


@pytest.mark.parametrize(
    "name", [pytest.param("dapo_math_17k", marks=pytest.mark.long), "aime_1983_2023", "aime_2024"]
)
def test_every_true_answer_counts_and_its_neighbour_does_not(name):
    answers = _column(name)
    assert len(answers) >= 30
    for answer in answers:
        assert grade_answer(f"We add up.\nAnswer: {answer}", answer).correct
        assert not grade_answer(f"We add up.\nAnswer: {int(answer) + 1}", answer).correct


@pytest.mark.parametrize(
    "name", [pytest.param("gsm8k_train", marks=pytest.mark.long), "gsm8k_test"]
)
def test_every_gsm8k_solution_is_right(name):
    for solution in _column(name):
        answer = solution.rpartition("####")[2]
        assert grade_gsm8k(solution, solution).correct
        assert grade_answer(solution, answer).correct
        assert grade_answer(f"#### {answer}", solution).correct


def test_nearly_every_math500_solution_is_right():
    """The others have their box too far from the end, or say "answer:" of something else."""
    rows = zip(_column("math500", "solution"), _column("math500"), strict=True)
    right = [grade_answer(solution, answer).correct for solution, answer in rows]
    assert sum(right) >= 0.95 * len(right)


def test_every_math500_answer_equals_itself_in_a_box():
    for answer in _column("math500"):
        assert grade_answer(rf"Thus $\boxed{{{answer}}}$.", answer).correct


def _column(name: str, field: str = "answer") -> list[str]:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)[field] for line in lines]
