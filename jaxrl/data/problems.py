"""Reads the problems of a run: each row of its sources becomes a `Record`, or is left out and counted.

    file                      rows -> layout -> records, without repeated problems
    function, task            records by number, all at once with a size, or else while prompts are drawn

A row that cannot be used is dropped and counted, and the first few are named. A source without a usable row
is an error. A problem is its whole row: prompt, ground truth, solution and all other fields. Rows of a file
are duplicates if they are equal, except for surrounding space, line ends and Unicode composition of the first
three; the first is kept. Sources are compared with the evaluation only (`Source.without_problems_of`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

from jaxrl.data.data_config import DataConfig, EvaluationSourceConfig, SourceConfig
from jaxrl.data.generated_problems import NUM_FIRST, TaskProblems, function_rows
from jaxrl.data.messages import Context, PromptFormat, text_of_context
from jaxrl.data.row_layouts import SOURCE_NAME, Record, recognise
from jaxrl.data.rows import BadRow, Row, open_rows, shown
from jaxrl.errors import UserError

Validate: TypeAlias = Callable[[str, Mapping[str, Any], str], str | None]
"""(answer, extra, source) -> the grader's objection to the ground truth; None if it can be read."""

Truths: TypeAlias = Callable[[Mapping[str, SourceConfig]], Validate]
"""Creates the check of ground truths, given the settings of each data set by its name."""

NO_EVALUATION = "none: data.evaluation names no problems, so there is no accuracy"
"""The description of a run without evaluation problems."""

UNREADABLE = "ground truths that the grader cannot read"
DUPLICATES = "duplicates"
HELD_OUT = "prompts of the evaluation"

NUM_NAMED = 3
"""Rows that are named in messages, of all those left out for one reason."""

# Rows that the layout is recognised by.
_FIRST_ROWS = 64


@dataclasses.dataclass
class Dropped:
    """Rows left out for one reason.

    Attributes:
      count: Number of rows.
      named: The first few, as "file:line: fault".
    """

    count: int = 0
    named: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of problems after reading.

    Attributes:
      name: Name of its setting, such as "data.train" or "data.sources.gsm8k".
      settings: Its settings.
      origin: A description for messages: a file with its format and layout, or a task.
      num_rows: Number of rows that were read.
      records: The usable problems.
      dropped: The rows that were left out, by reason.
      own_template: The words that the file has around every problem, as a template; "" for none.
      generated: Generates the problem of a number of an endless source, and raises BadRow if it is left out;
        None for other sources. `records` and `dropped` hold the first few of an endless one.
    """

    name: str
    settings: SourceConfig
    origin: str
    num_rows: int
    records: tuple[Record, ...]
    dropped: Mapping[str, Dropped] = dataclasses.field(default_factory=dict)
    own_template: str = ""
    generated: Callable[[int], Record] | None = None

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the data sets in it; metrics are kept under them."""
        return tuple(dict.fromkeys(record.source for record in self.records))

    def with_readable_truths(self, validate: Validate) -> Self:
        """Returns the source without rows whose ground truth the grader cannot read.

        Raises:
          UserError: No row is left.
        """
        return self._checked(lambda r: validate(r.answer, r.extra, r.source), UNREADABLE)

    def without_problems_of(self, evaluation: Sequence[Source]) -> Self:
        """Returns the source without the problems of the evaluation; UserError if no problem is left.

        Training rows are removed rather than evaluation rows, because a benchmark must stay whole.

        A prompt, without case and spacing, says which problem it is, whatever truth and other fields stand
        beside it: two files number the same problem differently. Some prompts do not say it, as those of
        agents whose tasks are in other fields: several problems of one evaluation source have the prompt, or
        all problems of this source. Then truth and other fields are compared too.
        """
        held_out: dict[str, set[bytes]] = {}
        # Prompts that do not say which problem they are.
        shared = {_normalised(record.prompt) for record in self.records}
        if len(shared) > 1 or len(self.records) == 1:
            shared = set()
        for source in evaluation:
            rests: dict[str, set[bytes]] = {}
            for record in source.records:
                rests.setdefault(_normalised(record.prompt), set()).add(_rest_of(record))
            for prompt, found in rests.items():
                held_out.setdefault(prompt, set()).update(found)
                # The question of a task says all, and its metadata have the number of the problem.
                if len(found) > 1 and not source.settings.task:
                    shared.add(prompt)

        def fault_of(record: Record) -> str | None:
            prompt = _normalised(record.prompt)
            rests = held_out.get(prompt, ())
            found = _rest_of(record) in rests if prompt in shared else bool(rests)
            return shown(record.prompt) if found else None

        return self._checked(fault_of, HELD_OUT)

    def _checked(self, fault_of: Callable[[Record], str | None], reason: str) -> Self:
        """The source without the rows that have a fault, be they read or generated later."""

        def checked(record: Record) -> Record:
            if (fault := fault_of(record)) is not None:
                raise BadRow(f"{record.place}: {fault}", reason)
            return record

        # Copies, since `_count` changes them, and `self` may be asked again (`ProblemReader` keeps it).
        dropped = {reason: dataclasses.replace(of_one) for reason, of_one in self.dropped.items()}
        kept, fault = [], None
        for record in self.records:
            try:
                kept.append(checked(record))
            except BadRow as error:
                fault = fault or error
                _count(dropped, error)
        if fault is not None and not kept:
            raise UserError(
                f"{self.name} has no row left: all {len(self.records)} are {fault.reason}, such as {fault}; "
                "use other data, or widen the task's range of numbers"
            )
        changes: dict[str, Any] = {"records": tuple(kept), "dropped": dropped}
        if (make := self.generated) is not None:
            changes["generated"] = lambda number: checked(make(number))
        return dataclasses.replace(self, **changes)


