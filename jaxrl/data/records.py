"""The type of a problem, and the procedural tasks of reasoning-gym that generate problems.

`source_reader` reads files of problems. Answers stay as written; the grader normalises and compares them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl.checks import check_value, finite, is_a, shown
from jaxrl.data.messages import Context
from jaxrl.errors import UserError

logger = logging.getLogger(__name__)

# Distance between the seeds of a procedural task; see TaskProblems. Some tasks seed NumPy, which
# accepts 32 bits, so there are 4,294 seeds.
MAX_TASK_SIZE = 1_000_000
MAX_TASK_SEED = 2**32 // MAX_TASK_SIZE - 1

# Problems of an endless task that are created at once; the default size of reasoning-gym.
_BLOCK = 500

# Numbers in the settings of a task. The largest default of any task is 2**31 - 1.
_TASK_NUMBER = finite(at_most=2**32)

# Options with these endings are numbers inside a problem. Others, such as digits, terms or cells, are sizes
# of a problem: a million of them takes minutes and all memory, and Python prints at most 4,300 digits.
_IS_VALUE = re.compile(
    r"(value|real|imag|_n|num|target|year|bounds?|base|range|seconds|days|factor|divisor|constant_m\w+)$"
)
_TASK_COUNT = finite(at_most=4000)


@dataclasses.dataclass(frozen=True)
class Record:
    """One problem.

    Attributes:
      prompt: The problem without a template, or the conversation before the answer.
      answer: The ground truth, in the grader's notation.
      source: Name of the data set; each has its own metrics.
      solution: A worked solution for supervised training, or None.
      extra: The other fields of its row, for graders; JSON's types only.
    """

    prompt: Context
    answer: str
    source: str
    solution: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


class TaskProblems:
    """Problems of a procedural task of reasoning-gym, by number.

    `extra["metadata"]` holds the input of the task's scorer, in JSON's types. Item i of reasoning-gym depends
    on seed + i alone, so its seeds s and s + 1 share all items but one. Here different seeds share no item,
    because they are `MAX_TASK_SIZE` apart. Two items can still ask the same *question*: see `disjoint`.

    Args:
      task: Name of the task, such as "countdown".
      seed: Seed, 0 to `MAX_TASK_SEED`.
      **task_config: Settings of the task, such as `min_terms=3`.

    Raises:
      UserError: reasoning-gym is not installed, or does not know the task or a setting.
    """

    def __init__(self, task: str, *, seed: int, **task_config: Any):
        task_factory(task)
        _check_task_size(task, _BLOCK, seed)
        self._task = task
        self._first_seed = seed * MAX_TASK_SIZE
        self._config = task_config
        self._block = -1
        self._items = self._items_of(0)

    def record(self, number: int) -> Record:
        """The problem of a number; number `MAX_TASK_SIZE` is number 0 again."""
        block, place = divmod(number % MAX_TASK_SIZE, _BLOCK)
        items = self._items_of(block)
        return _task_record(self._task, items[place])

    def _items_of(self, block: int) -> Any:
        """The items of a block. Blocks are small, because some tasks create all items at once."""
        if block != self._block:
            seed = self._first_seed + block * _BLOCK
            config = {**self._config, "size": _BLOCK, "seed": seed}
            self._block, self._items = block, _create_task(self._task, config)
        return self._items


def reasoning_gym_records(
    task: str, *, size: int, seed: int, **task_config: Any
) -> tuple[Record, ...]:
    """The first problems of a procedural task of reasoning-gym; they are those of `TaskProblems`.

    Args:
      task, seed, task_config: As for `TaskProblems`.
      size: Number of problems, at most 1,000,000.

    Raises:
      UserError: reasoning-gym is not installed, or does not know the task or a setting.
    """
    task_factory(task)
    _check_task_size(task, size, seed)
    first_seed = seed * MAX_TASK_SIZE
    items = _create_task(task, {**task_config, "size": size, "seed": first_seed})
    return tuple(_task_record(task, items[i]) for i in range(size))


def disjoint(train: Sequence[Record], evaluation: Sequence[Record]) -> tuple[Record, ...]:
    """Returns the rows of `train` whose prompt is not in `evaluation`, and logs how many others there are.

    Training rows are removed rather than evaluation rows, because a benchmark must stay whole. Otherwise a
    task with few easy questions would lose exactly those from its evaluation. The comparison ignores case and
    spacing.

    Raises:
      UserError: No training row is left.
    """
    seen = {normalised(record.prompt) for record in evaluation}
    kept = tuple(record for record in train if normalised(record.prompt) not in seen)
    if not kept:
        raise UserError(
            f"all {len(train)} training prompts also occur among the {len(evaluation)} evaluation "
            "ones; hold out fewer, or widen the task's range of numbers"
        )
    if len(kept) < len(train):
        logger.warning(
            "%d of %d training rows dropped: their prompt is an evaluation prompt",
            len(train) - len(kept),
            len(train),
        )
    return kept


def text_of_context(context: Context) -> str:
    """The text of a question, or of all messages of a conversation."""
    return context if isinstance(context, str) else "\n".join(m["content"] for m in context)


def normalised(prompt: Context) -> str:
    """The text without case and spacing, for comparison with evaluation prompts."""
    return " ".join(text_of_context(prompt).casefold().split())


def check_task_options(options: Mapping[str, Any]) -> None:
    """Raises UserError for a number out of range. Names are checked by the task itself."""
    for name, value in options.items():
        allowed = _TASK_NUMBER if _IS_VALUE.search(name) else _TASK_COUNT
        if is_a(value, float) and (fault := allowed.fault(value)):
            raise UserError(f"options.{name} {shown(value)} {fault}")


def _check_task_size(task: str, size: int, seed: int) -> None:
    if not 1 <= size <= MAX_TASK_SIZE or not 0 <= seed <= MAX_TASK_SEED:
        raise UserError(
            f"{task} cannot be made with size {size} and seed {seed}; the size must be between "
            f"1 and {MAX_TASK_SIZE} and the seed from 0 to {MAX_TASK_SEED}"
        )


def task_factory(task: str) -> Any:
    """The module of reasoning-gym that creates tasks; UserError if it is missing or lacks the task."""
    try:
        from reasoning_gym import factory
    except ModuleNotFoundError as error:
        raise UserError(
            f"task {task!r} comes from reasoning-gym, which is not installed; run "
            "pip install reasoning-gym"
        ) from error
    if task not in factory.DATASETS:
        raise UserError(
            f"reasoning-gym has no task {task!r}{_near(task, factory.DATASETS)}; name one of its "
            f"{len(factory.DATASETS)} data sets"
        )
    return factory


def _create_task(task: str, config: dict[str, Any]) -> Any:
    """Creates a data set of reasoning-gym; UserError for an unknown setting or a bad value."""
    factory = task_factory(task)
    _, config_class = factory.DATASETS[task]
    kinds = {field.name: field.type for field in dataclasses.fields(config_class)}
    for name, value in config.items():
        if name not in kinds:
            raise UserError(
                f"task {task!r} has no setting {name!r}{_near(name, kinds)}; it has "
                f"{', '.join(kinds)}"
            )
        check_value(f"task {task!r}: {name}", value, kinds[name])
    try:
        return factory.create_dataset(task, **config)
    # reasoning-gym raises AssertionError for settings that contradict each other.
    except (AssertionError, ValueError) as error:
        raise UserError(f"task {task!r} refuses its settings {config}: {error}") from error


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known))
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _task_record(task: str, item: dict[str, Any]) -> Record:
    return Record(item["question"], str(item["answer"]), task, extra=_extra_of(task, item))


def _extra_of(task: str, item: dict[str, Any]) -> dict[str, Any]:
    """The input of the task's scorer. JSON's types only, because it is compared between hosts and saved."""
    try:
        # The task selects the scorer; the record's source may have another name.
        metadata = {"source_dataset": task, **item["metadata"]}
        return {"metadata": json.loads(json.dumps(metadata, default=str))}
    except (TypeError, ValueError):  # keys that are not text, or cycles; the grader reports them
        return {}
