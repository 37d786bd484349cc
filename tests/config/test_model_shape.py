"""The model of a run: from its checkpoint's config.json alone, by name, or stated in the config."""

import dataclasses
import types

import jax
import pytest
from model_sizes import sized_model

from jaxrl.config.config_tree import from_config_dict, to_config_dict
from jaxrl.config.schema import Config, SftConfig
from jaxrl.config.shapes import model_of, tokenizer_directory
from jaxrl.data.data_config import DataConfig
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.models.shapes import model_shapes
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.trainer.findings import check_weights
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.roles import role_models

STORED = sized_model(300, 2, 32, 48, 2, 1, 16, rope_theta=5e5, tie_embeddings=False)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "model"
    save_checkpoint(init_params(STORED, jax.random.key(0)), STORED, folder, dtype="float32")
    return folder


def test_a_directory_of_weights_alone_gives_the_shape(weights):
    config = Config(weights=str(weights))
    assert model_of(config) == (STORED, str(weights))
    check_weights(resolve(config))
    tokenizer = types.SimpleNamespace(vocab_size=290)
    models = role_models(resolve(config), ("actor",)).with_tokenizers(tokenizer, {})
    assert models.actor == dataclasses.replace(STORED, num_tokens=290)


def test_adapters_are_the_runs_own(weights):
    lora = LoraConfig(rank=4, targets=("q",))
    model, _ = model_of(Config(weights=str(weights), model=ModelConfig(lora=lora)))
    assert model == dataclasses.replace(STORED, lora=lora)


def test_what_is_stated_beside_a_checkpoint_must_be_true(weights):
    stated = dataclasses.replace(STORED, d_ff=56)
    with pytest.raises(
        UserError, match=r"model\.d_ff = 56, but 48 in the checkpoint\. Leave these"
    ):
        model_of(Config(weights=str(weights), model=stated))
    part = ModelConfig(d_ff=48, rope_theta=5e5)
    assert model_of(Config(weights=str(weights), model=part))[0] == STORED


def test_texts_that_a_model_would_attend_to_sparsely_are_refused():
    model = model_shapes("glm-5")
    lengths = DataConfig(max_prompt_tokens=1024), RolloutConfig(max_response_tokens=1024)
    config = Config(model=model, data=lengths[0], rollout=lengths[1])
    assert model_of(config)[0] == model
    longer = dataclasses.replace(config, data=DataConfig(max_prompt_tokens=1025))
    with_sft = dataclasses.replace(
        config, sft=SftConfig(num_steps=1), train=TrainConfig(row_tokens=4096)
    )
    for config, tokens in ((longer, 2049), (with_sft, 4096)):
        with pytest.raises(UserError, match=f"up to {tokens} tokens, .* exceed index_topk 2048"):
            model_of(config)


def test_a_model_of_scores_is_no_policy(tmp_path):
    scores = dataclasses.replace(STORED, num_scores=1)
    save_checkpoint(
        init_params(scores, jax.random.key(0)), scores, tmp_path / "reward", dtype="float32"
    )
    with pytest.raises(UserError, match=r"model\.num_scores = 0, but 1 in the checkpoint"):
        model_of(Config(weights=str(tmp_path / "reward")))


def test_without_the_files_a_name_does_it():
    tree = to_config_dict(Config())
    tree.weights = "Qwen/Qwen2.5-0.5B-Instruct"
    with pytest.raises(UserError, match=r'model_shapes\("qwen2.5-0.5b"\)'):
        model_of(from_config_dict(Config, tree))
    tree.weights = "not/here"
    with pytest.raises(UserError, match=r'not/here is not here.*model_shapes\("qwen2.5-32b"\)'):
        model_of(from_config_dict(Config, tree))
    tree.model = model_shapes("qwen2.5-32b")
    tree.model.lora.rank = 8
    model, origin = model_of(from_config_dict(Config, tree))
    assert (model.num_layers, model.d_model, model.lora.rank) == (64, 5120, 8)
    assert origin == "config.model; not/here is not here to compare it with"


def test_the_tokenizer_comes_with_the_weights(weights, tmp_path):
    assert tokenizer_directory(Config(weights=str(weights))) == ""
    train_tokenizer(["1 + 2 = 3"], vocab_size=300).save(tmp_path)
    (tmp_path / "config.json").write_text((weights / "config.json").read_text())
    config = Config(weights=str(tmp_path))
    assert tokenizer_directory(config) == str(tmp_path)
    elsewhere = dataclasses.replace(config.tokenizer, path="elsewhere")
    assert tokenizer_directory(dataclasses.replace(config, tokenizer=elsewhere)) == "elsewhere"
