r"""Unit tests, in the notations of public data sets. Each has its reader here; other rows are refused.

    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                          APPS, TACO                 `_printing`
    {"public_tests": {"input": ["1 2\n"], "output": ["3\n"]}, ...}     CodeContests               `_parts`
    [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]         LiveCodeBench              `_printing`
    [{"input": "1\n2", "output": "3", "testtype": "functional"}]       LiveCodeBench              `_texts`
    {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}           the same, as harnesses pass it on
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}           APPS, TACO                 `_lists`
    ["assert add(1, 2) == 3"]                                          MBPP, AceCode              `_python`
    "def check(candidate):\n    assert candidate(1, 2) == 3"           HumanEval, LeetCodeDataset `_python`
    "from solution import add\ndef test_add():\n    assert ..."        KodCode                    `_python`

An object may hold a list or a text of these in a field of `HOLDERS`. Fields beside the tests count, too:
the name of the function (`fn_name`, `metadata.func_name`, `entry_point`, `starter_code`), and Python before
the tests (`test_setup_code`, `test_imports`, `import_prefix`).
"""

from __future__ import annotations

import ast
import base64
import builtins
import dataclasses
import functools
import io
import json
import pickle
import re
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl_code.calls import OWN, SETUP, TEST, TYPES

# Tests beyond these find little, and each run of a program takes 30 ms.
MAX_TESTS = 200
# The private tests of LiveCodeBench take up to some 100 MB.
_MAX_UNPACKED = 1 << 29

IMPORTS = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re
import string, sys
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from itertools import *
from functools import *
from operator import *
from builtins import *
from typing import *
"""
"""What harnesses import before a program whose functions they call: LeetCode's programs rely on it."""

FIELDS = (
    *("fn_name", "func_name", "metadata", "entry_point", "starter_code"),
    *("test_setup_code", "test_imports", "import_prefix"),
)
"""Fields of a row that its tests may need."""

HOLDERS = (
    *("test_list", "test_cases", "tests", "assert_case", "official_tests"),
    *("test", "test_code"),
)
"""Fields of an object that hold a list or a text of tests: of MBPP, AceCode, SYNTHETIC-1, DeepCoder, verl,
Codeforces; HumanEval, KodCode, Skywork-OR1."""
_PARTS = ("public_tests", "private_tests", "generated_tests")


@dataclasses.dataclass(frozen=True)
class PrintTest:
    """Tests that a program prints `expected` if its input is `stdin`."""

    stdin: str
    expected: str


