"""Ranges of settings, declared beside their types and defaults:

    lr: Annotated[float, positive(at_most=10)] = 1e-6
    clip: Annotated[float, positive(or_inf=True)] = 0.5
    weights: Annotated[str, PATH] = ""
    stop_ids: tuple[Annotated[int, at_least(0)], ...] = ()

Each is a pydantic validator. `settings` makes a class of such fields, which pydantic checks whenever it is
made; `check_value` checks one value, such as a keyword argument of a registered function. The messages are
pydantic's, behind the dotted name and the value.

NaN is never valid; infinity is valid only with `or_inf`. Every range is bounded: a value that no machine can
provide is a typing error, and it is refused before a library allocates memory for it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ArgsKwargs

from jaxrl.errors import UserError

LARGEST = 10**9
"""Upper bound of a range without its own."""

MAX_COEFFICIENT = 10_000
"""Far above every coefficient, weight, score and bound of published recipes."""

SMALLEST = 2.0**-126
"""The smallest positive normal number of float32. Accelerators round smaller ones to 0."""

MAX_STEPS = 10**7
"""Largest number of steps of a run: one per second for four months."""

MAX_TOKENS = 2**24
"""Largest length of a sequence or row, above the longest published context (10 million). Exact in float32."""

MAX_COUNT = 10**6
"""Largest number of objects at the same time: prompts, samples, slots, rows, experts."""

MAX_WIDTH = 2**20
"""Largest dimension of a weight; the widest published feed-forward network has 53,248."""

MAX_LAYERS = 10_000
"""Largest number of layers; the deepest published model has 126."""

MAX_VOCABULARY = 10**7
"""Largest number of rows of an embedding; the largest published one has 262,144."""


def between(
    low: float,
    high: float,
    *,
    has_low: bool = True,
    has_high: bool = True,
    or_inf: bool = False,
    or_zero: bool = False,
) -> AfterValidator:
    """Numbers from `low` to `high`; the bounds are included by default.

    With `or_inf` infinity is valid too and turns a limit off; with `or_zero` 0 is, with a special meaning.
    """
    rule = f"{'at least' if has_low else 'above'} {low:,} and {'at most' if has_high else 'below'} {high:,}"
    rule = f"must be {'0, or ' * or_zero}{rule}{', or inf for none' * or_inf}"

    def check(value: float) -> float:
        if (or_inf and value == math.inf) or (or_zero and value == 0):
            return value
        if 0 < abs(value) < SMALLEST:
            raise ValueError(f"{rule}, and no nearer to 0 than float32 holds, {SMALLEST:.2g}")
        # All comparisons with NaN are false.
        above_low = value >= low if has_low else value > low
        if not (above_low and (value <= high if has_high else value < high)):
            raise ValueError(rule)
        return value

    return AfterValidator(check)


def at_least(low: float, *, at_most: float = LARGEST, or_inf: bool = False) -> AfterValidator:
    """Numbers of at least `low`."""
    return between(low, at_most, or_inf=or_inf)


def positive(*, at_most: float = LARGEST, or_inf: bool = False) -> AfterValidator:
    """Numbers above 0."""
    return between(0, at_most, has_low=False, or_inf=or_inf)


coefficient = functools.partial(at_least, 0, at_most=MAX_COEFFICIENT)
"""Factors of a term; 0 removes the term."""

positive_coefficient = functools.partial(positive, at_most=MAX_COEFFICIENT)
"""Bounds and factors above 0."""

score = functools.partial(between, -MAX_COEFFICIENT, MAX_COEFFICIENT)
"""Rewards and their weights, positive or negative."""

steps = functools.partial(at_least, at_most=MAX_STEPS)
"""Numbers of steps: the length of a run, or an interval between events."""

token_count = functools.partial(at_least, at_most=MAX_TOKENS)
"""Lengths in tokens, of a prompt, a response or a row."""

count = functools.partial(at_least, at_most=MAX_COUNT)
"""Numbers of objects that exist at the same time."""

SEED = between(0, 2**31 - 1)
"""Seeds of the program's random keys, which compiled programs take as int32."""


def one_of(*choices: Any) -> AfterValidator:
    """The listed values only. Use Literal if they need not be computed."""

    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"is not one of {', '.join(map(str, choices))}")
        return value

    return AfterValidator(check)


# NAME_MAX and PATH_MAX of Linux.
_LONGEST_NAME, _LONGEST_PATH = 255, 4096


def _printable(value: str, *, lines: bool = True) -> str:
    for c in value:
        # `isprintable` is False for NUL and other control characters.
        if not (c.isprintable() or (lines and c.isspace())):
            raise ValueError(f"has the character {c!a}, which cannot be shown; leave it out")
    return value


def _path(value: str) -> str:
    # A function's name stands after a colon.
    longest = max(len(part.encode()) for part in re.split("[/:]", value))
    if longest > _LONGEST_NAME or len(value.encode()) > _LONGEST_PATH:
        raise ValueError(
            f"is too long for a file system, which has names of {_LONGEST_NAME} bytes and paths of "
            f"{_LONGEST_PATH:,}; shorten it"
        )
    return _printable(value)


def _name(value: str) -> str:
    """Returns a text of one line that can be shown; raises ValueError for another one."""
    return _printable(value, lines=False)


