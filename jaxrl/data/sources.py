"""Sources of problems, read and checked: what came of every row, and why a row was left out.

    file or task -> rows -> layout -> prompt, answer, extra -> no duplicates -> a truth that the grader reads
    function     -> the same row by row, while prompts are drawn, if it has no end (`generated_problems`)

A row that cannot be used is dropped, counted, and the first of its kind named; or, by setting, refused. When
none is left, or no field is what it should be, that is an error in any case.

Answers are kept as written. Two prompts are one problem if they are equal but for space around them, line
ends and Unicode composition; what differs in case or inner space is counted and kept, since either can mean
something in mathematics.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.generated_problems import NUM_FIRST, FunctionRows, GeneratedProblems
from jaxrl.data.messages import Context
from jaxrl.data.records import (
    ReasoningGymRecords,
    Record,
    TaskProblems,
    check_task,
    disjoint,
    normalised,
    text_of_context,
)
from jaxrl.data.row_files import open_rows
from jaxrl.data.row_layouts import ID_NAMES, RowLayout, recognise, value_at
from jaxrl.data.row_records import (
    CONTRADICTIONS,
    DUPLICATES,
    HELD_OUT,
    UNREADABLE,
    Unusable,
    record_of,
)
from jaxrl.data.rows import BadRow, RowFile, shown
from jaxrl.errors import UserError

FaultOf: TypeAlias = Callable[[str, Mapping[str, Any], str], str | None]
"""(answer, extra, source) -> what its grader says is wrong with the ground truth; None if nothing is."""

# Rows by which a layout is recognised, and how far to look for them.
_FIRST_ROWS = 64
_FIRST_TRIED = 2048
# Of each reason, the rows that are named.
_NUM_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Rows left out for one reason.

    Attributes:
      count: how many.
      named: the first few, as "file:line: what is wrong".
    """

    count: int
    named: tuple[str, ...] = ()

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(self.count + other.count, (self.named + other.named)[:_NUM_NAMED])


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of problems after reading.

    Attributes:
      name: of the setting, "data.train" or "data.sources.gsm8k".
      settings: of it.
      origin: where its rows are from, for people: a file, its format and its layout; or a task.
      num_rows: rows that there were.
      records: problems that are left.
      places: where each of them stands.
      dropped: by reason.
      notes: what else a reader should know.
      own_template: words that were around every problem of the file, as a template; "" where there were none.
      made: problems without end; `records` and `dropped` are then of the first few.
    """

    name: str
    settings: SourceConfig
    origin: str
    num_rows: int
    records: tuple[Record, ...]
    places: tuple[str, ...] = ()
    dropped: Mapping[str, Dropped] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    own_template: str = ""
    generated: GeneratedProblems | None = None

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the data sets in it, under which metrics are kept."""
        return tuple(dict.fromkeys(record.source for record in self.records))

    def with_readable_truths(self, validate: FaultOf, *, refuse: bool) -> Self:
        """Without the rows whose ground truth its grader cannot read.

        Args:
          validate: asks the grader.
          refuse: a single one is an error.

        Raises:
          UserError: `refuse`, or no row is left.
        """
        faults: dict[int, str] = {}
        for row, record in enumerate(self.records):
            fault = validate(record.answer, record.extra, record.source)
            if fault is not None:
                faults[row] = f"{self._place(row)}: {fault}"
                if refuse:
                    raise UserError(f"{self.name}: {faults[row]}")

        def check(record: Record) -> tuple[str, str] | None:
            fault = validate(record.answer, record.extra, record.source)
            return None if fault is None else (UNREADABLE, fault)

        generated = self.generated and self.generated.checked(check)
        return dataclasses.replace(self._without(faults, UNREADABLE), generated=generated)

    def without_prompts_of(self, evaluation: Sequence[Record]) -> Self:
        """Without problems that are evaluated with; UserError if nothing is left."""
        kept = {id(record) for record in disjoint(self.records, evaluation)}
        rows = [row for row, record in enumerate(self.records) if id(record) not in kept]
        told = {row: f"{self._place(row)}: {shown(self.records[row].prompt)}" for row in rows}
        held_out = {normalised(record.prompt) for record in evaluation}

        def check(record: Record) -> tuple[str, str] | None:
            known = normalised(record.prompt) in held_out
            return (HELD_OUT, shown(record.prompt)) if known else None

        generated = self.generated and self.generated.checked(check)
        return dataclasses.replace(self._without(told, HELD_OUT), generated=generated)

    def _without(self, faults: Mapping[int, str], reason: str) -> Self:
        """Without some rows, by their number, each with what is said about it."""
        if not faults:
            return self
        if len(faults) == len(self.records):
            first = next(iter(faults.values()))
            raise UserError(f"{self.name} has no row left: all {len(faults)} are {reason}; {first}")
        kept = [row for row in range(len(self.records)) if row not in faults]
        dropped = Dropped(len(faults), tuple(faults.values())[:_NUM_NAMED])
        return dataclasses.replace(
            self,
            records=tuple(self.records[row] for row in kept),
            places=tuple(self.places[row] for row in kept) if self.places else (),
            dropped={
                **self.dropped,
                reason: self.dropped.get(reason, Dropped(0)) + dropped,
            },
        )

    def _place(self, row: int) -> str:
        return self.places[row] if self.places else f"{self.origin} problem {row}"


