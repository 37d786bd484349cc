"""Determines the shape of a run's model, from its checkpoint or the config, and its tokenizer.

    config.weights = DIR                          DIR/config.json has the shape
    config.model = model_shapes("qwen2.5-32b")    a shape by name, for planning without the files

Model settings that differ from their defaults must agree with the checkpoint.
"""

from __future__ import annotations

import dataclasses
import pathlib

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.huggingface.config_json import read_adapter_config, read_config
from jaxrl.models.huggingface.weight_loading import check_adapter, check_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import SHAPES

# Settings that a run adds to the model of a checkpoint.
_OF_THE_RUN = ("num_tokens", "lora")


def check_weights(config: Config) -> None:
    """Checks the run's model against the files of its checkpoint and its adapter.

    Raises:
      UserError: the settings contradict the checkpoint or its adapter, or files are missing or damaged.
    """
    model, _ = model_of(config)
    if config.weights:
        check_params(config.weights, model)
    if config.adapter:
        check_adapter(config.adapter, model)


def model_of(config: Config) -> tuple[ModelConfig, str]:
    """The run's model, and a description of where its shape comes from.

    Raises:
      UserError: the settings contradict the checkpoint or its adapter, or there is neither a checkpoint nor a
        shape.
    """
    if config.adapter and is_here(config.adapter, "adapter_config.json"):
        ours, stored = config.model.lora, read_adapter_config(config.adapter)
        if dataclasses.replace(ours, targets=tuple(sorted(ours.targets))) != stored:
            raise UserError(
                f"model.lora is rank {ours.rank}, alpha {ours.alpha}, targets {', '.join(ours.targets)}, but "
                f"the adapter in {config.adapter} has {stored.rank}, {stored.alpha}, "
                f"{', '.join(stored.targets)}; set model.lora to these, or change `adapter`"
            )
    if not config.weights:
        return config.model, "config.model, random weights"
    if is_here(config.weights):
        stored = read_config(config.weights)
        _check_stated(config.model, stored, config.weights)
        of_the_run = {name: getattr(config.model, name) for name in _OF_THE_RUN}
        stored = stored.for_texts_of(config.longest_sequence)
        return dataclasses.replace(stored, **of_the_run), config.weights
    if not _stated(config.model):
        # The longest name that the weights' name has in it: qwen2.5-0.5b in Qwen/Qwen2.5-0.5B-Instruct.
        named = [name for name in SHAPES if name in config.weights.lower()]
        shape = max(named, key=len, default="qwen2.5-32b")
        raise UserError(
            f"weights {config.weights} is not here, so the shape of the model is not known; put its "
            "config.json there (a run fetches it from the hub, a dry run does not), or name it in the "
            f'recipe: config.model = model_shapes("{shape}")'
        )
    return config.model, f"config.model; {config.weights} is not here to compare it with"


def with_stored_shape(config: Config) -> Config:
    """The config with its checkpoint's shape in `model`; unchanged if the checkpoint is not on this machine.

    Raises:
      UserError: as `model_of`.
    """
    if not (config.weights and is_here(config.weights)):
        return config
    return dataclasses.replace(config, model=model_of(config)[0])


def is_here(directory: str, file: str = "config.json") -> bool:
    """Whether a Hugging Face directory exists and has `file`."""
    return (pathlib.Path(directory) / file).is_file()


def tokenizer_directory(config: Config) -> str:
    """Directory of the tokenizer: the configured one, else that of the weights; "" to train a tokenizer."""
    with_weights = config.weights and is_here(config.weights, "tokenizer.json")
    return config.tokenizer.path or (config.weights if with_weights else "")


def _stated(model: ModelConfig) -> list[str]:
    """Model settings that differ from their defaults."""
    default = ModelConfig()
    return [
        field.name
        for field in dataclasses.fields(model)
        if field.name not in _OF_THE_RUN
        and getattr(model, field.name) != getattr(default, field.name)
    ]


def _check_stated(model: ModelConfig, stored: ModelConfig, directory: str) -> None:
    # Scores instead of logits make it a scalar model, which the user must ask for explicitly.
    names = [
        name
        for name in dict.fromkeys((*_stated(model), "num_scores"))
        if getattr(model, name) != getattr(stored, name)
    ]
    if names:
        different = "; ".join(
            f"model.{name} = {getattr(model, name)}, but {getattr(stored, name)} in the checkpoint"
            for name in names
        )
        overrides = " ".join(f"--config.model.{name}={getattr(stored, name)}" for name in names)
        raise UserError(
            f"the config does not describe the model in {directory}: {different}. Leave these settings out, "
            f"which takes them from the checkpoint, or say {overrides}, or change `weights`"
        )
