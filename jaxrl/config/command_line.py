"""The command line of every training command: reads a recipe and overrides, returns a checked config.

    python launch/train.py --config configs/dapo_qwen32b.py --config.optim.lr=1e-6 --dry_run

`run` executes the recipe, applies the overrides, reads the result into settings and calls the command with
them. An error that the user can fix is printed as one line on stderr, with exit status 2. An error of the
program keeps its traceback. This module does not import jax. So a typing error is reported before any device
is touched, and the command can still choose its devices.

The recipe is executed by this module and not by ml_collections' `DEFINE_config_file`. That function uses a
loader that Python has deprecated, caches the last recipe under a fixed module name, and reports errors of a
recipe as text only.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import os
import pathlib
import re
import sys
import textwrap
import traceback
import typing
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_dict as ml_config_dict

from jaxrl.checks import quoted, shown
from jaxrl.config import config_tree
from jaxrl.errors import UserError
from jaxrl.files import read_bytes
from jaxrl.flags import help_of
from jaxrl.user_code import bundled_recipes

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

C = TypeVar("C")

_HERE = pathlib.Path("configs")
_MAX_LISTED = 8
_HELP_WIDTH = 110
# A value may have line breaks.
_OVERRIDE = re.compile(r"--?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def run(
    command: Callable[..., int | None],
    config_class: type[C],
    *,
    switches: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the command line and calls `command(config, **switches)`.

    Args:
      command: function that gets an instance of `config_class` and one boolean keyword per switch, and
        returns the exit status; None means 0.
      config_class: dataclass of all settings, with their defaults.
      switches: name and help text of flags that are False by default, such as `dry_run`.
      argv: program name and arguments; None means `sys.argv`.

    Returns:
      The exit status of the command.

    Raises:
      UserError: an argument, the recipe or a setting cannot be used, or the command raised it.
    """
    program, *arguments = sys.argv if argv is None else argv
    switches = switches or {}
    overrides, rest = take_overrides(arguments, config_class)
    # A FlagValues of its own instead of absl's global one: a process may run several commands.
    own = flags.FlagValues()
    flags.DEFINE_string("config", None, "recipe file", flag_values=own)
    flags.DEFINE_boolean("help", False, "show the settings", short_name="h", flag_values=own)
    for name, text in switches.items():
        flags.DEFINE_boolean(name, False, text, flag_values=own)
    try:
        # What is no flag are names of groups after --help.
        _, *groups = own([program, *rest])
    except flags.UnrecognizedFlagError as error:
        known = config_tree.leaf_types(config_class)
        near = [f"--{name}" for name in difflib.get_close_matches(error.flagname, [*own])]
        near += [
            f"--config.{n}=VALUE" for n in config_tree.near_settings(error.flagname, known.keys())
        ]
        hint = f"near: {near[0]}" if near else "settings are given as --config.NAME=VALUE"
        raise UserError(
            f"unknown flag --{error.flagname}; {hint} (--help lists all flags and settings)"
        ) from error
    except flags.Error as error:
        raise UserError(f"{error} (--help lists all flags and settings)") from error
    if own["help"].value:
        print(_usage(program, command, config_class, switches, groups))
        return 0
    if groups:
        raise UserError(
            f'unexpected argument "{groups[0]}"; settings are given as --config.NAME=VALUE'
        )
    config = load_config(config_class, own["config"].value, overrides)
    return command(config, **{name: own[name].value for name in switches}) or 0


def load_config(
    config_class: type[C],
    recipe: str | ml_config_dict.ConfigDict | None,
    overrides: Mapping[str, Any],
) -> C:
    """Loads a recipe, applies overrides and returns the checked config.

    Args:
      config_class: class of all settings.
      recipe: path of the recipe, as in `load_recipe`; or its settings, which are changed.
      overrides: value or text of each override by dotted name, applied in order. The text `none` means None
        where None is allowed.

    Raises:
      UserError: the recipe cannot be used, or a setting is unknown, mistyped or refused.
    """
    if not recipe:
        raise UserError(f"no recipe given; add --config RECIPE, {recipes_near('')}")
    tree = recipe
    if not isinstance(tree, ml_config_dict.ConfigDict):
        tree = load_recipe(tree, known=list(config_tree.leaf_types(config_class)))
    tree = config_tree.complete(config_class(), tree)
    for name, text in overrides.items():
        override(config_class, tree, name, text)
    return config_tree.from_config_dict(config_class, tree)


