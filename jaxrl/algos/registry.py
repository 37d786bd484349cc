"""Looking up, by the name in a config, what a user may extend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from jaxrl.checks import check_value
from jaxrl.errors import UserError

Entry = TypeVar("Entry")


def named(table: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """The entry of that name.

    Args:
      table: one of the registries of `algos`.
      name: from a config.
      kind: what the table holds, for the message.

    Raises:
      UserError: no such name; the message lists those there are.
    """
    if name not in table:
        raise UserError(
            f"{kind} {name!r} is not known; use one of {', '.join(sorted(table))}, or register your own"
        )
    return table[name]


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
