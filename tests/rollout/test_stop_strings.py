"""Stop strings in many slots at once: text is made only where one can have ended, and none is missed."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxrl.rollout.stop_strings import NO_TOKEN, StopTokens, end_of_stop, tokens_to_search

PARROT = "\N{PARROT}"


def utf8(tokens) -> str:
    return bytes(int(t) for t in tokens).decode("utf-8", "replace")


# Tokens of several characters, of parts of characters, and without text.
PIECES = [b"", *(bytes([b]) for b in (*PARROT.encode(), *b"ab :\n")), b"ab", b"b:", b": ", b"\n\n"]
PIECES += [b"a" + PARROT.encode()[:2], PARROT.encode()[2:] + b"b", b" ab: a", "é:".encode()]


def of_pieces(tokens) -> str:
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", "replace")


def library(pieces: list[str], decoder) -> tokenizers.Tokenizer:
    """A tokenizer of the library with these tokens and this decoder."""
    pieces = [*pieces, *"ab:", "ab", "b:", "<unk>"]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({p: i for i, p in enumerate(dict.fromkeys(pieces))}, unk_token="<unk>")
    )
    tokenizer.decoder = decoder
    return tokenizer


# What published tokenizers do: Llama and Mistral, T5, BERT, GPT (old).
BYTES = [f"<0x{b:02X}>" for b in (*PARROT.encode(), 10, 97)]
TOKENIZERS = {
    "byte fallback": library(
        ["▁", "▁▁", "▁a", "▁ab:", "▁:", *BYTES],
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    ),
    "metaspace": library(["▁", "▁a", "▁ab:", "▁:"], decoders.Metaspace()),
    "wordpiece": library(["##a", "##b:", ".", "n't", "##:"], decoders.WordPiece()),
    "word ends": library(["a</w>", "ab:</w>", ":</w>"], decoders.BPEDecoder("</w>")),
}
# Functions from tokens to text, and the tokens.
DECODE = {"pieces": (of_pieces, range(len(PIECES))), "bytes": (utf8, list(b"ab :\n"))} | {
    name: (lambda tokens, t=t: t.decode([int(x) for x in tokens]), range(t.get_vocab_size()))
    for name, t in TOKENIZERS.items()
}


@pytest.mark.parametrize("name", DECODE)
@settings(max_examples=200)
@given(st.data())
def test_no_end_of_a_stop_string_is_missed(name, data):
    """Against a search of the text of every slot in every dispatch."""
    decode, alphabet = DECODE[name]
    turn = np.array(
        data.draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=9)), np.int32
    )
    # Stop strings that occur, most of them in the middle of tokens and some in none.
    text = decode(turn).replace("\N{REPLACEMENT CHARACTER}", "") or "a"
    start = data.draw(st.integers(0, len(text) - 1))
    stop = (
        text[start : start + data.draw(st.integers(1, 6))],
        data.draw(st.text("ab: ", min_size=1)),
    )
    stop_tokens, W, first = StopTokens(stop, decode), data.draw(st.integers(1, 4)), 0
    while first < len(turn):
        new = turn[first : first + data.draw(st.integers(1, W))]
        first, count = first + len(new), len(new)
        tail = turn[:first][-tokens_to_search(count, stop) :]
        # Entries behind the new tokens are those of another dispatch.
        padded = np.concatenate([new, turn[: W - count], np.zeros(W, np.int32)])[:W]
        before = turn[first - count - 1] if first > count else NO_TOKEN
        (may_end,) = stop_tokens.may_end(np.array([before]), padded[None], np.array([count]))
        end = end_of_stop(tail, count, stop, decode)
        assert may_end or end is None
        if end is not None:
            break


@pytest.mark.parametrize(
    "before, text, expected",
    [
        ("", "ab", False),
        ("", "xx:", False),  # "x" is no part of it
        ("", "ab:", True),
        ("", "b:xx", True),  # "a" may be the token before
        ("", ":xxx", True),
        ("", "xb:", True),  # "b" is inside of it, and only one token before is looked at
        ("b", ":xxx", True),
        ("x", ":xxx", False),
        ("x", "xb:", True),
    ],
)
def test_slots_by_hand(before, text, expected):
    tokens_W = np.frombuffer(text.encode().ljust(6, b":"), np.uint8).astype(np.int32)
    stop_tokens = StopTokens(("ab:",), utf8)
    stop_tokens.may_end(np.full(1, NO_TOKEN), np.frombuffer(b"abx:", np.uint8)[None], np.array([4]))
    found = stop_tokens.may_end(
        np.array([ord(before) if before else NO_TOKEN, ord("a")]),
        np.stack([tokens_W, np.full(6, ord("x"))]),
        np.array([len(text), 6]),
    )
    assert found.tolist() == [expected, False]


@pytest.mark.parametrize("name", ["byte fallback", "metaspace"])
def test_the_space_before_a_word_counts_though_a_text_begins_without(name):
    decode, tokenizer = DECODE[name][0], TOKENIZERS[name]
    tokens = np.array([tokenizer.token_to_id("b"), tokenizer.token_to_id("▁a")], np.int32)
    assert decode(tokens) == "b a" and decode(tokens[1:]) == "a"
    before = np.array([NO_TOKEN])
    assert StopTokens((" a",), decode).may_end(before, tokens[None], np.array([2])).all()


def test_the_text_of_a_token_is_made_twice_in_all():
    calls = []

    def counted(tokens):
        calls.append(len(tokens))
        return utf8(tokens)

    stop_tokens = StopTokens(("never said",), counted)
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.integers(ord("a"), ord("z") + 1, (64, 16)).astype(np.int32)
        stop_tokens.may_end(np.full(64, NO_TOKEN), tokens, np.full(64, 16))
    assert sorted(calls) == [1] * 26 + [2] * 26