def override(config_class: type, tree: ml_config_dict.ConfigDict, name: str, value: Any) -> None:
    """Changes a setting of a recipe.

    Args:
      config_class: class of all settings.
      tree: settings of the recipe.
      name: dotted name of the setting, or of an entry of a free-form dict.
      value: the new value. Text is read by the type of the setting.

    Raises:
      UserError: there is no such setting, or the files of a model give its value. Types and ranges are
        checked when the tree is read.
    """
    known = config_tree.leaf_types(config_class)
    kind = config_tree.setting_type(config_class, name)
    if kind is not None and name.startswith(told_names(config_class)):
        raise UserError(
            f"--config.{name}: the model's files tell this; set weights, or in the recipe "
            "config.model = model_shapes(NAME)"
        )
    if isinstance(value, str):
        value = _parsed(value, kind)
    if config_tree.group_class(kind) and value is not None:
        inside = [f"{name}.{leaf}" for leaf in config_tree.names_inside(kind)]
        raise config_tree.GroupGiven(name, config_tree.meant_by_group(config_class, name) or inside)
    node: Any = tree
    *groups, leaf = name.split(".")
    in_table = False
    for group in groups:
        # A table takes entries that the recipe has not filled; anywhere else a group must exist.
        in_table = in_table or isinstance(node, config_tree.Table)
        if kind is not None and in_table and group not in node:
            node[group] = {}
        node = node.get(group) if isinstance(node, ml_config_dict.ConfigDict) else None
    if kind is not None and node is None:
        raise UserError(
            f"--config.{name}: its group is None in this recipe; fill the group there first"
        )
    # The name of an entry of any type is not checked later, so the entry must be there.
    if kind is None or (kind is Any and leaf not in node):
        known = config_tree.names_near(config_class, name)
        raise config_tree.UnknownSetting(name, {*known, *_names_in(tree)})
    if value is None and isinstance(node, config_tree.Table):
        # "none" takes an entry out of a free-form dict.
        if leaf in node:
            del node[leaf]
        return
    try:
        node[leaf] = value
    except (TypeError, ValueError) as error:
        raise UserError(f"--config.{name}={shown(value)}: {error}") from error


def _parsed(text: str, kind: Any) -> Any:
    """The value that a text means for a setting of a type. Text of another type stays text."""
    inner = config_tree.bare(kind)
    is_text = inner is str or all(isinstance(x, str) for x in typing.get_args(inner) or (0,))
    if text.lower() == "none" and (config_tree.accepts_none(kind) or not is_text):
        return None
    if is_text:
        return text
    # `literal_eval` reads True, but neither true nor inf.
    words = {"true": True, "false": False, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}
    try:
        value = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if typing.get_origin(inner) is tuple and not isinstance(value, list | tuple):
        return (value,)
    return value


def load_recipe(
    recipe: str | pathlib.Path, *, known: Sequence[str] = ()
) -> ml_config_dict.ConfigDict:
    """Executes a recipe file and returns its settings. A recipe calls this to build on another recipe.

    Args:
      recipe: path of a Python file that defines `get_config()`, or name of a recipe of the package. Text
        after a colon is passed to `get_config` as its argument.
      known: dotted names of all settings, for suggestions if the recipe misspells one.

    Returns:
      The locked ConfigDict that `get_config` returned.

    Raises:
      UserError: the file does not exist, or it failed; the message has file and line.
    """
    path, _, argument = str(recipe).partition(":")
    path = recipe_path(path)
    try:
        # An import would write a __pycache__ into the recipe folder. Python trusts that cache by modification
        # time, so it would miss an edit within the same second.
        # `dont_inherit`: the `from __future__` above is not meant for recipes.
        code = compile(read_bytes(path, absent="name a recipe"), path, "exec", dont_inherit=True)
        names: dict[str, Any] = {"__name__": "recipe", "__file__": path}
        exec(code, names)
        get_config = names.get("get_config")
        if get_config is None:
            raise UserError(f"{path} defines no get_config(), which is what a recipe is read by")
        tree = get_config(argument) if argument else get_config()
    except UserError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # a recipe is the user's own code and may raise anything
        raise UserError(_recipe_failure(path, error, known)) from error
    if not isinstance(tree, ml_config_dict.ConfigDict):
        raise UserError(f"get_config() of {path} returned {shown(tree)}, not a ConfigDict")
    # A recipe that builds on this one fails at the line that misspells a setting.
    return config_tree.locked(tree)


def recipe_path(recipe: str) -> str:
    """Returns the file of a recipe.

    Args:
      recipe: path of a file; or name of a recipe in `configs/` here or in the package, with or without ".py".

    Raises:
      UserError: there is neither; names similar recipes.
    """
    # Of os.path, whose answer to a path that no file system can hold is no.
    if os.path.isfile(recipe):
        return recipe
    name = recipe.removesuffix(".py")
    if recipe and "/" not in name:
        for folder in (_HERE, bundled_recipes()):
            if os.path.isfile(folder / f"{name}.py"):
                return str(folder / f"{name}.py")
    raise UserError(f"no recipe file {quoted(recipe)}; {recipes_near(recipe)}")


