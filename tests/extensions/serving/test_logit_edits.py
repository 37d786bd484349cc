"""Edits of logits in a live loop: numbers by hand, a NumPy twin, and requests without edits beside them."""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
import pytest
from byte_engine import LAYOUTS, MODEL, decode, engine_of, placed, weights
from closeness import assert_close
from extras import import_extra
from plain_pass import plain_logits, plain_logprobs
from test_live_loop import Heard, drain
from test_paged import BASE, backend_of

from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError
from jaxrl.rollout import speculation
from jaxrl.rollout.decode_loop import End
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.live_loop import LiveError, LiveLoop, Request
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl_serving.openai.logit_edits import LogitEdits, json_grammar, matcher_of

PROMPT = (3, 4, 5, 3, 9)
PENALTIES = LogitEdits(presence_penalty=0.4, frequency_penalty=0.3)


def request_of(edits=None, *, seed=0, prompt=PROMPT, max_tokens=12, **options) -> Request:
    given = {"temperature": 0.8, "edits": edits, **options}
    return Request(np.array(prompt, np.int32), max_tokens, seed, SamplingOptions(**given))


def answered(live: LiveLoop, *requests: Request) -> list[Heard]:
    heard = [Heard() for _ in requests]
    live.submit_all(list(zip(requests, heard, strict=True)))
    drain(live)
    return heard


@pytest.fixture(scope="module")
def live():
    return backend_of().live()


def test_a_bias_forces_and_forbids_tokens(live):
    """Logits of this model differ by less than 100."""
    usual, forced, forbidden = answered(
        live,
        request_of(num_samples=8, temperature=2.0),
        request_of(LogitEdits({7: 100.0}), num_samples=8, temperature=2.0),
        request_of(LogitEdits({i: -100.0 for i in range(258) if i not in (5, 6)}), num_samples=8),
    )
    assert len({t for k in range(8) for t in usual.joined("tokens", k)}) > 8
    for k in range(8):
        assert forced.joined("tokens", k).tolist() == [7] * 12 and forced.end(k) is End.FULL
        assert set(forbidden.joined("tokens", k)) <= {5, 6}
        # The model's own log-probabilities, not those of what was drawn.
        expected = plain_logprobs(
            MODEL, weights(), PROMPT, [7] * 12, longest=BASE.max_context_tokens, temperature=2.0
        )
        assert_close(forced.joined("logprob", k), expected, scale=1)


def test_a_bias_is_added_before_truncation(live):
    """Top-k of one token is the token that the bias makes the most probable one."""
    edits = LogitEdits({8: 100.0, 9: 50.0})
    (heard,) = answered(live, request_of(edits, truncation=truncation_of(top_k=1, min_tokens=12)))
    assert heard.joined("tokens").tolist() == [8] * 12


@pytest.mark.parametrize("bias", [{}, {4: 1.5, 1: -100.0}], ids=["penalties", "with a bias"])
def test_penalties_are_those_of_a_greedy_twin_in_numpy(live, bias):
    edits = LogitEdits(bias, presence_penalty=0.4, frequency_penalty=0.3)
    (heard,) = answered(live, request_of(edits, max_tokens=40, temperature=0.0))
    tokens = heard.joined("tokens")
    logits_TV = plain_logits(
        MODEL, weights(), PROMPT, tokens, longest=BASE.max_context_tokens
    ).copy()
    for t, row_V in enumerate(logits_TV):
        # Tokens of the prompt do not count.
        count_V = np.bincount(tokens[:t], minlength=MODEL.vocab_size)
        row_V -= 0.4 * (count_V > 0) + 0.3 * count_V
        for token, value in bias.items():
            row_V[token] += value
        assert row_V.argmax() == tokens[t]
    (usual,) = answered(live, request_of(max_tokens=40, temperature=0.0))
    assert usual.joined("tokens").tolist() != tokens.tolist()


