"""What a run leaves in its folder besides logs and checkpoints: its config, samples, and the report."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.models.huggingface.config_json import adapter_config_json, config_json, read_config_json
from jaxrl.models.huggingface.model_files import ADAPTER_CONFIG_FILE, copy_companions, write_json
from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.cross_checks import title_of
from jaxrl.trainer.model_shape import tokenizer_directory
from jaxrl.types import Scored

logger = logging.getLogger(__name__)

# Evaluations whose answers the report shows.
_SAMPLES_KEPT = ("before", "after")
_OF_A_SAMPLE = ("prompt", "answer", "text", "correct")

Rows = list[dict[str, Any]]


def check_folder(config: Config) -> None:
    """Says what differs from the config that the run in the folder was started with; changes nothing.

    Raises:
      UserError: the folder holds a run and the config does not allow to go on with it.
    """
    path = config.run_folder.config
    if not path.exists():
        return
    if config.run.resume == "never":
        raise UserError(
            f'{config.run_folder} already holds a run and run.resume is "never"; remove it, or give '
            "this run another --config.name or --config.run.output"
        )
    try:
        before = _parse(path.read_text())
    except ValueError as error:  # also for bytes that are no text
        logger.warning("%s cannot be read (%s): settings are not compared", path, error)
        return
    now = _parse(format_config(config))
    changed = [
        f"{key}: {before.get(key)} -> {now[key]}" for key in now if now[key] != before.get(key)
    ]
    if changed:
        logger.warning("this run was started with other settings: %s", "; ".join(changed))


def keep_run_files(run: RunContext) -> None:
    """Writes what describes the run beside it: its settings, and the model's files. Collective.

    Call it when everything that could refuse the run has been checked.
    """

    def write() -> None:
        config = run.config
        write_atomically(config.run_folder.config, format_config(config).encode())
        keep_model_files(run)

    hosts.on_first(write)


def keep_model_files(run: RunContext) -> None:
    """Writes `model/` into the run's folder: what `tracking.export.export_run` needs beside the weights."""
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


def _parse(text: str) -> dict[str, str]:
    return dict(line.split(" = ", 1) for line in text.splitlines())


def keep_samples(config: Config, scored: Scored, when: str) -> None:
    """Stores the first answer to a few evaluation problems, if the report will show this evaluation."""
    if when not in _SAMPLES_KEPT or not hosts.is_first():
        return
    completions = scored.completions
    samples = [
        {
            "prompt": completions.prompts.texts[i],
            "answer": completions.prompts.answers[i],
            "text": completions.texts[i * completions.num_samples],
            "correct": bool(scored.correct_B[i * completions.num_samples]),
        }
        for i in range(min(config.run.report_samples, len(completions.prompts)))
    ]
    write_atomically(config.run_folder.samples(when), json.dumps(samples, indent=1).encode())


def write_run_report(run: RunContext) -> pathlib.Path:
    """Writes one HTML page about the whole run; returns its path."""
    # Drawing libraries take a second to import, which only this last event has to wait for.
    from jaxrl.tracking import report

    config = run.config
    rows = {
        title_of(config): _rows(config.run_folder.rl),
        "Preferences": _rows(config.run_folder.preference),
        "Warm start (SFT)": _rows(config.warm_start_folder),
    }
    sections = [report.Section(title, found) for title, found in rows.items() if found]
    path = config.run_folder.report
    report.write_report(
        path,
        title=f"{config.name}, seed {config.seed}",
        summary=_summary(run, rows),
        sections=sections,
        samples=[
            report.SamplePair(
                before["prompt"],
                before["answer"],
                report.Response(before["text"], before["correct"]),
                report.Response(after["text"], after["correct"]),
            )
            for before, after in _sample_pairs(config)
        ],
        config_text=format_config(config),
    )
    return path


def _sample_pairs(config: Config) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the report shows of both evaluations; nothing where one of their files is missing or damaged."""
    paths = [config.run_folder.samples(when) for when in _SAMPLES_KEPT]
    if not all(path.exists() for path in paths):
        return []
    try:
        before, after = (_samples_of(path) for path in paths)
        return list(zip(before, after, strict=True))
    except (ValueError, TypeError, KeyError) as error:
        files = " or ".join(map(str, paths))
        logger.warning("%s is damaged (%s): the report has no answers", files, error)
        return []


def _samples_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [
        {name: sample[name] for name in _OF_A_SAMPLE} for sample in json.loads(path.read_text())
    ]


def _rows(folder: StageFolder) -> Rows:
    path = folder.metrics
    return read_metrics(path) if path.exists() else []


def _minutes(rows: Rows) -> float:
    """Of a stage, whose log may have a row for every so many steps only."""
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    return float(np.mean(seconds)) * rows[-1]["step"] / 60 if seconds else 0.0


def _summary(run: RunContext, rows: Mapping[str, Rows]) -> Sequence[tuple[str, str]]:
    """Headline numbers of the report."""
    config = run.config
    rl = rows[title_of(config)]
    # A run that only imitates may have no problems.
    sources = list(dict.fromkeys(run.evaluation_prompts.sources))
    accuracies: dict[str, list[float]] = {}
    for source in sources:
        key = f"val-core/{source}/acc/mean@{config.evaluation.num_samples}"
        of = "" if len(sources) == 1 else f" on {source}"
        accuracies[of] = [row[key] for row in rl if key in row]
    entropy = [row["actor/entropy"] for row in rl if "actor/entropy" in row]
    kind = run.meshes["actor"].devices.flat[0].device_kind
    lines = []
    for of, accuracy in accuracies.items():
        if accuracy:
            lines.append((f"evaluation accuracy{of} before", f"{accuracy[0]:.1%}"))
            lines.append((f"evaluation accuracy{of} after", f"{accuracy[-1]:.1%}"))
    if entropy:
        lines.append(("entropy, first and last step", f"{entropy[0]:.3f} → {entropy[-1]:.3f}"))
    lines += [
        (f"{title}, steps and minutes", f"{found[-1]['step']:,}, {_minutes(found):.1f}")
        for title, found in rows.items()
        if found
    ]
    return [
        *lines,
        ("parameters", f"{run.model.num_params:,}"),
        ("devices", f"{run.placement.num_devices} x {kind}"),
    ]
