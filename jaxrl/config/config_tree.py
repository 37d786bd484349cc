"""Converts nested frozen dataclasses to an ml_collections ConfigDict and, with checks, back.

    Config()  --to_config_dict-->  ConfigDict  --recipe file, command line-->  ConfigDict
                                                                                   |
    all other code  <--  frozen Config  <--from_config_dict (names, types, checks)

Only the dataclasses define defaults. The annotation of a field is bool, int, float, str, Literal, Any,
another dataclass, tuple[...] or dict[str, ...] of these, or a union of these with each other or None.
Annotated adds a range to it (`checks`). A dict is free-form: recipes may add entries to it. If its
entries are dataclasses, a recipe may set some of the settings; the others keep their defaults.

`command_line.py` reads files and command lines. Each dataclass checks the combination of its values in
its own `__post_init__`.
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
    """Returns the settings of `config` as a locked ConfigDict that a recipe can change.

    Optional fields become typed references: None and a value of the right type can be assigned at any
    time. Free-form dicts accept new entries and values of any type.

    Args:
      config: an instance of a dataclass, usually all defaults.

    Returns:
      A new, locked ConfigDict with the same names.
    """
    tree = _group_of(config)
    tree.lock()
    _unlock_free_form(tree)
    return tree


def from_config_dict(cls: type[C], config_dict: ml_config_dict.ConfigDict) -> C:
    """Checks a ConfigDict and converts it to frozen dataclasses.

    An integer is accepted for a float and a list for a tuple. Nothing else is converted.

    Args:
      cls: dataclass that `config_dict` describes.
      config_dict: all settings of `cls`, with the names of `to_config_dict`.

    Returns:
      An instance of `cls`.

    Raises:
      UserError: a setting is unknown (the message suggests similar names), missing or of the wrong type,
        or a dataclass rejected its values with a ValueError. The message has the dotted path.
    """
    return _read_group(cls, config_dict, "", cls)


def leaf_types(cls: type[DataclassInstance]) -> dict[str, Any]:
    """The annotation of every setting of `cls` by dotted name, in the order of the fields.

    An optional group is listed before its settings, because it can itself be set to None. Fields listed in
    a class's `TOLD` are left out: their values come from the model's files.
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
    """Dotted names of the fields of `cls` whose values come from the model's files."""
    names = getattr(cls, "TOLD", ())
    for name, annotation in _annotations(cls).items():
        if group := group_class(annotation):
            names += tuple(f"{name}.{told}" for told in told_names(group))
    return names


def help_texts(cls: type[DataclassInstance]) -> dict[str, str]:
    """The help text of every setting of `cls` by dotted name."""
    texts = {}
    for name, annotation in _annotations(cls).items():
        texts[name] = flags.help_of(cls).get(name, "")
        if group := group_class(annotation):
            texts |= {f"{name}.{leaf}": text for leaf, text in help_texts(group).items()}
    return texts


def leaf_names(cls: type[DataclassInstance]) -> list[str]:
    """The dotted name of every setting of `cls`, in the order of the fields."""
    return list(leaf_types(cls))


def flatten_config(config: DataclassInstance) -> dict[str, Any]:
    """The value of every setting by dotted name: fields in declared order, dict entries by name."""
    return dict(_leaves(config, ""))


def format_config(config: DataclassInstance) -> str:
    """Formats `config` as readable text with one `path = value` per line."""
    return "".join(f"{name} = {value!r}\n" for name, value in flatten_config(config).items())


def unknown_setting(name: str, known: Iterable[str]) -> UserError:
    """Makes the error for a setting that does not exist.

    Similarity is measured on the whole dotted name and on its last part alone. So a correct last part in
    the wrong group is found too. Names from other libraries (`synonyms`) are suggested first.

    Args:
      name: dotted name that the user wrote.
      known: dotted names of all settings.

    Returns:
      An error with up to three suggestions, most similar first.
    """
    if replacement := replacement_of(name):
        return UserError(f'setting "{name}" was removed; {replacement}')
    known = set(known)
    # The whole name breaks ties when several groups have the same last part.
    ranked = sorted(((*_likeness(name, other), other) for other in known), reverse=True)
    alike = (other for likeness, _, other in ranked if likeness >= _NEAR_RATIO)
    near = list(dict.fromkeys([*synonyms_of(name, known), *alike]))
    hint = "near: " + ", ".join(near[:_NUM_NEAR]) if near else "none is near, --help lists them all"
    return UserError(f'unknown setting "{name}"; {hint}')


def type_name(annotation: Any) -> str:
    """Formats an annotation without module names: `float`, `int | None`, `tuple[int, ...]`."""
    members = _union_members(annotation)
    if len(members) > 1:
        return " | ".join(type_name(member) for member in members)
    if annotation is types.NoneType:
        return "None"
    return annotation.__name__ if _is_class(annotation) else str(annotation).replace("typing.", "")


def accepts_none(annotation: Any) -> bool:
    """Whether `annotation` allows None."""
    return annotation is Any or types.NoneType in _union_members(annotation)


