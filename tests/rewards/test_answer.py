"""The rule grader: what counts as 42, what does not, and text written to break it."""

import json
import pathlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.errors import UserError
from jaxrl.rewards import Grade
from jaxrl.rewards.answer import (
    extract_answer,
    grade_answer,
    grade_gsm8k,
    gsm8k_answer,
    normalize_answer,
)

DATA = pathlib.Path(__file__).parents[2] / "../shared/data"

# ---- by hand


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        "42.",
        "42,",
        "42.0",
        "042",
        "+42",
        "84/2",
        r"\frac{84}{2}",
        "$42$",
        "$42$.",
        "$42.$",
        "**42**.",
        r"\(42\)",
        r"\[ 42 \]",
        r"\boxed{42}",
        r"$\boxed{42}$.",
        r"\boxed{\text{42.}}",
        r"\boxed{\boxed{42}}",
        "x = 42",
        "$AB = 42$",
        "a_1=42",
        r"\$42",
        r"42\%",
        "42 degrees",
        "42°",
        r"42^\circ",
        r"42^{\circ}",
        "42 cm^2",
        r"42 \text{ square feet}",
        r"42\mbox{ inches}^2",
        "42 sq. units",
    ],
)
def test_spellings_of_42(answer):
    assert grade_answer(f"So we are done.\nAnswer: {answer}", "42") == Grade(True, "42")


