"""Graders that run code in a sandbox: unit tests of programs, and the scorers of reasoning-gym.

A worker of the pool starts a sandbox (`jaxrl.rewards.sandbox`) for each response. Unit tests are written as:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       a program reads and prints
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}            a function is called
    ["assert add(1, 2) == 3", "assert not is_odd(2)"]                 calls, as asserts

The sandbox never sees the expected values. A program could read tests in its own process, or redefine
equality. So the sandbox makes the calls and returns their values as JSON, which this module reads and
compares. That is quick whatever a program writes: a megabyte of Python literals or of colliding dict keys
would take minutes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Callable
from typing import Any

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.answer import extract_answer
from jaxrl.rewards.grading import (
    RIGHT,
    WRONG,
    Grader,
    GradingTask,
    Response,
    Verdict,
    empty_fault,
    in_worker,
    refusal,
)
from jaxrl.rewards.reward_config import SandboxChoice
from jaxrl.rewards.sandbox import logged_choice, sandbox_called
from jaxrl.rewards.sandbox.native import SandboxLimits, run_forked

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
    tests: list[Test]
    try:
        if text.lstrip().startswith("assert"):
            tests = [_assertion(line) for line in text.splitlines() if line.strip()]
        elif isinstance(rows := json.loads(text), list):
            if all(isinstance(row, str) for row in rows):
                tests = [_assertion(row) for row in rows]
            else:
                tests = [PrintTest(_text(row["input"]), _text(row["output"])) for row in rows]
        else:
            inputs, outputs, name = rows["inputs"], rows["outputs"], rows.get("fn_name")
            if len(inputs) != len(outputs):
                raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
            if name and not str(name).isidentifier():
                raise ValueError(f"fn_name {name!r} is no name")
            tests = [
                CallTest(f"{name}({', '.join(map(repr, given))})", expected, name)
                if name
                else PrintTest(_text(given), _text(expected))
                for given, expected in zip(inputs, outputs, strict=True)
            ]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(
            f"unit tests {text[:80]!r} cannot be read ({type(error).__name__}: {error}); write JSON with "
            '"inputs" and "outputs" (and "fn_name" for calls), or a list of asserts "f(...) == literal"'
        ) from error
    if not tests:
        raise UserError(f"unit tests {text[:80]!r} are none; fix or drop the row")
    return tests[:MAX_TESTS]


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
        passed = []
        for value, call in zip(values, calls, strict=True):
            try:
                passed.append(_equal(json.loads(value), plain(call.expected)))
            except (ValueError, RecursionError, MemoryError):
                passed.append(False)
        return passed
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


_BLOCK = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
# No answer to a puzzle needs these. Some scorers evaluate the answer, and these would let it do anything.
_CODE = re.compile(
    r"__|\b(?:import|lambda|exec|eval|open|globals|getattr|setattr)\b|\w\.[A-Za-z_]\w*\s*\("
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Clock time of a call. The sandbox ends slow programs; this ends a worker that hangs, on any machine.
_PATIENCE_S = 1800.0
_MAX_PREDICTION = 300
_MAX_ANSWER = 20_000
# Some scorers deduct 0.01 for form, which is wrong; rounding errors are smaller.
_WHOLE_MARK = 0.999


class CodeGrader(Grader):
    """Runs the last fenced block of a response against the unit tests in the ground truth.

    Args:
      pool: processes that have the function of `worker`.
      code_sandbox: sandbox of the programs. It is tested now, and a warning lists its gaps. None is enough to
        validate ground truths.
      part_marks: whether the score is the share of passed tests; a program is correct only if it passes all.
    """

    @staticmethod
    def worker() -> Callable[[Any], Any]:
        """Returns `run_tests`."""
        return run_tests

    def __init__(
        self, pool: ProcessPool, code_sandbox: SandboxChoice | None, *, part_marks: bool = False
    ):
        self._pool = pool
        self._sandbox = "" if code_sandbox is None else logged_choice(code_sandbox)
        self._part_marks = part_marks

    def begin(self, sample: Response) -> Verdict | Callable[[], Verdict]:
        program = program_of(sample.text)
        if program is None:
            return Verdict.of(False, None)
        # The sandbox has the limit of time; that of the worker is for a worker that hangs.
        asked = (program, sample.row.answer, self._pool.cpu_seconds, self._sandbox)
        future = self._pool.submit("code", asked, patience_s=_PATIENCE_S)
        shown = program[:_MAX_PREDICTION]
        return in_worker(future, functools.partial(self._verdict, shown), shown)

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the ground truth holds no unit tests; None if it does."""
        return empty_fault(row) or refusal(lambda: read_tests(row.answer))

    def _verdict(self, shown: str, passed: list[bool] | None) -> Verdict:
        if passed is None:
            # The program ran out of time: it is wrong, and the grader has not failed.
            return Verdict.of(False, shown)
        return _marked(sum(passed) / len(passed), self._part_marks, shown)


