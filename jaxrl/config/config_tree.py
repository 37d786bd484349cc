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

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ml_collections import config_dict as ml_config_dict
from pydantic import TypeAdapter, ValidationError

from jaxrl import checks
from jaxrl.errors import UserError

C = TypeVar("C")

# Names that are suggested at most, and their least likeness: that of `difflib.get_close_matches`.
_NUM_NEAR = 3
_NEAR_RATIO = 0.6


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
    # Locked, so that a misspelt setting fails at its line of the recipe.
    tree.lock()
    for entry in tree.values():
        if isinstance(entry, Table):
            entry.unlock()
    return tree


def from_config_dict(cls: type[C], config_dict: ml_config_dict.ConfigDict) -> C:
    """Checks a ConfigDict and converts it to a group of settings.

    An integer is accepted for a float and a list for a tuple. Nothing else is converted. What is left out has
    its default.

    Raises:
      UserError: a setting is unknown (the message suggests similar names), of the wrong type or out of range,
        or a group rejected its values. The message has the dotted name.
    """
    try:
        return TypeAdapter(cls).validate_python(_plain(config_dict))
    except ValidationError as error:
        for fault in error.errors():
            # First of all: a misspelt name explains the other errors.
            if fault["type"] == "unexpected_keyword_argument":
                raise unknown_setting(".".join(map(str, fault["loc"])), leaf_types(cls)) from None
        raise UserError(checks.fault_of(cls, error)) from None


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


def unknown_setting(name: str, known: Iterable[str]) -> UserError:
    """Makes the error for a setting that does not exist, with up to three similar names.

    Similarity is measured on the whole dotted name and on its last part alone. So a correct last part in
    the wrong group is found too.
    """
    ranked = []
    for other in set(known):
        whole = difflib.SequenceMatcher(None, name, other).ratio()
        last = difflib.SequenceMatcher(None, name.split(".")[-1], other.split(".")[-1]).ratio()
        # The whole name breaks ties when several groups have the same last part.
        ranked.append((max(whole, last), whole, other))
    near = [other for ratio, _, other in sorted(ranked, reverse=True) if ratio >= _NEAR_RATIO]
    hint = "near: " + ", ".join(near[:_NUM_NEAR]) if near else "none is near, --help lists them all"
    return UserError(f'unknown setting "{name}"; {hint}')


def setting_type(cls: type, name: str) -> Any:
    """The annotation of a setting, or of an entry of a free-form dict; None if there is none of that name."""
    kind: Any = cls
    for part in name.split("."):
        inner = checks.bare(kind)
        if dataclasses.is_dataclass(inner):
            kind = typing.get_type_hints(typing.cast("type", inner)).get(part)
        elif is_dict(inner):
            kind = (typing.get_args(inner) or (str, Any))[1]
        else:
            return None
    return kind


def accepts_none(annotation: Any) -> bool:
    """Whether `annotation` allows None."""
    return annotation is Any or types.NoneType in typing.get_args(annotation)


def group_class(annotation: Any) -> type | None:
    """The dataclass in `X` or `X | None`; None if `annotation` is not a group of settings."""
    inner = checks.bare(annotation)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def is_dict(annotation: Any) -> bool:
    """Whether settings of an annotation are free-form dicts."""
    return (typing.get_origin(annotation) or annotation) in (dict, Mapping)
