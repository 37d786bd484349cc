"""The graders of a run: chosen by name and options, one for each data source.

    Graders(("answer", {}), {"math500": ("math", {}), "puzzles": ("reasoning_gym", {"task": "countdown"})})
      .grade(samples)   ->  the grader of each sample's source  ->  verdicts, in order
      .submit(samples)  ->  the same on a thread
      .validate(row)    ->  why the ground truth of a row cannot be used

Graders that need processes share one pool, which starts with its first call. The first failure of each kind
is logged in full; the verdicts hold all failures.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import itertools
import json
import logging
import os
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from jaxrl.checks import check_value
from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.answer import grade_answer, grade_gsm8k
from jaxrl.rewards.answer_reader.answer_equality import equal
from jaxrl.rewards.code_tests import run_tests
from jaxrl.rewards.grading import (
    UNGRADED,
    FunctionGrader,
    Grader,
    GradingTask,
    PendingVerdict,
    Response,
    TextGrader,
    Verdict,
    empty_fault,
)
from jaxrl.rewards.math_grader import MathGrader
from jaxrl.rewards.reward_config import SandboxChoice
from jaxrl.rewards.sandbox import choose_sandbox
from jaxrl.rewards.sandboxed_graders import (
    CODE,
    TASK,
    CodeGrader,
    ReasoningGymGrader,
    load_scorer,
)
from jaxrl.rewards.simple_graders import ChoiceGrader, ExactGrader, RegexGrader, search
from jaxrl.user_code import load_function

logger = logging.getLogger(__name__)

# Limit of a call's clock time, in multiples of its processor time. It ends calls that sleep.
_PATIENCE = 6.0
_MEMORY_BYTES = 1 << 30
# Responses after which a hint is given if the grader has found no answer in most of them.
_LOOKED_AT = 64

GraderChoice = tuple[str, Mapping[str, Any]]
"""A name of `GRADERS` or the path of a user's function, and options."""


@dataclasses.dataclass(frozen=True)
class GraderKind:
    """A built-in grader.

    Attributes:
      build: constructor. It takes the pool if the grader needs one, the name of the sandbox if it runs code,
        and options.
      reads: the form in which a response must give its answer, for the hint to users.
      works: its function in the processes of the pool, by its own name; None needs no pool.
      package: package that it needs; "" needs none.
    """

    build: Callable[..., Grader]
    reads: str
    works: Callable[[Any], Any] | None = None
    package: str = ""


_FINAL_ANSWER = r'a last line such as "Answer: 42" or "#### 42", or \boxed{42}'

GRADERS: dict[str, GraderKind] = {
    "answer": GraderKind(lambda: FunctionGrader(grade_answer), _FINAL_ANSWER),
    "gsm8k": GraderKind(lambda: FunctionGrader(grade_gsm8k), _FINAL_ANSWER),
    "math": GraderKind(MathGrader, _FINAL_ANSWER, lambda pair: equal(*pair)),
    "choice": GraderKind(ChoiceGrader, 'a last line such as "Answer: C"'),
    "exact": GraderKind(ExactGrader, _FINAL_ANSWER),
    "regex": GraderKind(RegexGrader, "what reward.grader_options.pattern finds", search),
    "code": GraderKind(CodeGrader, "a fenced block of Python code", run_tests),
    "reasoning_gym": GraderKind(
        ReasoningGymGrader,
        f"<answer>42</answer>, or {_FINAL_ANSWER}",
        # Loaded in the worker, since reasoning-gym takes seconds to import.
        lambda argument: load_scorer()(argument),
        "reasoning_gym",
    ),
}


def load_pool_function(name: str) -> Callable[[Any], Any]:
    """Returns the function of a grader in a process of the pool; imports it."""
    if ":" in name:
        function = load_function(name, "grader", takes=("response", "answer"), own_process=True)
        return lambda texts: function(*texts)
    if name == TASK:
        load_scorer()
    works = GRADERS[name].works
    assert works is not None, f"the grader {name} has no function in the pool"
    return works


def check_grader(name: str, options: Mapping[str, Any]) -> None:
    """Raises UserError if the grader does not exist, lacks a package, or refuses its options."""
    _built(name, options, None)


