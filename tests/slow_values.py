"""Parameters of tests of which only some values run in the fast suite."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def mostly_slow(
    values: Mapping[str, Any] | Iterable[Any], *, fast: Collection[Any], long: Collection[Any] = ()
) -> list[Any]:
    """All values; those that neither `fast` nor `long` names run in the slow suite only.

    Args:
      values: values of a parameter, or a mapping of names, which the ids of the tests show, to values.
      fast: some of the values, or of the names.
      long: others, which CI runs besides.
    """
    named = isinstance(values, Mapping)
    pairs = values.items() if named else ((value, value) for value in values)
    unknown = [name for name in (*fast, *long) if name not in values]
    assert not unknown, f"{unknown} are no values"

    def marks(name: Any) -> Any:
        if name in fast:
            return ()
        return pytest.mark.long if name in long else pytest.mark.slow

    return [
        pytest.param(value, id=name if named else None, marks=marks(name)) for name, value in pairs
    ]
