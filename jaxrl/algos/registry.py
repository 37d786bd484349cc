"""Looking up, by the name in a config, what a user may extend.

A name is that of a table, or says where a function of the user's own is (`user_code`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

from jaxrl.checks import check_value
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """The entry of that name, or the user's function at that path.

    Args:
      table: one of the registries of `algos`.
      name: from a config; with a colon it is "package.module:function" or "path/to/file.py:function".
      kind: what the table holds, for the message.

    Raises:
      UserError: no such name, and the message lists those there are; or no such function.
    """
    if ":" in name:
        # What it must be called with is its own to say: `check_inputs`, `check_options`.
        return cast("Entry", load_function(name, kind))
    if name not in table:
        raise UserError(
            f"{kind} {name!r} is not known; use one of {', '.join(sorted(table))}, or one of your own as "
            "package.module:function or path/to/file.py:function"
        )
    return table[name]


def check_inputs(function: Callable, known: Iterable[str], what: str) -> None:
    """Raises UserError where a function takes an array that there is not.

    Args:
      function: its arrays are its positional arguments, with or without the letters of their axes.
      known: names of the arrays that it may take.
      what: it is, for the message.
    """
    unknown = [name for name in array_names(function) if name not in known]
    if unknown:
        raise UserError(
            f"{what} takes {', '.join(unknown)}, which nothing computes here; it may take "
            f"{', '.join(known)}, and settings as keyword-only arguments"
        )


def array_names(function: Callable) -> tuple[str, ...]:
    """Names of a function's arrays without the letters of their axes: mask for mask_BT."""
    return tuple(re.sub(r"_[A-Z]+$", "", name) for name in inputs_of(function))


def inputs_of(function: Callable) -> tuple[str, ...]:
    """Names of a registered function's positional arguments: the arrays that a recipe must have for it."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def options_of(function: Callable) -> tuple[str, ...]:
    """Names of a registered function's settings, its keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def check_options(
    function: Callable, options: Mapping[str, object], what: str, *, given: tuple[str, ...] = ()
) -> None:
    """Checks the keywords that a config hands to a registered function.

    Args:
      function: its settings are its keyword-only arguments.
      options: from the config.
      what: it is, for the message.
      given: keywords that the program itself fills in.

    Raises:
      UserError: an option does not exist, one without a default is missing, or a value is not what the
        function's annotation says (`checks`).
    """
    parameters = _signature(function).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(
            f"{what} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )
    needed = [name for name, p in known.items() if p.default is p.empty and name not in options]
    if needed:
        raise UserError(f"{what} needs {', '.join(needed)}; set it among its options")
    for name, value in options.items():
        check_value(f"{what}: option {name}", value, known[name].annotation)


def _signature(function: Callable) -> inspect.Signature:
    """With annotations as objects, unless they name what only a type checker imports."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # a function of a user's, whose values are then not checked
        return inspect.signature(function)
