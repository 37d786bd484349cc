"""The graders of a run: chosen by name and options, one for each data source.

    Graders(("answer", {}), {"math500": ("math", {}), "puzzles": ("reasoning_gym", {"task": "countdown"})})
      .grade(samples)   ->  the grader of each sample's source  ->  verdicts, in order
      .submit(samples)  ->  the same on a thread
      .validate(row)    ->  why the ground truth of a row cannot be used

A grader's module is imported only if a run names it, so a run that reads numbers imports neither sandboxes
nor the parser of mathematics. Graders that need processes share one pool, which starts with its first call.
The first failure of each kind is logged in full; the verdicts hold all failures.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import json
import logging
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl import extensions
from jaxrl.checks import check_value
from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.grading import (
    UNGRADED,
    FunctionGrader,
    Grader,
    GradingTask,
    PathGrader,
    Response,
    Verdict,
    empty_fault,
)
from jaxrl.rewards.reward_config import SandboxChoice
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
      path: where in this package its class is, or its function of response and ground truth; a name of
        `extensions.EXTENSIONS` if an extension has it.
      reads: the form in which a response must give its answer, for the hint to users.
      in_pool: whether processes of the pool work for it (`Grader.worker`).
      package: package that it needs; "" needs none.
    """

    path: str
    reads: str
    in_pool: bool = False
    package: str = ""

    def load(self) -> Any:
        if self.path in extensions.EXTENSIONS:
            return extensions.lookup(self.path)
        return load_function(f"jaxrl.rewards.{self.path}", "grader")


_FINAL_ANSWER = r'a last line such as "Answer: 42" or "#### 42", or \boxed{42}'

GRADERS: dict[str, GraderKind] = {
    "answer": GraderKind("answer:grade_answer", _FINAL_ANSWER),
    "gsm8k": GraderKind("answer:grade_gsm8k", _FINAL_ANSWER),
    "math": GraderKind("reward.grader='math'", _FINAL_ANSWER, in_pool=True),
    "math_verify": GraderKind(
        "reward.grader='math_verify'",
        r"\boxed{42}, $42$, or the last number",
        in_pool=True,
        package="math_verify",
    ),
    "choice": GraderKind("simple_graders:ChoiceGrader", 'a last line such as "Answer: C"'),
    "exact": GraderKind("simple_graders:ExactGrader", _FINAL_ANSWER),
    "regex": GraderKind(
        "simple_graders:RegexGrader", "what reward.grader_options.pattern finds", in_pool=True
    ),
    "code": GraderKind("reward.grader='code'", "a fenced block of Python code", in_pool=True),
    "reasoning_gym": GraderKind(
        "reward.grader='reasoning_gym'",
        f"<answer>42</answer>, or {_FINAL_ANSWER}",
        in_pool=True,
        package="reasoning_gym",
    ),
}


def load_pool_function(name: str) -> Callable[[Any], Any]:
    """Returns the function of a grader in a process of the pool; imports it."""
    if ":" in name:
        function = load_function(name, "grader", takes=("response", "answer"), own_process=True)
        return lambda texts: function(*texts)
    return GRADERS[name].load().worker()