def recipes_near(recipe: str) -> str:
    """Returns text that suggests recipes: those with a similar name, otherwise the first few."""
    given = pathlib.Path(recipe)
    beside = given.parent.glob("*.py") if given.name and os.path.isdir(given.parent) else ()
    here = {file.stem: str(file) for file in sorted({*beside, *_HERE.rglob("*.py")})}
    bundled = {file.stem: file.stem for file in sorted(bundled_recipes().glob("*.py"))}
    known = bundled | here
    near = difflib.get_close_matches(given.stem, known)
    if near:
        return "near: " + ", ".join(known[stem] for stem in near)
    return "such as " + ", ".join(list((here or bundled).values())[:_MAX_LISTED])


def take_overrides(
    arguments: Sequence[str], config_class: type
) -> tuple[dict[str, str], list[str]]:
    """Separates the overrides `--config.name=value` from the other arguments.

    Args:
      arguments: arguments of a command line.
      config_class: class of all settings.

    Returns:
      The text of each override by dotted name (the last one if a name is repeated), and the other
      arguments.
    """
    kinds = config_tree.leaf_types(config_class)
    overrides = {}
    rest = []
    pending = iter(arguments)
    for argument in pending:
        if given := _OVERRIDE.fullmatch(argument):
            name, text = given.groups()
            if text is None:
                is_bool = kinds.get(name) in (bool, bool | None)
                # A flag without a value sets a bool; for others the next argument is the value.
                text = "true" if is_bool else next(pending, None)
            if text is None:
                raise UserError(f"--config.{name} has no value; write --config.{name}=VALUE")
            overrides[name] = text
        else:
            rest.append(argument)
    return overrides, rest


def told_names(cls: type) -> tuple[str, ...]:
    """Dotted names of the fields of `cls` whose values come from the model's files."""
    names: tuple[str, ...] = ()
    hints = typing.get_type_hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        if name not in getattr(cls, "SETTINGS", (name,)):
            names += (name,)
        elif group := config_tree.group_class(hints[name]):
            names += tuple(f"{name}.{told}" for told in told_names(group))
    return names


def help_texts(cls: type) -> dict[str, str]:
    """The help text of every setting of `cls` by dotted name."""
    texts = {}
    for name, annotation in typing.get_type_hints(cls).items():
        texts[name] = help_of(cls).get(name, "")
        if group := config_tree.group_class(annotation):
            texts |= {f"{name}.{leaf}": text for leaf, text in help_texts(group).items()}
    return texts


def _names_in(tree: ml_config_dict.ConfigDict, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, ml_config_dict.ConfigDict):
            yield from _names_in(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _recipe_failure(path: str, error: BaseException, known: Sequence[str]) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    # The last line of the recipe itself, whatever it called from there.
    lines = [f.lineno for f in frames if f.filename == path and f.lineno is not None]
    place = f"{path}:{lines[-1]}" if lines else path
    # A locked ConfigDict raises AttributeError with a KeyError inside, whose text starts with the name: 'lrr'
    # after a read, Key "lrr" does not exist after an assignment.
    cause = error.args[0] if isinstance(error, AttributeError) and error.args else None
    misspelt = isinstance(cause, KeyError) and re.match(
        r"""(?:Key )?["'](\w+)["']""", str(cause.args[0])
    )
    if misspelt:
        return f"{place}: {config_tree.UnknownSetting(misspelt[1], known)}"
    return f"{place}: {type(error).__name__}: {error}"


def _usage(
    program: str,
    command: Callable[..., int | None],
    config_class: type,
    switches: Mapping[str, str],
    groups: Sequence[str],
) -> str:
    about = (command.__doc__ or "").strip().splitlines()[:1]
    options = "".join(f" [--{name}]" for name in switches)
    texts = help_texts(config_class)
    told = told_names(config_class)
    defaults = {
        name: value
        for name, value in config_tree.flatten_config(config_class()).items()
        if not name.startswith(told)
    }
    # Groups are named with dots or without: "rollout", "algorithm.kl".
    chosen: list[str] = []
    for group in groups:
        inside = [n for n in defaults if n == group or n.startswith(f"{group}.")]
        if not inside:
            known = {n.rpartition(".")[0] for n in defaults} - {""}
            near = difflib.get_close_matches(group, known) or sorted(
                n for n in known if "." not in n
            )
            raise UserError(f'no group of settings "{group}"; near: {", ".join(near)}')
        chosen += inside
    shown = []
    indent = " " * 8
    for name in chosen or defaults:
        shown.append(f"  --config.{name}={defaults[name]!r}")
        text = texts.get(name, "")
        shown += textwrap.wrap(text, _HELP_WIDTH, initial_indent=indent, subsequent_indent=indent)
    if groups:
        return "\n".join(shown)
    return "\n".join(
        [
            *about,
            f"usage: {program} --config RECIPE [--config.NAME=VALUE ...]{options}",
            *(f"  --{name}: {text}" for name, text in switches.items()),
            "settings and their defaults, which the recipe may change (--help GROUP shows one group):",
            *shown,
        ]
    )
