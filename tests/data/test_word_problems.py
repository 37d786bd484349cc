"""Generated word problems with one step of arithmetic."""

import re

import numpy as np
import pytest

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import read_source
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

make = load_function("shared/word_problems.py:make", "data function")
KINDS = ("gain", "loss", "bags")

CALCULATED = {"gain": lambda a, b: a + b, "loss": lambda a, b: a - b, "bags": lambda a, b: a * b}


def problem(index: int, **options) -> dict[str, str]:
    return make(index, np.random.default_rng((1, index)), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_follows_from_the_numbers_of_the_story(kind):
    for index in range(200):
        made = problem(index, kinds=[kind], largest=9)
        a, b = map(int, re.findall(r"\d+", made["problem"]))
        assert int(made["answer"]) == CALCULATED[kind](a, b) >= 2
        assert re.search(r"How many (\w+) does (\w+) have now\?$", made["problem"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["halves"]}, "must be a choice of gain, loss, bags"),
        ({"kinds": []}, "must be a choice"),
        ({"largest": 1}, "leaves no number"),
    ],
)
def test_options_that_make_no_problem_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        problem(0, **options)


def test_a_run_reads_them_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = SourceConfig(path="shared/word_problems.py:make", size=20, seed=3)
    source = read_source(settings, "data.train", may_be_endless=True)
    assert len(source.records) == 20