@dataclasses.dataclass(frozen=True)
class UnitTests:
    """The tests of a row, either `prints` or `statements`.

    Attributes:
      prints: tests of what a program prints.
      statements: Python that calls the program, each statement with its kind: `calls.TEST`, `OWN` or `SETUP`.
      readings: number of readings of the row's outputs. A program is right if all tests of one reading hold.
      names: names that the program must define: functions, which may be methods of a class `Solution`.
      tested: those of the names that are classes under test.
      definitions: statements before the program, in its sandbox.
      classes: names of classes that the row defines.
    """

    prints: tuple[PrintTest, ...] = ()
    statements: tuple[tuple[str, str], ...] = ()
    readings: int = 1
    names: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of tests."""
        return len(self.prints) or sum(kind == TEST for kind, _ in self.statements)


def read_tests(truth: str | Sequence[str], fields: Mapping[str, Any]) -> UnitTests:
    """Reads the tests of a row.

    Args:
      truth: ground truth, JSON or Python; or a list of asserts.
      fields: other fields of the row, of which `FIELDS` matter.

    Raises:
      UserError: no reader knows the notation.
    """
    try:
        tests = _read(truth, fields)
        if not tests.count:
            raise ValueError("there is no test")
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(
            f"unit tests {str(truth)[:80]!r} cannot be read ({type(error).__name__}: {error}); write them in "
            'a notation of docs/rewards.md, such as {"inputs": ["1 2"], "outputs": ["3"]} or '
            '["assert add(1, 2) == 3"]'
        ) from error
    places = [n for n, (kind, _) in enumerate(tests.statements) if kind == TEST]
    end = places[MAX_TESTS] if len(places) > MAX_TESTS else None
    return dataclasses.replace(
        tests, prints=tests.prints[:MAX_TESTS], statements=tests.statements[:end]
    )


def _read(truth: str | Sequence[str], fields: Mapping[str, Any]) -> UnitTests:
    value: Any = truth if isinstance(truth, str) else list(truth)
    if isinstance(value, str) and value.lstrip().startswith(("[", "{", '"')):
        value = json.loads(value)
    elif isinstance(value, str) and not re.search(r"\bassert\b|^def |^from |^import ", value, re.M):
        value = _unpacked(value)
    if isinstance(value, dict):
        return _read_object(value, {**fields, **value})
    if isinstance(value, str):
        return _python([value], fields)
    if not isinstance(value, list) or not value:
        raise ValueError("there is no test")
    return _read_list(value, fields)


def _read_object(value: dict[str, Any], fields: Mapping[str, Any]) -> UnitTests:
    if not str(value.get("language") or "python").lower().startswith("py"):
        raise ValueError(f"its tests are of programs in {value['language']}")
    if parts := [value[name] for name in _PARTS if value.get(name)]:
        return _parts(parts)
    for name in HOLDERS:
        # A list of empty texts is a field that this row does not use.
        if any(value.get(name) or ()):
            return _read(value[name], fields)
    for inputs, outputs in (("inputs", "outputs"), ("input", "output")):
        if inputs in value and outputs in value:
            return _pairs(value[inputs], value[outputs], _function_name(fields))
    raise ValueError(
        f"an object with the fields {[*value]} is of no known convention: tests stand in inputs and outputs, "
        f"in {', '.join(_PARTS)}, or in one of {', '.join(HOLDERS)}"
    )


def _parts(parts: list[Any]) -> UnitTests:
    """CodeContests' tests: three objects, each with a list of inputs and one of outputs."""
    pairs: list[list[Any]] = [[], []]
    for part in parts:
        part = json.loads(part) if isinstance(part, str) else part
        if not isinstance(part, dict) or not {"input", "output"} <= part.keys():
            raise ValueError(f"of {', '.join(_PARTS)} each has the fields 'input' and 'output'")
        if len(part["input"]) != len(part["output"]):
            raise ValueError(f"{len(part['input'])} inputs and {len(part['output'])} outputs")
        pairs[0] += part["input"]
        pairs[1] += part["output"]
    return _printing(*pairs)


def _read_list(rows: list[Any], fields: Mapping[str, Any]) -> UnitTests:
    if all(isinstance(row, str) for row in rows):
        return _python(rows, fields)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("the tests are neither all texts nor all objects")
    if not all({"input", "output"} <= row.keys() for row in rows):
        raise ValueError("of the tests each has the fields 'input' and 'output'")
    kinds = {row.get("testtype") or row.get("type") or "stdin" for row in rows}
    inputs, outputs = [row["input"] for row in rows], [row["output"] for row in rows]
    if kinds <= {"stdin", "stdin_stdout"}:
        return _printing(inputs, outputs)
    if kinds not in ({"functional"}, {"function_call"}):
        raise ValueError(f"{', '.join(map(repr, sorted(kinds)))} is no one type of tests")
    name = _function_name({**fields, **rows[0]}) or _in_starter_code(fields)
    if not name:
        raise ValueError("the name of the function is neither in metadata.func_name nor fn_name")
    return _pairs(inputs, outputs, name)


def _function_name(fields: Mapping[str, Any]) -> str:
    """The name in `fn_name`, `func_name` or `metadata.func_name`; "" if there is none."""
    metadata = fields.get("metadata")
    if isinstance(metadata, str) and metadata.lstrip().startswith("{"):
        metadata = json.loads(metadata)
    inner = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    name = fields.get("fn_name") or fields.get("func_name") or inner or ""
    if name and not str(name).isidentifier():
        raise ValueError(f"the function's name {name!r} is no name")
    return str(name)


def _in_starter_code(fields: Mapping[str, Any]) -> str:
    methods = re.findall(r"^\s+def (\w+)\(\s*self", str(fields.get("starter_code") or ""), re.M)
    return methods[-1] if methods else ""


