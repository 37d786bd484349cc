"""Command lines made from settings: each field has a flag, its default and its help text."""

from __future__ import annotations

import argparse

import pytest

from jaxrl.config.command_line import help_texts
from jaxrl.config.config_tree import leaf_types
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.flags import add_flags, settings_of
from jaxrl.rollout.settings import EngineSettings
from jaxrl_serving.serve_config import ServeConfig


def parsed(cls, *arguments: str):
    parser = argparse.ArgumentParser()
    add_flags(parser, cls)
    return settings_of(cls, parser.parse_args(arguments))


@pytest.mark.parametrize("root", [Config, ServeConfig])
def test_every_setting_has_a_help_text(root):
    texts = help_texts(root)
    assert [name for name in leaf_types(root) if not texts[name]] == []


@pytest.mark.parametrize(
    "exclusive", [{"deterministic": True, "speculate": 0}, {"deterministic": False, "speculate": 2}]
)
def test_every_engine_setting_can_be_set_on_the_command_line_of_a_server(exclusive):
    given = {
        "slots": 3,
        "prefill_prompts": 1,
        "tokens_per_dispatch": 4,
        "dtype": "float32",
        "weights_dtype": "int8",
        "kv_dtype": "int8",
        "cache": "paged",
        "cache_tokens": 4096,
        **exclusive,
    }
    assert set(given) == set(leaf_types(EngineSettings))
    values = (
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in given.items()
        if value is not False
    )
    config = parsed(ServeConfig, "--model=m", *values)
    assert config.engine_settings() == given


def test_defaults_are_those_of_the_settings():
    assert parsed(ServeConfig, "--model", "m") == ServeConfig(model="m")


def test_a_value_out_of_range_is_refused_by_the_settings():
    with pytest.raises(UserError, match="http_port = 65536: must be at least 0 and at most 65,535"):
        parsed(ServeConfig, "--model=m", "--http_port=65536")
