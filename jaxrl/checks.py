"""Which values a setting may take, declared where its type and its default are:

    lr: Annotated[float, positive(at_most=10)] = 1e-6
    clip: Annotated[float, positive(or_inf=True)] = 0.5
    remat: Annotated[str, one_of("full", "none")] = "none"
    weights: Annotated[str, PATH] = ""
    stop_ids: tuple[Annotated[int, at_least(0)], ...] = ()

A settings dataclass calls `check_fields` first of all in its `__post_init__`; keywords of a function are
held against its signature by `algos.registry.check_options`. NaN never passes, an infinity only where
`or_inf` says that it is meant. Every range ends: what no machine could be asked for is a slip of the pen, and
is refused before a library allocates it.

Not covered: what two settings mean together, which each dataclass checks by itself.
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
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxrl.errors import UserError

LARGEST = 10_000
"""End of a range that names no other: far above every rate, coefficient and weight of published recipes."""

SMALLEST = 2.0**-126
"""The number nearest to 0 that float32 holds with all its digits. Accelerators round smaller ones to 0."""

MAX_STEPS = 10**7
"""Of a run. One a second for four months."""

MAX_TOKENS = 2**24
"""Of a sequence or a row: above the longest published context (10 million), and float32 counts it exactly."""

MAX_COUNT = 10**6
"""Of things side by side: prompts, samples, slots, rows, experts."""

MAX_WIDTH = 2**20
"""Of one dimension of a weight; the widest published feed-forward network has 53,248."""

MAX_LAYERS = 10_000
"""Of a model; the deepest published one has 126."""

MAX_VOCABULARY = 10**7
"""Rows of an embedding; the largest published one has 262,144."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`.

    Attributes:
      low, high: the ends.
      has_low, has_high: they belong to it.
      or_inf: so does infinity, which turns a limit off.
      or_zero: so does 0, which means something else than a small number.
    """

    low: float
    high: float
    has_low: bool = True
    has_high: bool = True
    or_inf: bool = False
    or_zero: bool = False

    def fault(self, value: float) -> str | None:
        """What is wrong with `value`, with the remedy; None if nothing is."""
        # Comparisons with NaN are false, so it is asked for by name, and first.
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
class OneOf:
    """Some values, and no others."""

    choices: tuple[Any, ...]

    def fault(self, value: Any) -> str | None:
        """What is wrong with `value`, with the remedy; None if nothing is."""
        if value in self.choices:
            return None
        return f"is not one of {', '.join(map(str, self.choices))}"


@dataclasses.dataclass(frozen=True)
class PathRule:
    """Texts that a file system takes for a path, and that leave room for the names of files in it.

    Attributes:
      max_bytes: of a path; the system takes 4,095, and a run adds the names of its own files.
      max_name_bytes: of each name in it, which is the system's limit.
    """

    max_bytes: int = 3500
    max_name_bytes: int = 255

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, with the remedy; None if nothing is."""
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
class Text:
    """Text that can be printed.

    Attributes:
      at_most: characters.
      lines: it may have several lines, and blanks at its ends.
    """

    at_most: int
    lines: bool = False

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, with the remedy; None if nothing is."""
        if len(value) > self.at_most:
            return f"is longer than {self.at_most:,} characters; shorten it"
        allowed = value.replace("\n", "").replace("\t", "") if self.lines else value
        # A lone surrogate, a NUL and other control characters are not printable, a blank is.
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

PROSE = Text(100_000, lines=True)
"""What a model reads: a template, a system prompt."""


def at_least(low: float, *, at_most: float = LARGEST, or_inf: bool = False) -> Range:
    """Numbers from `low` on."""
    return Range(low, at_most, or_inf=or_inf)


def above(low: float, *, at_most: float = LARGEST, or_inf: bool = False) -> Range:
    """Numbers above `low`, which is none of them."""
    return Range(low, at_most, has_low=False, or_inf=or_inf)


def positive(*, at_most: float = LARGEST, or_inf: bool = False) -> Range:
    """Numbers above 0."""
    return above(0, at_most=at_most, or_inf=or_inf)


def finite(*, at_most: float = LARGEST) -> Range:
    """Numbers of either sign."""
    return Range(-at_most, at_most)


def between(low: float, high: float, *, has_low: bool = True, has_high: bool = True) -> Range:
    """Numbers from `low` to `high`, with the ends unless they are excluded."""
    return Range(low, high, has_low=has_low, has_high=has_high)


def one_of(*choices: Any) -> OneOf:
    """Some values, and no others; Literal where they need not be computed."""
    return OneOf(choices)


def steps(low: int) -> Range:
    """Numbers of steps, of a run or between two events of it."""
    return at_least(low, at_most=MAX_STEPS)


def token_count(low: int) -> Range:
    """Lengths in tokens, of a prompt, a response, a row."""
    return at_least(low, at_most=MAX_TOKENS)


def count(low: int) -> Range:
    """Numbers of things that exist side by side."""
    return at_least(low, at_most=MAX_COUNT)


def check_fields(settings: Any) -> None:
    """Raises UserError for the first field of a dataclass that is not as its annotation says.

    The message has the field, the value, the rule and the remedy; the config door adds the group.
    """
    for name, annotation in annotations_of(type(settings)).items():
        check_value(name, getattr(settings, name), annotation)


@functools.cache
def annotations_of(cls: type) -> dict[str, Any]:
    """The annotation of each field of a dataclass, rules included."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raises UserError unless `value` has the type that `annotation` names and keeps its rules.

    Any, dataclasses and other classes are not looked into.

    Args:
      name: of the setting, for the message.
      value: of it.
      annotation: bool, int, float, str, Literal, tuple[...] or dict[str, ...] of these, unions of these, each
        with rules as the metadata of Annotated.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind, *rules = arguments
        check_value(name, value, kind)
        for rule in rules:
            if isinstance(rule, Range | OneOf | PathRule | Text) and (fault := rule.fault(value)):
                raise UserError(f"{name} {shown(value)} {fault}")
    elif origin in (typing.Union, types.UnionType):
        _check_union(name, value, arguments)
    elif origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            raise _wrong(name, value, " or ".join(map(repr, arguments)))
    elif tuple in (annotation, origin):
        _check_tuple(name, value, arguments or (Any, ...))
    elif (origin or annotation) in (dict, Mapping):
        _check_dict(name, value, arguments or (str, Any))
    elif annotation in _KINDS and not is_a(value, annotation):
        raise _wrong(name, value, _KINDS[annotation])


