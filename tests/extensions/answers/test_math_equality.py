"""Which answers are one: cases labelled by hand, before they were tried.

math_answers.tsv has a case in each line: whether both answers are the same, the kind of the case, and both.
"""

import collections
import contextlib
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_answers.equality import equal
from jaxrl_answers.parser import read_answer
from jaxrl_answers.tokens import Unreadable

DATA = pathlib.Path(__file__).parents[3] / "../shared/data"

CASES = [
    line.split("\t")
    for line in pathlib.Path(__file__).with_name("math_answers.tsv").read_text().split("\n")[:-1]
]
BY_KIND = collections.defaultdict(list)
for label, kind, *pair in CASES:
    BY_KIND[label, kind].append(tuple(pair))


@pytest.mark.parametrize(("label", "kind"), BY_KIND)
def test_labelled_pairs_in_both_orders(label, kind):
    pairs = [pair for one, other in BY_KIND[label, kind] for pair in ((one, other), (other, one))]
    assert [pair for pair in pairs if equal(*pair) != (label == "same")] == []
    # Some wrong answers are no answers at all, such as "42 or", and those do not equal themselves.
    assert label != "same" or all(equal(x, x) for pair in pairs for x in pair)


def test_the_pages_give_the_number_of_cases():
    for page in ("rewards", "answer_reader"):
        text = (pathlib.Path(__file__).parents[3] / "docs" / f"{page}.md").read_text()
        assert f"{len(CASES):,} labelled cases" in text


@pytest.mark.parametrize("truth", dict.fromkeys(one for one, _ in BY_KIND["same", "spellings"]))
def test_every_truth_is_itself(truth):
    for said in (truth, f"${truth}$", rf"\boxed{{{truth}}}"):
        assert equal(truth, said)


@given(st.integers(-9999, 9999), st.integers(1, 99), st.integers(-9999, 9999), st.integers(1, 99))
def test_fractions_are_equal_where_their_values_are(a, b, c, d):
    for said in (rf"\frac{{{c}}}{{{d}}}", f"{c}/{d}", rf"x = {c}/{d}", rf"\dfrac{{{c}}}{{{d}}}"):
        assert equal(rf"\frac{{{a}}}{{{b}}}", said) == (a * d == c * b)


RATIOS = st.lists(st.integers(0, 12), min_size=2, max_size=3)


@given(RATIOS, RATIOS | st.just([]), st.integers(1, 5))
def test_ratios_are_equal_up_to_a_factor_and_no_further(one, other, factor):
    other = other or [factor * member for member in one]
    several = sum(map(bool, one)) > 1
    crossed = len(one) == len(other) and all(
        a * d == b * c
        for a, c in zip(one, other, strict=True)
        for b, d in zip(one, other, strict=True)
    )
    # Where a single member is not 0, the others say nothing about it: 5 : 0 and 3 : 0.
    same = one == other or (several and any(other) and crossed)
    assert equal(*(" : ".join(map(str, ratio)) for ratio in (one, other))) == same


CLOCKS = st.tuples(st.integers(0, 23), st.integers(0, 59))
HALVES = {"": 0, " am": 0, " PM": 12, r"\text{ a.m.}": 0, r"\text{ p.m.}": 12}


@given(CLOCKS, CLOCKS)
def test_different_times_are_different(one, other):
    for written in ("{}:{:02}", "{:02}:{:02}", r"\text{{{}:{:02}}}", r"{}\!:\!{:02}"):
        assert equal("{}:{:02}".format(*one), written.format(*other)) == (one == other)


