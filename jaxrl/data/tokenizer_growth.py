"""Bounds how much longer a tokenizer.json can make a text, before the library reads the file.

A tokenizer comes from a stranger and holds lists of steps: normalizer, pre-tokenizer and decoder. Forty
steps that each write every "a" twice make a terabyte of one letter. The library cannot be interrupted and
takes the process down with it, and it normalises added tokens while it reads the file. So the steps are
checked before. Each multiplies a text's bytes by no more than:

    Replace        new / old; of a pattern, which may match between letters, 1 + 2 x new
    Prepend        1 + its text
    Precompiled    the longest text in its table
    NFC, NFD       3           (these and the next by the Unicode FAQ on normalisation)
    NFKC, NFKD     11
    ByteLevel      2, and twice as much with a space in front
    Metaspace      twice its replacement

Not covered: regular expressions that search for very long. The library's engine, Oniguruma, gives up after
ten million steps at one place.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.errors import UserError

# XLNet's steps come to 6,534 by these bounds, more than those of any other published tokenizer.
_MAX_GROWTH = 10_000
# Published tokenizers have up to 8, one inside another.
_MAX_STEPS = 64
_MAX_DEPTH = 8
# What the added tokens of a file may come to when they are normalised.
_MAX_ADDED_BYTES = 1 << 26

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
# Old files leave the type out, and new versions of the library bring new ones.
_UNKNOWN = 8.0
_BY_TYPE: Mapping[str, float] = {
    "Sequence": 1.0,
    # Letters that are longer in their other case have two bytes and get three.
    "Lowercase": 1.5,
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Strip": 1.0,
    "StripAccents": 1.0,
    "Nmt": 1.0,
    "Replace": 1.0,
    "Prepend": 1.0,
    "Precompiled": 1.0,
    "BertNormalizer": 8.0,
    "ByteLevel": 2.0,
    "Metaspace": 1.0,
    "Split": 1.0,
    "Digits": 1.0,
    "Punctuation": 1.0,
    "Whitespace": 1.0,
    "WhitespaceSplit": 1.0,
    "BertPreTokenizer": 1.0,
    "CharDelimiterSplit": 1.0,
    "UnicodeScripts": 1.0,
    "FixedLength": 1.0,
    "ByteFallback": 1.0,
    "Fuse": 1.0,
    "WordPiece": 2.0,
    # Each may write a space between any two letters.
    "BPEDecoder": 3.0,
    "CTC": 3.0,
    "TemplateProcessing": 1.0,
    "BertProcessing": 1.0,
    "RobertaProcessing": 1.0,
}


def check_growth(content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuses a tokenizer that could make a text more than 10,000 times as long.

    What is malformed otherwise is left to the library, which says what it misses.

    Args:
      content: of the tokenizer.json.
      path: of the file, for messages.

    Raises:
      UserError: the steps of a part multiply to more, there are too many, or added tokens would be normalised
        to more than 64 MiB.
    """
    growth = {}
    for part in _PARTS:
        steps = list(_steps(content.get(part), path, part))
        if len(steps) > _MAX_STEPS:
            raise _refusal(path, f"a {part} of {len(steps)} steps", f"{_MAX_STEPS} steps")
        growth[part] = math.prod(map(_factor, steps))
        if growth[part] > _MAX_GROWTH:
            raise _refusal(
                path,
                f"a {part} that can make a text {_shown(growth[part])} times as long",
                f"{_MAX_GROWTH:,} times",
            )
    added = growth["normalizer"] * _normalised_bytes(content.get("added_tokens"))
    if added > _MAX_ADDED_BYTES:
        raise _refusal(
            path,
            f"added tokens that its normalizer can make {_shown(added)} bytes of",
            f"{_MAX_ADDED_BYTES:,} bytes",
        )


def _refusal(path: str | os.PathLike[str], found: str, most: str) -> UserError:
    return UserError(
        f"{path} has {found}; at most {most} are taken: copy the published file again, and do not use it "
        "if it is so there"
    )


def _steps(
    step: Any, path: str | os.PathLike[str], part: str, depth: int = 0
) -> Iterator[dict[str, Any]]:
    """A step and all steps in it."""
    if depth > _MAX_DEPTH:
        raise _refusal(path, f"a {part} of steps nested more deeply", f"{_MAX_DEPTH} levels")
    if not isinstance(step, dict):
        return
    yield step
    for name in _LISTS:
        inner = step.get(name)
        for child in inner if isinstance(inner, list) else ():
            yield from _steps(child, path, part, depth + 1)


def _factor(step: dict[str, Any]) -> float:
    """The most bytes that a step makes of each byte, the steps in it aside."""
    kind = step.get("type")
    # Of a file without types, a list of steps is known by its name.
    known = isinstance(kind, str) or any(name in step for name in _LISTS)
    factor = _BY_TYPE.get(kind or "Sequence", _UNKNOWN) if known else _UNKNOWN
    if "pattern" in step and "content" in step:
        factor *= _replaced(step["pattern"], _num_bytes(step["content"]))
    factor *= 1 + _num_bytes(step.get("prepend"))
    if "precompiled_charsmap" in step:
        factor *= _longest_precompiled(step["precompiled_charsmap"])
    if kind == "Metaspace":
        factor *= 2 * max(1, _num_bytes(step.get("replacement")))
    if step.get("add_prefix_space") and kind == "ByteLevel":
        factor *= 2
    if isinstance(step.get("single"), list):
        factor *= max(1, sum("Sequence" in piece for piece in step["single"]))
    return factor


def _replaced(pattern: Any, new: int) -> float:
    old = _num_bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
    return max(1.0, new / old) if old else 1.0 + 2 * new


def _longest_precompiled(table: Any) -> int:
    """Bytes of the longest text that a SentencePiece table writes: its texts end with NUL, behind a trie."""
    try:
        content = base64.b64decode(table)
    except (TypeError, ValueError, binascii.Error):
        return 1  # the library refuses it
    trie = int.from_bytes(content[:4], "little")
    return max(1, *map(len, content[4 + trie :].split(b"\0"))) if content else 1


def _normalised_bytes(added: Any) -> int:
    tokens = (
        [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    )
    return sum(
        _num_bytes(token.get("content")) for token in tokens if token.get("normalized", True)
    )


def _num_bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number < 1e12 else f"{number:.0e}"
