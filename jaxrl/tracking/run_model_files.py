"""The files of a run's model besides its weights."""

from __future__ import annotations

import pathlib

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.huggingface.config_json import adapter_config_json, config_json, read_config_json
from jaxrl.models.huggingface.model_files import ADAPTER_CONFIG_FILE, copy_companions, write_json
from jaxrl.models.model_config import ModelConfig
from jaxrl.tracking.durable import ensure_writable


def write_model_files(
    directory: pathlib.Path,
    model: ModelConfig,
    tokenizer: Tokenizer,
    *,
    tokenizer_directory: str,
    weights: str,
    max_positions: int,
) -> None:
    """Writes config.json and the tokenizer: all that `tracking.run_weights.export_run` needs besides weights.

    Args:
      directory: the folder `model/` of the run.
      model, tokenizer: those of the policy.
      tokenizer_directory: directory that the tokenizer was read from; "" saves the tokenizer itself.
      weights: directory of the initial weights, whose config.json has what the model's settings lack; "" for
        random weights.
      max_positions: longest sequence of a model with random weights.
    """
    ensure_writable(directory)
    if tokenizer_directory:
        copy_companions(pathlib.Path(tokenizer_directory), directory)
    else:
        tokenizer.save(directory)
    if weights:
        base = read_config_json(weights)
    else:
        base = {
            "max_position_embeddings": max_positions,
            "eos_token_id": tokenizer.stop_ids[0],
        }
    write_json(directory / "config.json", config_json(model, dtype="float32", base=base))
    if model.lora.rank:
        write_json(directory / ADAPTER_CONFIG_FILE, adapter_config_json(model, base=weights))