@given(CLOCKS, CLOCKS, st.sampled_from(list(HALVES)), st.sampled_from(list(HALVES)))
def test_times_before_and_after_noon(one, other, half, other_half):
    def read(clock, half):
        hour, minute = clock[0] % 12, clock[1]
        # Without a half 8:30 is neither of the two, and 20:30 and 0:30 are known.
        known = bool(half) or hour == clock[0] == 0 or clock[0] > 12
        hour_of_day = hour + HALVES[half] if half else clock[0]
        return f"{hour or 12 if half else clock[0]}:{minute:02}{half}", (hour_of_day, minute, known)

    (text, value), (other_text, other_value) = read(one, half), read(other, other_half)
    assert equal(text, other_text) == (value == other_value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1:00", "12:00"),
        ("5:00", "3:00"),
        ("2:30", "1:15"),
        ("1:00", "2:0"),
        ("0:0", "1:2"),
        ("5:0", "3:0"),
        ("7:05", "7:5"),
        ("3:04:05", "6:08:10"),
        ("1:30:00", "1:30"),
        (r"3\text{ pm}", r"3\text{ am}"),
        ("12:00 am", "12:00 pm"),
        ("12:00 noon", "12:00 midnight"),
        ("3:00 EST", "3:00 PST"),
        ("2:30 h", "1:15 h"),
        ("2:30:00 \\text{hours}", "1:15:00 \\text{hours}"),
        ("t = 2:30", "t = 1:15"),
        ("2:30, 4:30", "1:15, 2:15"),
        ("(2:30, 3:30)", "(1:15, 1:45)"),
        ("10:30", "10.5"),
        ("1/2/2020", "2/4/2020"),
        ("1/2/20", "1/40"),
        ("2020-01-02", "2020-02-01"),
        ("2020/01/02", "2020/02/01"),
        ("3 - 1", "4 - 2"),
        ("555-1234", "554-1233"),
        ("e^{-100}", "e^{-101}"),
        ("0", "e^{-100}"),
        (r"\sqrt{2} \cdot 10^{-40}", r"\sqrt{3} \cdot 10^{-40}"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        (r"\frac{0}{0}", r"\frac{1}{0}"),
        (r"30^\circ 15'", r"30^\circ 25'"),
        ("1 hour 30 minutes", "1 hour 45 minutes"),
        ("60 seconds", "60 minutes"),
        ("0.5%", "0.5"),
        ("192.168.0.1", "192.168.0.2"),
        (r"\infty", r"2\infty"),
        ("10°C", "10°F"),
    ],
)
def test_different_answers_do_not_share_a_value(one, other):
    assert not equal(one, other) and not equal(other, one)
    assert equal(one, one) and equal(other, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("10:15", "2:3"),
        ("1:0:3", "2:0:6"),
        ("1.5 : 2", "3 : 4"),
        ("1/2 : 1/3", "3 : 2"),
        ("8:30 p.m.", "20:30"),
        (r"3\text{ p.m.}", "15:00"),
        ("3 PM", "3:00 pm"),
        ("12:00 a.m.", "0:00"),
        ("1/2/2020", "01/02/2020"),
        ("2020-01-02", "2020/1/2"),
        ("40 + 2", "2 + 40"),
        ("0%", "0"),
        (r"\sqrt{8} x - 2\sqrt{2} x", "0"),
        (r"10^{10}(\sqrt{8} - 2\sqrt{2})x", "0"),
    ],
)
def test_equal_answers_in_another_spelling(one, other):
    assert equal(one, other) and equal(other, one)


COMMANDS = r"\frac,\sqrt,\text{,\boxed{,\pm,\cup,\le,\infty,\begin{pmatrix},\\,\degree,\{,\}"
PIECES = (
    st.sampled_from(COMMANDS.split(","))
    | st.sampled_from("{}()[]|,;:=<>+-*/^_!%'$ \u00b1e")
    | st.sampled_from(["42", "1", "0.5", "x", "or", "and", "not", "cm", "pi"])
)


