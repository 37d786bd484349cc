"""Numbers and untrusted text for people."""

import pytest

from jaxrl.tracking.readable import duration, visible


@pytest.mark.parametrize(("seconds", "text"), [(45, "45s"), (187, "3:07"), (3723, "1:02:03")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n\ttabs, naïve 東京 🦜", "two\n\ttabs, naïve 東京 🦜"),
        ("NUL \x00, ESC \x1b[2J, \r", "NUL \\x00, ESC \\x1b[2J, \\x0d"),
        ("\u202egnp.exe\u2069 \u200f", "\\u202egnp.exe\\u2069 \\u200f"),
        ("\u200bno width\ufeff", "\\u200bno width\\ufeff"),
        ("half \ud83e", "half \\ud83e"),
        ("\U000e0041tags", "\\U000e0041tags"),
        ("<script>&", "<script>&"),
    ],
)
def test_invisible_characters_are_shown_by_their_codes(text, shown):
    assert visible(text) == shown
