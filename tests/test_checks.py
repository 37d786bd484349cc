"""Ranges of settings: what they accept, and one line for each kind of wrong value."""

import inspect
import math
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from jaxrl.checks import FOLDER_NAME, NAME, at_least, between, check_value, one_of, positive
from jaxrl.errors import UserError

COUNT = Annotated[int, at_least(1, at_most=1000)]
SHARE = Annotated[float, between(0, 1, has_low=False)]


@pytest.mark.parametrize(
    ("annotation", "values"),
    [
        (Annotated[float, positive(or_inf=True)], [1e-30, 1.2e-38, math.inf]),
        (Annotated[float, between(0.5, 2, or_zero=True)], [0.0, 0.5, 2.0]),
        (SHARE, [0.999, 1.0]),
        (Annotated[str, one_of("a", "b")], ["a", "b"]),
        (Annotated[str, FOLDER_NAME], ["", "a b", "é"]),
        (COUNT | None, [1, None]),
        (COUNT | Literal["auto"], [1, "auto"]),
        (tuple[COUNT, ...], [(), (1, 2)]),
        (dict[str, SHARE], [{}, {"x": 1.0}]),
        (Any, [object]),
        # What pydantic does not know, in functions of users.
        (inspect.Parameter.empty, [[1]]),
        ("Undefined", [[1]]),
        (np.ndarray, [[1]]),
        (Annotated[int, []], [1]),
    ],
)
def test_values_of_a_type_pass(annotation, values):
    assert [check_value("x", value, annotation) for value in values] == values


@pytest.mark.parametrize(
    ("annotation", "value", "line"),
    [
        (COUNT, 0, "x = 0: must be at least 1 and at most 1,000"),
        (COUNT, 10**400, "x = of about 400 digits: must be at least 1 and at most 1,000"),
        (SHARE, 0.0, "x = 0.0: must be above 0 and at most 1"),
        (SHARE, math.nan, "x = nan: must be above 0 and at most 1"),
        (
            SHARE,
            5e-324,
            "x = 5e-324: must be above 0 and at most 1, and no nearer to 0 than float32 holds, 1.2e-38",
        ),
        (
            Annotated[float, positive(at_most=2, or_inf=True)],
            -math.inf,
            "x = -inf: must be above 0 and at most 2, or inf for none",
        ),
        (
            Annotated[float, between(1, 2, has_high=False, or_zero=True)],
            2.0,
            "x = 2.0: must be 0, or at least 1 and below 2",
        ),
        (COUNT, True, "x = True: "),
        (COUNT, 1.0, "x = 1.0: "),
        (float, "1", "x = '1': "),
        (COUNT | None, [1], "x = [1]: "),
        (COUNT | Literal["auto"], "all", "x = 'all': "),
        (tuple[COUNT, ...], (1, -1), "x[1] = -1: must be at least 1 and at most 1,000"),
        (tuple[int, int], (1,), "x[1]: "),
        (dict[str, SHARE], {"y": 2.0}, "x.y = 2.0: must be above 0 and at most 1"),
        (dict[str, int], {"a\nb": 1}, r"x.a\nb = 'a\nb': has the character '\n', which"),
        (Annotated[str, one_of("a", "b")], "c", "x = 'c': is not one of a, b"),
        (Annotated[str, NAME], "a\0b", r"x = 'a\x00b': has the character '\x00', which cannot be"),
        (Annotated[str, NAME], "\ud800", r"x = '\ud800': has the character '\ud800', which"),
        (Annotated[str, FOLDER_NAME], "a/b", "x = 'a/b': leads to another folder; write a name"),
        (Annotated[str, FOLDER_NAME], "a" * 256, "which has names of 255 bytes"),
    ],
)
def test_wrong_values_are_refused_in_one_line(annotation, value, line):
    with pytest.raises(UserError) as error:
        check_value("x", value, annotation)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_lists_become_tuples_whole_numbers_floats_and_numpys_numbers_pythons():
    assert check_value("x", [[1], [2]], tuple[tuple[float, ...], ...]) == ((1.0,), (2.0,))
    for value, annotation in ((1, float), (np.float32(1), float), (np.int32(1), int)):
        assert type(check_value("x", value, annotation)) is annotation
