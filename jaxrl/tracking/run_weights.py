"""The weights that a run has trained so far: of its last stage, the newest that are intact."""

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
    """A checkpoint that was found intact, and its step."""

    checkpoints: CheckpointFolder
    step: int


def files_of_run(folder: pathlib.Path) -> pathlib.Path:
    """The directory with config.json and the tokenizer of a run's model.

    Raises:
      UserError: the folder holds no run.
    """
    source = RunFolder(folder).model
    if not source.is_dir():
        raise UserError(
            f"{source} does not exist; name the folder of a run, which holds model/ and rl/, such as "
            "runs/dapo_tiny/seed0"
        )
    return source


def model_of_run(source: pathlib.Path) -> ModelConfig:
    """The shape of a run's model, its adapters included, from the directory of `files_of_run`."""
    config = read_config(source)
    if not (source / ADAPTER_CONFIG_FILE).exists():
        return config
    return lora.with_adapters(config, read_adapter_config(source))


def newest_weights(folder: pathlib.Path) -> StoredWeights:
    """The newest intact checkpoint of a run. It reads all of it, and changes nothing.

    Raises:
      UserError: there is none.
    """
    run = RunFolder(folder)
    # Later stages first: the newest weights of a run are those of its last stage that has any.
    for stage in (run.rl, run.preference, run.sft):
        step = StoredCheckpoints(stage.checkpoints.path).newest_intact()
        if step is not None:
            return StoredWeights(stage.checkpoints, step)
    raise UserError(
        f"{folder} has no finished checkpoint that is intact; let the run save one (run.save_every "
        "steps, or a SIGTERM) and start again"
    )


def read_newest_params(folder: pathlib.Path, like: Params) -> tuple[int, Params]:
    """The policy's newest weights, born with the shapes and shardings of `like`, and their step.

    Raises:
      UserError: there is no intact checkpoint, or it holds a model of another shape.
    """
    newest = newest_weights(folder)
    while True:
        try:
            stored = StoredCheckpoints(newest.checkpoints.path)
            return newest.step, stored.restore_params(newest.step, "actor", like)
        except (OSError, ValueError):
            before, newest = newest, newest_weights(folder)
            # A run at work may have removed it while it was read; then there is a newer one.
            if newest == before:
                raise
