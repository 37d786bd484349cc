"""Refuses a tokenizer.json that can lengthen a text too much, before the library reads the file.

A tokenizer is untrusted code. Its normalizer, pre-tokenizer and decoder are lists of steps, and forty steps
that each double every "a" turn one letter into a terabyte. The library is compiled code: it cannot be
interrupted, it ends the process when memory runs out, and it normalises added tokens while it reads the file.
So the steps are checked before. A step multiplies the bytes of a text at most by:

    Replace        new / old; for a pattern, which may match between letters, 1 + 2 x new
    Prepend        1 + the bytes of its text
    Precompiled    the bytes of the longest text in its table
    NFC, NFD       3           (this and the next by the Unicode FAQ on normalisation)
    NFKC, NFKD     11
    ByteLevel      2, or 4 if it adds a space in front
    Metaspace      twice the bytes of its replacement

Not checked: slow regular expressions. Oniguruma, the library's engine, gives up after 10 million steps at one
position.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.errors import UserError

# Limit for the product of all steps. XLNet's steps come to 6,534, the largest of any published tokenizer.
_MAX_GROWTH = 10_000
# Limits for the steps and their nesting. Published tokenizers have up to 8 steps.
_MAX_STEPS = 64
_MAX_DEPTH = 8
# Limit for the added tokens of a file after normalisation.
_MAX_ADDED_BYTES = 1 << 26

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
# For steps without a type, as in old files, and for types of later versions of the library.
_UNKNOWN = 8.0
# Steps that only split, shorten or select, or whose factor depends on their settings; see `_factor`.
_KEEPING = (
    "Sequence Strip StripAccents Nmt Replace Prepend Precompiled Metaspace Split Digits Punctuation "
    "Whitespace WhitespaceSplit BertPreTokenizer CharDelimiterSplit UnicodeScripts FixedLength "
    "ByteFallback Fuse TemplateProcessing BertProcessing RobertaProcessing"
)
_BY_TYPE: Mapping[str, float] = {
    **dict.fromkeys(_KEEPING.split(), 1.0),
    "Lowercase": 1.5,  # some letters have two bytes, and three in the other case
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "BertNormalizer": 8.0,
    "ByteLevel": 2.0,
    "WordPiece": 2.0,
    "BPEDecoder": 3.0,  # this and CTC may write a space between any two letters
    "CTC": 3.0,
}


def check_growth(content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuses a tokenizer that can make a text more than 10,000 times as long.

    Other faults are left to the library, which reports them.

    Args:
      content: Content of the tokenizer.json.
      path: Path of the file, for messages.

    Raises:
      UserError: A part can lengthen a text too much or has too many steps, or the added tokens can exceed
        64 MiB after normalisation.
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
    """Yields a step and all steps inside it."""
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
    """The largest number of bytes that a step makes of one byte, without the steps inside it."""
    kind = step.get("type")
    # In a file without types, the name of its list identifies a Sequence.
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
    """Bytes of the longest text in a SentencePiece table: a trie, and then texts that end with NUL."""
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
