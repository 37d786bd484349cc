"""Generated problems: problem n depends on n alone, so the position in them is a number.

    def make(index, rng):                    a user's function, "puzzles.py:make"; returns a row as in a file
        a, b = rng.integers(100, size=2)
        return {"problem": f"{a} + {b} = ?", "answer": a + b}

    task = "countdown"                       or a task of reasoning-gym

Every host asks for the same problem, and a resumed run asks again. So a function must return the same row
whenever it gets the same index. This is checked for the first rows when the function is loaded.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl.data.data_config import MAX_TASK_SIZE
from jaxrl.data.row_layouts import Record
from jaxrl.data.rows import Row, shown
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

NUM_FIRST = 64
"""Problems of an endless source that are generated in advance, for the data card and to train a tokenizer."""

# Problems of an endless task that are created at once; the default size of reasoning-gym.
_BLOCK = 500
_EXAMPLE = '{"problem": ..., "answer": ...}'


def function_rows(
    path: str, *, size: int, seed: int, options: Mapping[str, Any]
) -> Callable[[int], Row]:
    """Loads a user's function of (index, rng, **options), "file.py:name" or "package.module:name".

    Args:
      path: The function.
      size: Number of rows; 0 for an endless source.
      seed: Seed of `rng`, together with the index; `rng` is a `numpy.random.Generator`.
      options: Keyword arguments of the function.

    Returns:
      A function that generates the row of an index, with JSON's types only. It raises UserError if the user's
      function raises or returns no row.

    Raises:
      UserError: The function does not exist, or returns another row for the same index.
    """
    function = load_function(path, "data function", takes=("index", "rng"), options=options)

    def row_of(index: int) -> Row:
        try:
            row = function(index, np.random.default_rng((seed, index)), **options)
            # Through JSON, so that numbers and arrays of NumPy become Python's.
            return dict(json.loads(json.dumps(row, default=_plain)))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise UserError(
                f"{path} index {index}: {type(error).__name__}: {error}; the function must return a row of "
                f"JSON's types, such as {_EXAMPLE}, for every index from 0 on"
            ) from error

    # Twice each: every host asks for the same row, and so does a resumed run.
    for index in range(min(size or NUM_FIRST, NUM_FIRST)):
        first, again = row_of(index), row_of(index)
        if json.dumps(first) != json.dumps(again):
            raise UserError(
                f"{path} index {index}: the function made {shown(first)} and, asked again, {shown(again)}; a "
                "resumed run would meet other problems. Draw from its argument `rng` alone, and keep nothing "
                "between two calls"
            )
    return row_of


class TaskProblems:
    """Problems of a procedural task of reasoning-gym, by number.

    `extra["metadata"]` holds the input of the task's scorer, in JSON's types. Item i of reasoning-gym depends
    on seed + i alone, so its seeds s and s + 1 share all items but one. Here different seeds share no item,
    because they are `MAX_TASK_SIZE` apart. Two items can still ask the same *question*.

    Args:
      task: Name of the task, such as "countdown".
      seed: Seed, 0 to `data_config.MAX_TASK_SEED`.
      options: Settings of the task, such as {"min_terms": 3}.
      size: Number of problems that are created at once; 0 creates them in blocks. Number `MAX_TASK_SIZE` is
        number 0 again.
      source: Name of the data set of its problems; "" takes the task's.

    Raises:
      UserError: reasoning-gym is not installed, does not know the task, or refuses a setting.
    """

    def __init__(
        self, task: str, *, seed: int, options: Mapping[str, Any], size: int = 0, source: str = ""
    ):
        try:
            from reasoning_gym import factory
        except ModuleNotFoundError as error:
            raise UserError(
                f"task {task!r} comes from reasoning-gym, which is not installed; run "
                "pip install reasoning-gym"
            ) from error
        if task not in factory.DATASETS:
            near = " or ".join(difflib.get_close_matches(task, list(factory.DATASETS)))
            near = f" (did you mean {near}?)" if near else ""
            raise UserError(
                f"reasoning-gym has no task {task!r}{near}; name one of its {len(factory.DATASETS)} data sets"
            )
        self._create = factory.create_dataset
        self._task, self._source = task, source or task
        self._first_seed = seed * MAX_TASK_SIZE
        self._options = dict(options)
        self._block_size = size or _BLOCK
        self._block, self._items = 0, self._items_of(0)

    def record(self, number: int) -> Record:
        block, offset = divmod(number % MAX_TASK_SIZE, self._block_size)
        # Only the last block is kept: problems are mostly drawn in order.
        if block != self._block:
            self._block, self._items = block, self._items_of(block)
        item = self._items[offset]
        try:
            # The task selects the scorer; the record's source may have another name. JSON's types only,
            # because it is compared between hosts and saved.
            metadata = {"source_dataset": self._task, **item["metadata"]}
            extra = {"metadata": json.loads(json.dumps(metadata, default=str))}
        # Keys that are not text, or cycles; the grader reports them.
        except (TypeError, ValueError):
            extra = {}
        answer, place = str(item["answer"]), f"{self._task} problem {number}"
        return Record(item["question"], answer, self._source, extra=extra, place=place)

    def _items_of(self, block: int) -> Any:
        # Blocks are small, because some tasks create all items at once.
        config = {
            **self._options,
            "size": self._block_size,
            "seed": self._first_seed + block * self._block_size,
        }
        try:
            return self._create(self._task, **config)
        # reasoning-gym raises AssertionError for settings that contradict each other.
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(
                f"task {self._task!r} refuses its settings {config}: {error}"
            ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of JSON's types")
