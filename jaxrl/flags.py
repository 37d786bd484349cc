"""Command-line flags and help texts made from dataclasses of settings.

Each setting is declared once: the annotation of a field has its type, range and default, and the text below
has its help text.

    class ServeConfig:
        http_port: Annotated[int, between(0, 65_535)] = 8000
        '''Port; 0 chooses a free one.'''

    jaxrl serve --help    --http_port HTTP_PORT    Port; 0 chooses a free one (default: 8000)

`add_flags` declares a flag for every field. `settings_of` makes the dataclass, which checks its own ranges,
from the parsed arguments. `config.command_line` reads recipes and `--config.NAME=VALUE`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import pathlib
import textwrap
import typing
from collections.abc import Container
from typing import Any, NoReturn, TypeVar

from jaxrl.errors import UserError

Settings = TypeVar("Settings")


class _Parser(argparse.ArgumentParser):
    """Its errors are one line, without the usage, as those of settings are."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all flags")


def command_parser(program: str, about: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help is a command's module docstring, as it is written. It raises UserError.

    Args:
      program: name of the program, as in `sys.argv[0]`.
      about: docstring of the module.
      **options: further arguments of `argparse.ArgumentParser`.
    """
    return _Parser(
        prog=pathlib.Path(program).name,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


@functools.cache
def help_of(cls: type) -> dict[str, str]:
    """The help text of every setting: the text below its field, or below the next field that has one."""
    texts: dict[str, str] = {}
    # A subclass comes last, so that its text of a setting wins.
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        waiting: list[str] = []
        for node in typing.cast("ast.ClassDef", tree).body:
            if isinstance(node, ast.AnnAssign):
                waiting.append(ast.unparse(node.target))
            elif waiting and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = " ".join(str(node.value.value).split()).rstrip(".")
                texts |= dict.fromkeys(waiting, text)
                waiting = []
    return texts


def add_flags(parser: Any, cls: type, *, only: Container[str] | None = None) -> None:
    """Adds a flag for every field of a dataclass.

    A field without a default is required. A bool field with default False becomes a switch.

    Args:
      parser: an ArgumentParser, or an argument group of one.
      cls: dataclass of the settings.
      only: names of the fields that get a flag; None means all.
    """
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = field.name, kinds[field.name]
        if only is not None and name not in only:
            continue
        # argparse formats help texts by %.
        text = help_of(cls).get(name, "").replace("%", "%%")
        if kind is bool and field.default is False:
            parser.add_argument(f"--{name}", action="store_true", help=text)
            continue
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        shown = "" if default in ("", None) else f" (default: {default})"
        reader = kind if kind in (int, float) else str
        if kind is bool:
            # argparse would read any text as a true bool; text that is neither is refused by the settings.
            reader = lambda text: {"true": True, "false": False}.get(text.lower(), text)  # noqa: E731
        parser.add_argument(
            f"--{name}", type=reader, required=required, default=default, help=f"{text}{shown}"
        )


def settings_of(cls: type[Settings], args: argparse.Namespace) -> Settings:
    """Makes the dataclass, to which `add_flags` was applied, from parsed arguments.

    Raises:
      UserError: a value is out of its range.
    """
    fields = typing.get_type_hints(cls)
    # Without a flag a field has its default.
    return cls(**{name: value for name, value in vars(args).items() if name in fields})
