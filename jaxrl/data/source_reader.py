"""Reads a source of problems: each row becomes a `Record`, or is left out for a reason that is counted.

    file, or function with a size -> rows -> layout -> records -> no duplicates or contradictions
    task with a size              -> records
    function or task without size -> `GeneratedProblems`, generated while prompts are drawn

A row that cannot be used is dropped and counted, and the first few are named; or, by setting, refused. A
source without a usable row is always an error.

Answers stay as written. Two prompts are the same problem if they are equal except for surrounding space, line
ends and Unicode composition. Prompts that differ in case or inner space are counted and kept, because either
may matter in mathematics.
"""

from __future__ import annotations

import collections
import dataclasses
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.generated_problems import NUM_FIRST, FunctionRows, GeneratedProblems
from jaxrl.data.messages import Context
from jaxrl.data.records import (
    Record,
    TaskProblems,
    normalised,
    reasoning_gym_records,
    task_factory,
)
from jaxrl.data.row_files import open_rows
from jaxrl.data.row_layouts import ID_NAMES, RowLayout, recognise, value_at
from jaxrl.data.row_records import CONTRADICTIONS, DUPLICATES, Unusable, record_of
from jaxrl.data.rows import BadRow, Row, RowFile, shown
from jaxrl.data.sources import NUM_NAMED, Dropped, Source
from jaxrl.errors import UserError

# Readable rows that the layout is recognised by, and the rows that are tried to find them.
_FIRST_ROWS = 64
_FIRST_TRIED = 2048


def read_source(
    settings: SourceConfig,
    name: str,
    *,
    refuse_bad_rows: bool = False,
    keep_duplicates: bool = False,
    may_be_endless: bool = False,
    needs_truth: bool = True,
) -> Source:
    """Reads a file, a task or a function. No grader validates the ground truths yet.

    Args:
      settings: Settings of the source.
      name: Name of the setting, for messages.
      refuse_bad_rows: Whether an unusable row is an error; otherwise it is dropped and counted.
      keep_duplicates: Whether a file may repeat a problem. Generated problems always may.
      may_be_endless: Whether a source without a size is allowed.
      needs_truth: Whether a row without a ground truth is unusable; otherwise its answer is "".

    Raises:
      UserError: The file or task does not exist, its layout is unknown, a bad row is refused, or no row is
        left.
    """
    if bool(settings.path) == bool(settings.task):
        raise UserError(
            f"{name} names {'both a file and a task' if settings.path else 'neither a file nor a task'}; "
            f"set {name}.path to a file of problems or {name}.task to a reasoning-gym data set"
        )
    if settings.task:
        task_factory(settings.task)
    if settings.is_endless and not may_be_endless:
        raise UserError(
            f"{name} is made without end by {settings.path or settings.task}, as only problems to train on "
            f"may be; set {name}.size to a number of problems"
        )
    reader = _Reader(
        settings,
        name,
        refuse=refuse_bad_rows,
        keep_duplicates=keep_duplicates or settings.has_function,
        needs_truth=needs_truth,
    )
    if settings.is_endless:
        return reader.read_endless()
    return reader.read_task() if settings.task else reader.read_rows()


