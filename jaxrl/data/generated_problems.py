"""Generated problems: problem n depends on n alone, so the position in them is a number.

    def make(index, rng):                    a user's function, "puzzles.py:make"; returns a row as in a file
        a, b = rng.integers(100, size=2)
        return {"problem": f"{a} + {b} = ?", "answer": a + b}

    task = "countdown"                       or a task of reasoning-gym

Every host asks for the same problem, and a resumed run asks again. So a function must return the same row
whenever it gets the same index. This is checked for the first rows when the function is loaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np

from jaxrl.data.records import Record
from jaxrl.data.row_records import HELD_OUT, Unusable
from jaxrl.data.rows import RowFile, object_of
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

Check: TypeAlias = Callable[[Record], tuple[str, str] | None]
"""Returns (reason, message) if a problem is left out; None otherwise."""

NUM_FIRST = 64
"""Problems of an endless source that are generated in advance, for the data card and to train a tokenizer."""

_TAKES = ("index", "rng")
_EXAMPLE = '{"problem": ..., "answer": ...}'


class FunctionRows(RowFile):
    """Rows that a user's function generates.

    Args:
      path: The function of (index, rng, **options), as "file.py:name" or "package.module:name".
      size: Number of rows; 0 for an endless source, which has no length.
      seed: Seed of `rng`, together with the index; `rng` is a `numpy.random.Generator`.
      options: Keyword arguments of the function.

    Raises:
      UserError: The function does not exist, or returns another row for the same index.
    """

    kind = "made by a function"

    def __init__(self, path: str, *, size: int, seed: int, options: Mapping[str, Any]):
        self._path = path
        self._size = size
        self._seed = seed
        self._options = dict(options)
        self._function = load_function(path, "data function", takes=_TAKES, options=options)
        for index in range(min(size or NUM_FIRST, NUM_FIRST)):
            self._check_repeats(index)

    def __len__(self) -> int:
        assert self._size, "an endless source is asked for no length"
        return self._size

    def __getitem__(self, index: SupportsIndex, /) -> dict[str, Any]:
        """Generates a row, with JSON's types only.

        Raises:
          UserError: The function raised, or did not return a row.
        """
        return object_of(self._json(int(index)))

    def place(self, index: int) -> str:
        """Function and index."""
        return f"{self._path} index {index}"

    def _json(self, index: int) -> bytes:
        """The row as JSON; numbers and arrays of NumPy become Python's."""
        rng = np.random.default_rng((self._seed, index))
        row = None
        try:
            row = self._function(index, rng, **self._options)
            text = json.dumps(row, default=_plain) if isinstance(row, dict) else ""
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            does = "raised" if row is None else f"returned {_cut(repr(row))}, which is no JSON:"
            raise UserError(
                f"{self.place(index)}: the function {does} {type(error).__name__}: {error}; it must return a "
                f"row of JSON's types, such as {_EXAMPLE}, for every index from 0 on"
            ) from error
        if not text:
            raise UserError(
                f"{self.place(index)}: the function returned {_cut(repr(row))}; it must return a row, such "
                f"as {_EXAMPLE}, for every index from 0 on"
            )
        return text.encode()

    def _check_repeats(self, index: int) -> None:
        first, again = self._json(index), self._json(index)
        if first != again:
            raise UserError(
                f"{self.place(index)}: the function made {_cut(first.decode())} and, asked again, "
                f"{_cut(again.decode())}; a resumed run would meet other problems. Draw from its argument "
                "`rng` alone, and keep nothing between two calls"
            )


@dataclasses.dataclass(frozen=True)
class GeneratedProblems:
    """Endless problems by number.

    Attributes:
      make: Generates the problem of a number; raises Unusable if it cannot be used.
      place: Describes the origin of the problem of a number, for messages.
      checks: Further checks that a problem must pass.
      refuse: Whether an unusable problem is an error. Problems of the evaluation are always left out instead.
    """

    make: Callable[[int], Record]
    place: Callable[[int], str]
    checks: tuple[Check, ...] = ()
    refuse: bool = False

    def problem(self, number: int) -> Record:
        """Generates and checks the problem of a number.

        Raises:
          Unusable: The problem is left out.
          UserError: The function failed, or the problem is refused.
        """
        try:
            return self._checked(number)
        except Unusable as error:
            if self.refuse and error.reason != HELD_OUT:
                raise UserError(str(error)) from error
            raise

    def _checked(self, number: int) -> Record:
        record = self.make(number)
        for check in self.checks:
            fault = check(record)
            if fault is not None:
                reason, message = fault
                raise Unusable(reason, f"{self.place(number)}: {message}")
        return record

    def first(self) -> tuple[dict[int, Record], list[Unusable]]:
        """The usable problems of the first `NUM_FIRST` numbers, and the faults of the others."""
        found, left_out = {}, []
        for number in range(NUM_FIRST):
            try:
                found[number] = self.problem(number)
            except Unusable as error:
                left_out.append(error)
        return found, left_out

    def checked(self, check: Check) -> Self:
        """The same problems with one more check."""
        return dataclasses.replace(self, checks=(*self.checks, check))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of JSON's types")


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