class _PlainUnpickler(pickle.Unpickler):
    """Reads texts, numbers and lists; a pickle that names a class could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the packed tests hold {module}.{name}")


def _unpacked(text: str) -> Any:
    """The private tests of LiveCodeBench: JSON, as a text, pickled, compressed, in base 64."""
    try:
        data = base64.b64decode(text, validate=True)
        whole = zlib.decompressobj().decompress(data, _MAX_UNPACKED)
        return json.loads(_PlainUnpickler(io.BytesIO(whole)).load())
    except (ValueError, TypeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise ValueError(f"it is neither JSON nor an assert ({error})") from error


# Inputs and outputs


def _pairs(inputs: Any, outputs: Any, name: str) -> UnitTests:
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("the inputs and the outputs are no lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if not name:
        return _printing(inputs, outputs)
    if all(isinstance(x, list) for x in inputs):
        return _lists(inputs, outputs, name)
    if all(isinstance(x, str) for x in (*inputs, *outputs)):
        return _texts(inputs, outputs, name)
    raise ValueError(
        f"of the inputs of {name!r} each is a list of arguments, or all inputs and outputs are texts, "
        "with an argument a line"
    )


def _printing(inputs: list[Any], outputs: list[Any]) -> UnitTests:
    return UnitTests(
        prints=tuple(
            PrintTest(_lines(stdin), _lines(expected))
            for stdin, expected in zip(inputs, outputs, strict=True)
        )
    )


def _lines(value: Any) -> str:
    """What is read or printed: a text, a number, or a list of lines."""
    parts = value if isinstance(value, list) else [value]
    if any(part is None or isinstance(part, list | dict) for part in parts):
        raise ValueError(f"{str(value)[:80]} is neither a text nor a list of lines")
    return "\n".join(map(str, parts))


def _texts(inputs: list[str], outputs: list[str], name: str) -> UnitTests:
    """LiveCodeBench's calls: an argument a line, and the value, each a text of JSON."""
    calls = [
        (
            _call(name, [_literal(line) for line in given.splitlines() if line.strip()]),
            [_literal(expected)],
        )
        for given, expected in zip(inputs, outputs, strict=True)
    ]
    return _calls(name, calls, 1)


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        # True, None and 'a' are Python's, in some copies of the data.
        return ast.literal_eval(text.strip())


def _lists(inputs: list[list[Any]], outputs: list[Any], name: str) -> UnitTests:
    """APPS's and TACO's calls: a list of arguments, and the value, often in a list of its own."""
    readings = [outputs]
    # [[3], [4], 5] may be the values 3, 4 and 5, or two lists and a value, as the harness takes it.
    wrapped = [isinstance(x, list) and len(x) == 1 for x in outputs]
    if any(wrapped):
        pairs = zip(outputs, wrapped, strict=True)
        readings.append([x[0] if is_wrapped else x for x, is_wrapped in pairs])
    calls = [
        (_call(name, _with_int_keys(given)), [_with_int_keys(reading[n]) for reading in readings])
        for n, given in enumerate(inputs)
    ]
    return _calls(name, calls, len(readings))


def _calls(name: str, calls: list[tuple[str, list[Any]]], readings: int) -> UnitTests:
    statements = tuple(
        (TEST, f"jaxrl_equals({call}, {', '.join(map(repr, expected))})")
        for call, expected in calls
    )
    return UnitTests(statements=statements, readings=readings, names=(name,))


def _call(name: str, arguments: Iterable[Any]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _with_int_keys(value: Any) -> Any:
    """A value whose tables have numbers as keys where all keys are spelled like them: JSON has texts."""
    if isinstance(value, list):
        return [_with_int_keys(part) for part in value]
    if isinstance(value, dict):
        whole = all(re.fullmatch(r"-?[0-9]{1,18}", key) for key in value)
        return {int(k) if whole else k: _with_int_keys(part) for k, part in value.items()}
    return value


# Python

# Of all values that come out of the program's sandbox.
_ATTRIBUTES = frozenset(x for kind in (str, int, float, list, *TYPES) for x in dir(kind))
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)