@dataclasses.dataclass
class _Reader:
    """Reads one source; the first five fields are arguments of `read_source`.

    Attributes:
      dropped: Rows left out so far, by reason.
      records, indices: The usable problems so far, and the row of each.
      seen: For each problem its index among the records; None if its answers contradict each other.
      times: The number of rows with each problem.
      contradicted: For each problem with contradicting answers, the message.
    """

    settings: SourceConfig
    name: str
    refuse: bool
    keep_duplicates: bool
    needs_truth: bool
    dropped: dict[str, Dropped] = dataclasses.field(default_factory=dict)
    records: list[Record] = dataclasses.field(default_factory=list)
    indices: list[int] = dataclasses.field(default_factory=list)
    seen: dict[Any, int | None] = dataclasses.field(default_factory=dict)
    times: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    contradicted: dict[Any, str] = dataclasses.field(default_factory=dict)

    def read_task(self) -> Source:
        """Problems of a task of reasoning-gym, as many as the settings say."""
        settings = self.settings
        records = reasoning_gym_records(
            settings.task, size=settings.size, seed=settings.seed, **settings.options
        )
        used = tuple(map(self._named, records))
        return Source(self.name, settings, self._task_origin, settings.size, used)

    def read_endless(self) -> Source:
        """The first problems of an endless function or task, and the means to generate the others."""
        settings = self.settings
        if settings.task:
            task = TaskProblems(settings.task, seed=settings.seed, **settings.options)
            origin, template = self._task_origin, ""
            generated = GeneratedProblems(
                lambda n: self._named(task.record(n)),
                lambda n: f"{settings.task} problem {n}",
                refuse=self.refuse,
            )
        else:
            rows = self._open()
            layout = self._layout([rows[n] for n in range(NUM_FIRST)])
            origin, template = self._origin(rows, layout), layout.template
            generated = GeneratedProblems(
                lambda n: self._record(rows, layout, n), rows.place, refuse=self.refuse
            )
        found, left_out = generated.first()
        if not found:
            raise UserError(
                f"none of the first {NUM_FIRST} problems of {self.name} can be used: {left_out[0]}"
            )
        for error in left_out:
            self._drop(error.reason, str(error))
        return Source(
            self.name,
            settings,
            f"{origin}, without end; of the first {NUM_FIRST}:",
            NUM_FIRST,
            tuple(found.values()),
            tuple(map(generated.place, found)),
            self.dropped,
            own_template=template,
            generated=generated,
        )

    def read_rows(self) -> Source:
        """The problems of a file, or of a function with a size."""
        rows = self._open()
        layout = self._layout(_first_rows(rows))
        num_rows = self._collect(rows, layout)
        if not self.keep_duplicates:
            self._drop_repetitions()
        if not self.records:
            reason, dropped = next(iter(self.dropped.items()))
            raise UserError(
                f"{self.settings.path} has no row that can be used: {reason}, {dropped.named[0]}"
            )
        return Source(
            self.name,
            self.settings,
            self._origin(rows, layout),
            num_rows,
            tuple(self.records),
            tuple(map(rows.place, self.indices)),
            self.dropped,
            tuple(_notes(self.records)),
            layout.template,
        )

    @property
    def _task_origin(self) -> str:
        return f"reasoning-gym task {self.settings.task}"

    def _origin(self, rows: RowFile, layout: RowLayout) -> str:
        return f"{self.settings.path} ({rows.kind}, layout {layout.name})"

    def _named(self, record: Record) -> Record:
        """A problem of a task under the name in the settings, if there is one."""
        name = self.settings.source
        return dataclasses.replace(record, source=name) if name else record

    def _open(self) -> RowFile:
        settings = self.settings
        if not settings.has_function:
            return open_rows(settings.path)
        return FunctionRows(
            settings.path, size=settings.size, seed=settings.seed, options=settings.options
        )

    def _layout(self, rows: Sequence[Mapping[str, Any]]) -> RowLayout:
        return recognise(
            rows,
            prompt_field=self.settings.prompt_field,
            answer_field=self.settings.answer_field,
            solution_field=self.settings.solution_field,
            needs_truth=self.needs_truth,
            what=self.settings.path,
        )

    def _record(self, rows: RowFile, layout: RowLayout, index: int) -> Record:
        return record_of(rows, index, layout, self.settings, needs_truth=self.needs_truth)

    def _drop(self, reason: str, *faults: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, Dropped()) + Dropped(1, faults)

    def _collect(self, rows: RowFile, layout: RowLayout) -> int:
        """Reads to the end, or until there are enough problems; returns the number of rows read."""
        # Rows that repeat an earlier one to the letter are not parsed again.
        fields = [name for name in (layout.prompt, layout.answer) if name]
        keys = None if self.keep_duplicates else rows.keys(fields)
        known: dict[Any, tuple[Any, str]] = {}
        for index in range(len(rows)):
            if self.settings.size and len(self.records) == self.settings.size:
                return index
            exact = index if keys is None else next(keys)
            if exact not in known:
                taken = self._take(rows, layout, index)
                if keys is not None:
                    known[exact] = taken
                continue
            problem, reason = known[exact]
            if reason:
                self._drop(reason)
            else:
                self.times[problem] += 1
        return len(rows)

    def _take(self, rows: RowFile, layout: RowLayout, index: int) -> tuple[Any, str]:
        """Takes in a row; returns its problem's identity, and the reason if it is dropped, else ""."""
        try:
            record = self._record(rows, layout, index)
        except Unusable as error:
            if self.refuse:
                raise UserError(str(error)) from error
            self._drop(error.reason, str(error))
            return None, error.reason
        problem = _identity(record.prompt)
        self.times[problem] += 1
        if self.keep_duplicates or problem not in self.seen:
            self.seen[problem] = len(self.records)
            self.records.append(record)
            self.indices.append(index)
            return problem, ""
        first = self.seen[problem]
        if first is None or _same_answer(record.answer, self.records[first].answer):
            return problem, ""
        self.seen[problem] = None
        message = (
            f"{rows.place(index)}: the answer is {record.answer!r}, and {self.records[first].answer!r} "
            f"to the same problem at {rows.place(self.indices[first])}"
        )
        if self.refuse:
            raise UserError(message)
        self.contradicted[problem] = message
        return problem, ""

    def _drop_repetitions(self) -> None:
        """Counts repeated rows, and takes out problems with contradicting answers."""
        repeated = sum(n - 1 for key, n in self.times.items() if key not in self.contradicted)
        if repeated:
            self.dropped[DUPLICATES] = Dropped(repeated)
        if self.contradicted:
            count = sum(self.times[problem] for problem in self.contradicted)
            named = tuple(self.contradicted.values())[:NUM_NAMED]
            self.dropped[CONTRADICTIONS] = Dropped(count, named)
            kept = sorted(number for number in self.seen.values() if number is not None)
            self.records = [self.records[number] for number in kept]
            self.indices = [self.indices[number] for number in kept]


