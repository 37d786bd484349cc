"""Numbers and untrusted text as a person reads them, on the screen and on the report."""

from __future__ import annotations

import re

# Everything that moves a terminal's cursor or state, which is also what HTML cannot hold, not even as a
# reference; tab and newline are harmless.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def number(value: float) -> str:
    """Three significant digits, without an exponent where that reads better: 0.123, 12,346, nan."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """45s, 3:07 (minutes) or 1:02:03 (hours)."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}" if minutes else f"{whole}s"


def visible(text: str) -> str:
    """Text of strangers with what is not seen, or misleads the eye, shown by its code.

    Such are controls, marks that turn the direction of writing, what has no width, and halves of surrogate
    pairs, which have no UTF-8.
    """
    return _UNSEEN.sub(lambda match: _code(ord(match[0])), text)


# Beside CONTROL: direction marks, embeddings, overrides and isolates; what has no width or is blank; line
# and paragraph separators; tags, which spell text that nobody sees.
_UNSEEN = re.compile(
    CONTROL.pattern[:-1]
    + "\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    + "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def _code(number: int) -> str:
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