def _python(sources: Sequence[str], fields: Mapping[str, Any]) -> UnitTests:
    """MBPP's asserts, HumanEval's `check(candidate)`, and functions `test_...` without arguments."""
    entry = str(fields.get("entry_point") or fields.get("fn_name") or "")
    called = re.search(r"^check\(([\w.()]+)\)\s*\Z", sources[-1], re.M)
    entry = (entry or (called.group(1) if called else "")).removeprefix("Solution().")
    imports = fields.get("test_imports") or []
    imports = [imports] if isinstance(imports, str) else [*imports]
    setup = _parsed(
        [*imports, *(fields.get(x) or "" for x in ("import_prefix", "test_setup_code"))]
    )
    body = _inlined(_parsed(sources), entry)
    bound = _bound(*setup, *body)
    names = {entry} if entry else _program_names([*setup, *body], bound)
    unknown = _loaded(*setup, *body) - bound - names - _known()
    if unknown:
        raise ValueError(
            f"neither the row nor Python defines {min(unknown)!r}; its definition may be given as "
            "test_setup_code"
        )
    asserting = {
        s.name for s in (*setup, *body) if isinstance(s, ast.FunctionDef) and _asserts(s, set())
    }
    statements, touched = [], set(names)
    for statement in (*setup, *body):
        kind = OWN
        if touched & _loaded(statement):
            _refuse(statement, names)
            # Arguments may be changed, too.
            touched |= _loaded(statement) | _bound(statement)
            defines = isinstance(statement, _DEFINITIONS)
            kind = TEST if not defines and _asserts(statement, asserting) else SETUP
        if isinstance(statement, ast.For | ast.If):
            statement = _GoesOn().generic_visit(statement)
        source = ast.unparse(ast.fix_missing_locations(statement))
        compile(source, "tests", "exec")
        statements.append((kind, source))
    shared = [s for s in setup if isinstance(s, _DEFINITIONS)]
    shared += [s for s in body if isinstance(s, ast.ClassDef | ast.Import | ast.ImportFrom)]
    return UnitTests(
        statements=tuple(statements),
        names=tuple(sorted(names)),
        tested=tuple(sorted(_tested([*setup, *body], names))),
        definitions=tuple(x for x in map(ast.unparse, shared) if "pytest" not in x),
        classes=tuple(s.name for s in shared if isinstance(s, ast.ClassDef)),
    )


def _asserts(node: ast.AST, asserting: set[str]) -> bool:
    """Whether a statement checks something, also by a function of that kind."""
    words = {getattr(x, "id", getattr(x, "attr", "")) for x in ast.walk(node)}
    return (
        any(isinstance(x, ast.Assert) for x in ast.walk(node))
        or any(word.startswith("assert") or word == "raises" for word in words)
        or bool(words & asserting)
    )


def _tested(body: Sequence[ast.stmt], names: set[str]) -> set[str]:
    """The names whose values have attributes that no value of Python's own types has: classes under test."""
    made: dict[str, set[str]] = {name: {name} for name in names}
    found = set()
    for node in (x for s in body for x in ast.walk(s)):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.withitem) and isinstance(
            call := getattr(node, "value", None) or getattr(node, "context_expr", None), ast.Call
        ):
            for name in _bound(node) - names:
                made[name] = made.get(name, set()) | (_loaded(call.func) & names)
    for node in (x for s in body for x in ast.walk(s)):
        if isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES:
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            found |= made.get(owner.id, set()) if isinstance(owner, ast.Name) else set()
    return found


def _refuse(statement: ast.stmt, names: set[str]) -> None:
    """Raises ValueError for a comparison of which the program alone makes both sides."""
    for node in (x for x in ast.walk(statement) if isinstance(x, ast.Compare)):
        sides = [_made(x, names) for x in (node.left, *node.comparators)]
        if all(sides) and any(
            isinstance(x, ast.Name) or _is_class(x) for side in sides for x in side
        ):
            raise ValueError(
                f"both sides of {_shown(node)} are objects of the program, which could make all of its "
                "objects equal; compare their attributes, or define them in test_setup_code"
            )


