"""Settings as an ml_collections ConfigDict, which recipes and command lines change, and back with checks.

    Config()  --to_config_dict-->  ConfigDict  --recipe file, command line-->  ConfigDict
                                                                                   |
    all other code  <--  frozen Config  <--from_config_dict (names, types, ranges: pydantic)

Groups of settings are classes made by `checks.settings`. Only they define names, types, ranges, defaults and
help texts. A ConfigDict holds values of any type until it is read back. A dict of settings is free-form:
recipes may add entries to it. If its entries are groups, a recipe may set some of their settings; the others
keep their defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import pathlib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from ml_collections import config_dict as ml_config_dict
from pydantic import TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from jaxrl import checks
from jaxrl.errors import UserError

C = TypeVar("C")

# Names that are suggested at most.
_NUM_NEAR = 3


class Group(ml_config_dict.ConfigDict):
    """A group of settings. Accepts an instance of its class: config.model = ModelConfig()."""

    def __init__(self, values: Mapping[str, Any] | None = None, **options: Any):
        """Types are checked once, when the whole tree is read."""
        super().__init__(values, **{**options, "type_safe": False})

    def __setitem__(self, key: str, value: Any) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = to_config_dict(value)
        # ml_collections makes floats of integers, True and 10^400 included.
        becomes_float = isinstance(value, int) and isinstance(self.get(key), float)
        if becomes_float and not checks.is_finite(value):
            raise TypeError(f"{key} = {checks.shown(value)}: expected a number")
        super().__setitem__(key, value)

    def get_ref(self, key: str) -> ml_config_dict.FieldReference:
        """A reference that follows the setting. An override of the setting it derives stays there.

        ml_collections would store one shared object: --config.run.save_every=6 changed num_steps, too.
        """
        return super().get_ref(key).identity()


class Table(Group):
    """A free-form dict, which takes new entries."""


def to_config_dict(config: Any) -> Group:
    """Returns the settings of a group as a locked ConfigDict that a recipe can change.

    Free-form dicts stay unlocked and accept new entries.
    """
    tree = Group({field.name: None for field in dataclasses.fields(config)})
    for name in tree:
        value = getattr(config, name)
        tree[name] = Table(value) if isinstance(value, Mapping) else value
    # So that a misspelt setting fails at its line of the recipe.
    tree.lock()
    _unlock_tables(tree)
    return tree


def complete(default: Any, tree: ml_config_dict.ConfigDict) -> ml_config_dict.ConfigDict:
    """Fills what a ConfigDict leaves out, at any depth, and locks it. Names that are no settings stay.

    Args:
      default: an instance of the class of all settings.
      tree: ConfigDict, which a recipe may have made by itself instead of by `to_config_dict`; it is changed.

    Raises:
      UserError: it cannot be read: a required value is missing, a key is no text, or it contains itself.
    """
    with _readable():
        tree.unlock()
        _fill(default, tree)
    return locked(tree)


def locked(tree: ml_config_dict.ConfigDict) -> ml_config_dict.ConfigDict:
    """Locks a ConfigDict, except for its free-form dicts. Errors as in `complete`."""
    with _readable():
        tree.lock()
        _unlock_tables(tree)
    return tree


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ml_config_dict.RequiredValueError, RecursionError, TypeError) as error:
        raise UserError(
            f"the recipe's ConfigDict cannot be read ({type(error).__name__}: {error}); begin with "
            "to_config_dict(Config()), and give every setting a value"
        ) from error


def _fill(default: Any, tree: ml_config_dict.ConfigDict) -> None:
    for name, whole in to_config_dict(default).items():
        given: Any = tree.get(name)
        if name not in tree:
            tree[name] = whole
        elif isinstance(whole, Table):
            if isinstance(given, ml_config_dict.ConfigDict) and not isinstance(given, Table):
                tree[name] = Table(typing.cast("Any", given))
        elif isinstance(whole, Group) and isinstance(given, ml_config_dict.ConfigDict):
            _fill(getattr(default, name), given)


def _unlock_tables(tree: ml_config_dict.ConfigDict) -> None:
    for entry in tree.values():
        if isinstance(entry, Table):
            entry.unlock()
        elif isinstance(entry, ml_config_dict.ConfigDict):
            _unlock_tables(entry)


def from_config_dict(cls: type[C], config_dict: ml_config_dict.ConfigDict) -> C:
    """Checks a ConfigDict and converts it to a group of settings.

    An integer is accepted for a float and a list for a tuple. Nothing else is converted. What is left out has
    its default.

    Raises:
      UserError: a setting is unknown (the message suggests similar names), of the wrong type or out of range,
        or a group rejected its values. The message has the dotted name.
    """
    values = _plain(config_dict)
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        for fault in error.errors():
            # First of all: a misspelt name explains the other errors.
            name = ".".join(map(str, fault["loc"]))
            if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                raise UnknownSetting(name, names_near(cls, name)) from None
            is_group = fault["type"] in ("dataclass_type", "dict_type")
            if near := is_group and meant_by_group(cls, name):
                raise GroupGiven(name, near) from None
        raise UserError(checks.fault_of(error, values)) from None


def _plain(value: Any) -> Any:
    """Converts ConfigDicts to plain dicts and groups to dicts of their settings, at any depth."""
    if isinstance(value, Mapping | ml_config_dict.ConfigDict):
        return {key: _plain(value[key]) for key in value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return value


def leaf_types(cls: type) -> dict[str, Any]:
    """The annotation of every setting of `cls` by dotted name, in the order of the fields.

    An optional group is listed before its settings, because it can itself be set to None. Of a class
    with `SETTINGS` only these are listed: the others come from the model's files.
    """
    leaves = {}
    # Not the fields' types: these are text under `from __future__ import annotations`.
    for name, annotation in typing.get_type_hints(cls).items():
        if (
            name not in getattr(cls, "SETTINGS", (name,))
            or typing.get_origin(annotation) is typing.ClassVar
        ):
            continue
        group = group_class(annotation)
        if group is None or accepts_none(annotation):
            leaves[name] = annotation
        if group is not None:
            leaves |= {f"{name}.{leaf}": kind for leaf, kind in leaf_types(group).items()}
    return leaves


def flatten_config(config: Any) -> dict[str, Any]:
    """The value of every setting by dotted name: fields in declared order, dict entries by name."""
    if isinstance(config, dict):
        # Recipes may fill a dict in any order, and equal settings are to print alike.
        entries = [(key, config[key]) for key in sorted(config)]
    else:
        entries = [
            (field.name, getattr(config, field.name)) for field in dataclasses.fields(config)
        ]
    leaves = {}
    for name, value in entries:
        if dataclasses.is_dataclass(value) or (isinstance(value, dict) and value):
            leaves |= {f"{name}.{leaf}": x for leaf, x in flatten_config(value).items()}
        else:
            leaves[name] = value
    return leaves


def format_config(config: Any) -> str:
    """Formats `config` as readable text with one `path = value` per line."""
    return "".join(f"{name} = {value!r}\n" for name, value in flatten_config(config).items())


class UnknownSetting(UserError):
    """A setting that does not exist.

    Attributes:
      name: what was given.
      near: up to three settings that may be meant, nearest first.
    """

    def __init__(self, name: str, known: Iterable[str]):
        self.name, self.near = name, near_settings(name, set(known))
        hint = (
            "near: " + ", ".join(self.near) if self.near else "none is near, --help lists them all"
        )
        super().__init__(f"unknown setting {checks.quoted(name)}; {hint}")


def names_near(cls: type, name: str) -> set[str]:
    """Dotted names of all settings of `cls`, and of those beside `name` if it is in an entry of a dict."""
    group = name.rpartition(".")[0]
    beside = names_inside(setting_type(cls, group))
    return {*leaf_types(cls), *(f"{group}.{leaf}" for leaf in beside)}


def meant_by_group(cls: type, name: str) -> list[str]:
    """The settings that a group or a table of groups may be taken for; [] if none are known."""
    known = leaf_types(cls).keys()
    # An entry of a table may have any name.
    is_ours = any(f"{leaf}.".startswith(f"{name}.") for leaf in known)
    return _meant(name, known) if is_ours else []


class GroupGiven(UserError):
    """A group of settings got a value."""

    def __init__(self, name: str, near: Iterable[str]):
        super().__init__(
            f'"{name}" is a group of settings; near: {", ".join(near)} (--help lists all settings)'
        )


def _meant(name: str, known: Set[str]) -> list[str]:
    """Up to three settings that TRL, verl or others call so, nearest first."""
    parts = name.lower().replace("-", "_").split(".")
    # verl's names have groups in front: actor_rollout_ref.actor.optim.lr.
    theirs = (_other_names().get(".".join(parts[n:])) for n in range(len(parts)))
    meant = next(filter(None, theirs), ())
    return [x for x in meant if {x, x.rpartition(".")[0], x.partition(".NAME")[0]} & known][
        :_NUM_NEAR
    ]


def near_settings(name: str, known: Set[str]) -> list[str]:
    """Up to three settings that a name may mean: those that TRL or verl call so, else those named alike.

    Similarity is measured on the whole dotted name and on its last part alone. So a correct last part in
    the wrong group is found too.
    """
    if meant := _meant(name, known):
        return meant
    last = name.lower().replace("-", "_").rpartition(".")[2]
    leaves = difflib.get_close_matches(last, {x.rpartition(".")[2] for x in known})
    same = [x for leaf in leaves for x in sorted(known) if x.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(name, known) + difflib.get_close_matches(name, same, cutoff=0)
    return list(dict.fromkeys(near))[:_NUM_NEAR]


@functools.cache
def _other_names() -> dict[str, list[str]]:
    """Our settings by their names in TRL and verl."""
    lines = pathlib.Path(__file__).with_name("other_names.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {name: ours for name, *ours in rows}


def setting_type(cls: type, name: str) -> Any:
    """The annotation of a setting, or of an entry of a free-form dict; None if there is none of that name."""
    kind: Any = cls
    for part in name.split("."):
        inner = bare(kind)
        entry = (typing.get_args(inner) or (str, Any))[1] if is_dict(inner) else None
        kind = names_inside(inner).get(part, entry)
    return kind


def names_inside(kind: Any) -> dict[str, Any]:
    """The annotation of each setting of a group; {} for what is no group."""
    kind = bare(kind)
    is_group = dataclasses.is_dataclass(kind) or is_typeddict(kind)
    return typing.get_type_hints(kind) if is_group else {}


def bare(annotation: Any) -> Any:
    """An annotation without rules and without None."""
    if typing.get_origin(annotation) is typing.Annotated:
        return bare(typing.get_args(annotation)[0])
    members = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return bare(members[0]) if is_union and len(members) == 1 else annotation


def accepts_none(annotation: Any) -> bool:
    """Whether `annotation` allows None."""
    return annotation is Any or types.NoneType in typing.get_args(annotation)


def group_class(annotation: Any) -> type | None:
    """The dataclass in `X` or `X | None`; None if `annotation` is not a group of settings."""
    inner = bare(annotation)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def is_dict(annotation: Any) -> bool:
    """Whether settings of an annotation are free-form dicts."""
    return (typing.get_origin(annotation) or annotation) in (dict, Mapping)