@pytest.mark.parametrize(
    "answer",
    [
        "42 or 43",
        r"42\text{ or }43",
        "43 or 42",
        "42, 43",
        "not 42",
        "~42",
        r"\approx 42",
        r"\pm 42",
        "42x",
        "42 m",
        "42!",
        "42?",
        "42...",
        "-42",
        "--42",
        "!= 42",
        ">= 42",
        "42^2",
        "4^2",
        "4 2",
        "4$2",
        "$4$ $2$",
        r"4\,2",
        r"4\!2",
        "4,2",
        r"4\text{2}",
        "4.2",
        "42.5",
        "42e0",
        "6*7",
        "42/0",
        "40+2",
        "42 million",
        "42 Answer: 43",
        "\u0664\u0662",  # Arabic-Indic digits
        "4²",
        "",
    ],
)
def test_not_42(answer):
    assert not grade_answer(f"Answer: {answer}", "42").correct


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("45 minutes", "45 hours", False),
        ("45 minutes", "45 min", True),
        ("45 minutes", "45", True),
        ("5 cm", "5 cm^2", False),
        ("5 square cm", "5 cm^2", True),
        ("5 cm²", "5 cm", False),
        (r"\$5", "5 cents", False),
        ("$5", "5 cents", False),
        ("$5$", "5 cents", True),
        (r"\$5", "5 dollars", True),
        (r"$\$5$", "5", True),
        ("5 sq. ft", "5 ft^2", True),
        (r"42\%", "42 degrees", False),
        (r"42\%", "42 percent", True),
        (r"42^\circ", "42 degrees", True),
        ("42°", r"42^{\circ}", True),
        ("5 miles", "5 km", False),
        ("60 km/h", "60 mph", False),
        ("5 foot", "5 feet", True),
        ("5 units", "5 cm", True),
        (r"42\text{ cm}", "42 centimeters", True),
        (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}\text{ km}", False),
        ("12 days", "12 weeks", False),
    ],
)
def test_units_may_be_left_out_but_not_changed(one, other, same):
    for said, truth in ((one, other), (other, one)):
        assert grade_answer(f"Answer: {said}", truth).correct == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        (r"1\,234\,567", "1234567"),
        (r"11,\! 111,\! 111", "11111111"),
        ("\u22127", "-7"),
        ("- 7", "-7"),
        ("-0", "0"),
        ("007", "7"),
        (".50", "1/2"),
        ("2/4", r"\frac{1}{2}"),
        (r"-\dfrac12", "-0.5"),
        (r"\frac{-1}{2}", "-1/2"),
        (r"\tfrac{270}7\text{ degrees}", "270/7"),
        (r"\frac 59", r"\frac{5}{9}"),
        (r"11\sqrt2", r"11 \sqrt{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}2)"),
        (r"\text{Evelyn}", "Evelyn"),
        ("4210_{5}", "4210_5"),
        ("x^{2} + 1", "$x^2+1$"),
    ],
)
def test_one_value_has_one_spelling(one, other):
    assert normalize_answer(one) == normalize_answer(other) != ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(1, 234)", "(1,234,0)"),
        ("1, 234", "1,234"),
        ("12,34", "1234"),
        ("1. 5", "1.5"),
        ("x+y=0", "0"),
        ("east", "west"),
        ("2x", "2X"),
        ("1/3", "0.333"),
        ("52_8", "52"),
    ],
)
def test_different_values_differ(one, other):
    assert normalize_answer(one) != normalize_answer(other)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 41\nAnswer: 42\nthe end", "42"),
        ("Answer: 41. No, Answer: 42", "42"),
        ("ANSWER :\n\n 42", "42"),
        ("**Answer:** 42", "42"),
        ("**Answer**: 42", "42"),
        ("**Answer: 42**", "42"),
        ("- **Final Answer: 42.**", "42."),
        ("__Answer: 42__", "42"),
        ("*Answer: 42*", "42"),
        ("**Answer:** **42**", "**42**"),
        ("**Final Answer:**\n42", "42"),
        ("**Answer:**42", "42"),
        ("**Answer:", None),
        ("**Answer:**", None),
        # No emphasis begins before these.
        ("Answer: 42**", "42**"),
        ("2**3 = 8 and 4**2 = 16. Answer: 42*", "42*"),
        ("**So** Answer: 42**", "42**"),
        ("Answer\uff1a42", "42"),
        ("Answer: 42\nAnswer: ", "42"),
        (r"\boxed{41} Answer: 42 \boxed{43}", r"42 \boxed{43}"),
        (r"so \boxed{41} and \boxed{\frac{4}{2}}, done", r"\frac{4}{2}"),
        (r"so \boxed{42", None),
        (r"so \boxed {42}", "42"),
        (r"so \fbox{42}", "42"),
        (r"so \boxed{ 42 }", "42"),
        (r"so \boxed{\ 42\, }", "42"),
        (r"so \boxed{\quad 42 \hspace{1mm}}", "42"),
        (r"so \boxed{\ }", ""),
        ("16 - 3 - 4 = 9 eggs.\n#### 42", "42"),
        ("#### $1,234.\nDone.", "$1,234."),
        ("####-7", "-7"),
        (r"#### \boxed{42}", r"\boxed{42}"),
        ("Answer: 41\n#### 42", "42"),
        ("#### 41\nAnswer: 42", "42"),
        ("Answer: 41 #### 42", "42"),
        (r"\boxed{41}" + "\n#### 42 dollars", "42 dollars"),
        # Headings of Markdown.
        ("Answer: 42\n#### Check", "42"),
        ("Answer: 42\n#### 2. Check", "42"),
        (r"\boxed{42}" + "\n#### 42 is right", "42"),
        ("#### Step 42", None),
        ("#### ", None),
        ("### 42", None),
        ("it is 42", None),
        ("Answer:", None),
        ("", None),
        ("Answer: 42" + " " * 290, "42"),
        ("Answer: 42" + " " * 291, None),  # the marker has left the last 300 characters
    ],
)
def test_the_last_answer_counts(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "The answer is 80.",
        "the answer is 80",
        "We add up. The answer is 80.",
        "We add up.\nSo, the answer is $80$.\n",
        "Therefore the final answer is: 80 dollars.",
        "The answer is:\n\n**80**",
        "**The answer is: 80.**",
        "**The final answer is 80**.",
        r"My answer is \(80\).",
        r"The answer is \boxed{80}.",
        "The final answer is 80. I hope it is correct.",
        "The final answer is $80$. I hope it is correct.",
        "Final Answer: The final answer is $80$. I hope it is correct.",
        "**Final Answer:** The final answer is $80$. I hope it is correct.",
        r"Answer: 41" + "\nThe answer is 80.",
        r"\boxed{41} is for the other. The answer is 80.",
    ],
)
def test_a_last_sentence_says_80(response):
    assert grade_answer(response, "80") == Grade(True, "80")


