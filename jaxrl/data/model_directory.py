"""A Hugging Face directory of a language model: its shape, tokenizer and context, and where its weights go.

Serving and evaluation read models from here. Weights themselves are read by `models.huggingface`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from jax.sharding import Mesh

from jaxrl.checks import MAX_TOKENS
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_config, read_config_json
from jaxrl.models.model_config import ModelConfig

# Context of a model whose config.json names none, and the shortest that is of use where memory is short.
SHORTEST_CONTEXT = 2048


@dataclasses.dataclass(frozen=True)
class ModelDirectory:
    """A language model whose files fit together; its weights are not loaded.

    Attributes:
      model: its shape.
      tokenizer: its tokenizer.
      context_tokens: tokens that it has positions for.
    """

    model: ModelConfig
    tokenizer: Tokenizer
    context_tokens: int


def read_model(directory: pathlib.Path) -> ModelDirectory:
    """Reads what a directory says of its language model.

    Raises:
      UserError: a file is missing or broken, the model gives scores, or the tokenizer is another model's.
    """
    model = read_config(directory)
    tokenizer = load_tokenizer(directory)
    if model.num_scores:
        raise UserError(f"{directory} holds a model of scores; name a language model")
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{model.vocab_size} rows; put two files of one model there"
        )
    model = dataclasses.replace(model, num_tokens=tokenizer.vocab_size)
    return ModelDirectory(model, tokenizer, _context_of(directory))


def check_is_directory(path: pathlib.Path, *, or_else: str = "") -> None:
    """Raises UserError if --model names a file; `or_else` is what it may name besides a directory."""
    if path.exists() and not path.is_dir():
        raise UserError(
            f"--model {path} is a file; name the Hugging Face directory it lies in, with config.json, "
            f"tokenizer.json and the weights{or_else}"
        )


def is_run_folder(path: pathlib.Path) -> bool:
    """Whether a directory is the folder of a training run rather than a Hugging Face directory."""
    return (path / "model").is_dir() and not (path / "config.json").exists()


def generation_shardings(model: ModelConfig, mesh: Mesh) -> Any:
    """Where the weights of a model lie for generation."""
    _, shapes, axes = decoder_graph(model)
    return shardings(axes, shapes, GENERATE_RULES, mesh)


def _context_of(directory: pathlib.Path) -> int:
    value = read_config_json(directory).get("max_position_embeddings")
    if value is None:
        return SHORTEST_CONTEXT
    if type(value) is not int or value < 2:
        raise UserError(
            f"{directory / 'config.json'}: max_position_embeddings is {value!r}; it must be a whole number "
            "of 2 or more: copy the published file again"
        )
    return min(value, MAX_TOKENS)
