"""Ranges of settings, declared beside their types and defaults:

    lr: Annotated[float, positive(at_most=10)] = 1e-6
    clip: Annotated[float, positive(or_inf=True)] = 0.5
    remat: Annotated[str, one_of("full", "none")] = "none"
    weights: Annotated[str, PATH] = ""
    stop_ids: tuple[Annotated[int, at_least(0)], ...] = ()

Each settings dataclass first calls `check_fields` in its `__post_init__`. `algos.registry.check_options`
checks keyword arguments against a function's signature. NaN is never valid; infinity is valid only with
`or_inf`. Every range is bounded: a value that no machine can provide is a typing error, and it is refused
before a library allocates memory for it.

pydantic checks the types, and its errors are turned into our one line; its own messages have several lines
and no remedy. Importing it and building the adapters of all settings takes 0.15 s of processor time. It runs
in strict mode: by default it accepts "1" as a number and True as 1.

Each dataclass checks combinations of its settings by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, core_schema

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


class Rule:
    """A condition on a value besides its type, used as metadata of Annotated."""

    def fault(self, value: Any) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_after_validator_function(self._kept, handler(source))

    def _kept(self, value: Any) -> Any:
        if fault := self.fault(value):
            # pydantic would read braces in the message as template fields.
            raise PydanticCustomError(_RULE, "{fault}", {"fault": fault})
        return value


@dataclasses.dataclass(frozen=True)
class Range(Rule):
    """Accepts numbers from `low` to `high`.

    Attributes:
      low, high: bounds.
      has_low, has_high: whether the bounds themselves are valid.
      or_inf: whether infinity is valid too; it turns a limit off.
      or_zero: whether 0 is valid too, with a special meaning.
    """

    low: float
    high: float
    has_low: bool = True
    has_high: bool = True
    or_inf: bool = False
    or_zero: bool = False

    def fault(self, value: float) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        # Comparisons with NaN are false, so NaN is tested first.
        if value != value:
            return f"is not a number; use {self}"
        if (value == math.inf and self.or_inf) or (value == 0 and self.or_zero):
            return None
        if abs(value) == math.inf:
            return f"is not finite; use {self}"
        if 0 < abs(value) < SMALLEST:
            return f"is nearer to 0 than float32 holds, {SMALLEST:.2g}; use {self}"
        if value < self.low or (value == self.low and not self.has_low):
            if self.has_low:
                return f"is below {_shown(self.low)}; use {self}"
            word = "positive" if self.low == 0 else f"above {_shown(self.low)}"
            return f"is not {word}; use {self}"
        if value > self.high or (value == self.high and not self.has_high):
            word = "above" if self.has_high else "not below"
            return f"is {word} {_shown(self.high)}; use {self}"
        return None

    def __str__(self) -> str:
        low, high = _shown(self.low), _shown(self.high)
        words = f"{low} to {high}" if self.has_low else f"a number above {low}, up to {high}"
        words += "" if self.has_high else f" ({high} excluded)"
        words = f"0, or {words}" if self.or_zero else words
        return f"{words}, or inf for none" if self.or_inf else words


SEED = Range(0, 2**31 - 1)
"""Seeds of the program's random keys, which compiled programs take as int32."""


@dataclasses.dataclass(frozen=True)
class OneOf(Rule):
    """Accepts only the listed values."""

    choices: tuple[Any, ...]

    def fault(self, value: Any) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        if value in self.choices:
            return None
        return f"is not one of {', '.join(map(str, self.choices))}"


@dataclasses.dataclass(frozen=True)
class PathRule(Rule):
    """Accepts valid file system paths that leave room for the names of files inside.

    Attributes:
      max_bytes: maximum length of a path; the system allows 4,095 bytes, and a run appends file names.
      max_name_bytes: maximum length of each component, as limited by the system.
    """

    max_bytes: int = 3500
    max_name_bytes: int = 255

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        if "\0" in value:
            return "has a NUL character, which no path has; name another path"
        names = [len(name.encode("utf-8", "surrogatepass")) for name in value.split("/")]
        size = sum(names) + len(names) - 1
        if size > self.max_bytes:
            return f"has {size:,} bytes; a path has at most {self.max_bytes:,}: name another path"
        if max(names) > self.max_name_bytes:
            return (
                f"has a name of {max(names):,} bytes in it; names of files and folders have at most "
                f"{self.max_name_bytes}: name another path"
            )
        return None


