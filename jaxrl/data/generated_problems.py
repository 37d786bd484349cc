"""Problems that are made rather than read: number n from n alone, so that a place in them is a number.

    def make(index, rng):                    a function of yours, "puzzles.py:make": a row like those of files
        a, b = rng.integers(100, size=2)
        return {"problem": f"{a} + {b} = ?", "answer": a + b}

    task = "chain_sum"                       or a task of reasoning-gym

What makes them may be asked for the same number twice, by several processes, and again after a restart; it
has to make the same problem every time. That is tried when a function is loaded.
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
"""Why a problem is left out, and what is said about it; None if it is not."""

NUM_FIRST = 64
"""Problems of an endless source that are made ahead: what the card shows, and a tokenizer is trained on."""

_TAKES = ("index", "rng")
_EXAMPLE = '{"problem": ..., "answer": ...}'


class FunctionRows(RowFile):
    """Rows that a user's function makes, read by index; a `RowFile`.

    Args:
      path: of the function of (index, rng, **options).
      size: how many rows there are; 0 says that there is no end, and no length.
      seed: with the index, of the generator `rng`, a `numpy.random.Generator`.
      options: the function's own.

    Raises:
      UserError: there is no such function, or it does not make the same rows again.
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
        """The row of a number, JSON's types only.

        Raises:
          UserError: the function raised, or returned something else than a row.
        """
        return object_of(self._made(int(index)))

    def place(self, index: int) -> str:
        """Function and number."""
        return f"{self._path} index {index}"

    def _made(self, index: int) -> bytes:
        """The row's JSON; numbers and arrays of NumPy are written as Python's."""
        rng = np.random.default_rng((self._seed, index))
        row = None
        try:
            row = self._function(index, rng, **self._options)
            text = json.dumps(row, default=_plain) if isinstance(row, dict) else ""
        except Exception as error:  # a user's function may raise anything
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
        first, again = self._made(index), self._made(index)
        if first != again:
            raise UserError(
                f"{self.place(index)}: the function made {_cut(first.decode())} and, asked again, "
                f"{_cut(again.decode())}; a resumed run would meet other problems. Draw from its argument "
                "`rng` alone, and keep nothing between two calls"
            )


@dataclasses.dataclass(frozen=True)
class GeneratedProblems:
    """Problems without end.

    Attributes:
      make: the problem of a number; it raises Unusable where that is none.
      place: where a number's problem comes from, for messages.
      checks: what else it has to pass.
      refuse: one that cannot be used is an error; one of the evaluation is always left out.
    """

    make: Callable[[int], Record]
    place: Callable[[int], str]
    checks: tuple[Check, ...] = ()
    refuse: bool = False

    def problem(self, number: int) -> Record:
        """The problem of a number.

        Raises:
          Unusable: it is left out.
          UserError: what makes it has failed, or it is refused.
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
                reason, told = fault
                raise Unusable(reason, f"{self.place(number)}: {told}")
        return record

    def first(self) -> tuple[dict[int, Record], list[Unusable]]:
        """Those of the first numbers that can be used, by number, and what is left out among them."""
        found, left_out = {}, []
        for number in range(NUM_FIRST):
            try:
                found[number] = self.problem(number)
            except Unusable as error:
                left_out.append(error)
        return found, left_out

    def checked(self, check: Check) -> Self:
        """The same with one check more."""
        return dataclasses.replace(self, checks=(*self.checks, check))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of JSON's types")


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