def read_source(
    settings: SourceConfig,
    name: str,
    *,
    refuse_bad_rows: bool = False,
    keep_duplicates: bool = False,
    may_be_endless: bool = False,
    needs_truth: bool = True,
) -> Source:
    """Reads a file, a task or a function; truths are not yet put to a grader.

    Args:
      settings: which, and its fields.
      name: of the setting, for messages.
      refuse_bad_rows: a row that cannot be used is an error; otherwise it is dropped and counted.
      keep_duplicates: a problem may stand in a file more than once. What is made always may.
      may_be_endless: problems may be made while they are drawn; otherwise there has to be a number of them.
      needs_truth: False keeps rows without one, whose answer is then "".

    Raises:
      UserError: there is no such file or task, its layout is not known, a bad row is to be refused, or no row
        is left.
    """
    if bool(settings.path) == bool(settings.task):
        raise UserError(
            f"{name} names {'both a file and a task' if settings.path else 'neither a file nor a task'}; "
            f"set {name}.path to a file of problems or {name}.task to a reasoning-gym data set"
        )
    if settings.task:
        check_task(settings.task)
    if settings.is_endless and not may_be_endless:
        raise UserError(
            f"{name} is made without end by {settings.path or settings.task}, as only problems to train on "
            f"may be; set {name}.size to a number of problems"
        )
    if settings.is_endless:
        return _endless(settings, name, refuse=refuse_bad_rows, needs_truth=needs_truth)
    if settings.task:
        records = ReasoningGymRecords(
            settings.task,
            size=settings.size or settings.limit,
            seed=settings.seed,
            **settings.options,
        )
        limit = settings.limit or len(records)
        named = tuple(_named(record, settings) for record in records[:limit])
        return Source(name, settings, _origin(settings), len(records), named)
    keep_duplicates = keep_duplicates or settings.has_function
    return _Reader(
        settings,
        name,
        refuse=refuse_bad_rows,
        keep_duplicates=keep_duplicates,
        needs_truth=needs_truth,
    ).read()


