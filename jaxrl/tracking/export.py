"""Exports a run's checkpoint as a directory for Transformers, vLLM or PEFT.

The weights come from the checkpoint. The other files come from the run's `model/` folder: config.json, the
tokenizer and, if the run trains adapters, adapter_config.json.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import (
    read_config_json,
)
from jaxrl.models.huggingface.model_files import (
    ADAPTER_CONFIG_FILE,
    check_new,
    copy_companions,
)
from jaxrl.models.huggingface.weight_export import save_adapter, save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl.tracking.run_weights import files_of_run, model_of_run, read_newest_params


def export_run(
    run_folder: pathlib.Path,
    out: pathlib.Path,
    *,
    dtype: Any,
    max_shard_bytes: int,
    adapter_only: bool = False,
) -> int:
    """Writes the newest weights of a run as a Hugging Face directory.

    Adapters are merged into the weights, or saved alone in PEFT's layout. The export runs on the host and
    needs memory for the model in float32.

    Args:
      run_folder: folder of the run, <output>/<name>/seed<seed>.
      out: directory to create; it must not exist.
      dtype: type of the tensors in the files, "bfloat16" or "float32".
      max_shard_bytes: largest size of a file with several tensors.
      adapter_only: whether to write the adapters without the base model.

    Returns:
      The step of the exported checkpoint.

    Raises:
      UserError: if the folder contains no run or no intact checkpoint, or `out` exists.
    """
    check_new(out)
    source = files_of_run(run_folder)
    config = model_of_run(source)
    step, params = read_newest_params(run_folder, _on_host(config))
    if adapter_only:
        save_adapter(params, config, out, dtype=dtype, base=_base_of(source))
        copy_companions(source, out)
    else:
        save_checkpoint(
            jax.jit(lora.merge, static_argnums=1)(params, config),
            lora.base_config(config),
            out,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            source=source,
        )
    return step


def _base_of(source: pathlib.Path) -> str:
    """Directory or hub name of the base model of the run's adapters; "" without adapters."""
    if not (source / ADAPTER_CONFIG_FILE).exists():
        return ""
    return read_config_json(source, ADAPTER_CONFIG_FILE)["base_model_name_or_path"]


def _on_host(config: ModelConfig) -> Any:
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host),
        decoder_graph(config)[1],
    )
