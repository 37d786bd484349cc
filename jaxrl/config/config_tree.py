"""The config door: nested frozen dataclasses to an ml_collections ConfigDict and, checked, back.

    Config()  --to_config_dict-->  ConfigDict  --recipe file, command line-->  ConfigDict
                                                                                   |
    everything below the door  <--  frozen Config  <--from_config_dict (names, types, checks)

Defaults live in the dataclasses and nowhere else. A field may be annotated with bool, int, float,
str, Literal, Any, another dataclass, tuple[...] or dict[str, ...] of these, and unions of these
with each other or None, each with its range as the metadata of Annotated (`checks`). A dict is
free-form: recipes may add entries to it. An entry that is a dataclass may name some of its settings only; the
others have their defaults.

Not covered: reading files and command lines (`command_line.py`), and what the values mean together,
which each dataclass checks in its own `__post_init__`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import types
import typing
from typing import Any, TypeVar

from ml_collections import config_dict as ml_config_dict

from jaxrl import checks, flags
from jaxrl.config.removed_settings import replacement_of
from jaxrl.config.synonyms import synonyms_of
from jaxrl.errors import UserError

if typing.TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

_NUM_NEAR = 3
_NEAR_RATIO = 0.6


def to_config_dict(config: DataclassInstance) -> ml_config_dict.ConfigDict:
    """The settings of `config` as a locked ConfigDict, for a recipe to change.

    Fields that may be None become typed references: None and a value of the right type can both be
    assigned, whatever is there now. Free-form dicts stay open to new entries and other types.

    Args:
      config: an instance of a dataclass, usually all defaults.

    Returns:
      A new, locked ConfigDict of the same names.
    """
    tree = _group_of(config)
    tree.lock()
    _unlock_free_form(tree)
    return tree


def from_config_dict(cls: type[C], config_dict: ml_config_dict.ConfigDict) -> C:
    """The frozen dataclasses for what recipe and command line have settled.

    Integers are accepted for floats and lists for tuples; nothing else is converted.

    Args:
      cls: the dataclass that `config_dict` describes.
      config_dict: all settings of `cls`, as `to_config_dict` names them.

    Returns:
      An instance of `cls`.

    Raises:
      UserError: a setting is unknown (near names are given), missing or of the wrong type, or a
        dataclass refused its values with a ValueError; the message has the dotted path.
    """
    return _read_group(cls, config_dict, "", cls)


def leaf_types(cls: type[DataclassInstance]) -> dict[str, Any]:
    """Annotation of every setting of `cls` by dotted name, in the order of the fields.

    A group that may be None is listed itself, since it can be set to None, and before its settings. Fields
    that a class lists as `TOLD` are no settings: the files of a model say them.
    """
    leaves = {}
    for name, annotation in _annotations(cls).items():
        if name in getattr(cls, "TOLD", ()):
            continue
        group = group_class(annotation)
        if group is None or accepts_none(annotation):
            leaves[name] = annotation
        if group is not None:
            leaves |= {f"{name}.{leaf}": kind for leaf, kind in leaf_types(group).items()}
    return leaves


def told_names(cls: type[DataclassInstance]) -> tuple[str, ...]:
    """Dotted names of the fields of `cls` that are no settings."""
    names = getattr(cls, "TOLD", ())
    for name, annotation in _annotations(cls).items():
        if group := group_class(annotation):
            names += tuple(f"{name}.{told}" for told in told_names(group))
    return names


def help_texts(cls: type[DataclassInstance]) -> dict[str, str]:
    """Help text of every setting of `cls` by dotted name."""
    texts = {}
    for name, annotation in _annotations(cls).items():
        texts[name] = flags.help_of(cls).get(name, "")
        if group := group_class(annotation):
            texts |= {f"{name}.{leaf}": text for leaf, text in help_texts(group).items()}
    return texts


def leaf_names(cls: type[DataclassInstance]) -> list[str]:
    """Dotted name of every setting of `cls`, in the order of the fields."""
    return list(leaf_types(cls))


def flatten_config(config: DataclassInstance) -> dict[str, Any]:
    """Value of every setting by dotted name: fields in their order, entries of a dict by name."""
    return dict(_leaves(config, ""))


def format_config(config: DataclassInstance) -> str:
    """`config` as text to read and to diff, one `path = value` a line."""
    return "".join(f"{name} = {value!r}\n" for name, value in flatten_config(config).items())


def unknown_setting(name: str, known: Iterable[str]) -> UserError:
    """The error for a setting that does not exist.

    Nearness looks at the whole dotted name and at its last part alone, so that a right leaf in a
    wrong group is found too. Words of other libraries come before both (`synonyms`).

    Args:
      name: what the user wrote, dotted.
      known: all dotted names there are.

    Returns:
      An error naming up to three near settings, nearest first.
    """
    if replacement := replacement_of(name):
        return UserError(f'setting "{name}" was removed; {replacement}')
    known = set(known)
    # The whole name settles ties of a leaf that several groups have.
    ranked = sorted(((*_likeness(name, other), other) for other in known), reverse=True)
    alike = (other for likeness, _, other in ranked if likeness >= _NEAR_RATIO)
    near = list(dict.fromkeys([*synonyms_of(name, known), *alike]))
    hint = "near: " + ", ".join(near[:_NUM_NEAR]) if near else "none is near, --help lists them all"
    return UserError(f'unknown setting "{name}"; {hint}')


def type_name(annotation: Any) -> str:
    """An annotation as written, without modules: `float`, `int | None`, `tuple[int, ...]`."""
    members = _union_members(annotation)
    if len(members) > 1:
        return " | ".join(type_name(member) for member in members)
    if annotation is types.NoneType:
        return "None"
    return annotation.__name__ if _is_class(annotation) else str(annotation).replace("typing.", "")


def accepts_none(annotation: Any) -> bool:
    """Whether None is a value of `annotation`."""
    return annotation is Any or types.NoneType in _union_members(annotation)


def group_class(annotation: Any) -> type[DataclassInstance] | None:
    """The dataclass in `X` or `X | None`; None if `annotation` is no group of settings."""
    inner = _without_none(annotation)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


# Dataclasses -> ConfigDict.


class _Group(ml_config_dict.ConfigDict):
    """A group of settings, in which another group can be set to a dataclass: config.model = ModelConfig()."""

    def __setitem__(self, key: str, value: Any) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = to_config_dict(value)
        # ml_collections takes True for 1.0, and turns what is assigned to a float into one.
        replaces_float = isinstance(value, int) and isinstance(self.get(key), float)
        if replaces_float and not checks.is_finite(value):
            raise TypeError(f"{key} = {checks.shown(value)}: expected a number")
        super().__setitem__(key, value)


def _group_of(config: DataclassInstance) -> ml_config_dict.ConfigDict:
    tree = _Group()
    for name, annotation in _annotations(type(config)).items():
        tree[name] = _setting(annotation, getattr(config, name))
    return tree


def _setting(annotation: Any, value: Any) -> Any:
    """`value` as a ConfigDict holds it: in a typed reference where it does not tell its type."""
    inner = _without_none(annotation)
    stored = None if value is None else _stored(inner, value)
    if annotation is not Any and len(_union_members(annotation)) == 1:
        return stored
    return ml_config_dict.FieldReference(stored, field_type=_reference_type(inner))


def _stored(annotation: Any, value: Any) -> Any:
    if group_class(annotation):
        return _group_of(value)
    if _is_dict(annotation):
        # Values of a free-form dict may change type, so the ConfigDict must not watch over them.
        kind = _dict_value_type(annotation)
        holder = _Group if group_class(kind) else ml_config_dict.ConfigDict
        entries = holder(type_safe=False)
        for key, entry in value.items():
            entries[key] = entry if kind is Any else _setting(kind, entry)
        return entries
    # A ConfigDict keeps the type it saw first: a float written as 1 would refuse 0.5 later.
    return float(value) if annotation is float else value


def _reference_type(annotation: Any) -> type:
    """The class that a reference to a value of `annotation` admits; `object` means any literal."""
    if group_class(annotation):
        return ml_config_dict.ConfigDict
    if typing.get_origin(annotation) is typing.Literal:
        kinds = {type(choice) for choice in typing.get_args(annotation)}
        return kinds.pop() if len(kinds) == 1 else object
    kind = typing.get_origin(annotation) or annotation
    return kind if kind in (bool, int, float, str, tuple) else object


def _unlock_free_form(tree: ml_config_dict.ConfigDict) -> None:
    for entry in tree.values():
        if isinstance(entry, ml_config_dict.ConfigDict):
            _unlock_free_form(entry) if entry.is_type_safe else entry.unlock()


# ConfigDict -> dataclasses. `root` is the outermost class, whose names are offered as near ones.


def _read_group(cls: type[C], tree: Any, path: str, root: type) -> C:
    if not _is_mapping(tree):
        raise _wrong_type(path, tree, cls)
    annotations = _annotations(cls)
    for key in tree:
        if key not in annotations:
            raise unknown_setting(_join(path, key), leaf_names(root))
    values = {}
    for name, annotation in checks.annotations_of(cls).items():
        if name not in tree:
            raise UserError(
                f'setting "{_join(path, name)}" is missing; '
                f"a recipe starts from to_config_dict({root.__name__}()) and changes some lines"
            )
        values[name] = _read(annotation, tree[name], _join(path, name), root)
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{path}: {error}" if path else str(error)) from error


def _read(annotation: Any, value: Any, path: str, root: type) -> Any:
    """A setting: groups by their names, all else as its annotation says."""
    group, entry = group_class(annotation), entry_class(annotation)
    if group and not (value is None and accepts_none(annotation)):
        return _read_group(group, value, path, root)
    if entry is not None:
        if not _is_mapping(value):
            raise _wrong_type(path, value, annotation)
        entries = {key: _filled(entry, value[key]) for key in value}
        return {k: _read_group(entry, e, _join(path, k), root) for k, e in entries.items()}
    return checks.check_value(path, _plain(value), annotation)


def _filled(group: type[DataclassInstance], entry: Any) -> Any:
    """An entry of a free-form dict with the defaults of the settings that it does not name."""
    if not _is_mapping(entry):
        return entry
    defaults = _group_of(group())
    return {**{key: defaults[key] for key in defaults}, **{key: entry[key] for key in entry}}


def entry_class(annotation: Any) -> type[DataclassInstance] | None:
    """The dataclass that entries of a free-form dict are; None if `annotation` is something else."""
    return group_class(_dict_value_type(annotation)) if _is_dict(annotation) else None


def _plain(value: Any) -> Any:
    """Without ConfigDicts, at any depth of dicts."""
    if _is_mapping(value):
        return {key: _plain(value[key]) for key in value}
    return value


def _wrong_type(path: str, value: Any, annotation: Any) -> UserError:
    shown = (
        "a group of settings"
        if isinstance(value, ml_config_dict.ConfigDict)
        else checks.shown(value)
    )
    return UserError(f"{path or 'the config'} = {shown}: expected {type_name(annotation)}")


# Annotations and names.


@functools.cache
def _annotations(cls: type[DataclassInstance]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _union_members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; the annotation alone if it is none."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _without_none(annotation: Any) -> Any:
    members = _union_members(annotation)
    if types.NoneType not in members or len(members) == 1:
        return annotation
    # A union of the rest, which for one member is that member.
    return typing.Union[tuple(m for m in members if m is not types.NoneType)]  # noqa: UP007


def _is_class(annotation: Any) -> bool:
    # Python calls list[int] a type in places; only a class proper has no origin.
    return isinstance(annotation, type) and typing.get_origin(annotation) is None


def _is_dict(annotation: Any) -> bool:
    kind = typing.get_origin(annotation) or annotation
    return kind in (dict, collections.abc.Mapping)


def _dict_value_type(annotation: Any) -> Any:
    arguments = typing.get_args(annotation)
    return arguments[1] if arguments else Any


def _is_mapping(value: Any) -> typing.TypeGuard[collections.abc.Mapping[str, Any]]:
    return isinstance(value, dict | ml_config_dict.ConfigDict)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), _join(path, field.name))
    elif isinstance(value, dict) and value:
        for key in sorted(value):
            yield from _leaves(value[key], _join(path, key))
    else:
        yield path, value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _likeness(name: str, other: str) -> tuple[float, float]:
    """Of the names or their last parts, whichever are more alike, and of the names; 0 to 1."""
    whole = difflib.SequenceMatcher(None, name, other).ratio()
    last = difflib.SequenceMatcher(None, name.split(".")[-1], other.split(".")[-1]).ratio()
    return max(whole, last), whole
