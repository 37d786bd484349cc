"""Reads settings of verl: a YAML file of OmegaConf, or a shell script with a Hydra command line.

    python3 -m verl.trainer.main_ppo data.train_batch_size=1024 +data.seed=1 "data.train_files=[$a,$b]"

Nothing is executed. Of a script these are understood: assignments (also `export`, and arrays of overrides),
`$NAME`, `${NAME}`, `${NAME:-default}`, `$((arithmetic))`, quotes, comments and continued lines. Variables
that a script does not assign are taken from the environment. Other expansions are left as they stand.
"""

from __future__ import annotations

import ast
import operator
import os
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from jaxrl.errors import UserError
from jaxrl.files import read_text, shown_path

_ABSENT = "name a YAML file of verl, or a shell script that starts it"
_MAX_SETTINGS = 20_000
_MAX_LOOKUPS = 200_000
_MAX_CHARS = 100_000
_MAX_DEPTH = 50
_ROOTS = ("actor_rollout_ref", "algorithm", "critic", "data", "reward", "reward_model", "trainer")

_OVERRIDE = re.compile(r"(?:\+{1,2})?([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:export\s+|local\s+|declare\s+-a\s+)?([A-Za-z_]\w*)\+?=\(")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class VerlFile(NamedTuple):
    """Settings by dotted name, and those whose value is not in the file.

    `unresolved` has the text of each such value: a variable that nobody assigns, or an interpolation of a
    setting that the file does not have.
    """

    settings: dict[str, Any]
    unresolved: dict[str, str]


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it: 1e-6 is a number, and yes, no, on and off are texts."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def read_verl(path: str | os.PathLike[str]) -> VerlFile:
    """Reads the settings in a file of verl.

    Args:
      path: a YAML file (.yaml, .yml), or a shell script (all other names).

    Raises:
      UserError: the file cannot be read, is malformed, or has no setting of verl.
    """
    text = read_text(path, absent=_ABSENT)
    shown = shown_path(path)
    if "\0" in text:
        raise UserError(f"{shown} is no text; {_ABSENT}")
    is_yaml = pathlib.Path(path).suffix.lower() in (".yaml", ".yml")
    given = dict(_yaml_settings(text, shown) if is_yaml else _script_settings(text, shown))
    if not any(name.split(".")[0] in _ROOTS for name in given):
        raise UserError(f"{shown} has no setting of verl, such as data.train_batch_size; {_ABSENT}")
    resolver, settings, unresolved = _Resolver(given, shown), {}, {}
    for name, value in given.items():
        try:
            settings[name] = resolver.value_of(value, name)
        except KeyError:
            unresolved[name] = str(value)
    return VerlFile(settings, unresolved)


# YAML.


def _yaml_settings(text: str, shown: str) -> Iterator[tuple[str, Any]]:
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise UserError(f"{shown}{line} is no YAML ({problem}); write the file again") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{shown} is no YAML that can be read; write the file again") from error
    if not isinstance(tree, dict):
        raise UserError(f"{shown} has no groups of settings; {_ABSENT}")
    for number, leaf in enumerate(_leaves(tree, "", shown)):
        if number >= _MAX_SETTINGS:
            raise UserError(f"{shown} has more than {_MAX_SETTINGS:,} settings; {_ABSENT}")
        yield leaf


