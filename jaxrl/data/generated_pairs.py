"""Generates preference pairs from problems with worked solutions, for recipes without a file of pairs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from jaxrl.data import worked_sums
from jaxrl.data.preferences import Preference
from jaxrl.data.records import Record
from jaxrl.errors import UserError


def right_or_wrong(records: Sequence[Record]) -> tuple[Preference, ...]:
    """Pairs of a solution with the right answer (chosen) and the same with a wrong answer (rejected)."""
    pairs = []
    for row, record in enumerate(records):
        rng = random.Random(f"slip {row} {record.prompt}")
        chosen, rejected = worked_sums.right_and_wrong(_solution(record), record.answer, rng)
        pairs.append(Preference(record.prompt, chosen, rejected, record.source))
    return tuple(pairs)


def worked_or_guessed(records: Sequence[Record]) -> tuple[Preference, ...]:
    """Pairs of a solution with its steps, chosen, and the bare answer, rejected and marked as harmful."""
    pairs = []
    for record in records:
        texts = worked_sums.worked_and_bare(_solution(record), record.answer)
        if texts is not None:
            pairs.append(
                Preference(record.prompt, *texts, record.source, chosen_harm=-1, rejected_harm=1)
            )
    return tuple(pairs)


PAIR_GENERATORS: dict[str, Callable[[Sequence[Record]], tuple[Preference, ...]]] = {
    "right_or_wrong": right_or_wrong,
    "worked_or_guessed": worked_or_guessed,
}
"""The choices of the setting `preference.pair_generator`."""


def _solution(record: Record) -> str:
    if record.solution is None:
        raise UserError(
            f"{record.source} has no solutions to make pairs from; use jaxrl.data.worked_sums:make, which has"
        )
    return record.solution