def check_path(name: str, value: str | os.PathLike[str]) -> None:
    """Raises UserError unless an argument of a command keeps `PATH`; the name is for the message."""
    check_value(name, os.fspath(value), Annotated[str, PATH])


def is_a(value: Any, kind: type) -> bool:
    """Whether `value` is of a plain type: a bool is no number here, and an int is a float."""
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold; any object may be asked."""
    return is_a(value, float) and _ANY_FLOAT.fault(value) is None


_ANY_FLOAT = Range(-sys.float_info.max, sys.float_info.max)
_KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
}


def _check_union(name: str, value: Any, members: tuple[Any, ...]) -> None:
    if value is None and types.NoneType in members:
        return
    expected, broken = [], None
    for member in members:
        if member is types.NoneType:
            continue
        try:
            return check_value(name, value, member)
        except _WrongTypeError as error:
            expected.append(error.expected)
        except UserError as error:
            broken = error
    # A rule that a value of the right type breaks says more than the types that it is not of.
    raise broken or _wrong(name, value, " or ".join(expected))


def _check_tuple(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    if not isinstance(value, tuple | list):
        raise _wrong(name, value, "a tuple")
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise _wrong(name, value, f"{len(kinds)} values")
    for i, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        check_value(f"{name}[{i}]", item, kind)


def _check_dict(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a table of names and values")
    for key, item in value.items():
        check_value(f"{name}.{key}", item, kinds[1])


class _WrongTypeError(UserError):
    """A value is of another type than `expected`."""

    def __init__(self, message: str, expected: str):
        super().__init__(message)
        self.expected = expected


def _wrong(name: str, value: Any, expected: str) -> UserError:
    return _WrongTypeError(f"{name} = {shown(value)}: expected {expected}", expected)


def shown(value: Any) -> str:
    """`value` as a message shows it: as written, or its beginning where that is long."""
    # Python writes no number of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 400:
        return f"of about {int(value.bit_length() * math.log10(2)):,} digits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


_MAX_SHOWN = 120


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
