"""Looks up losses, advantages and other extensible functions by the name in a config.

A name is a key of a registry, or the path of a user's own function (`user_code`).
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
    """The registry entry of a name, or the user's function at a path.

    Args:
      table: a registry of `algos`.
      name: key of the registry. With a colon it is "package.module:function" or "path/to/file.py:function".
      kind: kind of the entries, for the message, such as "policy loss".

    Raises:
      UserError: the name is unknown (the message lists the known ones), or the function does not exist.
    """
    if ":" in name:
        # Callers check its arguments later, with `check_inputs` and `check_options`.
        return cast("Entry", load_function(name, kind))
    if name not in table:
        raise UserError(
            f"{kind} {name!r} is not known; use one of {', '.join(sorted(table))}, or one of your own as "
            "package.module:function or path/to/file.py:function"
        )
    return table[name]


def check_inputs(function: Callable, known: Iterable[str], what: str) -> None:
    """Raises UserError if a function takes an array that is not available.

    Args:
      function: a function whose positional arguments are arrays, with or without axis letters in their names.
      known: names of the available arrays.
      what: description of the function, for the message.
    """
    unknown = [name for name in array_names(function) if name not in known]
    if unknown:
        raise UserError(
            f"{what} takes {', '.join(unknown)}, which nothing computes here; it may take "
            f"{', '.join(known)}, and settings as keyword-only arguments"
        )


def array_names(function: Callable) -> tuple[str, ...]:
    """Names of a function's arrays without their axis letters: mask for mask_BT."""
    return tuple(re.sub(r"_[A-Z]+$", "", name) for name in inputs_of(function))


def inputs_of(function: Callable) -> tuple[str, ...]:
    """Names of a registered function's positional arguments: the arrays that it needs."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def options_of(function: Callable) -> tuple[str, ...]:
    """Names of a registered function's keyword-only arguments: its settings."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def check_options(
    function: Callable, options: Mapping[str, object], what: str, *, given: tuple[str, ...] = ()
) -> None:
    """Checks the options that a config gives to a registered function.

    Args:
      function: a function whose settings are its keyword-only arguments.
      options: options from the config, by name.
      what: description of the function, for the message.
      given: names of keywords that the program itself fills in.

    Raises:
      UserError: an option does not exist, an option without a default is missing, or a value does not fit the
        function's annotation (`checks`).
    """
    try:
        # Annotations are text under `from __future__ import annotations`; the checks need the objects.
        signature = inspect.signature(function, eval_str=True)
    except NameError:
        # A user's annotation may name a type that is imported under TYPE_CHECKING only. Its value is then not
        # checked.
        signature = inspect.signature(function)
    parameters = signature.parameters.values()
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
