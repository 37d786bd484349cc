"""Several sources of problems, in a recipe and on the command line."""

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.errors import UserError

RECIPE = """
from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.data.data_config import SourceConfig

def get_config():
    config = to_config_dict(Config())
    config.data.sources.gsm8k = {"path": "gsm8k.jsonl", "weight": 0.3}
    config.data.sources.math = SourceConfig(path="math.parquet", weight=0.7)
    config.data.evaluations.aime = {"path": "aime.jsonl"}
    return config
"""


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return str(path)


def load(recipe, **overrides) -> DataConfig:
    named = {f"data.{name.replace('__', '.')}": text for name, text in overrides.items()}
    return load_config(Config, recipe, named).data


def test_a_recipe_names_what_differs(recipe):
    data = load(recipe)
    assert data.training_sources == {
        "data.sources.gsm8k": SourceConfig(path="gsm8k.jsonl", weight=0.3),
        "data.sources.math": SourceConfig(path="math.parquet", weight=0.7),
    }
    assert data.evaluation_sources == {"data.evaluations.aime": SourceConfig(path="aime.jsonl")}


def test_the_command_line_changes_and_adds_sources(recipe):
    data = load(
        recipe,
        sources__gsm8k__weight="2",
        sources__new__path="new.jsonl",
        sources__new__size="9",
        sources__math__fields__prompt="question.text",
        train__path="first.jsonl",
    )
    assert list(data.training_sources) == [
        "data.train",
        "data.sources.gsm8k",
        "data.sources.math",
        "data.sources.new",
    ]
    assert data.sources["gsm8k"] == SourceConfig(path="gsm8k.jsonl", weight=2.0)
    assert data.sources["new"] == SourceConfig(path="new.jsonl", size=9)
    assert data.sources["math"].fields == {"prompt": "question.text"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sources__new__pth", "x", r"\.new\.pth.; near: data\.sources\.new\.path"),
        ("sources__new__weight", "0", r"data\.sources\.new\.weight = 0: must be above 0"),
        ("sources__new__fields__truth", "a", r"fields\.truth = .* is not one of prompt, answer"),
    ],
)
def test_a_slip_in_a_source_is_one_line(recipe, name, text, message):
    with pytest.raises(UserError, match=message):
        load(recipe, **{name: text})


def test_variables_that_the_program_sets_are_refused():
    with pytest.raises(ValueError, match=r"chat_options\.messages is set by the program"):
        DataConfig(chat_options={"messages": []})
    with pytest.raises(ValueError, match=r"chat_options\.self is set by the program"):
        DataConfig(chat_options={"self": 1})
