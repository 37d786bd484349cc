"""Finds and reads the newest weights of a run: the newest intact checkpoint of its last stage."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.decoder import Params
from jaxrl.models.huggingface.config_json import read_adapter_config, read_config
from jaxrl.models.huggingface.model_files import ADAPTER_CONFIG_FILE
from jaxrl.models.model_config import ModelConfig
from jaxrl.tracking.checkpoints import StoredCheckpoints
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


def newest_weights(folder: pathlib.Path) -> StoredWeights:
    """Finds the newest intact checkpoint of a run. Reads all of its files and changes nothing.

    Raises:
      UserError: if there is none.
    """
    run = RunFolder(folder)
    # Later stages first: their weights are newer.
    for stage in (run.rl, run.preference, run.sft):
        step = StoredCheckpoints(stage.checkpoints.path).newest_intact()
        if step is not None:
            return StoredWeights(stage.checkpoints, step)
    raise UserError(
        f"{folder} has no finished checkpoint that is intact; let the run save one (run.save_every "
        "steps, or a SIGTERM) and start again"
    )


def read_newest_params(folder: pathlib.Path, like: Params) -> tuple[int, Params]:
    """Restores the policy's newest weights.

    Args:
      folder: folder of the run.
      like: tree of the weights' shapes, dtypes and shardings; the weights are restored directly to them.

    Returns:
      The step of the checkpoint, and the weights.

    Raises:
      UserError: if there is no intact checkpoint, or its shapes differ from those of `like`.
    """
    newest = newest_weights(folder)
    while True:
        try:
            stored = StoredCheckpoints(newest.checkpoints.path)
            return newest.step, stored.restore_params(newest.step, "actor", like)
        except (OSError, ValueError):
            before, newest = newest, newest_weights(folder)
            # A running job may have removed the checkpoint during reading. Then there is a newer one.
            if newest == before:
                raise
