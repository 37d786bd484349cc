"""The files in a run's folder besides logs and checkpoints: its settings, and those of its model."""

from __future__ import annotations

import logging
import pathlib

from jaxrl.config.schema import Config
from jaxrl.config.shapes import tokenizer_directory
from jaxrl.errors import UserError
from jaxrl.files import read_text
from jaxrl.mesh import hosts
from jaxrl.models.huggingface.config_json import adapter_config_json, config_json, read_config_json
from jaxrl.models.huggingface.model_files import (
    ADAPTER_CONFIG_FILE,
    GENERATION_FILE,
    copy_companions,
    write_json,
)
from jaxrl.tracking.durable import ensure_writable, write_atomically
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_folder import StageFolder, parse_config
from jaxrl.tracking.stage_checkpoints import lost_rows
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.identity import contents_of, differences, listed, made_with, run_settings

logger = logging.getLogger(__name__)


def check_folder(config: Config) -> None:
    """Checks that the run in the config's folder, if there is one, is the same run; changes nothing.

    Raises:
      UserError: the folder holds a run that this config must not resume, or rows of its metrics are lost.
    """
    for folder in stage_folders(config).values():
        fault = lost_rows(folder)
        if fault is not None and config.run.resume != "accept_lost_rows":
            raise UserError(
                f"{fault}; what is lost cannot be made again: restore the file from a copy, or go on without "
                "the lost rows with --config.run.resume=accept_lost_rows"
            )
        if fault is not None:
            logger.warning("%s; going on without the lost rows", fault)
    last = max(map(_last_step, (config.run_folder.rl, config.run_folder.preference)))
    path = config.run_folder.config
    if not path.exists() and not last:
        return
    if config.run.resume == "never":
        raise UserError(
            f'{config.run_folder} already holds a run and run.resume is "never"; remove it, or give '
            "this run another --config.name or --config.run.output"
        )
    remedy = (
        "give this run another `name`, or let the old one go on with these settings by "
        "run.resume=accept_other_settings"
    )
    accepts = config.run.resume == "accept_other_settings"
    try:
        before = parse_config(read_text(path, absent=f"restore it, or {remedy}"))
    except ValueError as error:
        if accepts:
            return
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({error}); restore it, or {remedy}") from error
    changed = differences(before, parse_config(run_settings(config, contents_of(config))))
    if changed and not accepts:
        raise UserError(
            f"{config.run_folder} holds a run that was made with other settings "
            f"({listed(changed)}); {remedy}"
        )
    if last > config.run.num_steps:
        raise UserError(
            f"the run in {config.run_folder} has done {last} steps, and run.num_steps is "
            f"{config.run.num_steps}; set it to {last} or more, or give this run another `name`"
        )
    if changed:
        logger.warning("this run was started with other settings: %s", "; ".join(changed))


def _last_step(stage: StageFolder) -> int:
    rows = read_metrics(stage.metrics, skips_damaged=True)
    return max((row["step"] for row in rows), default=0)


def stage_folders(config: Config) -> dict[str, StageFolder]:
    """The folders that the report reads, by section title; reinforcement learning first."""
    return {
        config.algorithm.flow.title: config.run_folder.rl,
        "Preferences": config.run_folder.preference,
        "SFT": config.sft_folder,
    }


def keep_run_files(run: RunContext) -> None:
    """Writes the settings and the model's files into the run's folder. Collective.

    Call it after all checks that can refuse the run.
    """

    def write() -> None:
        config = run.config
        text = run_settings(config, run.contents | made_with())
        write_atomically(config.run_folder.config, text.encode())
        keep_model_files(run)

    # One process writes: all share the folder.
    hosts.on_first(write)


def keep_model_files(run: RunContext) -> None:
    """Writes config.json and the tokenizer into `model/` of the run's folder.

    They are all that `tracking.run_weights.export_run` needs besides weights.
    """
    config, directory, model = run.config, run.config.run_folder.model, run.model
    ensure_writable(directory)
    if read_from := tokenizer_directory(config):
        copy_companions(pathlib.Path(read_from), directory)
    else:
        run.tokenizer.save(directory)
    if config.weights:
        # It has what the model's settings lack, such as the ids of special tokens.
        base = read_config_json(config.weights)
        # The ends of a response are the model's, as `load_tokenizer` reads them.
        (directory / GENERATION_FILE).unlink(missing_ok=True)
        copy_companions(pathlib.Path(config.weights), directory, (GENERATION_FILE,))
    else:
        base = {
            "max_position_embeddings": config.row_tokens,
            "eos_token_id": run.tokenizer.stop_ids[0],
        }
    write_json(directory / "config.json", config_json(model, dtype="float32", base=base))
    if model.lora.rank:
        values = adapter_config_json(model, base=config.weights)
        write_json(directory / ADAPTER_CONFIG_FILE, values)
