"""Problems, and the procedural tasks that make them.

Files of problems are read by `sources`. Answers are kept as written: to normalise and compare them is the
grader's business.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl.checks import check_value, finite, is_a, shown
from jaxrl.data import worked_sums
from jaxrl.data.messages import Context
from jaxrl.errors import UserError

logger = logging.getLogger(__name__)

# Room between the seeds of a procedural task; see TaskProblems. Some tasks seed NumPy, which
# takes 32 bits, so this leaves them 4,294 seeds.
MAX_TASK_SIZE = 1_000_000
MAX_TASK_SEED = 2**32 // MAX_TASK_SIZE - 1

# Problems of an endless task that are made as one data set; reasoning-gym's own default.
_BLOCK = 500

# Numbers among the settings of a task: the largest default of any is 2**31 - 1.
_TASK_NUMBER = finite(at_most=2**32)

# Options that end so are numbers inside a problem. Of others, such as digits, terms or cells, a problem is
# made: a million takes minutes and all memory, and Python writes no number of more than 4,300 digits.
_IS_VALUE = re.compile(
    r"(value|real|imag|_n|num|target|year|bounds?|base|range|seconds|days|factor|divisor|constant_m\w+)$"
)
_TASK_COUNT = finite(at_most=4000)


@dataclasses.dataclass(frozen=True)
class Record:
    """One problem.

    Attributes:
      prompt: the problem, before any template; or a conversation that ends where the answer begins.
      answer: the ground truth, in the grader's own notation.
      source: name of the data set; metrics are kept apart by it.
      solution: a worked solution to learn from, if there is one.
      extra: the other fields of its row, for graders; JSON's types only.
    """

    prompt: Context
    answer: str
    source: str
    solution: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


class TaskProblems:
    """Problems of a procedural task of reasoning-gym (extra `demo`), each by its number.

    What its scorer looks at comes along as `extra["metadata"]`, in JSON's types. Item i of reasoning-gym
    depends on seed + i alone, so its seeds s and s + 1 share all but one item; here seeds are spread apart
    and different seeds share none. They can still draw the same *question* twice: see `disjoint`.

    Args:
      task: name of the data set, such as "chain_sum", for which solutions are written too.
      seed: 0 to `MAX_TASK_SEED`.
      **task_config: the task's own settings, such as `min_terms=3`.

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
        """The problem of a number; after `MAX_TASK_SIZE` they begin again."""
        block, place = divmod(number % MAX_TASK_SIZE, _BLOCK)
        items = self._items_of(block)
        item_seed = self._first_seed + block * _BLOCK + place
        return _task_record(self._task, items[place], item_seed)

    def _items_of(self, block: int) -> Any:
        """Items of some tasks are made when the data set is, and take as long as there are many."""
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
    return tuple(_task_record(task, items[i], first_seed + i) for i in range(size))


def disjoint(train: Sequence[Record], evaluation: Sequence[Record]) -> tuple[Record, ...]:
    """The rows of `train` whose prompt is not in `evaluation`.

    Training rows go rather than evaluation ones: a task with few distinct easy questions would
    otherwise lose just those from evaluation, and a benchmark must stay whole. Prompts are compared
    without regard to case and spacing.

    Raises:
      UserError: nothing is left to train on.
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
    """All that is said in a question or a conversation, a line each."""
    return context if isinstance(context, str) else "\n".join(m["content"] for m in context)


def normalised(prompt: Context) -> str:
    """What two prompts have in common that are one problem of an evaluation: all but case and spacing."""
    return " ".join(text_of_context(prompt).casefold().split())


def check_task_options(options: Mapping[str, Any]) -> None:
    """Raises UserError for a number that no task can mean; which names there are only the task knows."""
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
            "pip install jaxrl[demo]"
        ) from error
    if task not in factory.DATASETS:
        raise UserError(
            f"reasoning-gym has no task {task!r}{_near(task, factory.DATASETS)}; name one of its "
            f"{len(factory.DATASETS)} data sets"
        )
    return factory


def _create_task(task: str, config: dict[str, Any]) -> Any:
    """The reasoning-gym data set; its settings are checked here, with near names."""
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
    # AssertionError is how reasoning-gym reports settings that do not fit together.
    except (AssertionError, ValueError) as error:
        raise UserError(f"task {task!r} refuses its settings {config}: {error}") from error


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known))
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _task_record(task: str, item: dict[str, Any], item_seed: int) -> Record:
    solution = None
    if task == "chain_sum":
        rng = random.Random(f"worked sum {item_seed}")
        solution = worked_sums.solve(item["metadata"]["expression"], rng)
    return Record(item["question"], str(item["answer"]), task, solution, _extra_of(task, item))


def _extra_of(task: str, item: dict[str, Any]) -> dict[str, Any]:
    """What a scorer looks at, as a file would have it: it is checked between processes, and kept, as JSON."""
    try:
        # Its scorer is found by the task, and the record's source may have another name.
        metadata = {"source_dataset": task, **item["metadata"]}
        return {"metadata": json.loads(json.dumps(metadata, default=str))}
    except (TypeError, ValueError):  # keys that are no text, or rings; the scorer's grader says so
        return {}