def _endless(settings: SourceConfig, name: str, *, refuse: bool, needs_truth: bool) -> Source:
    """Problems that are made while they are drawn, and the first of them."""
    layout = None
    if settings.task:
        task = TaskProblems(settings.task, seed=settings.seed, **settings.options)
        generated = GeneratedProblems(
            lambda n: _named(task.record(n), settings),
            lambda n: f"{settings.task} problem {n}",
            refuse=refuse,
        )
    else:
        rows = _function_rows(settings)
        layout = _recognised([rows[n] for n in range(NUM_FIRST)], settings, needs_truth=needs_truth)
        make = _maker(rows, layout, settings, needs_truth=needs_truth)
        generated = GeneratedProblems(make, rows.place, refuse=refuse)
    found, left_out = generated.first()
    if not found:
        raise UserError(
            f"none of the first {NUM_FIRST} problems of {name} can be used: {left_out[0]}"
        )
    dropped: dict[str, Dropped] = {}
    for error in left_out:
        dropped[error.reason] = dropped.get(error.reason, Dropped(0)) + Dropped(1, (str(error),))
    return Source(
        name,
        settings,
        f"{_origin(settings, layout)}, without end; of the first {NUM_FIRST}:",
        NUM_FIRST,
        tuple(found.values()),
        tuple(map(generated.place, found)),
        dropped,
        own_template=layout.template if layout else "",
        generated=generated,
    )


def _named(record: Record, settings: SourceConfig) -> Record:
    """A task's problem under the name that the settings give its source, if they do."""
    return dataclasses.replace(record, source=settings.source) if settings.source else record


def _maker(
    rows: FunctionRows, layout: RowLayout, settings: SourceConfig, *, needs_truth: bool
) -> Callable[[int], Record]:
    return lambda n: record_of(
        functools.partial(rows.__getitem__, n),
        layout,
        settings,
        rows.place(n),
        needs_truth=needs_truth,
    )


def _origin(settings: SourceConfig, layout: RowLayout | None = None) -> str:
    if layout is None:
        return f"reasoning-gym task {settings.task}"
    return f"{settings.path} (made by a function, layout {layout.name})"


def _function_rows(settings: SourceConfig) -> FunctionRows:
    return FunctionRows(
        settings.path,
        size=settings.num_generated,
        seed=settings.seed,
        options=settings.options,
    )


def _recognised(
    rows: Sequence[Mapping[str, Any]], settings: SourceConfig, *, needs_truth: bool
) -> RowLayout:
    return recognise(
        rows,
        prompt_field=settings.prompt_field,
        answer_field=settings.answer_field,
        solution_field=settings.solution_field,
        needs_truth=needs_truth,
        what=settings.path,
    )