CASES = {
    "contiguous": (LAYOUTS["one device"], {}),
    "few pages": (LAYOUTS["one device"], {"cache": "paged", "cache_tokens": 160}),
    "speculation": (LAYOUTS["one device"], {"speculate": 3}),
    "deterministic": (LAYOUTS["one device"], {"deterministic": True}),
    "eight devices": (LAYOUTS["replicas and heads"], {}),
    "stages": (LAYOUTS["stages"], {}),
}


@pytest.mark.parametrize(
    "case",
    ["contiguous", *(pytest.param(case, marks=pytest.mark.long) for case in list(CASES)[1:])],
)
def test_nothing_changes_beside_edited_requests(case, live, monkeypatch):
    """Neither do they change by what runs beside them, in what way ever it decodes."""
    monkeypatch.setattr(speculation, "OFF_ON", ())
    plain = [request_of(seed=i, num_samples=2, max_tokens=30) for i in range(3)]
    edited = [
        request_of(PENALTIES, seed=7, max_tokens=20, num_samples=2),
        request_of(LogitEdits({5: 2.0}), seed=8, max_tokens=9),
        request_of(seed=9, max_tokens=25, top_logprobs=3),
    ]
    alone = [answered(live, request)[0] for request in (*plain, *edited)]
    layout, changes = CASES[case]
    other = backend_of(layout, **changes).live()
    beside = [Heard() for _ in alone]
    # Some in one turn and others later: they meet in all ways.
    for request, heard in zip((*plain, *edited), beside, strict=True):
        other.submit(request, heard)
        other.turn()
    drain(other)
    for one, two in zip(alone, beside, strict=True):
        for k in one.turns:
            assert one.joined("tokens", k).tolist() == two.joined("tokens", k).tolist()
            assert_close(two.joined("logprob", k), one.joined("logprob", k), scale=1)


@pytest.mark.parametrize("edits", [None, PENALTIES], ids=["alone", "with edits"])
def test_the_most_probable_tokens_are_those_of_a_plain_pass(live, edits):
    (heard,) = answered(live, request_of(edits, top_logprobs=5, temperature=0.7))
    tokens = heard.joined("tokens")
    logits_TV = plain_logits(MODEL, weights(), PROMPT, tokens, longest=BASE.max_context_tokens)
    expected_TV = jax.nn.log_softmax(logits_TV / np.float32(0.7))
    found = [turn.top for turn in heard.turns[0]]
    ids_TK, logprob_TK = (np.concatenate(x) for x in zip(*found, strict=True))
    np.testing.assert_array_equal(ids_TK, np.argsort(-expected_TV, kind="stable")[:, :5])
    assert_close(logprob_TK, -np.sort(-expected_TV)[:, :5], scale=1)
    # Only edits that change from token to token cost a dispatch for each.
    assert max(len(turn.tokens) for turn in heard.turns[0]) == (1 if edits else 4)
    assert all(turn.top is None for turn in answered(live, request_of())[0].turns[0])


def test_what_has_no_edits_compiles_nothing_new():
    # Of its own: those that tests share have compiled before.
    engine = engine_of.__wrapped__(base=BASE)
    backend = OfflineBackend(engine, functools.partial(map, decode))
    backend.load(placed(weights(), MODEL, engine.mesh))
    live = backend.live()

    def compiled() -> tuple[int, int]:
        return engine.generate._cache_size(), engine.generate_edited._cache_size()  # pyright: ignore

    answered(live, request_of(num_samples=8, max_tokens=30))
    plain, edited = compiled()
    assert plain and not edited
    answered(live, request_of(PENALTIES, num_samples=5), *[request_of(seed=i) for i in range(3)])
    assert compiled() == (plain, plain)
    # Up to 8 rows are one program.
    answered(live, request_of(PENALTIES, num_samples=8), request_of(top_logprobs=20))
    answered(live, request_of(num_samples=8, max_tokens=30))
    assert compiled() == (plain, plain)


