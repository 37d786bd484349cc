"""Markup around a written answer, its units, and one notation of numbers: what several graders read alike."""

from __future__ import annotations

import pathlib
import re

# Units and counted things, a group of names in each line. The first name of a group stands for all. They are
# whole words after a number only.
UNITS: dict[str, str] = {
    name: names.split()[0]
    for names in pathlib.Path(__file__).with_name("units.txt").read_text("utf-8").splitlines()
    for name in names.split()
}

SCIENTIFIC = (
    r"(?<![0-9.,])[1-9](?:[eE](?:[0-9]{1,2}|[+-]0[0-9])|\.[0-9]+[eE][+-]?[0-9]{1,2})"
    r"(?![0-9A-Za-z.^_!])"
)
"""Matches 1.5e3, 2e6 and 1e-05. With a sign it needs a point or a 0, as "2e-1" is also 2 times e minus 1."""

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
"""Matches the beginning of a box, its opening brace included."""

# No "~": before a number it reads as "about".
_SPACING = r"(?:\s|\\[ ,;:!]|\\q?quad(?![A-Za-z])|\\hspace\s*\{[^{}]*\})+"
_SPACING_AROUND = re.compile(rf"\A{_SPACING}|(?<!\\){_SPACING}\Z")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def without_spacing(text: str) -> str:
    """Returns `text` without the space around it, typed or in TeX: "\\ 42\\," -> "42"."""
    return _SPACING_AROUND.sub("", text)


def closing_brace(text: str, start: int) -> int:
    """Returns the position of the brace that closes the one before `start`; -1 if none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return -1
