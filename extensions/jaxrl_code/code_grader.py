"""The grader `code`: runs programs that a model wrote against unit tests, in a sandbox.

A worker of the pool starts a sandbox (`jaxrl_code.sandbox`) for each response. `unit_tests` reads tests.

    a program prints        a sandbox runs it with each input   ->  its output, compared here
    functions are called    a sandbox runs program and calls    ->  values  ->  another one runs the tests

The program never meets the expected values: it could read tests in its own process, or redefine equality.
Nor does this process make a value of what a program writes: a megabyte of colliding keys would take minutes.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.grading import (
    Grader,
    GradingTask,
    Response,
    Verdict,
    empty_fault,
    in_worker,
    marked,
    refusal,
)
from jaxrl.rewards.reward_config import SandboxChoice
from jaxrl_code import calls as sandbox_calls
from jaxrl_code.sandbox import logged_choice, sandbox_called
from jaxrl_code.sandbox.native import Sandbox, SandboxLimits
from jaxrl_code.unit_tests import FIELDS, IMPORTS, UnitTests, read_tests

_MAX_CODE_CHARS = 100_000
# Runs in the sandbox, followed by the function's call.
_CALLS = inspect.getsource(sandbox_calls)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
# As judges have it. Longer numbers than these are compared as texts.
_PRINTED_TOLERANCE = decimal.Decimal("1e-6")
_MAX_NUMBER = 400
# Each takes two processes of 30 ms. Tests whose calls depend on no value of another call take one.
_MAX_ROUNDS = 16
_MAX_FIRST_RUNS = 64


def run_tests(
    argument: tuple[str, str | Sequence[str], Mapping[str, Any], float, str],
) -> list[bool] | str | None:
    """Returns which tests a program passes; None if it ran out of time, or why the tests cannot tell.

    Runs in a worker.

    Args:
      argument: program, tests and the other fields of their row (`unit_tests.read_tests`), seconds of
        processor time, and name of the sandbox. The seconds limit all calls together, or each run of a
        program that prints; all runs together have four times as long. Time asleep counts as processor time.
    """
    program, truth, fields, seconds, name = argument
    sandbox = sandbox_called(name)
    tests = read_tests(truth, fields)
    if len(program) > _MAX_CODE_CHARS:
        return [False] * tests.count
    if tests.statements:
        return _run_calls(program, tests, SandboxLimits(seconds), sandbox)
    passed = []
    left = 4 * seconds
    for test in tests.prints:
        if left <= 0:
            return None
        outcome = sandbox.run(program, test.stdin.encode(), SandboxLimits(min(seconds, left)))
        if outcome.status is None:
            return None
        # Not time by the clock, so that a right program does not fail on a busy machine.
        left -= outcome.seconds
        printed = outcome.stdout.decode(errors="replace")
        passed.append(outcome.status == 0 and same_output(printed, test.expected))
        if not passed[-1]:
            # One failed test makes the program wrong, so the others are skipped.
            break
    return passed + [False] * (len(tests.prints) - len(passed))


def _run_calls(
    program: str, tests: UnitTests, limits: SandboxLimits, sandbox: Sandbox
) -> list[bool] | str | None:
    """Which tests hold: one process makes their calls, and another one runs them with the values.

    With values the tests may make other calls, so both are repeated until there are none.
    """
    left = 4 * limits.seconds
    calls, _, refused = _first_run(tests, limits, sandbox)
    for _ in range(_MAX_ROUNDS):
        if refused:
            return f"the tests of the row cannot be run: {refused}"
        if left <= 0:
            return None
        given = {"imports": IMPORTS, "names": tests.names, "program": program, "calls": calls}
        given |= {"definitions": tests.definitions, "classes": tests.classes}
        some = dataclasses.replace(limits, seconds=min(limits.seconds, left))
        outcome = sandbox.run(f"{_CALLS}\n\ncall_program()\n", json.dumps(given).encode(), some)
        if outcome.status is None:
            return None
        left -= outcome.seconds
        reports = outcome.stderr.decode(errors="replace").split("\n")[:-1]
        if calls and not reports:
            return [False] * tests.count
        # Calls without a report are lost. All stay texts here.
        reports += [""] * (len(calls) - len(reports))
        known = {key: report for (key, _), report in zip(calls, reports, strict=False)}
        made, results, refused = _run_with(known, tests, limits, sandbox)
        # Tests that loop over a set of texts make the same calls in another order.
        same = made == calls[: len(made)] or {key for key, _ in made} == known.keys()
        if not refused and same:
            return results
        calls = made
    return (
        f"the tests of the row cannot be run: they make new calls in each of {_MAX_ROUNDS} rounds"
    )


@functools.lru_cache(_MAX_FIRST_RUNS)
def _first_run(
    tests: UnitTests, limits: SandboxLimits, sandbox: Sandbox
) -> tuple[list[Any], list[bool], str]:
    """What `_run_with` returns before any value is known: the same for all programs."""
    return _run_with({}, tests, limits, sandbox)


def _run_with(
    known: dict[str, str], tests: UnitTests, limits: SandboxLimits, sandbox: Sandbox
) -> tuple[list[Any], list[bool], str]:
    """The calls that tests make with these values, which of the tests hold, and why none can be run."""
    given = {**dataclasses.asdict(tests), "imports": IMPORTS, "known": known}
    asked = json.dumps(given).encode()
    outcome = sandbox.run(f"{_CALLS}\n\ncheck_tests()\n", asked, limits)
    if outcome.status != 0:
        # Values that take too long to make or to compare end it, or else the tests themselves.
        return [], [False] * tests.count, "" if known else "they take too long, or too much memory"
    calls, results, refused = json.loads(outcome.stdout)
    return calls, list(max(zip(*results, strict=True), key=sum, default=())), refused


def same_output(printed: str, expected: str) -> bool:
    """Returns whether two outputs have the same tokens, as judges compare them; numbers to a millionth.

    "2.50\\n" is "2.5", and "0.3333333" is "0.333333". A whole number must be met to a millionth, not to a
    millionth of it: 1000000007 is not 1000000006.
    """
    ours, theirs = printed.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_token, ours, theirs))


def _same_token(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if max(len(printed), len(expected)) > _MAX_NUMBER:
        return False
    if not _NUMBER.fullmatch(printed) or not _NUMBER.fullmatch(expected):
        return False
    ours, theirs = decimal.Decimal(printed), decimal.Decimal(expected)
    # Exponents have three digits, so the difference has at most some two thousand.
    with decimal.localcontext(prec=3000):
        size = max(1, abs(theirs)) if set(expected) & set(".eE") else 1
        return abs(ours - theirs) <= _PRINTED_TOLERANCE * size


_BLOCK = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
# Clock time of a call. The sandbox ends slow programs; this ends a worker that hangs, on any machine.
_PATIENCE_S = 1800.0
_MAX_PREDICTION = 300


class CodeGrader(Grader):
    """Runs the last fenced block of a response against the unit tests in the ground truth.

    Args:
      pool: processes that have the function of `worker`.
      code_sandbox: sandbox of the programs. It is tested now, and a warning lists its gaps. None is enough to
        validate ground truths.
      part_marks: whether the score is the share of passed tests; a program is correct only if it passes all.
    """

    reads_all = True

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
        asked = (program, *_tests_of(sample.row), self._pool.cpu_seconds, self._sandbox)
        future = self._pool.submit("code", asked, patience_s=_PATIENCE_S)
        shown = program[:_MAX_PREDICTION]
        return in_worker(future, functools.partial(self._verdict, shown), shown)

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the ground truth holds no unit tests; None if it does."""
        return empty_fault(row) or refusal(lambda: read_tests(*_tests_of(row)))

    def _verdict(self, shown: str, passed: list[bool] | str | None) -> Verdict:
        if isinstance(passed, str):
            return Verdict.failed("raised", passed, shown)
        if passed is None:
            # The program ran out of time: it is wrong, and the grader has not failed.
            return Verdict.of(False, shown)
        return marked(sum(passed) / len(passed), self._part_marks, shown)


def _tests_of(row: GradingTask) -> tuple[str | list[str], dict[str, Any]]:
    # A list holds asserts, all of which must hold.
    truths = [member.answer for member in row.members]
    return truths if len(truths) > 1 else row.answer, {
        name: row.extra[name] for name in FIELDS if name in row.extra
    }


def program_of(response: str) -> str | None:
    """Returns the last block of code; None if there is none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks and blocks[-1].strip() else None
