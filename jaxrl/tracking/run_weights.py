"""Finds, reads and exports the newest weights of a run: the newest intact checkpoint of its last stage.

An export is a directory for Transformers, vLLM or PEFT. Its other files come from the run's `model/` folder:
config.json, the tokenizer and, if the run trains adapters, adapter_config.json.
"""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface.config_json import read_adapter_config, read_config, read_config_json
from jaxrl.models.huggingface.model_files import ADAPTER_CONFIG_FILE, check_new, copy_companions
from jaxrl.models.huggingface.weight_export import save_adapter, save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl.tracking.checkpoints import VALUE_HEAD, StoredCheckpoints
from jaxrl.tracking.run_folder import CheckpointFolder, RunFolder


class StoredWeights(NamedTuple):
    """The step of an intact checkpoint, and the folder of the checkpoints."""

    checkpoints: CheckpointFolder
    step: int


def files_of_run(folder: pathlib.Path) -> pathlib.Path:
    """The directory with config.json and the tokenizer of a run's model.

    Raises:
      UserError: if the folder contains no run.
    """
    source = RunFolder(folder).model
    if not source.is_dir():
        raise UserError(
            f"{source} does not exist; name the folder of a run, which holds model/ and rl/, such as "
            "runs/dapo_tiny/seed0"
        )
    return source


def model_of_run(source: pathlib.Path) -> ModelConfig:
    """The model config of a run, with its adapters.

    Args:
      source: directory that `files_of_run` returns.
    """
    config = read_config(source)
    if not (source / ADAPTER_CONFIG_FILE).exists():
        return config
    return lora.with_adapters(config, read_adapter_config(source))


def newest_weights(folder: pathlib.Path, step: int | None = None) -> StoredWeights:
    """Finds the newest intact checkpoint of a run, or that of a step. Reads its files and changes nothing.

    Raises:
      UserError: if there is none.
    """
    run = RunFolder(folder)
    # Later stages first: their weights are newer.
    for stage in (run.rl, run.preference, run.sft):
        stored = StoredCheckpoints(stage.checkpoints.path)
        if step is None and (newest := stored.newest_intact()) is not None:
            return StoredWeights(stage.checkpoints, newest)
        if step in stored.steps and stored.fault(step) is None:
            return StoredWeights(stage.checkpoints, step)
    if step is not None:
        raise UserError(
            f"{folder} has no intact checkpoint of step {step}; choose one of "
            f"{', '.join(map(str, StoredCheckpoints(run.rl.checkpoints.path).steps)) or 'another run'} "
            "(run.keep_checkpoints=0 keeps all)"
        )
    raise UserError(
        f"{folder} has no finished checkpoint that is intact; let the run save one (run.save_every "
        "steps, or a SIGTERM) and start again"
    )


def read_newest_params(
    folder: pathlib.Path, like: Params, step: int | None = None
) -> tuple[int, Params]:
    """Restores the policy's newest weights, or those of a step.

    Args:
      folder: folder of the run.
      like: tree of the weights' shapes, dtypes and shardings; the weights are restored directly to them.
      step: step of the checkpoint; None takes the newest.

    Returns:
      The step of the checkpoint, and the weights.

    Raises:
      UserError: if there is no intact checkpoint, or its shapes differ from those of `like`.
    """
    newest = newest_weights(folder, step)
    while True:
        try:
            stored = StoredCheckpoints(newest.checkpoints.path)
            return newest.step, stored.restore_params(newest.step, "actor", like)
        except (OSError, ValueError):
            before, newest = newest, newest_weights(folder, step)
            # A running job may have removed the checkpoint during reading. Then there is a newer one.
            if newest == before:
                raise


def has_value_head(folder: pathlib.Path, step: int) -> bool:
    """Whether a step's checkpoint has the value head of an actor-critic, which no export has."""
    stored = StoredCheckpoints(RunFolder(folder).rl.checkpoints.path)
    return stored.paths.step(step).exists() and VALUE_HEAD in stored.shapes(step, "actor")


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
    # The accelerators may belong to a run that is at work.
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host),
        decoder_graph(config)[1],
    )
    step, params = read_newest_params(run_folder, like)
    if adapter_only:
        base = ""  # without adapters `save_adapter` refuses
        if (source / ADAPTER_CONFIG_FILE).exists():
            base = read_config_json(source, ADAPTER_CONFIG_FILE)["base_model_name_or_path"]
        save_adapter(params, config, out, dtype=dtype, base=base)
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
