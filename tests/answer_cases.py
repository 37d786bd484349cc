"""Cases of answers in answers.tsv: a line has their kind and their fields."""

import pathlib

import pytest

_LINES = pathlib.Path(__file__).with_name("answers.tsv").read_text(encoding="utf-8").split("\n")
_SIGNS = {"(none)": None, "same": True, "different": False}


def cases(kind: str) -> list:
    """The cases of a kind, as parameters; a line break is written "⏎"."""
    rows = [line.split("\t")[1:] for line in _LINES if line.startswith(f"{kind}\t")]
    assert rows, f"there is no case of {kind}"
    return [
        pytest.param(*(_SIGNS.get(field, field.replace("⏎", "\n")) for field in row))
        for row in rows
    ]
