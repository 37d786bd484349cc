"""From a run's checkpoint to a directory that Transformers, vLLM or PEFT load.

A run keeps beside its checkpoints what they do not hold: `model/` with config.json, the tokenizer and,
where it trains adapters, adapter_config.json.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import (
    adapter_config_json,
    config_json,
    read_adapter_config,
    read_config,
    read_config_json,
)
from jaxrl.models.huggingface.model_files import (
    ADAPTER_CONFIG_FILE,
    check_new,
    copy_companions,
    write_json,
)
from jaxrl.models.huggingface.weight_export import save_adapter, save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.model_shape import tokenizer_directory

# Later stages first: the newest weights of a run are those of its last stage that has any.


def keep_model_files(run: RunContext) -> None:
    """Writes `model/` into the run's folder: what `export_run` needs beside the weights."""
    config, model = run.config, run.model
    directory = config.run_folder.model
    directory.mkdir(exist_ok=True)
    tokenizer = tokenizer_directory(config)
    if tokenizer:
        copy_companions(pathlib.Path(tokenizer), directory)
    else:
        run.tokenizer.save(directory)
    if config.weights:
        base = read_config_json(config.weights)
    else:
        end = run.tokenizer.stop_ids[0]
        base = {"max_position_embeddings": config.train.row_tokens, "eos_token_id": end}
    write_json(directory / "config.json", config_json(model, dtype="float32", base=base))
    if model.lora.rank:
        values = adapter_config_json(model, base=config.weights)
        write_json(directory / ADAPTER_CONFIG_FILE, values)


def export_run(
    run_folder: pathlib.Path,
    out: pathlib.Path,
    *,
    dtype: Any,
    max_shard_bytes: int,
    adapter_only: bool = False,
) -> int:
    """Writes the newest weights of a run as a Hugging Face directory.

    Adapters are merged into the weights, or saved alone in PEFT's layout. It runs on the host, which
    must have room for the model in float32.

    Args:
      run_folder: of the run, <output>/<name>/seed<seed>.
      out: the directory; must not exist yet.
      dtype: of the tensors in the files, "bfloat16" or "float32".
      max_shard_bytes: a file holds no more than this, or a single tensor.
      adapter_only: leave the base model out.

    Returns:
      The step the weights are of.

    Raises:
      UserError: the folder holds no run or no intact checkpoint, or `out` exists.
    """
    check_new(out)
    source = RunFolder(run_folder).model
    if not source.is_dir():
        raise UserError(
            f"{source} does not exist; name the folder of a run, which holds model/ and rl/, such as "
            "runs/dapo_tiny/seed0"
        )
    config = _model_of(source)
    step, params = _newest_params(run_folder, config)
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


def _model_of(source: pathlib.Path) -> ModelConfig:
    config = read_config(source)
    if not (source / ADAPTER_CONFIG_FILE).exists():
        return config
    return lora.with_adapters(config, read_adapter_config(source))


def _base_of(source: pathlib.Path) -> str:
    """Directory or hub name of the model that the run's adapters sit on."""
    if not (source / ADAPTER_CONFIG_FILE).exists():
        return ""
    return read_config_json(source, ADAPTER_CONFIG_FILE)["base_model_name_or_path"]


def _newest_params(run_folder: pathlib.Path, config: ModelConfig) -> tuple[int, Any]:
    run = RunFolder(run_folder)
    for stage in (run.rl, run.preference, run.sft):
        stored = StoredCheckpoints(stage.checkpoints.path)
        step = stored.newest_intact()
        while step is not None:
            try:
                return step, stored.restore_params(step, "actor", _on_host(config))
            except (OSError, ValueError):
                newest = stored.newest_intact()
                # A run at work may have removed it while it was read; then there is a newer one.
                if newest == step:
                    raise
                step = newest
    raise UserError(
        f"{run_folder} has no finished checkpoint that is intact; let the run save one (run.save_every "
        "steps, or a SIGTERM) and export again"
    )


def _on_host(config: ModelConfig) -> Any:
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host),
        decoder_graph(config)[1],
    )