class Graders:
    """All graders of a run. Close it after use."""

    def __init__(
        self,
        default: GraderChoice,
        by_source: Mapping[str, GraderChoice] | None = None,
        *,
        cpu_seconds: float = 4.0,
        code_sandbox: SandboxChoice | None = None,
        needs_truths: bool = True,
    ):
        """Builds the graders without starting a process.

        Args:
          default: grader of the sources that are not in `by_source`.
          by_source: graders of other sources, by the name of a data set.
          cpu_seconds: processor time of one response in such a process.
          code_sandbox: sandbox of the grader `code`. It is tested now, and a warning lists its gaps. None is
            enough to validate ground truths.
          needs_truths: whether every prompt needs a ground truth. If False, responses to prompts without one
            stay ungraded.

        Raises:
          UserError: See `check_grader`; or the sandbox does not work on this machine.
        """
        self._needs_truths = needs_truths
        choices = {"": default, **(by_source or {})}
        names = {name for name, _ in choices.values()}
        asked = {n for n in names if ":" in n or (n in GRADERS and GRADERS[n].works)}
        self._pool = _pool_of(asked, cpu_seconds)
        self._sandbox = ""
        if CODE in asked and code_sandbox is not None:
            self._sandbox = _chosen_sandbox(code_sandbox)
        made: dict[str, Grader] = {}
        self._graders: dict[str, Grader] = {}
        self._names: dict[str, str] = {}
        for source, (name, options) in choices.items():
            key = json.dumps([name, dict(options)], sort_keys=True, default=str)
            if key not in made:
                try:
                    made[key] = _built(name, options, self._pool, self._sandbox)
                except UserError as error:
                    of = f"data set {source!r}: " if source else ""
                    raise UserError(f"{of}{error}") from error
            self._graders[source], self._names[source] = made[key], name
        self._shown: set[str] = set()
        # Of each grader: the responses it has looked at, up to `_LOOKED_AT`, and those without an answer.
        self._looked_at: collections.Counter[str] = collections.Counter()
        self._without_answer: collections.Counter[str] = collections.Counter()
        self._aside: concurrent.futures.ThreadPoolExecutor | None = None
        self._waiting: collections.deque[
            tuple[Callable[[], Sequence[Response]], concurrent.futures.Future[list[Verdict]]]
        ] = collections.deque()

    @staticmethod
    def of(grader: Grader) -> Graders:
        """One grader for all sources."""
        graders = Graders(("exact", {}))
        graders._graders[""], graders._names[""] = grader, type(grader).__name__
        return graders

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """Returns a verdict on each sample, in order; `UNGRADED` if it needs no ground truth and has none.

        Raises:
          UserError: A ground truth is malformed.
        """
        verdicts = [Verdict(UNGRADED, False)] * len(samples)
        # By identity: a grader of a user may not be hashable.
        groups: dict[int, list[int]] = {}
        for n, sample in enumerate(samples):
            if self._needs_truths or sample.row.answer:
                groups.setdefault(id(self._grader_of(sample.row)), []).append(n)
        for indices in groups.values():
            row = samples[indices[0]].row
            found = self._grader_of(row).grade([samples[n] for n in indices])
            self._look_for_answers(row, found)
            for n, verdict in zip(indices, found, strict=True):
                verdicts[n] = verdict
        self._show_new_failures(samples, verdicts)
        return verdicts

    def submit(
        self, samples: Callable[[], Sequence[Response]]
    ) -> concurrent.futures.Future[list[Verdict]]:
        """Grades on a thread, in the order of calls. `samples` is called there too.

        All waiting samples are graded at once, which keeps the processes busy. A slow sample delays the
        others of its batch.
        """
        future: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()
        self._waiting.append((samples, future))
        if self._aside is None:
            self._aside = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grading")
        self._aside.submit(self._grade_waiting)
        return future

    def _grade_waiting(self) -> None:
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            asked = [samples() for samples, _ in waiting]
            verdicts = iter(self.grade([sample for samples in asked for sample in samples]))
        except BaseException:
            # One has failed, for example by a malformed ground truth; the others must get their verdicts.
            for samples, future in waiting:
                try:
                    future.set_result(self.grade(samples()))
                except BaseException as error:  # the caller gets it from the future
                    future.set_exception(error)
            return
        for samples, (_, future) in zip(asked, waiting, strict=True):
            future.set_result(list(itertools.islice(verdicts, len(samples))))

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the ground truth of a row cannot be used; None if it can."""
        return empty_fault(row) or self._grader_of(row).validate(row)

    def close(self) -> None:
        # The pool first: then the thread, which may wait for the pool, gets an answer.
        self._pool.close()
        if self._aside is not None:
            self._aside.shutdown()

    def _grader_of(self, row: GradingTask) -> Grader:
        return self._graders.get(row.source, self._graders[""])

    def _name_of(self, row: GradingTask) -> str:
        return self._names.get(row.source, self._names[""])

    def _look_for_answers(self, row: GradingTask, verdicts: Sequence[Verdict]) -> None:
        """Warns once if a built-in grader finds no answer in most of the first responses."""
        name = self._name_of(row)
        # A grader of the user's need not tell what it has read.
        if name not in GRADERS or self._looked_at[name] >= _LOOKED_AT:
            return
        self._looked_at[name] += len(verdicts)
        self._without_answer[name] += sum(
            verdict.prediction is None and verdict.failure is None for verdict in verdicts
        )
        looked_at, without = self._looked_at[name], self._without_answer[name]
        if looked_at >= _LOOKED_AT and 2 * without > looked_at:
            logger.warning(
                "the grader %r found no answer in %d of the first %d responses; it reads %s. Ask for that in "
                "data.template or data.system_prompt, allow longer responses, or choose another "
                "reward.grader (docs/rewards.md)",
                name,
                without,
                looked_at,
                GRADERS[name].reads,
            )

    def _show_new_failures(self, samples: Sequence[Response], verdicts: Sequence[Verdict]) -> None:
        for sample, verdict in zip(samples, verdicts, strict=True):
            failure = verdict.failure
            if failure is None or failure.kind in self._shown:
                continue
            self._shown.add(failure.kind)
            logger.warning(
                "the grader %r failed (%s) and the response counts as wrong: %s; ground truth %r, response "
                "ending in %r. Further failures of this kind are counted in reward/grader/failed_%s",
                self._name_of(sample.row),
                failure.kind,
                failure.message,
                sample.row.answer[:80],
                sample.text[-160:],
                failure.kind,
            )


class _PathGrader:
    """Calls a user's function of two texts in a worker, which can be ended if it hangs."""

    def __init__(self, path: str, pool: ProcessPool):
        self._path = path
        self._pool = pool
        # Loaded here as well, so that a wrong path is reported before a process starts.
        self._function: TextGrader = load_function(
            path, "grader", takes=("response", "answer"), own_process=True
        )

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        asked = [self._pool.submit(self._path, (s.text, s.row.answer)) for s in samples]
        return [PendingVerdict(future, self._verdict).wait() for future in asked]

    def validate(self, row: GradingTask) -> str | None:
        return FunctionGrader(self._function).validate(row)

    def _verdict(self, grade: Any) -> Verdict:
        try:
            return Verdict.of(bool(grade.correct), grade.prediction)
        except AttributeError as error:
            return Verdict.failed("raised", f"grader {self._path!r} returned no Grade: {error}")


