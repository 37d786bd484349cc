import collections
import dataclasses
import json

import grain
import numpy as np
import pytest

from jaxrl.data import Record
from jaxrl.data.chat import ChatTemplate
from jaxrl.data.demonstrations import DemonstrationStream, solutions_of
from jaxrl.data.messages import PromptFormat
from jaxrl.data.prompt_encoding import encode_prompts, evaluation_prompts
from jaxrl.data.stream import PromptStream
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError

TOKENIZER = train_tokenizer(["Sum: 1 + 2 ="], vocab_size=258)
# Seven prompts; "{a} + {a} =" has one token a character.
RECORDS = [Record(f"{a} + {a} =", str(2 * a), "sums", f"{2 * a}") for a in range(7)]


def prompts(records=RECORDS, **settings):
    """A stream of one source; settings of the stream, of its prompts, and of their format."""
    order = {"prompts_per_batch": 3, "seed": 5}
    of_stream = {**order, **{k: settings.pop(k) for k in list(settings) if k in order}}
    return PromptStream([encoded(records, **settings).prompts], **of_stream)


def encoded(records=RECORDS, *, tokenizer=TOKENIZER, **settings):
    fields = [field.name for field in dataclasses.fields(PromptFormat)]
    prompt_format = PromptFormat(**{k: settings.pop(k) for k in list(settings) if k in fields})
    limits = {"max_prompt_tokens": 100, **settings}
    return encode_prompts(records, tokenizer, prompt_format=prompt_format, **limits)


def examples(records=RECORDS, **settings):
    defaults = {"examples_per_batch": 3, "seed": 5, "max_tokens": 100}
    return DemonstrationStream(solutions_of(records), TOKENIZER, **{**defaults, **settings})


def texts(stream, num_batches: int) -> list[str]:
    return [text for _ in range(num_batches) for text in next(stream).texts]


def take(stream, num_batches: int) -> list:
    """The next batches, tokens as lists."""
    batches = [next(stream) for _ in range(num_batches)]
    if isinstance(stream, PromptStream):
        return [(b.ids_N.tolist(), [t.tolist() for t in b.tokens], b.answers) for b in batches]
    return [[(p.tolist(), r.tolist()) for p, r, _ in batch] for batch in batches]


def test_every_prompt_once_an_epoch_in_a_new_order():
    seen = texts(prompts(prompts_per_batch=7), 5)
    epochs = [tuple(seen[i : i + 7]) for i in range(0, 35, 7)]

    assert all(sorted(epoch) == sorted(r.prompt for r in RECORDS) for epoch in epochs)
    assert len(set(epochs)) == 5


def test_fields_belong_together():
    batch = next(prompts(template="Sum: {prompt}"))
    for tokens, text, answer, source in zip(
        batch.tokens, batch.texts, batch.answers, batch.sources, strict=True
    ):
        record = next(r for r in RECORDS if r.answer == answer)
        assert text == f"Sum: {record.prompt}"
        assert tokens.dtype == np.int32
        assert (TOKENIZER.decode(tokens), source) == (text, "sums")


def test_order_depends_on_the_seed_alone():
    reference = texts(prompts(), 6)
    assert texts(prompts(), 6) == reference
    assert texts(prompts(prompts_per_batch=9), 2) == reference
    assert texts(prompts(seed=6), 6) != reference


@pytest.mark.parametrize("make", [prompts, examples, lambda: mixture()])
@pytest.mark.parametrize("num_taken", [0, 1, 4])
def test_restored_streams_continue_exactly(make, num_taken):
    stream = make()
    take(stream, num_taken)
    state = json.loads(json.dumps(stream.state()))
    expected = take(stream, 4)

    restored = make()
    take(restored, 2)  # wherever it stood before
    restored.restore(state)

    assert restored.state() == state
    assert take(restored, 4) == expected


@pytest.mark.parametrize(
    "other",
    [
        lambda: prompts(RECORDS[:6]),
        lambda: prompts([*RECORDS[:6], Record("9 + 9 =", "18", "sums")]),
        lambda: prompts([*RECORDS[:6], dataclasses.replace(RECORDS[6], answer="13")]),
        lambda: prompts([*RECORDS[:6], dataclasses.replace(RECORDS[6], extra={"seed": 1})]),
        lambda: prompts(seed=6),
        lambda: prompts(template="Sum: {prompt}"),
        lambda: examples(),
    ],
)
def test_a_state_of_other_data_is_refused(other):
    with pytest.raises(UserError, match="in other data"):
        other().restore(prompts().state())
    with pytest.raises(UserError, match="in other data"):
        mixture(weights=(1.0, 1.0)).restore(mixture().state())


def test_long_prompts_are_dropped_with_one_count(caplog):
    stream = prompts(
        [*RECORDS, Record("100 + 100 =", "200", "sums")] * 2,
        max_prompt_tokens=7,
        prompts_per_batch=14,
    )

    epoch = collections.Counter(texts(stream, 1))
    assert set(epoch.values()) == {2}
    assert "100 + 100 =" not in epoch
    assert [r.getMessage() for r in caplog.records] == [
        "2 of 16 prompts dropped: longer than max_prompt_tokens 7 (the longest has 11 tokens)"
    ]


