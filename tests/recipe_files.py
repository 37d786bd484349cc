"""Recipes as files, for programs that tests start."""

import pathlib
from collections.abc import Mapping
from typing import Any

RECIPE = """
from jaxrl.config.schema import Config
from jaxrl.config.config_tree import to_config_dict

def get_config():
    config = to_config_dict(Config())
    config.update_from_flattened_dict({settings!r})
    return config
"""


def write_recipe_file(folder: pathlib.Path, settings: Mapping[str, Any]) -> pathlib.Path:
    """A recipe in `folder` with the settings given by their dotted names, and defaults."""
    path = folder / "recipe.py"
    path.write_text(RECIPE.format(settings=dict(settings)))
    return path