PATH = PathRule()
"""Files, folders, and functions named by the file that they are in."""


@dataclasses.dataclass(frozen=True)
class Text(Rule):
    """Accepts printable text.

    Attributes:
      at_most: maximum number of characters.
      lines: whether line feeds, and blanks at the ends, are valid.
    """

    at_most: int
    lines: bool = False

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        if len(value) > self.at_most:
            return f"is longer than {self.at_most:,} characters; shorten it"
        allowed = value.replace("\n", "").replace("\t", "") if self.lines else value
        # `isprintable` is False for lone surrogates, NUL and other control characters; True for blanks.
        odd = next(
            (c for c in allowed if not (c.isprintable() or (self.lines and c.isspace()))), None
        )
        if odd is not None:
            return f"has the character {odd!a}, which cannot be shown; leave it out"
        if value != value.strip() and not self.lines:
            return "has blanks at its ends; remove them"
        return None


NAME = Text(1000)
"""A name, a field of a file, a note: one line without blanks at its ends."""


@dataclasses.dataclass(frozen=True)
class FolderName(Text):
    """Accepts a `NAME` that names a folder inside another one, or nothing."""

    at_most: int = 1000

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        if "/" in value or value in (".", ".."):
            return "leads to another folder; write a name without slashes"
        return super().fault(value)


FOLDER_NAME = FolderName()
"""The name of a run, whose folder is inside `run.output`."""

PROSE = Text(100_000, lines=True)
"""Text for a model: a template, a system prompt."""


def at_least(low: float, *, at_most: float = LARGEST, or_inf: bool = False) -> Range:
    """Numbers of at least `low`."""
    return Range(low, at_most, or_inf=or_inf)


def above(low: float, *, at_most: float = LARGEST, or_inf: bool = False) -> Range:
    """Numbers above `low`, excluding it."""
    return Range(low, at_most, has_low=False, or_inf=or_inf)


def positive(*, at_most: float = LARGEST, or_inf: bool = False) -> Range:
    """Numbers above 0."""
    return above(0, at_most=at_most, or_inf=or_inf)


def finite(*, at_most: float = LARGEST) -> Range:
    """Numbers of either sign."""
    return Range(-at_most, at_most)


def between(low: float, high: float, *, has_low: bool = True, has_high: bool = True) -> Range:
    """Numbers from `low` to `high`; the bounds are included by default."""
    return Range(low, high, has_low=has_low, has_high=has_high)


def one_of(*choices: Any) -> OneOf:
    """The listed values only. Use Literal if they need not be computed."""
    return OneOf(choices)


def coefficient() -> Range:
    """Factors of a term; 0 removes the term."""
    return at_least(0, at_most=MAX_COEFFICIENT)


def positive_coefficient(*, or_inf: bool = False) -> Range:
    """Bounds and factors above 0."""
    return positive(at_most=MAX_COEFFICIENT, or_inf=or_inf)


def score() -> Range:
    """Rewards and their weights, positive or negative."""
    return finite(at_most=MAX_COEFFICIENT)


def steps(low: int) -> Range:
    """Numbers of steps: the length of a run, or an interval between events."""
    return at_least(low, at_most=MAX_STEPS)


def token_count(low: int) -> Range:
    """Lengths in tokens, of a prompt, a response or a row."""
    return at_least(low, at_most=MAX_TOKENS)


def count(low: int) -> Range:
    """Numbers of objects that exist at the same time."""
    return at_least(low, at_most=MAX_COUNT)


def check_fields(settings: Any) -> None:
    """Raises UserError for the first field of a dataclass that breaks its annotation.

    The message has the field, the value, the rule and the remedy; `config_tree` adds the group's name.
    """
    for name, annotation in annotations_of(type(settings)).items():
        check_value(name, getattr(settings, name), annotation)


