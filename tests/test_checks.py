"""The vocabulary of checks: what a rule lets through, and what it says of the rest."""

import inspect
import math
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from jaxrl.checks import NAME, above, at_least, between, check_value, finite, one_of, positive
from jaxrl.errors import UserError


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (finite(), [-1.0, 0, 2.5, 10**4]),
        (positive(), [1e-30, 1]),
        (positive(or_inf=True), [1, math.inf]),
        (at_least(0), [0, 0.0, 3]),
        (above(1, at_most=5), [1.5, 5]),
        (between(0, 1), [0, 0.5, 1]),
        (between(0, 1, has_low=False, has_high=False), [1e-9, 0.999]),
        (one_of("a", "b"), ["a", "b"]),
    ],
)
def test_a_rule_lets_through(rule, values):
    assert [rule.fault(value) for value in values] == [None] * len(values)


@pytest.mark.parametrize(
    ("rule", "value", "fault"),
    [
        (positive(), 0, "is not positive; use a number above 0, up to 1,000,000,000"),
        (positive(), math.nan, "is not a number; use a number above 0"),
        (positive(), math.inf, "is not finite; use a number above 0, up to 1,000,000,000"),
        (positive(or_inf=True), -math.inf, "is not finite; use"),
        (positive(or_inf=True), math.nan, "or inf for none"),
        (at_least(1), 0, "is below 1; use 1 to 1,000,000,000"),
        (at_least(1), 10**400, "is above 1,000,000,000; use 1 to"),
        (above(1), 1, "is not above 1; use"),
        (between(0, 1, has_high=False), 1.0, "is not below 1; use 0 to 1 (1 excluded)"),
        (finite(), -(10**12), "is below -1,000,000,000"),
        (one_of("a", "b"), "c", "is not one of a, b"),
    ],
)
def test_a_rule_says_what_is_wrong_and_what_to_do(rule, value, fault):
    assert fault in rule.fault(value)


@pytest.mark.parametrize(
    ("annotation", "values"),
    [
        (int, [1, np.int32(1)]),
        (float, [1, 1.5, np.float32(1)]),
        (Annotated[int, at_least(1)] | None, [1, None]),
        (Literal["a", 1], ["a", 1]),
        (tuple[Annotated[int, at_least(0)], ...], [(), (1, 2)]),
        (dict[str, Annotated[float, finite()]], [{}, {"x": 1}]),
        (int | str, [1, "a"]),
        (Any, [object()]),
    ],
)
def test_values_of_a_type_pass(annotation, values):
    for value in values:
        check_value("x", value, annotation)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, True, "x = True: expected a whole number"),
        (int, 1.0, "x = 1.0: expected a whole number"),
        (float, "1", "x = '1': expected a number"),
        (Annotated[int, at_least(1)], None, "x = None: expected a whole number"),
        (Annotated[int, at_least(1)] | None, 0, "x 0 is below 1"),
        (Annotated[int, at_least(1)] | Literal["auto"], 0, "x 0 is below 1"),
        (
            Annotated[int, at_least(1)] | Literal["auto"],
            "all",
            "x = 'all': expected a whole number or 'auto'",
        ),
        (Annotated[int, at_least(1)], [1], r"x = \[1\]: expected a whole number"),
        (tuple[Annotated[int, at_least(0)], ...], (1, -1), r"x\[1\] -1 is below 0"),
        (tuple[int, int], (1,), "expected 2 values"),
        (dict[str, Annotated[float, finite()]], {"y": math.nan}, "x.y nan is not a number"),
        (int | str, 1.5, "x = 1.5: expected a whole number or text"),
    ],
)
def test_values_of_another_type_or_range_are_refused_by_name(annotation, value, message):
    with pytest.raises(ValueError, match=message) as error:
        check_value("x", value, annotation)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "annotation", [inspect.Parameter.empty, "Undefined", object, Annotated[object, []]]
)
def test_what_no_rule_is_known_for_passes(annotation):
    assert check_value("x", [1], annotation) == [1]


def test_metadata_without_a_hash_does_not_hide_the_rules():
    annotation = Annotated[int, at_least(1), []]
    assert check_value("x", 2, annotation) == 2
    with pytest.raises(UserError, match="x 0 is below 1"):
        check_value("x", 0, annotation)


def test_lists_become_tuples_and_whole_numbers_floats():
    assert check_value("x", [1, 2], tuple[float, ...]) == (1.0, 2.0)
    assert isinstance(check_value("x", 1, float), float)
    assert check_value("x", [[1], [2]], tuple[tuple[int, ...], ...]) == ((1,), (2,))


@pytest.mark.parametrize(("value", "shown"), [("a\0b", "x00"), ("\ud800", "ud800"), ("a\nb", "n")])
def test_a_name_is_one_line_that_can_be_shown(value, shown):
    with pytest.raises(UserError, match=rf"has the character '\\{shown}'"):
        check_value("name", value, Annotated[str, NAME])


def test_numbers_that_float32_does_not_hold_are_refused():
    for value in (1e-300, -1e-40, 5e-324):
        with pytest.raises(UserError, match="is nearer to 0 than float32 holds"):
            check_value("x", value, Annotated[float, between(0, 1)])
    assert check_value("x", 1.2e-38, Annotated[float, between(0, 1)]) == 1.2e-38
