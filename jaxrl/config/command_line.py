"""The command line of every training command: reads a recipe and overrides, returns a checked config.

    python launch/train.py --config configs/dapo_qwen32b.py --config.optim.lr=1e-6 --dry_run

`run` executes the recipe, applies the overrides, converts the result to frozen dataclasses and calls
the command with them. An error that the user can fix is printed as one line on stderr, with exit
status 2. An error of the program keeps its traceback. This module does not import jax. So a typing
error is reported before any device is touched, and the command can still choose its devices.

ml_collections parses each override by the type of its setting. The recipe is executed by this module
and not by ml_collections' `DEFINE_config_file`. That function uses a loader that Python has deprecated,
caches the last recipe under a fixed module name, and reports errors of a recipe as text only.
"""

from __future__ import annotations

import difflib
import pathlib
import re
import sys
import textwrap
import traceback
import typing
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_dict as ml_config_dict
from ml_collections import config_flags
from ml_collections.config_flags import config_path

from jaxrl.checks import check_path
from jaxrl.config import config_tree
from jaxrl.config.recipes import recipe_path, recipes_near
from jaxrl.config.removed_settings import replacement_of
from jaxrl.errors import UserError

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


_HELP_WIDTH = 110
_OVERRIDE = re.compile(r"--?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_NEGATION = re.compile(r"--?noconfig\.([^=]+)")


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
    overrides, rest = take_overrides(arguments, config_tree.leaf_types(config_class))
    own, groups = _parse_own_flags(program, rest, switches)
    if own["help"].value:
        print(_usage(program, command, config_class, switches, groups))
        return 0
    if groups:
        raise UserError(
            f'unexpected argument "{groups[0]}"; settings are given as --config.NAME=VALUE'
        )
    config = load_config(config_class, own["config"].value, overrides)
    try:
        return command(config, **{name: own[name].value for name in switches}) or 0
    except SystemExit as error:
        if error.code:
            raise
        # Status 0 would say that the run is finished.
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{place.filename}:{place.lineno} has ended the program (SystemExit); a function that a config "
            "names must return"
        ) from error


def load_config(
    config_class: type[C],
    recipe: str | ml_config_dict.ConfigDict | None,
    overrides: Mapping[str, str],
) -> C:
    """Loads a recipe, applies overrides and returns frozen dataclasses.

    Args:
      config_class: dataclass of all settings.
      recipe: path of the recipe, as in `load_recipe`, or its settings, which are changed.
      overrides: text of each override by dotted name, applied in order. The text `none` means None where
        None is allowed.

    Returns:
      The checked config.

    Raises:
      UserError: the recipe cannot be used, or a setting is unknown, mistyped or refused.
    """
    if not recipe:
        raise UserError(f"no recipe given; add --config RECIPE, {recipes_near('')}")
    kinds = config_tree.leaf_types(config_class)
    is_tree = isinstance(recipe, ml_config_dict.ConfigDict)
    tree = recipe if is_tree else load_recipe(recipe, known=list(kinds))
    told = config_tree.told_names(config_class)
    for name, text in overrides.items():
        if name.startswith(told):
            raise UserError(
                f"--config.{name}: the model's files tell this; set weights, or in the recipe "
                "config.model = model_shapes(NAME)"
            )
        _apply_override(tree, kinds | _add_entry(tree, kinds, name), name, text)
    return config_tree.from_config_dict(config_class, tree)


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
    check_path("--config", path)
    path = recipe_path(path)
    try:
        get_config = _execute(path).get("get_config")
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
        raise UserError(f"get_config() of {path} returned {tree!r}, not a ConfigDict")
    return tree.lock()


