"""Text of a growing response: whole characters, and nothing of a stop string."""

import pytest

from jaxrl.rollout.text_stream import TextStream


def utf8(tokens) -> str:
    return bytes(list(tokens)).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["plain", "naïve 東京 🦜!", "\N{REPLACEMENT CHARACTER}x"])
def test_a_text_stream_shows_whole_characters_only(text):
    stream = TextStream(utf8)
    pieces, shown = zip(*(stream.add(b) for b in text.encode()), strict=True)
    assert "".join(shown) + stream.flush() == text
    assert pieces == shown
    assert all(piece == "" or piece.encode().decode() in text for piece in pieces)


def test_bytes_that_are_no_character_do_not_delay_a_text():
    stream = TextStream(utf8)
    shown = [stream.add(0x80)[1] for _ in range(100)]
    assert len("".join(shown)) >= 90
    assert "".join(shown) + stream.flush() == utf8([0x80] * 100)


@pytest.mark.parametrize(
    "stop, expected", [(("cd",), "ab"), (("bcx", "cde"), "ab"), (("de", "c"), "ab"), (("q",), None)]
)
def test_nothing_of_a_stop_string_is_shown(stop, expected):
    stream = TextStream(utf8, stop)
    shown = ""
    for byte in b"abcdef":
        shown += stream.add(byte)[1]
        if stream.stopped:
            break
    assert stream.stopped == (expected is not None)
    assert shown + ("" if stream.stopped else stream.flush()) == (expected or "abcdef")