def read_source(
    settings: SourceConfig, name: str, *, may_be_endless: bool = False, needs_truth: bool = True
) -> Source:
    """Reads a file, a task or a function. No grader validates the ground truths yet.

    Args:
      settings: Settings of the source.
      name: Name of the setting, for messages.
      may_be_endless: Whether a source without a size is allowed.
      needs_truth: Whether a row without a ground truth is unusable; otherwise its answer is "".

    Raises:
      UserError: The file or task does not exist, its layout is unknown, or no row is left.
    """
    what = settings.path
    if not what:
        raise UserError(
            f"{name} names no problems; set {name}.path to a file, a function or reasoning-gym:NAME"
        )
    generated = None
    if settings.task or settings.has_function:
        make, origin, template = _numbered(settings, needs_truth=needs_truth)
        numbers = range(settings.size or NUM_FIRST)
        # Functions, so that one unusable row does not end the iteration.
        made: Iterator[Callable[[], Record]] = (functools.partial(make, n) for n in numbers)
        if settings.is_endless and not may_be_endless:
            raise UserError(
                f"{name} is endless: {what} makes its problems while a run draws them, which only "
                f"training can use; set {name}.size to a number of problems"
            )
        if settings.is_endless:
            origin += f", without end; of the first {NUM_FIRST}:"
            generated = make
    else:
        made, origin, template = _rows_of(settings, needs_truth=needs_truth)
    dropped: dict[str, Dropped] = {}
    records: list[Record] = []
    seen = set()
    num_rows = 0
    for make_record in made:
        num_rows += 1
        try:
            record = make_record()
        except BadRow as error:
            _count(dropped, error)
            continue
        # Generated problems may repeat: a task may have few.
        if not (settings.task or settings.has_function):
            identity = _identity(record)
            if identity in seen:
                # Not named: DAPO-Math-17k has every row a hundred times.
                dropped.setdefault(DUPLICATES, Dropped()).count += 1
                continue
            seen.add(identity)
        records.append(record)
        if settings.size and len(records) == settings.size:
            break
    if not records:
        reason, some = next(iter(dropped.items()))
        raise UserError(f"{what} has no row that can be used: {reason}, {some.named[0]}")
    return Source(name, settings, origin, num_rows, tuple(records), dropped, template, generated)