def test_an_unknown_token_is_refused(live):
    with pytest.raises(
        UserError, match="logit_bias has token id 258; this model's go from 0 to 257"
    ):
        live.submit(request_of(LogitEdits({258: 1.0})), print)


# Grammars

TOKENIZER = train_tokenizer(["one two three"], vocab_size=270)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "é"]}}, "required": ["a"]}


@functools.cache
def grammar_of(schema: str):
    import_extra("json", "llguidance")
    return matcher_for(json.loads(schema))


def matcher_for(schema, tokenizer=TOKENIZER):
    return matcher_of(tokenizer, tokenizer.stop_ids, json_grammar(schema), "response_format")


def allowed(edits: LogitEdits, text: str, vocabulary: int = 300) -> set[int]:
    """The tokens that may follow a text."""
    sample, row_V = edits.begin(), np.zeros(vocabulary, np.float32)
    sample.add(TOKENIZER.encode(text))
    sample.fill(row_V)
    assert not sample.error
    return set(np.flatnonzero(row_V == 0).tolist())


def test_a_grammar_allows_what_may_follow_and_ends_with_the_stop_id():
    edits = LogitEdits(grammar=grammar_of(json.dumps(SCHEMA | {"additionalProperties": False})))
    (quote,) = TOKENIZER.encode('"').tolist()
    begun = allowed(edits, '{"a":')
    assert quote in begun and 1 not in begun and max(begun) < TOKENIZER.vocab_size
    assert allowed(edits, '{"a":"') == {TOKENIZER.encode("x")[0], TOKENIZER.encode("é")[0]}
    # No token is left but <eos>; a second sample of the request is still at its beginning.
    assert allowed(edits, '{"a":"é"}') == {1}
    assert TOKENIZER.encode("{")[0] in allowed(edits, "")


def test_a_grammar_may_begin_after_a_token():
    edits = LogitEdits(grammar=grammar_of('{"type": "boolean"}'), grammar_after=17)
    assert len(allowed(edits, "")) == 300
    sample, row_V = edits.begin(), np.zeros(300, np.float32)
    sample.add(np.array([*TOKENIZER.encode("one"), 17, *TOKENIZER.encode("tr")]))
    sample.fill(row_V)
    assert np.flatnonzero(row_V == 0).tolist() == TOKENIZER.encode("u").tolist()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nothing"}, r"cannot be enforced \(Invalid type: nothing\); change or leave out"),
        ({"type": "array", "uniqueItems": True}, r'Unimplemented keys: \["uniqueItems"\]'),
        ({"$ref": "http://127.0.0.1/x"}, "is not present in a registry"),
        ({"type": "string", "pattern": "(?=a)b"}, "cannot be enforced"),
        ({"const": "\ud800"}, "schema"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema, message):
    import_extra("json", "llguidance")
    with pytest.raises(UserError, match=message):
        matcher_for(schema)


def test_without_llguidance_a_response_format_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    other = dataclasses.replace(TOKENIZER)
    with pytest.raises(UserError, match="need the extra json, which this server lacks"):
        matcher_for(SCHEMA, other)


@pytest.mark.parametrize("limit", [{"max_items_in_row": 3}, {"max_lexer_states": 20}], ids=str)
def test_a_grammar_that_fails_fails_its_request_alone(live, limit):
    """Some schemas need too much only when tokens are read, or when the next ones are looked for."""
    llguidance = import_extra("json", "llguidance")
    tokens = llguidance.LLTokenizer(TOKENIZER.backend.to_str(), eos_token=[1])
    text = llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}')
    limits = llguidance.LLParserLimits(**limit)
    edits = LogitEdits(grammar=llguidance.LLMatcher(tokens, text, log_level=0, limits=limits))
    failed, usual = answered(live, request_of(edits), request_of(seed=1))
    assert isinstance(failed.error, LiveError) and "the grammar of the answer failed" in str(
        failed.error
    )
    assert usual.error is None and usual.end() is not None