def _made(node: ast.expr, names: set[str]) -> list[ast.expr]:
    """The values of the program that an operand is or holds: Pair(1, 2) in "[Pair(1, 2)]"."""
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Name):
        return [node] if function.id in names else []
    return [x for part in getattr(node, "elts", ()) for x in _made(part, names)]


def _is_class(call: ast.expr) -> bool:
    return ast.unparse(call).lstrip("_")[:1].isupper()


class _GoesOn(ast.NodeTransformer):
    """Lets a loop go on after an assert that fails, so that it makes the same calls in any case."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        (goes_on,) = ast.parse("try: pass\nexcept AssertionError: jaxrl_fail()").body
        assert isinstance(goes_on, ast.Try), "it is written so"
        goes_on.body = [node]
        return goes_on

    def _kept(self, node: ast.AST) -> ast.AST:
        return node

    visit_Try = visit_With = visit_FunctionDef = _kept


def _parsed(sources: Sequence[str]) -> list[ast.stmt]:
    return [s for source in sources for s in ast.parse(textwrap.dedent(source)).body]


def _inlined(body: Sequence[ast.stmt], entry: str) -> list[ast.stmt]:
    """The statements, with those of HumanEval's `check(candidate)` and of tests of pytest in their places."""
    found: list[ast.stmt] = []
    for s in body:
        arguments = [x.arg for x in s.args.args] if isinstance(s, ast.FunctionDef) else []
        if isinstance(s, ast.FunctionDef) and s.name == "check" and len(arguments) == 1:
            if not entry.isidentifier():
                raise ValueError("check(candidate) needs the function's name in entry_point")
            found += [*_parsed([f"{arguments[0]} = {entry}"]), *s.body]
        elif isinstance(s, ast.FunctionDef) and s.name.startswith("test"):
            if arguments or s.decorator_list:
                raise ValueError(f"the test {s.name!r} has arguments or decorators")
            found += s.body
        elif isinstance(s, ast.ClassDef) and "test" in ast.unparse(s).partition("\n")[0].lower():
            raise ValueError(f"the tests of the class {s.name!r} need to be functions")
        elif isinstance(s, ast.ImportFrom) and s.module == "solution":
            found += _parsed([f"{x.asname} = {x.name}" for x in s.names if x.asname])
        elif not ast.unparse(s).startswith("check("):
            found.append(s)
    return found


def _program_names(body: Sequence[ast.stmt], bound: set[str]) -> set[str]:
    """The names that only the program can define; else those that it calls and modules define as well."""
    names = _loaded(*body) - bound - _known()
    calls = [x for s in body for x in ast.walk(s) if isinstance(x, ast.Call)]
    called = {x.func.id for x in calls if isinstance(x.func, ast.Name)} - bound
    if any(not name[0].isupper() for name in names):
        return names
    # Of a module's name, too: "assert add(Pair(1, 2)).x == 2".
    return names | {x for x in called - set(dir(builtins)) if x[0].islower()} or called


@functools.cache
def _known() -> frozenset[str]:
    """Names that every test may use."""
    space: dict[str, Any] = {}
    exec(IMPORTS, space)
    return frozenset({*space, *dir(builtins), "pytest", "raises"})


def _loaded(*nodes: ast.AST) -> set[str]:
    """Names that are read."""
    names = [x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)]
    return {x.id for x in names if isinstance(x.ctx, ast.Load)}


def _bound(*nodes: ast.AST) -> set[str]:
    """Names that are defined or changed."""
    found = set()
    for x in (x for node in nodes for x in ast.walk(node)):
        if isinstance(x, ast.Attribute | ast.Subscript) and isinstance(x.ctx, ast.Store):
            # "root.left = Node(2)" changes root.
            found |= _loaded(x.value)
        elif isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load):
            found.add(x.id)
        elif isinstance(x, ast.FunctionDef | ast.ClassDef):
            found.add(x.name)
        elif isinstance(x, ast.alias):
            found.add((x.asname or x.name).partition(".")[0])
        elif isinstance(x, ast.arg):
            found.add(x.arg)
        elif isinstance(x, ast.ExceptHandler):
            found.add(x.name or "")
    return found


def _shown(node: ast.AST) -> str:
    return repr(ast.unparse(node)[:80])
