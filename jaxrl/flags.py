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
from collections.abc import Callable, Container
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def command_parser(program: str, about: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help is a command's module docstring, as it is written.

    Args:
      program: name of the program, as in `sys.argv[0]`.
      about: docstring of the module.
      **options: further arguments of `argparse.ArgumentParser`.
    """
    return argparse.ArgumentParser(
        prog=pathlib.Path(program).name,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


@functools.cache
def help_of(cls: type) -> dict[str, str]:
    """The help text of every setting: the text below its field, or below the next field that has one."""
    texts: dict[str, str] = {}
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


def add_flags(
    parser: Any,
    cls: type,
    *,
    only: Container[str] | None = None,
    without: Container[str] = (),
) -> None:
    """Adds a flag for every field of a dataclass, including fields of nested dataclasses.

    A field without a default is required. A bool field with default False becomes a switch.

    Args:
      parser: an ArgumentParser, or an argument group of one.
      cls: dataclass of the settings.
      only: names of the fields that get a flag; None means all.
      without: names of the fields that get no flag.
    """
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = field.name, kinds[field.name]
        if name in without or (only is not None and name not in only):
            continue
        if dataclasses.is_dataclass(kind):
            add_flags(parser, typing.cast("type", kind))
            continue
        text = help_of(cls).get(name, "").replace("%", "%%")
        flag = f"--{name}"
        if kind is bool and field.default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        default = _default(field)
        required = default is dataclasses.MISSING
        shown = "" if required or default in ("", (), {}, None) else f" (default: {default})"
        parser.add_argument(
            flag,
            type=_reader(kind),
            required=required,
            default=None if required else default,
            help=f"{text}{shown}",
        )


def settings_of(cls: type[Settings], args: argparse.Namespace, **given: Any) -> Settings:
    """Makes the dataclass from a parsed command line.

    Args:
      cls: dataclass given to `add_flags`.
      args: parsed arguments.
      **given: values of fields without a flag.

    Raises:
      UserError: a value is out of its range.
    """
    values = {}
    for name, kind in typing.get_type_hints(cls).items():
        if name in given:
            values[name] = given[name]
        elif dataclasses.is_dataclass(kind):
            values[name] = settings_of(typing.cast("type", kind), args)
        elif hasattr(args, name):
            values[name] = getattr(args, name)
    return cls(**values)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _reader(kind: Any) -> Callable[[str], Any]:
    if kind in (str, int, float):
        return kind
    if typing.get_origin(kind) is typing.Literal:
        return str
    return _literal


def _literal(text: str) -> Any:
    """A Python value such as ("a", "b"), {"a": 1} or True; text that is not a literal stays text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
