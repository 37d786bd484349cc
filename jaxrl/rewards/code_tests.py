"""Unit tests of code written by a model. They run in a sandbox, which never sees the expected values.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       a program reads and prints
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}            a function is called
    ["assert add(1, 2) == 3", "assert not is_odd(2)"]                 calls, as asserts

A program could read tests in its own process, or redefine equality. So the sandbox makes the calls and
returns their values as JSON, which this module reads and compares. That is quick whatever a program writes:
a megabyte of Python literals or of colliding dict keys would take minutes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
from typing import Any

from jaxrl.errors import UserError
from jaxrl.rewards.sandbox.choose import sandbox_called
from jaxrl.rewards.sandbox.native import SandboxLimits

# Tests beyond these find little, and each run of a program takes 30 ms.
MAX_TESTS = 200
_MAX_CODE_CHARS = 100_000


def plain(value: Any) -> Any:
    """A value as lists, tables, texts and numbers, which JSON can hold. It also runs in the sandbox.

    (1, [2.5, None])   ->  [1, [2.5, null]]
    {1: "a", 2: "b"}   ->  {"dict": [["1", "a"], ["2", "b"]]}
    {"a", 1.0}         ->  {"set": ["\\"a\\"", "1"]}
    3 + 4j             ->  {"other": "(3+4j)"}
    """

    def key(member: Any) -> str:
        # Equal keys have equal texts: True, 1.0 and 1 are one key.
        whole = isinstance(member, bool) or (isinstance(member, float) and member.is_integer())
        return json.dumps(plain(int(member) if whole else member))

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(key, value))}
    if isinstance(value, dict):
        pairs = [[key(name), plain(member)] for name, member in value.items()]
        return {"dict": sorted(pairs, key=lambda pair: pair[0])}
    return {"other": repr(value)}


# Runs in the sandbox: executes the program, then each call, and writes the values to the error output.
_CALLER = f"""
from __future__ import annotations
import io, json, os, sys
{inspect.getsource(plain)}
given = json.load(sys.stdin)
sys.stdin, sys.stderr = io.StringIO(), io.StringIO()
space = {{"__name__": "solution"}}
exec(compile(given["program"], "solution.py", "exec", dont_inherit=True), space)
if hasattr(space.get("Solution"), given["method"] or " "):
    space[given["method"]] = getattr(space["Solution"](), given["method"])
for call in given["calls"]:
    try:
        value = json.dumps(plain(eval(call, space)))
    except Exception:
        value = "no value"
    left = value.encode() + b"\\n"
    while left:
        left = left[os.write(2, left):]
