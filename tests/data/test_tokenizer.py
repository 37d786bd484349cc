import json
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from jaxrl.errors import UserError

QWEN = pathlib.Path(__file__).parents[2] / "../shared/data/tokenizers/qwen2.5"
needs_qwen = pytest.mark.skipif(not QWEN.is_dir(), reason="no Qwen tokenizer beside the repository")

TEXTS = [
    f"State the final answer: {a} + {b} =\n{a} + {b} = {a + b}\nAnswer: {a + b}"
    for a in range(20)
    for b in range(20)
]
TOKENIZER = train_tokenizer(TEXTS, vocab_size=320)


def write(directory: pathlib.Path, **files: dict) -> pathlib.Path:
    """A directory with the trained tokenizer, and these JSON files written over its own."""
    TOKENIZER.save(directory)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def assert_same(a: Tokenizer, b: Tokenizer):
    assert a.backend.to_str() == b.backend.to_str()
    assert (a.vocab_size, a.stop_ids) == (b.vocab_size, b.stop_ids)


# The trained one.


@settings(deadline=None)
@given(st.text())
def test_decoding_undoes_encoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_digit_is_a_token_and_words_are_short():
    ids = TOKENIZER.encode("Answer: 1234")

    assert ids.dtype == np.int32
    assert [TOKENIZER.decode([i]) for i in ids] == ["Answer", ":", " ", "1", "2", "3", "4"]


def test_special_tokens_come_first_and_are_not_read_back():
    assert (TOKENIZER.eos_id, TOKENIZER.stop_ids) == (1, (1,))
    ids = TOKENIZER.encode("12")
    assert TOKENIZER.decode([0, *ids, 1, 0]) == "12"


def test_ids_that_are_no_token_are_dropped():
    ids = TOKENIZER.encode("12")
    assert TOKENIZER.vocab_size <= 320
    assert TOKENIZER.decode([-1, *ids, TOKENIZER.vocab_size, 151_935]) == "12"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_batch_is_decoded_like_each_of_its_sequences(count):
    sequences = [np.append(TOKENIZER.encode(f"Answer: {n} é"), 151_935) for n in range(count)]
    assert TOKENIZER.decode_batch(sequences) == [TOKENIZER.decode(ids) for ids in sequences]


def test_same_texts_same_tokenizer():
    again = train_tokenizer(iter(TEXTS), vocab_size=320)
    assert_same(again, TOKENIZER)


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(UserError, match="at least 258"):
        train_tokenizer(TEXTS, vocab_size=100)


# Directories.


def test_saved_and_loaded_is_the_same(tmp_path):
    TOKENIZER.save(tmp_path)
    assert_same(load_tokenizer(tmp_path), TOKENIZER)


def test_every_end_of_generation_config_stops_and_is_saved(tmp_path):
    first = write(tmp_path / "a", generation_config={"eos_token_id": [5, 1]})
    loaded = load_tokenizer(first)
    loaded.save(tmp_path / "b")

    assert (loaded.eos_id, loaded.stop_ids) == (1, (1, 5))
    assert_same(load_tokenizer(tmp_path / "b"), loaded)


GENERATION, MODEL = "generation_config", "config"
NESTED = {"text_config": {"eos_token_id": [5, 6]}}