def _first_rows(rows: RowFile) -> list[Row]:
    """The first readable rows; UserError if there are none."""
    found: list[Row] = []
    fault = None
    for index in range(min(len(rows), _FIRST_TRIED)):
        try:
            found.append(rows[index])
        except BadRow as error:
            fault = fault or UserError(f"{rows.place(index)}: {error}")
        if len(found) == _FIRST_ROWS:
            break
    if not found:
        assert fault is not None, "open_rows refuses a file without rows"
        raise fault
    return found


def _identity(prompt: Context) -> Any:
    """Equal for two prompts that are the same problem."""
    if isinstance(prompt, str):
        return unicodedata.normalize("NFC", prompt.replace("\r\n", "\n")).strip()
    return tuple((message["role"], _identity(message["content"])) for message in prompt)


def _same_answer(answer: str, other: str) -> bool:
    return answer.strip().casefold() == other.strip().casefold()


def _notes(records: Sequence[Record]) -> Iterator[str]:
    """Remarks on rows that are kept, but may be a mistake in the file."""
    without_truth = sum(not record.answer for record in records)
    if without_truth:
        yield f"{without_truth:,} prompts without a truth, which the grader does not look at; kept"
    alike = len(records) - len({normalised(record.prompt) for record in records})
    if alike:
        yield f"{alike} prompts differ from another one in case or space only; kept"
    for name in ID_NAMES:
        ids = []
        for record in records:
            try:
                ids.append(shown(value_at(record.extra, name)))
            except BadRow:
                continue
        twice = [x for x, n in collections.Counter(ids).items() if n > 1]
        if twice:
            yield f"{len(twice)} values of {name!r} stand in several rows, {twice[0]} first; kept"