def check_grader(name: str, options: Mapping[str, Any]) -> None:
    """Raises UserError if the grader does not exist, lacks a package, or refuses its options."""
    # A pool without functions starts no process.
    pool = ProcessPool((), load_pool_function, what="grader", patience_s=_PATIENCE)
    _built(name, options, pool, None)


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
          code_sandbox: sandbox of the graders `code` and `reasoning_gym`. It is tested now, and a warning
            lists its gaps. None is enough to validate ground truths.
          needs_truths: whether every prompt needs a ground truth. If False, responses to prompts without one
            stay ungraded.

        Raises:
          UserError: See `check_grader`; or the sandbox does not work on this machine.
        """
        self._needs_truths = needs_truths
        choices = {"": default, **(by_source or {})}
        names = {name for name, _ in choices.values()}
        self._pool = ProcessPool(
            sorted(n for n in names if ":" in n or (n in GRADERS and GRADERS[n].in_pool)),
            load_pool_function,
            what="grader",
            patience_s=cpu_seconds * _PATIENCE,
            workers=min(8, len(os.sched_getaffinity(0))),
            cpu_seconds=cpu_seconds,
            memory_bytes=_MEMORY_BYTES,
        )
        made: dict[str, Grader] = {}
        # By source: the grader's name and itself.
        self._graders: dict[str, tuple[str, Grader]] = {}
        for source, (name, options) in choices.items():
            # Sources with equal graders share one, so that their samples are graded together.
            key = json.dumps([name, dict(options)], sort_keys=True, default=str)
            if key not in made:
                try:
                    made[key] = _built(name, options, self._pool, code_sandbox)
                except UserError as error:
                    of = f"data set {source!r}: " if source else ""
                    raise UserError(f"{of}{error}") from error
            self._graders[source] = name, made[key]
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
        graders = Graders(("answer", {}))
        graders._graders[""] = type(grader).__name__, grader
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
                groups.setdefault(id(self._of_row(sample.row)[1]), []).append(n)
        for indices in groups.values():
            name, grader = self._of_row(samples[indices[0]].row)
            asked = [
                (n, dataclasses.replace(samples[n], row=row))
                for n in indices
                for row in ([samples[n].row] if grader.reads_all else samples[n].row.members)
            ]
            # Of a sample's verdicts the best one: any of its ground truths is right.
            best: dict[int, Verdict] = {}
            for (n, _), verdict in zip(asked, grader.grade([x for _, x in asked]), strict=True):
                if n not in best or _rank(verdict) > _rank(best[n]):
                    best[n] = verdict
            found = list(best.values())
            self._look_for_answers(name, found)
            for n, verdict in zip(indices, found, strict=True):
                verdicts[n] = verdict
                failure = verdict.failure
                if failure is None or failure.kind in self._shown:
                    continue
                self._shown.add(failure.kind)
                logger.warning(
                    "the grader %r failed (%s) and the response counts as wrong: %s; ground truth %r, "
                    "response ending in %r. Further failures of this kind are counted in "
                    "reward/grader/failed_%s",
                    name,
                    failure.kind,
                    failure.message,
                    samples[n].row.answer[:80],
                    samples[n].text[-160:],
                    failure.kind,
                )
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
        name, grader = self._of_row(row)
        if not grader.reads_all and name in GRADERS and row.answer.startswith(('{"', '[{"')):
            return (
                f"ground truth {row.answer[:80]!r} is an object; name the field in it that holds the answer, "
                "or use the grader 'code' for unit tests"
            )
        # Member by member: one that cannot be read would never be met.
        for member in [row] if grader.reads_all else row.members:
            if fault := empty_fault(member) or grader.validate(member):
                return fault
        return None

    def close(self) -> None:
        # The pool first: then the thread, which may wait for the pool, gets an answer.
        self._pool.close()
        if self._aside is not None:
            self._aside.shutdown()

    def _of_row(self, row: GradingTask) -> tuple[str, Grader]:
        return self._graders.get(row.source, self._graders[""])

    def _look_for_answers(self, name: str, verdicts: Sequence[Verdict]) -> None:
        """Warns once if a built-in grader finds no answer in most of the first responses."""
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


def _rank(verdict: Verdict) -> tuple[bool, float, bool]:
    # A failure is reported if no other ground truth is met.
    return verdict.correct, verdict.score, verdict.failure is not None


def _built(
    name: str, options: Mapping[str, Any], pool: ProcessPool, code_sandbox: SandboxChoice | None
) -> Grader:
    """Builds a grader, after a check of its options against its constructor."""
    if ":" in name:
        if options:
            raise UserError(
                f"grader {name!r} is a function of your own and takes no options, but has {dict(options)}; "
                "write them into the function"
            )
        return PathGrader(name, pool)
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
    # Imported now: options are checked by the constructor, before anything is compiled.
    build = kind.load()
    is_class = not inspect.isfunction(build)
    parameters = inspect.signature(build).parameters.values() if is_class else ()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    hints = typing.get_type_hints(build.__init__) if is_class else {}
    for option, value in options.items():
        if option not in known:
            raise UserError(
                f"grader {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
        check_value(f"grader_options.{option}", value, hints[option])
    if not is_class:
        return FunctionGrader(build)
    needs = {"pool": pool, "code_sandbox": code_sandbox}
    return build(*(needs[p.name] for p in parameters if p.name in needs), **options)