@functools.cache
def annotations_of(cls: type) -> dict[str, Any]:
    """The annotation of each field of a dataclass, including rules."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_value(name: str, value: Any, annotation: Any) -> Any:
    """Checks a value; returns it with lists converted to tuples, and integers to floats, as annotated.

    Nothing else is converted. The contents of Any, dataclasses and other classes are not checked.

    Args:
      name: name of the setting, for the message.
      value: value of the setting.
      annotation: bool, int, float, str, Literal, tuple[...] or dict[str, ...] of these, or unions of these,
        each with rules as metadata of Annotated.
    Raises:
      UserError: the value is of another type, or breaks a rule.
    """
    if not _is_checked(annotation):
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)  # NumPy scalars
    try:
        adapter = _adapter(annotation)
    except TypeError:  # unhashable metadata in a user's annotation
        adapter = _adapter.__wrapped__(annotation)
    try:
        return adapter.validate_python(_as_tuple(value, annotation))
    except ValidationError as error:
        raise UserError(_line(name, value, annotation, error.errors())) from None


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter:
    # strict: otherwise pydantic accepts "1" as a number and True as 1.
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


_PLAIN = (bool, int, float, str, tuple, dict, Any, types.NoneType)


def _is_checked(annotation: Any) -> bool:
    """Whether an annotation consists of plain types only.

    Dataclasses check their own fields. In a user's function an annotation may be missing, an unresolvable
    string, or any class.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return True
    if origin is typing.Annotated:
        return _is_checked(arguments[0])
    if origin in (tuple, dict, Mapping, typing.Union, types.UnionType):
        return all(kind is ... or _is_checked(kind) for kind in arguments)
    return any(annotation is plain for plain in _PLAIN)


def _as_tuple(value: Any, annotation: Any) -> Any:
    """Converts a list to a tuple if the annotation is a tuple, because recipes use both."""
    kinds = [annotation, *typing.get_args(annotation)]
    wanted = any(tuple in (kind, typing.get_origin(kind)) for kind in kinds)
    if not wanted or not isinstance(value, list | tuple):
        return value
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _line(name: str, value: Any, annotation: Any, errors: Sequence[Any]) -> str:
    """Formats pydantic's errors as one line: setting, value, and the broken rule or the expected types."""
    # A broken rule of the right type is more helpful than the list of other types.
    broken = [error for error in errors if error["type"] == _RULE]
    first = broken[0] if broken else errors[0]
    where, at = _place(name, value, first["loc"])
    if broken:
        return f"{where} {shown(at)} {first['msg']}"
    expected = dict.fromkeys(_expected(error, annotation) for error in errors)
    if at is value and types.NoneType in typing.get_args(annotation):
        expected["None"] = None  # pydantic does not report it
    remedy = ""
    if callable(at) and _EXPECTED["string_type"] in expected:
        remedy = '; write the function into a file and name it, such as "my_functions.py:score"'
    return f"{where} = {shown(at)}: expected {' or '.join(expected)}{remedy}"


def _place(name: str, value: Any, loc: Sequence[Any]) -> tuple[str, Any]:
    """Name and value inside a tuple or dict; skips the union members in pydantic's location."""
    for part in loc:
        if isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
            name, value = f"{name}[{part}]", value[part]
        elif isinstance(value, Mapping) and part in value:
            name, value = f"{name}.{part}", value[part]
    return name, value


def _expected(error: Any, annotation: Any) -> str:
    kind: str = error["type"]
    if kind == "literal_error":
        return error["ctx"]["expected"]
    if kind in ("missing", "too_long"):
        members = (annotation, *typing.get_args(annotation))
        (pair,) = (member for member in members if typing.get_origin(member) is tuple)
        return f"{len(typing.get_args(pair))} values"
    return _EXPECTED[kind] if kind in _EXPECTED else error["msg"].removeprefix("Input should be ")


# Our words for pydantic's kinds of errors.
_EXPECTED = {
    "bool_type": "True or False",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "none_required": "None",
    "tuple_type": "a tuple",
    "dict_type": "a table of names and values",
}
_RULE = "rule"


def check_path(name: str, value: str | os.PathLike[str]) -> None:
    """Raises UserError if an argument of a command is not a valid `PATH`; `name` is for the message."""
    check_value(name, os.fspath(value), typing.Annotated[str, PATH])


def is_a(value: Any, kind: type) -> bool:
    """Whether `value` has a plain type: a bool is not a number, and an int is also a float."""
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold; accepts any object."""
    return is_a(value, float) and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    """Formats `value` for a message; long values are cut."""
    # Python refuses to print integers of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 400:
        return f"of about {int(value.bit_length() * math.log10(2)):,} digits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


_MAX_SHOWN = 120


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
