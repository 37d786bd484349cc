"""`jaxrl data`: what a run would read, and files from one format into another."""

import json
import pathlib

import pytest

from jaxrl import cli
from jaxrl.data.chat import ChatTemplate
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import read_source
from jaxrl.data.tokenizer import train_tokenizer

RECIPE = """
from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config

def get_config():
    config = to_config_dict(Config())
    config.data.sources.sums = {"path": "sums.jsonl", "weight": 1.0}
    config.data.sources.products = {"path": "products.jsonl", "weight": 3.0}
    config.data.evaluation.path = "test.jsonl"
    config.data.max_prompt_tokens = 16
    config.model.vocab_size = 320
    config.data.template = "Sum: {prompt}"
    return config
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    write("recipe.py", RECIPE)
    sums = [{"problem": f"{i} + {i}", "answer": 2 * i, "level": i} for i in range(5)]
    rows(
        "sums.jsonl",
        *sums,
        sums[0],
        {"problem": "1 + 2", "answer": ""},
        {"problem": "5 + " * 9 + "5", "answer": "50"},
        {"problem": "no number", "answer": "x" * 400},
    )
    rows("products.jsonl", *({"question": f"{i} * 1", "answer": f"so\n#### {i}"} for i in range(3)))
    rows("test.jsonl", sums[4])
    return tmp_path


def write(name: str, text: str) -> None:
    pathlib.Path(name).write_text(text)


def rows(name: str, *objects) -> None:
    write(name, "\n".join(json.dumps(row) for row in objects))


def data(*arguments: str) -> int:
    return cli.main(["jaxrl", "data", *arguments])


def test_a_recipe_is_shown_without_training(capsys):
    assert data("--config", "recipe.py", "--show", "1") == 0
    out = capsys.readouterr().out
    card, _, shown = out.partition("-" * 80)
    assert "data.sources.sums: sums.jsonl (JSONL, layout problem/answer)" in card
    assert "9 rows, 4 prompts, 25.0% of what is drawn" in card
    assert "1 duplicates, left out" in card
    assert "1 rows without a truth, left out\n    sums.jsonl:7: field 'answer' is \"\"" in card
    assert (
        "1 ground truths that the grader cannot read, left out\n    sums.jsonl:9: ground truth"
        in card
    )
    assert '1 prompts of the evaluation, left out\n    sums.jsonl:5: "4 + 4"' in card
    assert "1 longer than data.max_prompt_tokens, left out" in card
    assert "products.jsonl (JSONL, layout GSM8K)\n  3 rows, 3 prompts, 75.0% of" in card
    assert "data.evaluation: test.jsonl" in card
    assert "Sum: 0 + 0\n[" in shown and "answer '0'  extra {\"level\": 0}" in shown
    assert "\nSum: 0 * 1\n[" in shown and "\nSum: 4 + 4\n[" in shown
    assert not pathlib.Path("runs").exists()


def test_overrides_change_a_recipe(capsys):
    assert data("--config=recipe.py", "--config.data.sources.sums.size", "2") == 0
    assert "2 rows, 2 prompts" in capsys.readouterr().out


def test_files_are_shown_as_text_or_as_the_model_reads_them(capsys, folder):
    assert data("sums.jsonl", "products.jsonl", "--show=1", "--template", "<{prompt}>") == 0
    out = capsys.readouterr().out
    assert "\n<0 + 0>\n[sums]  answer '0'" in out and "tokens" not in out
    tokenizer = train_tokenizer(["1 + 1"], vocab_size=258)
    template = "{% for m in messages %}{{ eos_token }}{{ m.content }}{% endfor %}:"
    chat = ChatTemplate(template, origin="a test", special_tokens=tokenizer.special_tokens)
    type(tokenizer)(**{**vars(tokenizer), "chat_template": chat}).save(folder / "model")
    assert data("sums.jsonl", "--tokenizer=model", "--chat", "--show=1") == 0
    out = capsys.readouterr().out
    assert "\n<eos>0 + 0:\n[7 tokens, sums]" in out
    assert "\n  tokens up to" in out and "longest 39" in out


MADE = """
def make(index, rng):
    return {"problem": f"{index} + 1", "answer": index + 1}
"""


def test_what_a_function_makes_is_shown_and_written_where_it_ends(capsys):
    write("made.py", MADE)
    assert data("made.py:make", "--show=2", "--template", "<{prompt}>") == 0
    out = capsys.readouterr().out
    assert (
        "made.py:make: made.py:make (made by a function, layout problem/answer), without end" in out
    )
    assert "<0 + 1>\n[make]  answer '1'" in out and "<1 + 1>\n[make]  answer '2'" in out
    assert data("made.py:make", "--to=out.jsonl") == 2
    assert "made.py:make.size to a number of problems" in capsys.readouterr().err
    size = ["--config.data.sources.sums.size=3", "--config.data.sources.sums.path=made.py:make"]
    assert data("--config=recipe.py", *size, "--to=out.jsonl") == 0
    assert "6 problems written to out.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_converted_is_read_without_a_setting(capsys, suffix):
    assert data("sums.jsonl", "products.jsonl", "--to", f"out.{suffix}") == 0
    assert f"10 problems written to out.{suffix}" in capsys.readouterr().out
    (given, more), again = (
        [read_source(SourceConfig(path=f"{n}.jsonl"), "x") for n in ("sums", "products")],
        read_source(SourceConfig(path=f"out.{suffix}"), "x"),
    )

    def told(records):
        return [(r.prompt, r.answer, r.solution, r.source) for r in records]

    assert not again.dropped
    assert told(again.records) == told([*given.records, *more.records])
    assert again.records[1].extra["level"] == 1
    assert data("sums.jsonl", "--to", f"out.{suffix}") == 2
    assert "exists; remove it" in capsys.readouterr().err


def test_text_of_a_file_does_not_steer_the_terminal(capsys):
    rows("odd.jsonl", {"problem": "a\x1b[2Jb\u202e", "answer": "1"})
    assert data("odd.jsonl", "--show", "1") == 0
    assert "a\\x1b[2Jb\\u202e" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name files of problems, or a recipe with --config"),
        (["sums.jsonl", "--config=recipe.py"], "and not both"),
        (["sums.jsonl", "--config.seed=1"], "changes a recipe"),
        (["absent.parquet"], "absent.parquet does not exist"),
        (["sums.jsonl", "--prompt_field=question"], "has no field 'question'; it has 'problem'"),
        (["sums.jsonl", "--chat"], "add --tokenizer DIR"),
        (["sums.jsonl", "--grader=no"], "no grader is called 'no'"),
        (["sums.jsonl", "--to=out.csv"], "neither .jsonl nor .parquet"),
    ],
)
def test_what_cannot_be_shown_is_one_line(capsys, arguments, message):
    assert data(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