def _pool_of(names: Set[str], cpu_seconds: float) -> ProcessPool:
    return ProcessPool(
        sorted(names),
        load_pool_function,
        what="grader",
        patience_s=cpu_seconds * _PATIENCE,
        workers=min(8, len(os.sched_getaffinity(0))),
        cpu_seconds=cpu_seconds,
        memory_bytes=_MEMORY_BYTES,
    )


@functools.cache
def _chosen_sandbox(choice: SandboxChoice) -> str:
    """Returns the name of a sandbox that works on this machine; logs its gaps once."""
    sandbox = choose_sandbox(choice)
    logger.warning(
        "the grader 'code' runs programs in the sandbox %r, which has these limits: %s",
        sandbox.name,
        "; ".join(sandbox.gaps),
    )
    return sandbox.name


def _built(
    name: str, options: Mapping[str, Any], pool: ProcessPool | None, sandbox: str = ""
) -> Grader:
    """Builds a grader; without a pool it can only validate ground truths."""
    pool = pool or _pool_of(set(), cpu_seconds=1.0)
    if ":" in name:
        if options:
            raise UserError(
                f"grader {name!r} is a function of your own and takes no options, but has {dict(options)}; "
                "write them into the function"
            )
        return _PathGrader(name, pool)
    if name not in GRADERS:
        near = difflib.get_close_matches(name, GRADERS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(
            f"no grader is called {name!r}{hint}; use one of {', '.join(sorted(GRADERS))}, "
            "or your own as package.module:function or path/to/file.py:function"
        )
    kind = GRADERS[name]
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise UserError(
            f"the grader {name!r} needs the package {kind.package}, which is not installed; run "
            f"pip install {kind.package.replace('_', '-')}, or use the grader 'answer'"
        )
    _check_options(name, kind, options)
    needs = [pool, sandbox] if name == CODE else [pool] if kind.works else []
    return kind.build(*needs, **options)


def _check_options(name: str, kind: GraderKind, options: Mapping[str, Any]) -> None:
    known = {
        parameter.name: parameter
        for parameter in inspect.signature(kind.build).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    hints = typing.get_type_hints(kind.build.__init__) if inspect.isclass(kind.build) else {}
    for option, value in options.items():
        if option not in known:
            raise UserError(
                f"grader {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
        check_value(f"grader_options.{option}", value, hints[option])