def _leaves(
    tree: Mapping[Any, Any], prefix: str, shown: str, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise UserError(f"{shown} nests more than {_MAX_DEPTH} groups; {_ABSENT}")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{name}.", shown, depth + 1)
        else:
            yield name, value


class _Resolver:
    """Replaces OmegaConf's interpolations by the values of the same file."""

    def __init__(self, given: Mapping[str, Any], shown: str):
        self._given = given
        self._shown = shown
        # A few lines can ask for 2^50 values.
        self._lookups_left = _MAX_LOOKUPS

    def value_of(self, value: Any, name: str, depth: int = 0) -> Any:
        """`value` of the setting `name`, resolved; KeyError if a part of it is nowhere."""
        self._check_end(name, depth)
        if isinstance(value, list):
            return [self.value_of(item, name, depth + 1) for item in value]
        if not isinstance(value, str):
            return value
        if whole := _INTERPOLATION.fullmatch(value):
            return self._looked_up(whole[1], name, depth)
        while found := _INTERPOLATION.search(value):
            inner = self._looked_up(found[1], name, depth)
            value = f"{value[: found.start()]}{inner}{value[found.end() :]}"
            if len(value) > _MAX_CHARS:
                raise UserError(f"{self._shown}: {name} gets too long; write its value")
        if "${" in value or _VARIABLE.search(value):
            raise KeyError(name)
        return value

    def _check_end(self, name: str, depth: int) -> None:
        self._lookups_left -= 1
        if depth > _MAX_DEPTH or self._lookups_left < 0:
            raise UserError(
                f"{self._shown}: the interpolations of {name} do not end; write its value"
            )

    def _looked_up(self, reference: str, name: str, depth: int) -> Any:
        self._check_end(name, depth)
        resolver, is_call, arguments = reference.strip().partition(":")
        default: list[str] = []
        if is_call:
            reference, *default = (part.strip() for part in arguments.split(",", 1))
            if resolver.strip() == "oc.env":
                if reference not in os.environ and not default:
                    raise KeyError(reference)
                return _scalar(os.environ.get(reference, *default))
            if resolver.strip() != "oc.select":
                raise KeyError(reference)
        target = _absolute(reference.strip(), name)
        if target in self._given:
            return self.value_of(self._given[target], target, depth + 1)
        if default:
            return _scalar(default[0])
        raise KeyError(reference)


def _absolute(reference: str, name: str) -> str:
    """The dotted name that a relative reference such as ".lr" or "..lr" of `name` means."""
    dots = len(reference) - len(reference.lstrip("."))
    if not dots:
        return reference
    return ".".join([*name.split(".")[:-dots], reference[dots:]])


# Shell scripts.


def _script_settings(text: str, shown: str) -> Iterator[tuple[str, Any]]:
    variables: dict[str, str] = {"HOME": str(pathlib.Path.home()), **os.environ}
    arrays: dict[str, list[str]] = {}
    for line, statement in _statements(text, shown):
        if array := _ARRAY.match(statement):
            inside = statement[array.end() : statement.rindex(")")]
            items = _words(inside, variables, arrays, shown, line)
            arrays[array[1]] = [*arrays.get(array[1], ()), *items]
            continue
        words = _words(statement, variables, arrays, shown, line)
        if words and words[0] in ("export", "local", "readonly", "declare"):
            words = words[1:]
        if words and all(_ASSIGNMENT.fullmatch(word) for word in words):
            for word in words:
                name, _, value = _ASSIGNMENT.fullmatch(word).groups()  # pyright: ignore[reportOptionalMemberAccess]
                variables[name] = value
            continue
        for word in words:
            if given := _OVERRIDE.fullmatch(word):
                yield given[1], _scalar(given[2])


def _statements(text: str, shown: str) -> Iterator[tuple[int, str]]:
    """(line, statement): continued lines, open quotes and open arrays are joined."""
    statement, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        first = first if statement else number
        if line.lstrip().startswith("#"):
            # Inside a command too: bash ends the command there, and people comment overrides out like this.
            continue
        line = line.rstrip()
        if line.endswith("\\"):
            statement += line[:-1] + " "
            continue
        statement += line
        if _is_open(statement):
            statement += "\n"
            continue
        yield first, statement
        statement = ""
    if statement.strip():
        if _is_open(statement):
            raise UserError(f"{shown}:{first}: a quote or an array is not closed; close it")
        yield first, statement


def _is_open(statement: str) -> bool:
    """Whether a quote or an array goes on in the next line."""
    try:
        shlex.split(statement, comments=True)
    except ValueError:
        return True
    is_array = _ARRAY.match(statement) is not None
    return is_array and statement.count("(") > statement.count(")")


def _words(
    statement: str,
    variables: Mapping[str, str],
    arrays: Mapping[str, list[str]],
    shown: str,
    line: int,
) -> list[str]:
    """The words of a statement after expansion."""
    # First, since spaces inside of $(( )) separate no words.
    statement = _ARITHMETIC.sub(lambda found: _computed(found, variables, shown, line), statement)
    words = []
    for word in shlex.split(statement, comments=True):
        if array := re.fullmatch(r"\$\{(\w+)\[@\]\}", word):
            words += arrays.get(array[1], ())
        else:
            words.append(_expanded(word, variables))
    return words


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word with its variables; those that nobody assigns are left as they stand."""

    def value(found: re.Match[str]) -> str:
        plain, braced, default = found.groups()
        # An empty value gives way to a default, as with ":-".
        return variables.get(plain or braced) or (found[0] if default is None else default)

    # Twice: a default may name variables itself.
    return _VARIABLE.sub(value, _VARIABLE.sub(value, word))


def _computed(found: re.Match[str], variables: Mapping[str, str], shown: str, line: int) -> str:
    text = re.sub(
        r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), _expanded(found[1], variables)
    )
    try:
        return str(_arithmetic(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{shown}:{line}: {found[0]} cannot be computed; write the number"
        ) from error


def _arithmetic(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_arithmetic(node.left), _arithmetic(node.right))
    raise ValueError(ast.dump(node))


def _scalar(text: Any) -> Any:
    """A value as Hydra reads it on a command line; text that is no YAML is itself."""
    if not isinstance(text, str):
        return text
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return text
    return text if isinstance(value, dict) and not text.lstrip().startswith("{") else value