def check_file(settings: EvaluationSourceConfig, *, needs_truth: bool) -> None:
    """Opens a source's file and looks for its fields in the first rows, as `read_source` does.

    Raises:
      UserError: The file cannot be read, or lacks a field.
    """
    _rows_of(settings, needs_truth=needs_truth)


def _rows_of(
    settings: EvaluationSourceConfig, *, needs_truth: bool
) -> tuple[Iterator[Callable[[], Record]], str, str]:
    """(makes each record in turn, a description, own template) of a file."""
    file = open_rows(settings.path)
    rows = iter(file)
    # Several: the first row may lack fields that others have.
    first = list(itertools.islice(rows, _FIRST_ROWS))
    readable = [row for _, row in first if not isinstance(row, BadRow)]
    if not readable:
        raise UserError(f"{first[0][0]}: {first[0][1]}")
    path = settings.path
    # By the readable rows: a broken one is counted later, and says nothing about the layout.
    layout = recognise(readable, what=path, fields=settings.fields, needs_truth=needs_truth)

    def make(place: str, row: Row | BadRow) -> Record:
        if isinstance(row, BadRow):
            raise BadRow(f"{place}: {row}", row.reason)
        return layout.record(row, place, source=settings.source, default_source=file.stem)

    # The rows that the layout was recognised by, and then the rest: the file is read once.
    made = (functools.partial(make, *located) for located in itertools.chain(first, rows))
    return made, f"{path} ({file.kind}, layout {layout.name})", layout.template


def _numbered(
    settings: SourceConfig, *, needs_truth: bool
) -> tuple[Callable[[int], Record], str, str]:
    """(generates the problem of a number, a description, own template) of a function or a task."""
    size, seed, options = settings.size, settings.seed, settings.options
    if settings.task:
        task = TaskProblems(
            settings.task, seed=seed, options=options, size=size, source=settings.source
        )
        return task.record, f"reasoning-gym task {settings.task}", ""
    path = settings.path
    row_of = function_rows(path, size=size, seed=seed, options=options)
    first = [row_of(n) for n in range(min(size or NUM_FIRST, NUM_FIRST))]
    layout = recognise(first, what=path, fields=settings.fields, needs_truth=needs_truth)
    name = path.rpartition(":")[2]

    def make(number: int) -> Record:
        place = f"{path} index {number}"
        return layout.record(row_of(number), place, source=settings.source, default_source=name)

    return make, f"{path} (made by a function, layout {layout.name})", layout.template


def _count(dropped: dict[str, Dropped], error: BadRow) -> None:
    of_reason = dropped.setdefault(error.reason, Dropped())
    of_reason.count += 1
    of_reason.named = (*of_reason.named, str(error))[:NUM_NAMED]


def _identity(record: Record) -> bytes:
    """Equal for two rows that are the same problem."""
    prompt, answer, solution = map(_spelled, (record.prompt, record.answer, record.solution))
    return _digest([prompt, answer, solution, record.source, record.extra])


def _rest_of(record: Record) -> bytes:
    """Equal for two problems of one prompt that are the same in two data sets."""
    extra = {name: value for name, value in record.extra.items() if name != SOURCE_NAME}
    return _digest([_spelled(record.answer), extra])


def _digest(value: Any) -> bytes:
    # The hash alone is kept: the tests of a programming problem may be megabytes.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _spelled(value: Any) -> Any:
    """The value with one spelling for each of its texts."""
    if isinstance(value, str):
        # An accented letter may be one character, or the letter and its accent.
        return unicodedata.normalize("NFC", value.replace("\r\n", "\n")).strip()
    if isinstance(value, Mapping):
        return {name: _spelled(item) for name, item in value.items()}
    return list(map(_spelled, value)) if isinstance(value, list | tuple) else value