def group_class(annotation: Any) -> type[DataclassInstance] | None:
    """The dataclass in `X` or `X | None`; None if `annotation` is not a group of settings."""
    inner = _without_none(annotation)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


# Dataclasses -> ConfigDict.


class _Group(ml_config_dict.ConfigDict):
    """A group of settings. Accepts a dataclass for a nested group: config.model = ModelConfig()."""

    def __setitem__(self, key: str, value: Any) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = to_config_dict(value)
        # ml_collections accepts True for 1.0 and converts any value assigned to a float setting.
        replaces_float = isinstance(value, int) and isinstance(self.get(key), float)
        if replaces_float and not checks.is_finite(value):
            raise TypeError(f"{key} = {checks.shown(value)}: expected a number")
        super().__setitem__(key, value)

    def get_ref(self, key: str) -> ml_config_dict.FieldReference:
        """A reference that follows the setting. An override of the setting it derives stays there.

        ml_collections would store one shared object: --config.run.save_every=6 changed num_steps, too.
        """
        return super().get_ref(key).identity()


def _group_of(config: DataclassInstance) -> ml_config_dict.ConfigDict:
    tree = _Group()
    for name, annotation in _annotations(type(config)).items():
        tree[name] = _setting(annotation, getattr(config, name))
    return tree


def _setting(annotation: Any, value: Any) -> Any:
    """`value` in the form a ConfigDict holds; a typed reference if the value alone does not fix the type."""
    inner = _without_none(annotation)
    stored = None if value is None else _stored(inner, value)
    if annotation is not Any and len(_union_members(annotation)) == 1:
        return stored
    return ml_config_dict.FieldReference(stored, field_type=_reference_type(inner))


def _stored(annotation: Any, value: Any) -> Any:
    if group_class(annotation):
        return _group_of(value)
    if _is_dict(annotation):
        # type_safe=False: values of a free-form dict may change their type.
        kind = _dict_value_type(annotation)
        holder = _Group if group_class(kind) else ml_config_dict.ConfigDict
        entries = holder(type_safe=False)
        for key, entry in value.items():
            entries[key] = entry if kind is Any else _setting(kind, entry)
        return entries
    # A ConfigDict keeps the first type it sees: a float written as 1 would later reject 0.5.
    return float(value) if annotation is float else value


def _reference_type(annotation: Any) -> type:
    """The class of values that a reference accepts for `annotation`; `object` accepts any literal."""
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


# ConfigDict -> dataclasses. `root` is the outermost class; suggestions come from its names.


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
    """Reads one setting: a group recursively, any other value by its annotation."""
    group, entry = group_class(annotation), entry_class(annotation)
    if group and not (value is None and accepts_none(annotation)):
        return _read_group(group, value, path, root)
    if entry is not None:
        if not _is_mapping(value):
            raise _wrong_type(path, value, annotation)
        entries = {key: _filled(entry, value[key]) for key in value}
        return {k: _read_group(entry, e, _join(path, k), root) for k, e in entries.items()}
    value = _plain(value)
    if entry_type(annotation) and _is_mapping(value):
        # The command line removes an entry by "none".
        value = {key: entry for key, entry in value.items() if entry is not None}
    return checks.check_value(path, value, annotation)


def _filled(group: type[DataclassInstance], entry: Any) -> Any:
    """An entry of a free-form dict, completed with the defaults of its class."""
    if not _is_mapping(entry):
        return entry
    defaults = _group_of(group())
    return {**{key: defaults[key] for key in defaults}, **{key: entry[key] for key in entry}}


def entry_class(annotation: Any) -> type[DataclassInstance] | None:
    """The dataclass of a free-form dict's entries; None if the entries are not dataclasses."""
    return group_class(_dict_value_type(annotation)) if _is_dict(annotation) else None


def entry_type(annotation: Any) -> Any:
    """The type of a free-form dict's entries; None if they are groups, dicts or of any type."""
    value = _dict_value_type(annotation) if _is_dict(annotation) else Any
    return None if value is Any or group_class(value) or _is_dict(value) else value


def _plain(value: Any) -> Any:
    """Converts ConfigDicts to plain dicts at any depth."""
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
    """The members of a union; a tuple of `annotation` alone if it is not a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _without_none(annotation: Any) -> Any:
    members = _union_members(annotation)
    if types.NoneType not in members or len(members) == 1:
        return annotation
    # typing.Union of a single member is that member.
    return typing.Union[tuple(m for m in members if m is not types.NoneType)]  # noqa: UP007


def _is_class(annotation: Any) -> bool:
    # isinstance(list[int], type) is True in some Python versions. A plain class has no origin.
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
    """Similarity of two names from 0 to 1: the better of whole name and last part, then the whole name."""
    whole = difflib.SequenceMatcher(None, name, other).ratio()
    last = difflib.SequenceMatcher(None, name.split(".")[-1], other.split(".")[-1]).ratio()
    return max(whole, last), whole