@pytest.mark.parametrize(
    "response",
    [
        "Suppose the answer is 80.",
        "I do not think that the answer is 80.",
        "It is wrong that the answer is 80.",
        "If so, the answer is 80.",
        "One may guess, e.g. the answer is 80.",
        'He said: "The answer is 80."',
        "The answer is not 80.",
        "The answer is not $80$.",
        "The answer is 80 or 81.",
        "The answer is $80$ or $81$.",
        "The answer is $80 or $81.",
        "The answer is about 80.",
        "The answer is 80, if the first line is right.",
        "The answer is 80?",
        "The answer is 80!",
        "The answer is 80%-81%.",
        "The answer is 8 0.",
        "The answer is 80 apples or pears.",
        "The answer is clear.",
        "The answer is: ",
        "The answer is 80. No, it is 81.",
        "The answer is 80. I hope it is not.",
        "The answer is 80.\nWait, this is wrong.",
        "The answer isn't 80.",
        "The answer was 80.",
        "The answer to the first part is 80.",
        "I hope it is correct: 80.",
        "80. I hope it is correct.",
        "**80**",
    ],
)
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


@pytest.mark.parametrize(
    ("notation", "value"),
    [
        ("1.5e3", "1500"),
        ("1.5E3", "1500"),
        ("-1.5e+3", "-1500"),
        ("2e6 dollars", "2000000"),
        ("2.5e-3", "1/400"),
        ("1e-05", "1/100000"),
    ],
)
def test_scientific_notation_is_a_number(notation, value):
    assert grade_answer(f"Answer: {notation}", value) == Grade(True, value)


@pytest.mark.parametrize(
    ("notation", "value"),
    [
        ("2e", "2"),
        ("2e-1", "1/5"),  # 2e - 1
        ("2e^3", "2000"),
        ("2 e3", "2000"),
        ("2e3x", "2000"),
        ("2e3.5", "2000"),
        ("15e2", "1500"),
        ("1.5e", "1.5"),
        ("1.5e3!", "1500"),
        ("1,5e3", "1500"),
        ("x1e3", "1000"),
        ("1e100", "1" + "0" * 100),
    ],
)
def test_what_only_looks_like_scientific_notation_is_none(notation, value):
    assert not grade_answer(f"Answer: {notation}", value).correct


def test_no_answer_is_no_prediction():
    assert grade_answer("I do not know.", "42") == Grade(False, None)
    assert grade_answer("Answer: $$", "42") == Grade(False, None)


def test_gsm8k():
    solution = "He has 2*617 = <<2*617=1234>>1,234 apples.\n#### 1,234"
    assert gsm8k_answer(solution) == "1,234"
    assert grade_gsm8k("Answer: $1,234", solution) == Grade(True, "1234")
    # As the model is taught to answer, whatever of it the data's answer field holds.
    for grade in (grade_gsm8k, grade_answer):
        assert grade(solution, solution) == Grade(True, "1234")
        assert grade("#### 1234.", solution) == Grade(True, "1234")
        assert grade("#### 1235", solution) == Grade(False, "1235")
    assert grade_answer(solution, "1234") == Grade(True, "1234")
    for other in ("so ####  ", "x = 12", "twelve", "12 apples", "", "12 or 13"):
        with pytest.raises(UserError, match="no final answer"):
            gsm8k_answer(other)


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


def test_every_gsm8k_solution_has_an_integer_answer():
    for solution in _column("gsm8k_test"):
        number = int(gsm8k_answer(solution).replace(",", ""))
        assert grade_gsm8k(f"Answer: ${number:,}", solution).correct
        assert not grade_gsm8k(f"Answer: {number + 1}", solution).correct


@pytest.mark.parametrize(
    "name", [pytest.param("gsm8k_train", marks=pytest.mark.long), "gsm8k_test"]
)
def test_every_gsm8k_solution_is_right(name):
    for solution in _column(name):
        answer = gsm8k_answer(solution)
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