def test_long_prompts_may_be_an_error():
    with pytest.raises(UserError, match="row 1 has a prompt of 11 tokens, and 1 rows"):
        prompts(
            [RECORDS[0], Record("100 + 100 =", "200", "s")], max_prompt_tokens=7, overlong="error"
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_prompt_tokens": 6}, "all 7 prompts are longer than max_prompt_tokens 6"),
        ({"template": "Solve it."}, "has no {prompt}"),
        ({"chat": True}, "no chat template"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        prompts(**settings)


def test_evaluation_prompts_keep_rows_and_order():
    rows = [RECORDS[0], Record("100 + 100 =", "200", "s"), *RECORDS[1:]]
    sets = [encoded(rows, max_prompt_tokens=7), encoded(RECORDS[:2])]
    evaluation = evaluation_prompts(sets)

    np.testing.assert_array_equal(evaluation.ids_N, [0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert evaluation.answers[:3] == ("0", "2", "4")
    np.testing.assert_array_equal(evaluation_prompts(sets[:1]).ids_N, sets[0].prompts.ids_N)


def test_a_missing_solution_is_named():
    with pytest.raises(UserError, match="row 1 of sums has no solution"):
        examples([RECORDS[0], Record("1 + 1 =", "2", "sums")])


# Formats, lengths, mixtures.

CHAT = (
    "{% if enable_thinking is defined and not enable_thinking %}(quick) {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}assistant:"
)
TALKER = dataclasses.replace(
    TOKENIZER, chat_template=ChatTemplate(CHAT, origin="this test", special_tokens={})
)
TALK = tuple({"role": role, "content": role} for role in ("user", "assistant", "user"))


@pytest.mark.parametrize(
    ("context", "settings", "text"),
    [
        ("1?", {}, "1?"),
        ("1?", {"template": "Q: {prompt}\n"}, "Q: 1?\n"),
        ("1?", {"system_prompt": "Be terse."}, "Be terse.\n1?"),
        ("1?", {"chat": True, "template": "<{prompt}>"}, "user: <1?>|assistant:"),
        (
            "1?",
            {"chat": True, "system_prompt": "Be terse."},
            "system: Be terse.|user: 1?|assistant:",
        ),
        (
            "1?",
            {"chat": True, "chat_options": {"enable_thinking": False}},
            "(quick) user: 1?|assistant:",
        ),
        (TALK, {"template": "<{prompt}>"}, "user: user|assistant: assistant|user: user|assistant:"),
        (TALK[:1], {"system_prompt": "S"}, "system: S|user: user|assistant:"),
        (
            ({"role": "system", "content": "own"}, *TALK[:1]),
            {"system_prompt": "S"},
            "system: own|user: user|assistant:",
        ),
    ],
)
def test_a_format_is_what_the_model_reads(context, settings, text):
    batch = encoded([Record(context, "1", "s")], tokenizer=TALKER, **settings).prompts
    assert batch.texts == (text,)
    assert TOKENIZER.decode(batch.tokens[0]) == text


@pytest.mark.parametrize(
    ("overlong", "kept"), [("left", "+ 23 ="), ("right", "100 + "), ("middle", "1003 =")]
)
def test_long_prompts_may_be_cut(overlong, kept):
    sets = encoded([Record("100 + 23 =", "123", "s")], max_prompt_tokens=6, overlong=overlong)
    assert TOKENIZER.decode(sets.prompts.tokens[0]).replace(" ", "") == kept.replace(" ", "")
    assert (sets.num_cut, sets.lengths.tolist()) == (1, [10])


def mixture(weights=(1.0, 3.0), seed=5, **settings):
    other = [Record(f"{a} - {a} =", "0", "differences") for a in range(40)]
    sets = [encoded(RECORDS).prompts, encoded(other).prompts]
    defaults = {"prompts_per_batch": 8}
    return PromptStream(sets, weights=weights, seed=seed, **{**defaults, **settings})


def test_sources_are_mixed_by_weight():
    stream = mixture()
    sources = [source for _ in range(50) for source in next(stream).sources]
    assert collections.Counter(sources) == {"sums": 100, "differences": 300}
    # Of any stretch each has its share.
    assert all(sources[i : i + 40].count("sums") in (9, 10, 11) for i in range(0, 360, 7))


def test_each_source_has_its_own_epochs():
    drawn = texts(mixture(weights=(0.25, 0.75)), 40)
    for of_source, count in ((" + ", 7), (" - ", 40)):
        own = [text for text in drawn if of_source in text]
        epochs = [own[i : i + count] for i in range(0, len(own) - count, count)]
        assert len(epochs) >= 2
        assert all(len(set(epoch)) == count for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs)


def test_one_source_is_in_grains_own_order():
    rows = grain.MapDataset.range(7).shuffle(seed=5).repeat()
    assert texts(prompts(), 7) == [RECORDS[rows[i]].prompt for i in range(21)]