def _normalised(prompt: Context) -> str:
    """The text without case and spacing, for comparison with evaluation prompts."""
    return " ".join(text_of_context(prompt).casefold().split())


@dataclasses.dataclass(frozen=True)
class Problems:
    """Training and evaluation problems, by source. No problem is in both.

    Attributes:
      train, evaluation: The sources.
    """

    train: tuple[Source, ...] = ()
    evaluation: tuple[Source, ...] = ()

    @property
    def train_records(self) -> tuple[Record, ...]:
        """All training problems; UserError if a source is endless."""
        for source in self.train:
            if source.generated is not None:
                raise UserError(
                    f"{source.name} is endless, and this command needs all of its problems; set "
                    f"{source.name}.size to a number of problems"
                )
        return _records(self.train)

    @property
    def evaluation_records(self) -> tuple[Record, ...]:
        return _records(self.evaluation)

    @property
    def settings(self) -> dict[str, SourceConfig]:
        """The settings of each data set, by the name that its problems have.

        Raises:
          UserError: Two data sets of one name have different graders.
        """
        found: dict[str, Source] = {}
        for source in (*self.train, *self.evaluation):
            for name in source.source_names:
                other = found.setdefault(name, source)
                ours, theirs = source.settings, other.settings
                if ours.grader != theirs.grader:
                    raise UserError(
                        f"{other.name} and {source.name} both call their problems {name!r} and have "
                        f"different graders; set {source.name}.source to a name of its own, or give both "
                        "the same grader"
                    )
        return {name: source.settings for name, source in found.items()}

    def formats(self, data: DataConfig) -> dict[str, PromptFormat]:
        """The prompt format of each training data set, by its name."""
        return {
            name: data.format_of(source.own_template)
            for source in self.train
            for name in source.source_names
        }


class ProblemReader:
    """Reads the sources of a config, each only once.

    Args:
      data: The settings.
      needs_truths: Whether training problems need a ground truth. Evaluation problems always do.
    """

    def __init__(self, data: DataConfig, *, needs_truths: bool = True):
        self._data = data
        self._needs_truths = needs_truths
        # A source may be asked for twice: by `readers`, to collect the errors, and by `read`.
        self._read = functools.cache(
            lambda name: read_source(
                self._sources[name],
                name,
                may_be_endless=name in data.training_sources,
                needs_truth=needs_truths or name not in data.training_sources,
            )
        )
        self._sources = data.training_sources | data.evaluation_sources

    @property
    def readers(self) -> dict[str, Callable[[], Source]]:
        """For each source that the config names, by its setting, the function that reads it."""
        return {
            name: functools.partial(self._read, name)
            for name, settings in self._sources.items()
            if settings.path
        }

    def read(self, truths: Truths | None) -> Problems:
        """Reads and checks all sources.

        Args:
          truths: Creates the check of ground truths; None, for a run without a grader, checks none.

        Raises:
          UserError: A source cannot be used, or no row of it is left.
        """
        evaluation = tuple(map(self._read, self._data.evaluation_sources))
        train = tuple(
            self._read(name).without_problems_of(evaluation) for name in self._data.training_sources
        )
        problems = Problems(train, evaluation)
        settings = problems.settings  # raises if a data set would have two graders
        if truths is None:
            return problems
        validate = truths(settings)

        def of_training(answer: str, extra: Mapping[str, Any], source: str) -> str | None:
            # A prompt without a truth is scored by other rewards, and no grader looks at it.
            known = answer or self._needs_truths
            return validate(answer, extra, source) if known else None

        return Problems(
            tuple(s.with_readable_truths(of_training) for s in train),
            tuple(s.with_readable_truths(validate) for s in evaluation),
        )


def _records(sources: Sequence[Source]) -> tuple[Record, ...]:
    return tuple(record for source in sources for record in source.records)
