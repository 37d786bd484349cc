"""Ranges of settings, declared beside their types and defaults:

    lr: Annotated[float, positive(at_most=10)] = 1e-6
    clip: Annotated[float, positive(or_inf=True)] = 0.5
    remat: Annotated[str, one_of("full", "none")] = "none"
    weights: Annotated[str, PATH] = ""
    stop_ids: tuple[Annotated[int, at_least(0)], ...] = ()

`settings` makes a class of such fields, which checks them whenever it is made. `algos.registry.check_options`
checks keyword arguments against a function's signature. NaN is never valid; infinity is valid only with
`or_inf`. Every range is bounded: a value that no machine can provide is a typing error, and it is refused
before a library allocates memory for it.

pydantic checks the types, and its errors are turned into our one line; its own messages have several lines
and no remedy. It runs in strict mode: by default it accepts "1" as a number and True as 1.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic.dataclasses
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
class Text(Rule):
    """Accepts printable text; with `lines` also line feeds, tabs and other blanks."""

    lines: bool = False

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        for c in value:
            # `isprintable` is False for lone surrogates, NUL and other control characters.
            if not (c.isprintable() or (self.lines and c.isspace())):
                return f"has the character {c!a}, which cannot be shown; leave it out"
        return None


NAME = Text()
"""A name: one line."""

PATH = PROSE = Text(lines=True)
"""A path; and text for a model, such as a template."""


@dataclasses.dataclass(frozen=True)
class FolderName(Text):
    """Accepts a `NAME` that names a folder inside another one, or nothing."""

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        if "/" in value or value in (".", ".."):
            return "leads to another folder; write a name without slashes"
        return super().fault(value)


FOLDER_NAME = FolderName()
"""The name of a run, whose folder is inside `run.output`."""


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
    own = inspect.get_annotations(cls)
    # Before pydantic reads them. Strict mode of a whole class would also refuse tables and lists.
    cls.__annotations__ = {name: _strict(hints[name]) for name in own}
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
            raise UserError(fault_of(made, error)) from error

    made.__init__ = __init__
    return made


def _strict(annotation: Any) -> Any:
    """The annotation with strict values; groups are also made of tables, and tuples of lists."""
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is typing.Annotated:
        return typing.Annotated[(_strict(arguments[0]), *annotation.__metadata__)]
    if kind in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_strict, arguments))]  # noqa: UP007
    if kind in (dict, Mapping):
        return dict[arguments[0], _strict(arguments[1])]
    if kind is tuple:
        return tuple[tuple(map(_strict, arguments))]
    if annotation in (bool, int, float, str):
        return typing.Annotated[annotation, pydantic.Strict()]
    return annotation


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
        return adapter.validate_python(value)
    except ValidationError as error:
        raise UserError(_line(name, annotation, error.errors())) from None


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter:
    return TypeAdapter(_strict(annotation))


_PLAIN = (bool, int, float, str, tuple, dict, Any, types.NoneType)


def _is_checked(annotation: Any) -> bool:
    """Whether an annotation consists of plain types only."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return True
    if origin is typing.Annotated:
        return _is_checked(arguments[0])
    if origin in (tuple, dict, Mapping, typing.Union, types.UnionType):
        return all(kind is ... or _is_checked(kind) for kind in arguments)
    # Dataclasses check their own fields. In a user's function an annotation may be missing, an unresolvable
    # string, or any class.
    return any(annotation is plain for plain in _PLAIN)


def fault_of(cls: type, error: ValidationError) -> str:
    """The first error of a group of settings in one line: setting, value and rule, or expected types."""
    faults = error.errors()
    name, annotation, _ = _setting_at(cls, faults[0]["loc"])
    if faults[0]["type"] == "value_error":  # of a __post_init__
        fault = str(faults[0].get("ctx", {}).get("error", faults[0]["msg"]))
        return f"{name}: {fault}" if name else fault
    if faults[0]["type"] == "unexpected_keyword_argument":
        return f'unknown setting "{name}" of {cls.__name__}'
    same = []
    for fault in faults:
        # Each type of a union has its own error.
        of_setting, _, inner = _setting_at(cls, fault["loc"])
        if of_setting == name:
            same.append({**fault, "loc": inner})
    return _line(name, annotation, same)


def _setting_at(cls: Any, loc: Sequence[int | str]) -> tuple[str, Any, tuple[int | str, ...]]:
    """Dotted name and annotation of the setting at a location of pydantic, and the location inside it."""
    name, kind = "", cls
    for depth, part in enumerate(loc):
        kind = bare(kind)
        if dataclasses.is_dataclass(kind):
            kind = annotations_of(typing.cast("type", kind)).get(str(part), Any)
        elif typing.get_origin(kind) in (dict, Mapping):
            kind = typing.get_args(kind)[1]
        else:
            return name, kind, tuple(loc[depth:])
        name = f"{name}.{part}" if name else str(part)
    return name, kind, ()


def bare(annotation: Any) -> Any:
    """An annotation without rules and without None."""
    if typing.get_origin(annotation) is typing.Annotated:
        return bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(annotation) if m is not types.NoneType]
        return bare(members[0]) if len(members) == 1 else annotation
    return annotation


def _line(name: str, annotation: Any, errors: Sequence[Any]) -> str:
    """Formats pydantic's errors as one line: setting, value, and the broken rule or the expected types."""
    # A broken rule of the right type is more helpful than the list of other types.
    broken = [error for error in errors if error["type"] == _RULE]
    first = broken[0] if broken else errors[0]
    wrong_length = first["type"] in ("missing", "too_long")
    # Names of dict entries and numbers of tuple items; the tags of union members are left out.
    in_table = typing.get_origin(bare(annotation)) in (dict, Mapping)
    inside = [x for x in first["loc"] if not wrong_length and (isinstance(x, int) or in_table)]
    where = name + "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in inside)
    value = first["input"]
    if broken:
        return f"{where} {shown(value)} {first['msg']}"
    expected = dict.fromkeys(_expected(error, annotation) for error in errors)
    if not inside and types.NoneType in typing.get_args(annotation):
        expected["None"] = None  # pydantic does not report it
    remedy = ""
    if callable(value) and _EXPECTED["string_type"] in expected:
        remedy = '; write the function into a file and name it, such as "my_functions.py:score"'
    return f"{where} = {shown(value)}: expected {' or '.join(expected)}{remedy}"


def _expected(error: Any, annotation: Any) -> str:
    kind: str = error["type"]
    if kind == "literal_error":
        return error["ctx"]["expected"]
    if kind in ("missing", "too_long"):
        members = (annotation, *typing.get_args(annotation))
        (pair,) = (member for member in members if typing.get_origin(member) is tuple)
        return f"{len(typing.get_args(pair))} values"
    if kind.startswith("dataclass"):
        return "a group of settings"
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


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold; accepts any object."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    # A comparison and not `math.isfinite`, which fails at integers beyond the range of floats. False for NaN.
    return abs(typing.cast("float", value)) <= sys.float_info.max


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
