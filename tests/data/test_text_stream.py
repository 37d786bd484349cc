"""Text of a growing response: whole characters, and nothing of a stop string."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.data.tokenizer import TextStream
from jaxrl.rollout.stop_strings import end_of_stop, tokens_to_search


def utf8(tokens) -> str:
    return bytes(list(tokens)).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["plain", "naïve 東京 🦜!", "\N{REPLACEMENT CHARACTER}x"])
def test_a_text_stream_shows_whole_characters_only(text):
    stream = TextStream(utf8)
    pieces, shown = zip(*(stream.add([b]) for b in text.encode()), strict=True)
    assert "".join(shown) + stream.end() == text
    assert tuple(p for (p,) in pieces) == shown
    assert all(piece == "" or piece.encode().decode() in text for (piece,) in pieces)


def test_bytes_that_are_no_character_do_not_delay_a_text():
    stream = TextStream(utf8)
    shown = [stream.add([0x80])[1] for _ in range(100)]
    assert len("".join(shown)) >= 90
    assert "".join(shown) + stream.end() == utf8([0x80] * 100)


@pytest.mark.parametrize(
    "stop, expected", [(("cd",), "ab"), (("bcx", "cde"), "ab"), (("de", "c"), "ab"), (("q",), None)]
)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_nothing_of_a_stop_string_is_shown(stop, expected, size):
    """Whether tokens come one at a time or several, of which the later ones are cut off."""
    stream = TextStream(utf8, stop)
    tokens, shown, end = np.frombuffer(b"abcdef", np.uint8), "", None
    for start in range(0, 6, size):
        end = end_of_stop(tokens[: start + size], size, stop, utf8)
        shown += stream.add(tokens[start : start + size if end is None else end])[1]
        assert "abcdef".startswith(shown) and not any(s in shown for s in stop)
        if end is not None:
            break
    assert (end is not None) == (expected is not None)
    assert shown + stream.end(at_stop_string=end is not None) == (expected or "abcdef")


def test_text_that_only_began_like_a_stop_string_is_shown_later():
    stream = TextStream(utf8, ("cd!",))
    assert [stream.add([b])[1] for b in b"abcde"] == ["a", "b", "", "", "cde"]


@given(
    st.text("ab\N{PARROT}", max_size=12),
    st.lists(st.text("ab\N{PARROT}", min_size=1, max_size=3), max_size=3),
    st.integers(0, 30),
)
def test_the_end_of_a_stop_string_is_the_first_at_which_the_text_has_one(text, stop, newest):
    tokens = np.frombuffer(text.encode(), np.uint8)
    newest = min(newest, len(tokens))
    ends = range(len(tokens) - newest + 1, len(tokens) + 1)
    found = [end for end in ends if any(s in utf8(tokens[:end]) for s in stop)]
    expected = found[0] if found else None
    decoded = []

    def counted(tokens):
        decoded.append(len(tokens))
        return utf8(tokens)

    assert end_of_stop(tokens, newest, stop, counted) == expected
    assert len(decoded) <= (1 if expected is None else 2 + np.log2(newest + 1))
    # The last tokens alone are enough, unless a stop string ended before.
    last = tokens[max(0, len(tokens) - tokens_to_search(newest, stop)) :]
    if newest and not any(s in utf8(tokens[: ends[0] - 1]) for s in stop):
        cut = len(tokens) - len(last)
        assert end_of_stop(last, newest, stop, utf8) == (
            None if expected is None else expected - cut
        )