@given(st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(Unreadable):
        read_answer(text)
    equal("42", text)
    equal(text, "42")


SAID_AS_WELL = (
    st.sampled_from(
        [
            " or 43",
            ", 43",
            r"\text{ or } 43",
            " and 43",
            "; 43",
            "!",
            "?",
            r" \text{ (or } 43)",
            "x",
        ]
    )
    | st.sampled_from(
        [r" \lor 43", r"\ldots", " = 43", " + 1", r"^{2}", r" \ne 42", r" \text{ is wrong}", "/0"]
    )
    | st.sampled_from([r" \cup \{43\}", r"_{7}", r" \pm 1", " million"])
)


@given(st.integers(2, 10**6), SAID_AS_WELL)
def test_what_is_said_beside_the_answer_makes_it_another(number, more):
    if number not in (43, 42):
        assert not equal(str(number), f"{number}{more}")


SAID_BEFORE = st.sampled_from(
    [r"\ne ", r"\neq ", "not ", r"\pm ", r"\approx ", "> ", r"\ge ", "43 or ", "-", "~"]
)


@given(st.integers(2, 10**6), SAID_BEFORE)
def test_what_is_said_before_the_answer_makes_it_another(number, more):
    assert not equal(str(number), f"{more}{number}")


NUMERALS = st.one_of(
    st.integers(-12, 12).map(str),
    st.sampled_from(["0.5", "1.25", "1,234", "1234", "3 x 10^2", "300", r"10^{3}", "0.3", "-7.0"]),
    st.tuples(st.integers(-5, 5), st.integers(1, 4)).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"),
    st.tuples(st.integers(-5, 5), st.integers(1, 4)).map(lambda t: rf"{{{t[0]} \over {t[1]}}}"),
    st.sampled_from(
        [r"\sqrt{2}", r"\sqrt[3]{8}", r"\pi", "2i", r"\sum_{k=1}^{3} k", "6*7", "40+2"]
    ),
)
EXPRESSIONS = st.one_of(
    NUMERALS,
    st.sampled_from(
        ["x", "2x+1", "x^2", "(x-1)(x+1)", "ab", "yes", "Yes", "AB", r"\text{even}", "C"]
    ),
    st.tuples(NUMERALS, st.sampled_from("+-*")).map(lambda t: f"x {t[1]} {t[0]}"),
    st.tuples(NUMERALS, NUMERALS).map(lambda t: rf"{t[0]} \pm {t[1]}"),
)
WITH_UNITS = st.tuples(
    NUMERALS,
    st.sampled_from(
        [
            "",
            "%",
            r"\%",
            r"^\circ",
            " cm",
            r"\text{ cm}^2",
            " m/s",
            r"\text{ apples}",
            " 米",
            " kg apples",
        ]
    ),
).map("".join)
SETS = st.tuples(
    st.sampled_from("([]"), NUMERALS, st.sampled_from(",;"), NUMERALS, st.sampled_from(")[]")
).map("".join)
ITEMS = EXPRESSIONS | WITH_UNITS | SETS
ANSWERS = st.one_of(
    ITEMS,
    st.lists(ITEMS, min_size=2, max_size=3).map(", ".join),
    st.lists(ITEMS, min_size=2, max_size=3).map(r" \text{ or } ".join),
    st.lists(ITEMS, min_size=1, max_size=3).map(lambda x: r"\{" + ", ".join(x) + r"\}"),
    st.lists(SETS, min_size=2, max_size=2).map(r" \cup ".join),
    st.tuples(
        st.sampled_from(["x", "y", "x+y", "a+b", "AB", "f(x)", "2", "84/2"]),
        st.sampled_from(["=", "=", "<", r"\le", r"\approx", r"\in", r"\ne"]),
        ITEMS,
    ).map(" ".join),
    st.tuples(ITEMS, st.sampled_from(["= x", "= y", "= 2", "< x", r"\approx 0.33"])).map(" ".join),
    st.tuples(NUMERALS, NUMERALS).map(" : ".join),
)


@given(ANSWERS, ANSWERS)
def test_equality_is_symmetric_and_reflexive(one, other):
    assert equal(one, one) and equal(other, other)
    assert equal(one, other) == equal(other, one)


@given(
    ANSWERS, st.sampled_from(["$~$", r"\boxed{~}", "**~**", "x = ~", "~ cm", "-~", "(~)", "~, 1"])
)
def test_equality_is_symmetric_for_answers_that_are_alike(answer, dress):
    other = dress.replace("~", answer)
    assert equal(answer, other) == equal(other, answer)


@pytest.mark.parametrize("name", ["math500", pytest.param("math_train", marks=pytest.mark.long)])
def test_equality_of_the_data_sets_answers_is_symmetric_and_reflexive(name):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with path.open(encoding="utf-8") as lines:
        answers = [x for x in (str(json.loads(line)["answer"]) for line in lines) if x.strip()]
    for one, other in zip(answers, [*answers[1:], answers[0]], strict=True):
        assert equal(one, one)
        assert equal(one, other) == equal(other, one)