def take_overrides(
    arguments: Sequence[str], kinds: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Separates the overrides `--config.name=value` from the other arguments.

    Args:
      arguments: arguments of a command line.
      kinds: annotation of every setting by dotted name.

    Returns:
      The text of each override by dotted name (the last one if a name is repeated), and the other
      arguments.
    """
    overrides = {}
    rest = []
    pending = iter(arguments)
    for argument in pending:
        if negated := _NEGATION.fullmatch(argument):
            overrides[negated[1]] = "false"
        elif given := _OVERRIDE.fullmatch(argument):
            name, text = given.groups()
            if text is None:
                is_bool = kinds.get(name) in (bool, bool | None)
                text = "true" if is_bool else next(pending, None)
            if text is None:
                raise UserError(f"--config.{name} has no value; write --config.{name}=VALUE")
            overrides[name] = text
        else:
            rest.append(argument)
    return overrides, rest


def _parse_own_flags(
    program: str, arguments: Sequence[str], switches: Mapping[str, str]
) -> tuple[flags.FlagValues, list[str]]:
    """(the flags, the arguments that are none: names of groups after --help)."""
    # A FlagValues of its own instead of absl's global one: a process may run several commands.
    own = flags.FlagValues()
    flags.DEFINE_string("config", None, "recipe file", flag_values=own)
    flags.DEFINE_boolean("help", False, "show the settings", short_name="h", flag_values=own)
    for name, text in switches.items():
        flags.DEFINE_boolean(name, False, text, flag_values=own)
    try:
        _, *positional = own([program, *arguments])
    except flags.Error as error:
        raise UserError(f"{error} (--help lists all flags and settings)") from error
    return own, positional


def _apply_override(
    tree: ml_config_dict.ConfigDict, kinds: Mapping[str, Any], name: str, text: str
) -> None:
    _require_setting(tree, kinds, name)
    kind = kinds.get(name)
    if text.lower() == "none" and config_tree.accepts_none(kind):
        config_path.set_value(name, tree, None)
        return
    if config_tree.group_class(kind):
        raise UserError(
            f"--config.{name}={text}: a group of settings can only be set to none; "
            f"set --config.{name}.NAME=VALUE, or fill the group in the recipe"
        )
    argv = ["", f"--config.{name}={text}"]
    one_setting = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", tree, flag_values=one_setting, sys_argv=argv)
        one_setting(argv)
    except flags.IllegalFlagValueError as error:
        expected = config_tree.type_name(kind or type(config_path.get_value(name, tree)))
        raise UserError(f"--config.{name}={text}: expected {expected}") from error
    except (flags.Error, ValueError, TypeError) as error:
        # ml_collections cannot parse lists, dicts, None without a type, or keys that are not identifiers.
        raise UserError(
            f"--config.{name}={text}: this entry can only be changed in the recipe"
        ) from error


def _add_entry(
    tree: ml_config_dict.ConfigDict, kinds: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Adds an entry if `name` is inside one (data.sources.gsm8k.path) or is one (correction.reject.veto).

    An entry of settings begins with their defaults, any other with None.

    Returns:
      Annotations of the entry's settings by dotted name; empty if `name` belongs to no entry.
    """
    *groups, key, leaf = ["", "", *name.split(".")]
    if value := config_tree.entry_type(kinds.get(name.removesuffix(f".{leaf}"))):
        return _add_typed_entry(tree, name, value)
    path = ".".join(filter(None, groups))
    entry = config_tree.entry_class(kinds.get(path))
    if entry is None or not key.isidentifier():
        return {}
    leaves = config_tree.leaf_types(entry)
    if leaf not in leaves:
        known = {*kinds, *(f"{path}.{key}.{other}" for other in leaves)}
        raise config_tree.unknown_setting(name, known)
    entries = config_path.get_value(path, tree)
    given = entries.get(key, {})
    # The recipe may have set only some settings of this entry.
    entries[key] = config_tree.to_config_dict(entry())
    for other in given:
        entries[key][other] = given[other]
    return {f"{path}.{key}.{other}": kind for other, kind in leaves.items()}


def _add_typed_entry(tree: ml_config_dict.ConfigDict, name: str, value: Any) -> dict[str, Any]:
    """Adds a free-form dict's entry of one value, None, which the override then replaces."""
    group, _, key = name.rpartition(".")
    entries = config_path.get_value(group, tree)
    if key not in entries:
        entries[key] = ml_config_dict.FieldReference(None, field_type=object)
    return {name: value | None}


def _require_setting(tree: ml_config_dict.ConfigDict, kinds: Mapping[str, Any], name: str) -> None:
    """Raises UserError unless `name` is a setting, or an entry of a free-form dict, of `tree`."""
    node = tree
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if node is None and name in kinds:
            group = ".".join(parts[:depth])
            raise UserError(
                f"--config.{name}: {group} is None in this recipe; fill the group there first"
            )
        if not isinstance(node, ml_config_dict.ConfigDict) or part not in node:
            raise config_tree.unknown_setting(name, {*kinds, *_names_in(tree)})
        node = node[part]
    inside = [leaf for leaf in kinds if leaf.startswith(name + ".")]
    if inside and name not in kinds:
        raise UserError(f'"{name}" is a group of settings; set one of {", ".join(inside)}')


def _names_in(tree: ml_config_dict.ConfigDict, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, ml_config_dict.ConfigDict):
            yield from _names_in(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _execute(path: str) -> dict[str, Any]:
    """Executes the Python file at `path` and returns its global names."""
    # An import would write a __pycache__ into the recipe folder. Python trusts that cache by modification
    # time, so it would miss an edit within the same second.
    code = compile(pathlib.Path(path).read_bytes(), path, "exec", dont_inherit=True)
    names = {"__name__": "recipe", "__file__": path}
    exec(code, names)
    return names


def _recipe_failure(path: str, error: BaseException, known: Sequence[str]) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == path and f.lineno is not None]
    place = f"{path}:{lines[-1]}" if lines else path
    misspelt = _misspelt_setting(error)
    if misspelt and lines:
        misspelt = _name_in_recipe(path, lines[-1], misspelt)
    if misspelt:
        return f"{place}: {config_tree.unknown_setting(misspelt, known)}"
    return f"{place}: {type(error).__name__}: {error}"


def _name_in_recipe(path: str, line: int, leaf: str) -> str:
    """The full name of a removed setting in a line of a recipe; `leaf` if the line has none."""
    text = pathlib.Path(path).read_text().splitlines()[line - 1]
    written = re.findall(r"\w+((?:\.\w+)+)", text)
    names = [name[1:] for name in written if leaf in name.split(".")]
    return next((name for name in names if replacement_of(name)), leaf)


def _misspelt_setting(error: BaseException) -> str | None:
    """The name that a locked ConfigDict rejected; None for all other errors."""
    # A ConfigDict raises AttributeError with a KeyError inside. The text of the KeyError starts with the
    # name: 'lrr' after a read, Key "lrr" does not exist after an assignment.
    cause = error.args[0] if isinstance(error, AttributeError) and error.args else error
    if not isinstance(cause, KeyError) or cause is error:
        return None
    name = re.match(r"""(?:Key )?["'](\w+)["']""", str(cause.args[0]))
    return name[1] if name else None


def _usage(
    program: str,
    command: Callable[..., int | None],
    config_class: type[DataclassInstance],
    switches: Mapping[str, str],
    groups: Sequence[str],
) -> str:
    about = (command.__doc__ or "").strip().splitlines()[:1]
    options = "".join(f" [--{name}]" for name in switches)
    texts = config_tree.help_texts(config_class)
    told = config_tree.told_names(config_class)
    defaults = {
        name: value
        for name, value in config_tree.flatten_config(config_class()).items()
        if not name.startswith(told)
    }
    if groups:
        return "\n".join(
            _described(n, v, texts.get(n, "")) for n, v in _in_groups(defaults, groups)
        )
    return "\n".join(
        [
            *about,
            f"usage: {program} --config RECIPE [--config.NAME=VALUE ...]{options}",
            *(f"  --{name}: {text}" for name, text in switches.items()),
            "settings and their defaults, which the recipe may change (--help GROUP shows one group):",
            *(_described(name, value, texts.get(name, "")) for name, value in defaults.items()),
        ]
    )


def _in_groups(defaults: Mapping[str, Any], groups: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The settings of some groups, each named with dots or without: "rollout", "algorithm.kl"."""
    for group in groups:
        inside = [n for n in defaults if n == group or n.startswith(f"{group}.")]
        if not inside:
            known = {n.rpartition(".")[0] for n in defaults} - {""}
            near = difflib.get_close_matches(group, known) or sorted(
                n for n in known if "." not in n
            )
            raise UserError(f'no group of settings "{group}"; near: {", ".join(near)}')
        yield from ((name, defaults[name]) for name in inside)


def _described(name: str, value: Any, text: str) -> str:
    lines = textwrap.wrap(text, _HELP_WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join([f"  --config.{name}={value!r}", *lines])