def _folder_name(value: str) -> str:
    if "/" in value or value in (".", ".."):
        raise ValueError("leads to another folder; write a name without slashes")
    return _name(_path(value))


NAME = AfterValidator(_name)
"""A name: one line."""

PROSE = AfterValidator(_printable)
"""Text for a model, such as a template."""

PATH = AfterValidator(_path)
"""A path, of a file or a function, that a file system can hold."""

FOLDER_NAME = AfterValidator(_folder_name)
"""The name of a run, whose folder is inside `run.output`, or nothing."""


Settings = TypeVar("Settings")


# For type checkers all fields are keywords; a subclass of settings takes no others.
@typing.dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def settings(cls: type[Settings]) -> type[Settings]:
    """Makes a group of settings of a class: a frozen dataclass that pydantic checks.

    Types and ranges are those of the annotations. A `__post_init__` checks combinations of values and raises
    ValueError. A group may be made of a table of its settings, and a tuple of a list. Nothing else is
    converted, and a name that is no setting is refused. The text below a field is its help text.

    Raises:
      UserError: when an instance is made with a wrong value; one line with setting, value and rule.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    # Before pydantic reads them. Strict mode of a whole class would also refuse tables and lists.
    cls.__annotations__ = {name: _strict(hints[name]) for name in inspect.get_annotations(cls)}
    made: Any = pydantic.dataclasses.dataclass(
        frozen=True,
        # A subclass may add fields without a default.
        kw_only=any(map(dataclasses.is_dataclass, cls.__mro__[1:])),
        config=ConfigDict(extra="forbid"),
    )(cls)
    make = made.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            make(self, *args, **values)
        except ValidationError as error:
            raise UserError(fault_of(error, values)) from error

    made.__init__ = __init__
    return made


def _strict(annotation: Any) -> Any:
    """The annotation with strict values: pydantic would take "1" for a number, and True for 1."""
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is Annotated:
        return Annotated[(_strict(arguments[0]), *annotation.__metadata__)]
    if kind in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_strict, arguments))]  # noqa: UP007
    if kind in (dict, Mapping):
        # The names of entries stand in lines of their own in config.txt.
        key = Annotated[str, NAME] if arguments[0] is str else arguments[0]
        return dict[key, _strict(arguments[1])]
    if kind is tuple:
        return tuple[tuple(map(_strict, arguments))]
    return Annotated[annotation, Strict()] if annotation in (bool, int, float, str) else annotation


def check_value(name: str, value: Any, annotation: Any) -> Any:
    """Checks a value; returns it with lists converted to tuples, and integers to floats, as annotated.

    A value whose annotation pydantic does not know, such as an array, is not checked.

    Args:
      name: name of the setting, for the message.
      value: value of the setting.
      annotation: its type, with rules as metadata of Annotated.

    Raises:
      UserError: the value is of another type, or breaks a rule.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)  # NumPy scalars
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as error:
        raise UserError(fault_of(error, value, name)) from None
    except (
        PydanticUserError,
        NameError,
        TypeError,
    ):  # of a user's function anything may be annotated
        return value


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter:
    return TypeAdapter(_strict(annotation))


def fault_of(error: ValidationError, values: Any, name: str = "") -> str:
    """The first setting of pydantic's errors in one line: its dotted name, its value, and what is wrong.

    Args:
      error: error of a group of settings, or of one setting.
      values: what was checked, a group as a table.
      name: dotted name of it.
    """
    messages: dict[str, list[str]] = {}
    # Of a union a broken rule says more than the types that the value has not.
    for fault in sorted(error.errors(), key=lambda fault: fault["type"] != "value_error"):
        where, inside, given = name, values, fault["input"]
        for part in fault["loc"]:
            try:
                inside = inside[part]
            except (KeyError, IndexError, TypeError):
                # A setting that is missing; else the type in a union, which has an error for each.
                if fault["type"] != "missing":
                    break
            where += f"[{part}]" if isinstance(part, int) else f".{part}"
        where = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in where).removeprefix(".")
        # The `__post_init__` of a group shows what matters of it.
        of_group = fault["type"] == "value_error" and isinstance(given, Mapping | ArgsKwargs)
        if fault["type"] != "missing" and not of_group:
            where += f" = {shown(given)}"
        messages.setdefault(where, []).append(fault["msg"].removeprefix("Value error, "))
    where, said = next(iter(messages.items()))
    return ": ".join(filter(None, (where, " or ".join(dict.fromkeys(said)))))


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold; accepts any object."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    # A comparison and not `math.isfinite`, which fails at integers beyond the range of floats. False for NaN.
    return abs(typing.cast("float", value)) <= sys.float_info.max


def shown(value: Any) -> str:
    """Formats `value` for a message in one line; long values are cut."""
    # Python refuses to print integers of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 400:
        return f"of about {int(value.bit_length() * math.log10(2)):,} digits"
    # Arrays and frames have several lines.
    text = " ".join(map(str.strip, repr(value).splitlines()))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


def quoted(text: str) -> str:
    """Quotes text for a message in one line; long text is cut."""
    shown_text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return json.dumps(shown_text, ensure_ascii=False)


_MAX_SHOWN = 120