def program_of(response: str) -> str | None:
    """Returns the last block of code; None if there is none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks and blocks[-1].strip() else None


class ReasoningGymGrader(Grader):
    """Grades by the scorer of a reasoning-gym task; a mark below 1 is wrong.

    The scorer reads `extra["metadata"]` of the row. Its `source_dataset` names the task, else the row's
    source does. The answer is the content of <answer>, else that of `answer.extract_answer`.

    Args:
      pool: processes that have the function of `worker`.
      task: task of all rows; "" takes it from each row.
      part_marks: whether the score follows the mark.
    """

    @staticmethod
    def worker() -> Callable[[tuple[str, str, dict, float]], float | str]:
        """Returns a function to the mark of an answer, or why there is none."""
        # Imported in the worker, since it takes seconds.
        import reasoning_gym
        from reasoning_gym import factory

        scorer_of: Any = factory.get_score_answer_fn
        # It reads word lists from its own folder.
        readable = list(reasoning_gym.__path__)

        def score(argument: tuple[str, str, dict, float]) -> float | str:
            task, answer, entry, seconds = argument
            if task not in factory.DATASETS:
                return f"raised: reasoning-gym has no task {task!r}"
            # A wrong answer, and no failure of the grader, which would be counted and shown.
            if _CODE.search(answer):
                return 0.0
            scorer = scorer_of(task)

            def marked() -> bytes:
                # An exception may be due to the answer or to the scorer; the child then returns no mark.
                return json.dumps(float(scorer(answer, entry))).encode()

            mark = run_forked(marked, SandboxLimits(seconds=seconds), readable)
            if mark is None:
                return f"timeout: the scorer of {task} has taken more than {seconds:g} s"
            try:
                return float(json.loads(mark))
            except ValueError:
                return f"raised: the scorer of {task} gave no mark"

        return score

    def __init__(self, pool: ProcessPool, *, task: str = "", part_marks: bool = False):
        self._pool = pool
        self._task = task
        self._part_marks = part_marks

    def begin(self, sample: Response) -> Verdict | Callable[[], Verdict]:
        row, tagged = sample.row, _TAG.findall(sample.text[-_MAX_ANSWER:])
        answer = tagged[-1].strip() if tagged else extract_answer(sample.text)
        if not answer:
            return Verdict.of(False, None)
        metadata = row.extra["metadata"]
        task = self._task or metadata.get("source_dataset") or row.source
        entry = {
            "question": str(row.extra.get("question", "")),
            "answer": row.answer,
            "metadata": metadata,
        }
        asked = (task, answer, entry, self._pool.cpu_seconds)
        future = self._pool.submit("reasoning_gym", asked, patience_s=_PATIENCE_S)
        shown = answer[:_MAX_PREDICTION]
        return in_worker(future, functools.partial(self._verdict, shown), shown)

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the scorer cannot use the row: an empty ground truth or no metadata; None if it can."""
        if fault := empty_fault(row):
            return fault
        if not isinstance(row.extra.get("metadata"), dict):
            return (
                "has no `metadata` beside its answer, which the scorers of reasoning-gym look at; keep "
                "that field of its rows, or use the grader 'answer' or 'exact'"
            )
        return None

    def _verdict(self, shown: str, mark: float | str) -> Verdict:
        if isinstance(mark, str):
            kind, _, message = mark.partition(": ")
            return Verdict.failed(kind, message, shown)
        return _marked(mark, self._part_marks, shown)


def _marked(mark: float, part_marks: bool, shown: str) -> Verdict:
    correct = mark >= _WHOLE_MARK
    if not part_marks:
        return Verdict.of(correct, shown)
    return Verdict(WRONG + (RIGHT - WRONG) * min(1.0, max(0.0, mark)), correct, shown)
