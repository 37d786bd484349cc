"""Reads the directory of a language model: its shape, its tokenizer and the length of its context."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from jax.sharding import Mesh

from jaxrl.checks import MAX_TOKENS
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh import rules
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_config, read_config_json
from jaxrl.models.model_config import ModelConfig

# The context of a model whose config.json names none, and the shortest context to offer if memory is short.
SHORTEST_CONTEXT = 2048


@dataclasses.dataclass(frozen=True)
class ModelDirectory:
    """A language model with consistent files; its weights are not loaded.

    Attributes:
      model: Shape of the model.
      tokenizer: Its tokenizer.
      context_tokens: Number of tokens that it has positions for, or its attention takes (`index_topk`).
    """

    model: ModelConfig
    tokenizer: Tokenizer
    context_tokens: int


def read_model(directory: pathlib.Path, *, chat_template: str = "") -> ModelDirectory:
    """Reads the config and the tokenizer of a directory.

    Args:
      directory: the directory.
      chat_template: file with the chat template; "" is the one of the directory.

    Raises:
      UserError: A file is missing or broken, the model is a scalar model, or the tokenizer has more tokens
        than the model.
    """
    model = read_config(directory)
    tokenizer = load_tokenizer(directory, chat_template=chat_template)
    if model.num_scores:
        raise UserError(f"{directory} holds a model of scores; name a language model")
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{model.vocab_size} rows; put two files of one model there"
        )
    context = read_config_json(directory).get("max_position_embeddings")
    context = SHORTEST_CONTEXT if context is None else context
    if type(context) is not int or context < 2:
        raise UserError(
            f"{directory / 'config.json'}: max_position_embeddings is {context!r}; it must be a whole number "
            "of 2 or more: copy the published file again"
        )
    # Rows of the embedding beyond these are padding, which must never be drawn.
    model = dataclasses.replace(model, num_tokens=tokenizer.vocab_size)
    return ModelDirectory(model, tokenizer, min(context, model.index_topk or context, MAX_TOKENS))


def check_is_directory(path: pathlib.Path, *, or_else: str = "") -> None:
    """Raises UserError if --model names a file; `or_else` adds the alternatives to the message."""
    if path.exists() and not path.is_dir():
        raise UserError(
            f"--model {path} is a file; name the Hugging Face directory it lies in, with config.json, "
            f"tokenizer.json and the weights{or_else}"
        )


def is_run_folder(path: pathlib.Path) -> bool:
    """Whether a directory is the folder of a training run, and not a Hugging Face directory."""
    return (path / "model").is_dir() and not (path / "config.json").exists()


def generation_shardings(model: ModelConfig, mesh: Mesh) -> Any:
    """The shardings of a model's weights for generation."""
    _, shapes, axes = decoder_graph(model)
    return rules.generation_shardings(axes, shapes, mesh)
