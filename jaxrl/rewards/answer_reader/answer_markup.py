"""Removes the markup around an answer (Markdown, dollars, boxes) and compares texts regardless of markup."""

from __future__ import annotations

import re

from jaxrl.rewards.answer_reader.answer_tokens import (
    MAX_CHARS,
    SYMBOLS,
    Unreadable,
    is_op,
    tokens_of,
)

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
"""Matches the beginning of a box, its opening brace included."""

# No "~": before a number it reads as "about".
_SPACING = r"(?:\s|\\[ ,;:!]|\\q?quad(?![A-Za-z])|\\hspace\s*\{[^{}]*\})+"
_SPACING_AROUND = re.compile(rf"\A{_SPACING}|(?<!\\){_SPACING}\Z")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def undressed(text: str) -> str:
    """Returns an answer without Markdown, dollars, box and full stop around it."""
    while True:
        before = text
        text = without_spacing(without_spacing(text).strip("`"))
        if text.startswith("**") and text.endswith("**") and len(text) > 4:
            text = text[2:-2]
        text = re.sub(r"\A\*\*\s+|\s+\*\*\Z", "", text)
        text = re.sub(r"(?<![.\\])[.,;:\u3002]\s*\Z", "", text)
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and len(text) > len(opening + closing)
                and opening not in text[len(opening) : -len(closing)]
                and not text.endswith(r"\$")
            ):
                text = text[len(opening) : -len(closing)]
        box = BOX.match(text)
        if box and text.endswith("}") and closing_brace(text, box.end()) == len(text) - 1:
            text = text[box.end() : -1]
        if text == before:
            return text


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


def spelled(text: str) -> str:
    """Returns one text for all answers that differ in markup only; empty if there is only markup."""
    text = undressed(text)
    if len(text) > MAX_CHARS:
        return " ".join(text.split())
    try:
        tokens = tokens_of(text)
    except Unreadable:
        return " ".join(text.split())
    out: list[str] = []
    for n, token in enumerate(tokens):
        # Braces around a single token have no meaning.
        if is_op(token, "{") and any(is_op(t, "}") for t in tokens[n + 2 : n + 3]):
            continue
        if is_op(token, "}") and n >= 2 and is_op(tokens[n - 2], "{"):
            continue
        lower = token.kind == "word" and token.text not in SYMBOLS
        out.append(token.text.lower() if lower else token.text)
    return " ".join(out)