@pytest.mark.parametrize(
    ("files", "stop_ids"),
    [
        ({MODEL: {"eos_token_id": [5, 1]}}, (1, 5)),
        ({MODEL: {"eos_token_id": 5}}, (1, 5)),
        ({MODEL: {"eos_token_id": 1}}, (1,)),
        ({MODEL: {"eos_token_id": [5, 5, 6]}}, (1, 5, 6)),
        ({MODEL: {"eos_token_id": None}}, (1,)),
        ({MODEL: {"eos_token_id": []}}, (1,)),
        ({MODEL: {}}, (1,)),
        ({MODEL: {"text_config": None}}, (1,)),
        ({MODEL: NESTED}, (1, 5, 6)),
        ({MODEL: NESTED | {"eos_token_id": None}}, (1, 5, 6)),
        ({MODEL: NESTED | {"eos_token_id": 7}}, (1, 7)),
        # The file of generation decides, if it names any.
        ({MODEL: {"eos_token_id": [5, 6]}, GENERATION: {"eos_token_id": [1, 7]}}, (1, 7)),
        ({MODEL: {"eos_token_id": [5, 6]}, GENERATION: {"eos_token_id": 0}}, (1, 0)),
        ({MODEL: {"eos_token_id": [5, 6]}, GENERATION: {"eos_token_id": None}}, (1, 5, 6)),
        ({MODEL: {"eos_token_id": [5, 6]}, GENERATION: {"eos_token_id": []}}, (1, 5, 6)),
        ({MODEL: NESTED, GENERATION: {"temperature": 1.0}}, (1, 5, 6)),
        ({MODEL: {"eos_token_id": [5, 6]}, "tokenizer_config": {}}, (5, 6)),
    ],
)
def test_all_ends_of_a_model_stop(tmp_path, files, stop_ids):
    assert load_tokenizer(write(tmp_path, **files)).stop_ids == stop_ids


def test_a_model_of_another_directory_says_where_its_answers_end(tmp_path):
    """As in Transformers, whose generation reads the files of the model alone."""
    directory = write(tmp_path / "words", **{GENERATION: {"eos_token_id": [7, 8]}})
    for name, files, stop_ids in (
        ("both", {MODEL: {"eos_token_id": 6}, GENERATION: {"eos_token_id": [5, 1]}}, (1, 5)),
        ("one", {MODEL: {"eos_token_id": 6}}, (1, 6)),
        ("none", {}, (1,)),
    ):
        model = write(tmp_path / name, **files)
        (model / "tokenizer.json").write_text("{}")
        assert load_tokenizer(directory, model=model).stop_ids == stop_ids
    model = write(tmp_path / "other", **{MODEL: {"eos_token_id": 320}})
    ids = TOKENIZER.vocab_size - 1
    with pytest.raises(
        UserError,
        match=f"other/config.json has eos_token_id 320, .*/words/tokenizer.json go from 0 to {ids},",
    ):
        load_tokenizer(directory, model=model)


ODD_ENDS = ["1", "<eos>", True, 1.0, 1.5, {}, {"id": 1}, [[1]], [1, None], [1, "2"], [True]]


@pytest.mark.parametrize("ids", ODD_ENDS, ids=str)
@pytest.mark.parametrize("name", [GENERATION, MODEL])
def test_ends_that_are_no_ids_are_named(tmp_path, name, ids):
    for i, values in enumerate(({"eos_token_id": ids}, {"text_config": {"eos_token_id": ids}})):
        with pytest.raises(UserError, match=rf"/{name}.json has eos_token_id .* must be a token"):
            load_tokenizer(write(tmp_path / str(i), **{name: values}))


def test_end_token_may_be_a_dict_or_come_from_generation_config(tmp_path):
    as_dict = write(tmp_path / "a", tokenizer_config={"eos_token": {"content": "<eos>"}})
    generation = {"eos_token_id": 7}
    without = write(tmp_path / "b", tokenizer_config={}, generation_config=generation)

    assert load_tokenizer(as_dict).eos_id == 1
    assert load_tokenizer(without).stop_ids == (7,)


