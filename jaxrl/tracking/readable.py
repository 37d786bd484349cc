"""Numbers and untrusted text as a person reads them, on the screen and on the report."""

from __future__ import annotations

import re

# Everything that moves a terminal's cursor or state, which is also what HTML cannot hold, not even as a
# reference; tab and newline are harmless.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def number(value: float) -> str:
    """Three significant digits, without an exponent where that reads better: 0.123, 12,346, nan."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