class _Reader:
    """Reads one file; keeps count."""

    def __init__(
        self,
        settings: SourceConfig,
        name: str,
        *,
        refuse: bool,
        keep_duplicates: bool,
        needs_truth: bool,
    ):
        self._settings = settings
        self._name = name
        self._refuse = refuse
        self._keep_duplicates = keep_duplicates
        self._needs_truth = needs_truth
        self._dropped: dict[str, Dropped] = {}
        self._records: list[Record] = []
        self._places: list[int] = []

    def read(self) -> Source:
        settings = self._settings
        rows = _function_rows(settings) if settings.has_function else open_rows(settings.path)
        layout = _recognised(self._first(rows), settings, needs_truth=self._needs_truth)
        num_rows = self._collect(rows, layout)
        records = tuple(self._records)
        places = tuple(rows.place(row) for row in self._places)
        if not records:
            reason, dropped = next(iter(self._dropped.items()))
            raise UserError(
                f"{settings.path} has no row that can be used: {reason}, {dropped.named[0]}"
            )
        origin = f"{settings.path} ({rows.kind}, layout {layout.name})"
        return Source(
            self._name,
            settings,
            origin,
            num_rows,
            records,
            places,
            self._dropped,
            tuple(_notes(records)),
            layout.template,
        )

    def _first(self, rows: RowFile) -> list[dict[str, Any]]:
        """Some rows that can be read, from the beginning."""
        found, first = [], None
        for index in range(min(len(rows), _FIRST_TRIED)):
            try:
                found.append(rows[index])
            except BadRow as error:
                first = first or UserError(f"{rows.place(index)}: {error}")
            if len(found) == _FIRST_ROWS:
                break
        if not found:
            assert first is not None, "a file that is empty was refused"
            raise first
        return found

    def _collect(self, rows: RowFile, layout: RowLayout) -> int:
        """Reads until the end, or until there are enough; returns how many rows."""
        # Of each problem: its number among the records, None once its answers contradict each other.
        seen: dict[Any, int | None] = {}
        times: collections.Counter[Any] = collections.Counter()
        contradicted: dict[Any, str] = {}
        # Rows that are a row before them once more, to the letter, need not be looked at again.
        fields = [name for name in (layout.prompt, layout.answer) if name]
        keys = None if self._keep_duplicates else rows.keys(fields)
        known: dict[Any, Any] = {}
        index = -1
        for index in range(len(rows)):
            if self._settings.limit and len(self._records) == self._settings.limit:
                index -= 1
                break
            exact = index if keys is None else next(keys)
            if exact in known:
                key, reason = known[exact]
                if reason:
                    self._dropped[reason] += Dropped(1)
                else:
                    times[key] += 1
                continue
            record, reason = self._record(rows, index, layout)
            key = None if record is None else _key(record.prompt)
            if keys is not None:
                known[exact] = (key, reason)
            if record is None:
                continue
            times[key] += 1
            if self._keep_duplicates or key not in seen:
                seen[key] = len(self._records)
                self._records.append(record)
                self._places.append(index)
                continue
            number = seen[key]
            if number is None or _same(record.answer, self._records[number].answer):
                continue
            seen[key] = None
            told = (
                f"{rows.place(index)}: the answer is {record.answer!r}, and {self._records[number].answer!r} "
                f"to the same problem at {rows.place(self._places[number])}"
            )
            if self._refuse:
                raise UserError(told)
            contradicted[key] = told
        self._take_out(seen, times, contradicted)
        return index + 1

    def _take_out(
        self,
        seen: Mapping[Any, int | None],
        times: Mapping[Any, int],
        contradicted: Mapping[Any, str],
    ) -> None:
        """Takes out problems with contradicting answers, and counts repetitions."""
        if self._keep_duplicates:
            return
        repeated = sum(n - 1 for key, n in times.items() if key not in contradicted)
        if repeated:
            self._dropped[DUPLICATES] = Dropped(repeated)
        if contradicted:
            count = sum(times[key] for key in contradicted)
            named = tuple(contradicted.values())[:_NUM_NAMED]
            self._dropped[CONTRADICTIONS] = Dropped(count, named)
            kept = sorted(number for number in seen.values() if number is not None)
            self._records = [self._records[number] for number in kept]
            self._places = [self._places[number] for number in kept]

    def _record(self, rows: RowFile, index: int, layout: RowLayout) -> tuple[Record | None, str]:
        """The problem of a row, and ""; or None, and why it is dropped."""
        read = functools.partial(rows.__getitem__, index)
        try:
            place, needs_truth = rows.place(index), self._needs_truth
            return record_of(read, layout, self._settings, place, needs_truth=needs_truth), ""
        except Unusable as error:
            if self._refuse:
                raise UserError(str(error)) from error
            dropped = self._dropped.get(error.reason, Dropped(0))
            self._dropped[error.reason] = dropped + Dropped(1, (str(error),))
            return None, error.reason


def _key(prompt: Context) -> Any:
    if isinstance(prompt, str):
        return unicodedata.normalize("NFC", prompt.replace("\r\n", "\n")).strip()
    return tuple((message["role"], _key(message["content"])) for message in prompt)


def _same(answer: str, other: str) -> bool:
    return answer.strip().casefold() == other.strip().casefold()


def _notes(records: Iterable[Record]) -> Iterator[str]:
    """What is no reason to drop anything, and may be a slip of whoever made the file."""
    records = tuple(records)
    without_truth = sum(not record.answer for record in records)
    if without_truth:
        yield f"{without_truth:,} prompts without a truth, which the grader does not look at; kept"
    alike = len(records) - len(
        {" ".join(text_of_context(r.prompt).casefold().split()) for r in records}
    )
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
