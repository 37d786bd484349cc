"""Formats numbers and untrusted text for the screen and the report."""

from __future__ import annotations

import re

# Control characters: they change the state of a terminal, and HTML does not allow them even as references.
# Tab and newline are harmless.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def number(value: float) -> str:
    """Formats with three significant digits, or as an integer from 1000 on: 0.123, 12,346, nan."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Formats seconds as 45s, 3:07 (minutes) or 1:02:03 (hours)."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}" if minutes else f"{whole}s"


def visible(text: str) -> str:
    """Replaces the invisible and misleading characters of an untrusted text by their codes, such as \\u200b.

    These are control characters, direction marks, characters without width, and lone surrogates, which cannot
    be encoded as UTF-8.
    """

    def code(match: re.Match[str]) -> str:
        number = ord(match[0])
        if number < 0x100:
            return f"\\x{number:02x}"
        return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"

    return _UNSEEN.sub(code, text)


# CONTROL and: direction marks, embeddings, overrides and isolates; blank characters and those without width;
# line and paragraph separators; tag characters, which spell invisible text.
_UNSEEN = re.compile(
    CONTROL.pattern[:-1]
    + "\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    + "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