def test_a_chat_template_in_a_file_wins_over_the_key(tmp_path):
    # Indentation before a block and the newline after it are not part of the text.
    key = "  {% for m in messages %}\n{{ bos_token }}{{ m.content | tojson }}{% endfor %}"
    config = {"eos_token": "<eos>", "bos_token": "<pad>", "chat_template": key}
    directory = write(tmp_path, tokenizer_config=config)
    messages = [{"role": "user", "content": "2 < é"}]

    assert load_tokenizer(directory).render_chat(messages) == '<pad>"2 < é"'
    (directory / "chat_template.jinja").write_text("{{ messages[0].role }}{{ mood }}")
    assert load_tokenizer(directory).render_chat(messages, mood="!") == "user!"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {}}, 'tokenizer_config.json names no "eos_token"'),
        ({"tokenizer_config": {"eos_token": "</s>"}}, "names the token '</s>'"),
        ({"tokenizer_config": ["<eos>"]}, "holds no JSON object"),
        ({"tokenizer": {"model": "?"}}, "tokenizer.json is no readable tokenizer"),
        ({"generation_config": {"eos_token_id": [1, -1]}}, "eos_token_id -1, and the ids of"),
        ({"generation_config": {"eos_token_id": 10**12}}, "so no response would end there"),
        ({"config": {"eos_token_id": [1, 320]}}, "/config.json has eos_token_id 320, and the ids"),
        ({"config": [1]}, "/config.json holds no JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(write(tmp_path, **files))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_and_cut_files_are_named(tmp_path, name):
    file = write(tmp_path) / name
    file.write_text(file.read_text()[:20])
    with pytest.raises(UserError, match=f"{name} is no .* copy the published file again"):
        load_tokenizer(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=f"{name} does not exist; put the"):
        load_tokenizer(tmp_path)


# <tool> is added, but its text is shown; ids 0 and 1 are special.
TOOL_TOKENIZER = train_tokenizer(TEXTS, vocab_size=320)
TOOL_TOKENIZER.backend.add_tokens(["<tool>"])


@pytest.mark.parametrize(
    ("stop", "ids"),
    [
        ((), ()),
        (("<eos>",), (1,)),
        (("<pad>", "\n", "<eos>", "<pad>"), (0, 1)),
        # Texts, which are found as such: parts of names, other names, tokens that have a text.
        (("<eo", "eos", "<|im_end|>", "</s>", "\n\n", "<tool>", "<EOS>", "< eos >"), ()),
        (("<tool>\n", "<eos>"), (1,)),
    ],
)
def test_stop_strings_that_are_special_tokens_are_ids(stop, ids):
    assert TOOL_TOKENIZER.ids_named_by(stop) == ids


@pytest.mark.parametrize(
    "stop",
    ["\n<eos>", "<eos>\n", " <eos>", "<eos><eos>", "<pad><eos>", "Answer:<pad>", "<tool><eos>"],
)
def test_a_stop_string_with_a_special_token_in_it_is_refused(stop):
    with pytest.raises(UserError, match=r"no answer's text has special tokens; use '<\w+>' alone"):
        TOOL_TOKENIZER.ids_named_by(["x", stop])


# A published one.


@needs_qwen
def test_qwen_ids(tmp_path):
    qwen = load_tokenizer(QWEN)
    text = "Let $x^2 = 10$.\n\n那么 x = ±√10 🙂"

    assert qwen.encode("Hello world").tolist() == [9707, 1879]
    assert (qwen.vocab_size, qwen.eos_id) == (151_665, 151_645)
    assert qwen.decode([9707, 1879, 151_645, 151_935]) == "Hello world"
    assert qwen.decode(qwen.encode(text)) == text
    qwen.save(tmp_path)
    assert_same(load_tokenizer(tmp_path), qwen)


@needs_qwen
def test_qwen_chat_from_file_and_from_key(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QWEN / name, tmp_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )

    for qwen in (load_tokenizer(QWEN), load_tokenizer(tmp_path)):
        assert qwen.render_chat(messages) == expected
        ids = qwen.encode(qwen.render_chat(messages, add_generation_prompt=False))
        # One id for each special token: 151644 opens a turn, 151645 closes it.
        assert [i for i in ids.tolist() if i > 151_642] == [151_644, 151_645] * 2
