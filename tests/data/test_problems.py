"""The problems of a run: several sources, each with its grader and format, none of them evaluated with."""

import functools
import json

import numpy as np
import pytest

from jaxrl.data.data_card import data_card, histogram
from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.data.problems import ProblemReader
from jaxrl.data.prompt_encoding import encode, stream_inputs
from jaxrl.data.row_layouts import DAPO_AFTER, DAPO_BEFORE
from jaxrl.data.stream import PromptStream
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError
from jaxrl.trainer.run_rewards import truth_faults

TOKENIZER = train_tokenizer(["1 + 1"], vocab_size=258)
GRADERS = """
from jaxrl.errors import UserError
from jaxrl.rewards import Grade

def upper(response, answer):
    if not answer.isupper():
        raise UserError(f"{answer!r} is not upper case")
    return Grade(response == answer, response)
"""


@pytest.fixture
def data(tmp_path, monkeypatch) -> DataConfig:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graders.py").write_text(GRADERS)

    def rows(name, *answers, start=0):
        lines = [{"problem": f"{name} {start + i}", "answer": x} for i, x in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    rows("sums", "1", "2", "y" * 400)
    rows("words", "A", "b", "C")
    rows("test", "1", "2")
    (tmp_path / "words_test.jsonl").write_text('{"problem": "words  2", "answer": "C"}')
    return DataConfig(
        train=SourceConfig(path="sums.jsonl"),
        sources={"words": SourceConfig(path="words.jsonl", grader="graders.py:upper", weight=3.0)},
        evaluation=SourceConfig(path="test.jsonl"),
        evaluations={"words": SourceConfig(path="words_test.jsonl", grader="graders.py:upper")},
    )


def read(data):
    return ProblemReader(data).read(functools.partial(truth_faults, ("answer", {})))


def test_every_truth_is_put_to_the_grader_of_its_source(data):
    problems = read(data)
    assert [record.answer for record in problems.train_records] == ["1", "2", "A"]
    assert [record.answer for record in problems.evaluation_records] == ["1", "2", "C"]
    assert {name: source.grader for name, source in problems.settings.items()} == {
        "sums": "",
        "words": "graders.py:upper",
        "test": "",
        "words_test": "graders.py:upper",
    }


MADE = """
def make(index, rng):
    return {"problem": f"made {index}", "answer": "y" * 400 if index % 3 == 0 else str(index)}
"""


def test_generated_problems_are_held_against_graders_and_the_evaluation(data, tmp_path):
    (tmp_path / "made.py").write_text(MADE)
    (tmp_path / "test.jsonl").write_text('{"problem": "Made  1", "answer": "1"}')
    sources = {"made": SourceConfig(path="made.py:make")}
    made = DataConfig(**{**vars(data), "sources": sources})
    problems = read(made)
    encoded = encode(problems.train, made, TOKENIZER)
    card = data_card(problems, encoded)
    assert (
        "data.sources.made: made.py:make (made by a function, layout problem/answer), without"
        in card
    )
    assert (
        "22 ground truths that the grader cannot read, left out\n    made.py:make index 0" in card
    )
    assert "1 prompts of the evaluation, left out\n    made.py:make index 1" in card
    stream = PromptStream(
        stream_inputs(problems.train, encoded, made, TOKENIZER),
        weights=[source.settings.weight for source in problems.train],
        prompts_per_batch=4,
        seed=0,
    )
    # A sampler of the user's decides the shares.
    chosen = data_card(problems, encoded, sampler="my.py:Mine")
    assert "% of what is drawn" in card and "% of what is drawn" not in chosen
    assert chosen.count("drawn as my.py:Mine decides") == len(problems.train)
    texts = [text for _ in range(4) for text in next(stream).texts if "made" in text]
    assert texts == [f"made {n}" for n in (2, 4, 5, 7, 8, 10, 11, 13)]
    with pytest.raises(UserError, match=r"data\.sources\.made is endless, and.*\.made\.size"):
        _ = problems.train_records
    evaluated = DataConfig(**{**vars(data), "evaluations": sources})
    with pytest.raises(
        UserError, match=r"which only training can use; set data\.evaluations\.made"
    ):
        read(evaluated)


def test_one_name_with_two_graders_is_refused(data):
    evaluation = SourceConfig(path="words_test.jsonl", source="words")
    mixed = DataConfig(**{**vars(data), "evaluation": evaluation, "evaluations": {}})
    with pytest.raises(UserError, match="both call their problems 'words' and have different"):
        read(mixed)


def test_a_source_is_read_once(data, tmp_path):
    reader = ProblemReader(data)
    for read_one in reader.readers.values():
        read_one()
    assert list(reader.readers) == [
        "data.train",
        "data.sources.words",
        "data.evaluation",
        "data.evaluations.words",
    ]
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    assert len(reader.read(None).train_records) == 5


def test_lengths_are_counted_by_doubling():
    assert histogram(np.array([1, 64, 65, 300])) == [(64, 2), (128, 1), (256, 0), (512, 1)]
    assert histogram(np.array([70])) == [(128, 1)]


def test_dapos_words_stay_unless_others_are_set(tmp_path):
    words = f"{DAPO_BEFORE}{{prompt}}{DAPO_AFTER}"
    row = {
        "prompt": [{"role": "user", "content": words.replace("{prompt}", "1 + 1?")}],
        "reward_model": {"ground_truth": "2"},
    }
    (tmp_path / "dapo.jsonl").write_text(json.dumps(row))
    source = SourceConfig(path=str(tmp_path / "dapo.jsonl"))

    def prompt(**settings):
        data = DataConfig(train=source, max_prompt_tokens=999, **settings)
        problems = ProblemReader(data).read(None)
        assert problems.train_records[0].prompt == "1 + 1?"
        return encode(problems.train, data, TOKENIZER)[0].prompts.texts[0]

    assert prompt() == prompt(template=words) == row["prompt"][0]["content"]
    assert prompt(template="Q: {prompt}") == "Q: 1 + 1?"