"""


@dataclasses.dataclass(frozen=True)
class PrintTest:
    """Tests that a program prints `expected` if its input is `stdin`."""

    stdin: str
    expected: str


@dataclasses.dataclass(frozen=True)
class CallTest:
    """Tests the value of an expression.

    Attributes:
      call: expression.
      expected: its value.
      method: name of the function, which may be a method of a class `Solution`; "" for asserts.
    """

    call: str
    expected: Any
    method: str = ""


Test = PrintTest | CallTest


def read_tests(text: str) -> list[Test]:
    """Parses the tests of a row.

    Raises:
      UserError: The tests have none of the forms above.
    """
    try:
        tests = _tests(text)
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(
            f"unit tests {text[:80]!r} cannot be read ({type(error).__name__}: {error}); write JSON with "
            '"inputs" and "outputs" (and "fn_name" for calls), or a list of asserts "f(...) == literal"'
        ) from error
    if not tests:
        raise UserError(f"unit tests {text[:80]!r} are none; fix or drop the row")
    return tests[:MAX_TESTS]


def _tests(text: str) -> list[Test]:
    if text.lstrip().startswith("assert"):
        return [_assertion(line) for line in text.splitlines() if line.strip()]
    rows = json.loads(text)
    if isinstance(rows, list):
        if all(isinstance(row, str) for row in rows):
            return [_assertion(row) for row in rows]
        return [PrintTest(_text(row["input"]), _text(row["output"])) for row in rows]
    inputs, outputs = rows["inputs"], rows["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    name = rows.get("fn_name")
    if not name:
        return [PrintTest(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]
    if not str(name).isidentifier():
        raise ValueError(f"fn_name {name!r} is no name")
    return [
        CallTest(f"{name}({', '.join(map(repr, arguments))})", expected, name)
        for arguments, expected in zip(inputs, outputs, strict=True)
    ]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _assertion(line: str) -> CallTest:
    """Parses "assert f(1) == 2", "assert f(1)", "assert not f(1)" or "assert f(1) is None"."""
    match ast.parse(line.strip()).body:
        case [ast.Assert(ast.Compare(left, [ast.Eq() | ast.Is()], [right]))]:
            for call, value in ((left, right), (right, left)):
                try:
                    return CallTest(ast.unparse(call), ast.literal_eval(value))
                except ValueError:
                    continue
            raise ValueError(f"{line[:80]!r} compares with no literal")
        case [ast.Assert(ast.UnaryOp(ast.Not(), ast.Call() as call))]:
            return CallTest(f"not ({ast.unparse(call)})", True)
        case [ast.Assert(ast.Call() as call)]:
            return CallTest(f"not ({ast.unparse(call)})", False)
        case [ast.Assert()]:
            raise ValueError(f"{line[:80]!r} is neither a call nor a comparison with a literal")
    raise ValueError(f"{line[:80]!r} is no assert")


def run_tests(argument: tuple[str, str, float, str]) -> list[bool] | None:
    """Returns which tests a program passes; None if it ran out of time. Runs in a worker.

    Args:
      argument: program, tests as text, seconds of processor time, and name of the sandbox. The seconds limit
        all calls together, or each run of a program that prints; all runs together have four times as long.
        Time asleep counts as processor time.
    """
    program, text, seconds, name = argument
    sandbox = sandbox_called(name)
    tests = read_tests(text)
    if len(program) > _MAX_CODE_CHARS:
        return [False] * len(tests)
    # Calls share one process, programs that print have one each.
    calls = [test for test in tests if isinstance(test, CallTest)]
    if calls:
        given = {"program": program, "calls": [c.call for c in calls], "method": calls[0].method}
        outcome = sandbox.run(_CALLER, json.dumps(given).encode(), SandboxLimits(seconds))
        if outcome.status is None:
            return None
        values = outcome.stderr.splitlines()[: len(calls)]
        # A program that ends early has no values for the other calls.
        values += [b"no value"] * (len(calls) - len(values))
        return [_has_value(v, call.expected) for v, call in zip(values, calls, strict=True)]
    passed = []
    left = 4 * seconds
    for test in tests:
        assert isinstance(test, PrintTest), "the others are calls"
        if left <= 0:
            return None
        outcome = sandbox.run(program, test.stdin.encode(), SandboxLimits(min(seconds, left)))
        if outcome.status is None:
            return None
        # Not time by the clock, so that a right program does not fail on a busy machine.
        left -= outcome.seconds
        printed = outcome.stdout.decode(errors="replace")
        passed.append(outcome.status == 0 and _lines(printed) == _lines(test.expected))
        if not passed[-1]:
            # One failed test makes the program wrong, so the others are skipped.
            break
    return passed + [False] * (len(tests) - len(passed))


def _has_value(reported: bytes, expected: Any) -> bool:
    try:
        return _equal(json.loads(reported), plain(expected))
    except (ValueError, RecursionError, MemoryError):
        return False


def _equal(value: Any, expected: Any) -> bool:
    """Whether two `plain` values are equal; floats nearly so."""
    # True == 1 in Python, but a test that wants True means it.
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[k], expected[k]) for k in value)
    return value == expected


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
