"""The files in a run's folder besides logs and checkpoints: config, samples and report."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.data.problems import NO_EVALUATION
from jaxrl.errors import UserError
from jaxrl.files import read_text
from jaxrl.mesh import hosts
from jaxrl.models.huggingface.config_json import adapter_config_json, config_json, read_config_json
from jaxrl.models.huggingface.model_files import ADAPTER_CONFIG_FILE, copy_companions, write_json
from jaxrl.tracking.durable import ensure_writable, write_atomically
from jaxrl.tracking.lost_rows import lost_rows
from jaxrl.tracking.metrics import read_metrics, readable_rows
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.cross_checks import title_of
from jaxrl.trainer.model_shape import tokenizer_directory
from jaxrl.types import Scored

logger = logging.getLogger(__name__)

_AUTO = repr("auto")
# Number of problems whose answers the report shows before and after training.
_REPORT_SAMPLES = 8
# The evaluations whose answers the report shows.
_SAMPLES_KEPT = ("before", "after")
_OF_A_SAMPLE = ("prompt", "answer", "text", "correct")

Rows = list[dict[str, Any]]


def check_folder(config: Config) -> None:
    """Prints how the config differs from that of the run in the folder; changes nothing.

    Raises:
      UserError: the folder holds a run that this config must not resume, or rows of its metrics are lost.
    """
    _check_rows(config)
    path = config.run_folder.config
    if not path.exists():
        return
    if config.run.resume == "never":
        raise UserError(
            f'{config.run_folder} already holds a run and run.resume is "never"; remove it, or give '
            "this run another --config.name or --config.run.output"
        )
    try:
        before = _parse(read_text(path, absent="remove it"))
    except ValueError as error:  # includes directories and binary files
        logger.warning("%s cannot be read (%s): settings are not compared", path, error)
        return
    now = _parse(format_config(config))
    changed = [
        f"{key}: {before.get(key)} -> {now[key]}"
        for key in now
        # The file has the choice of the program in the place of "auto".
        if now[key] not in (before.get(key), _AUTO)
    ]
    if changed:
        logger.warning("this run was started with other settings: %s", "; ".join(changed))


def _check_rows(config: Config) -> None:
    accepts = config.run.resume == "accept_lost_rows"
    for folder in _stages(config).values():
        fault = lost_rows(folder)
        if fault is None:
            continue
        if not accepts:
            raise UserError(
                f"{fault}; what is lost cannot be made again: restore the file from a copy, or go on without "
                "the lost rows with --config.run.resume=accept_lost_rows"
            )
        logger.warning("%s; going on without the lost rows", fault)


def _stages(config: Config) -> dict[str, StageFolder]:
    """The folders that the report reads, by section title."""
    return {
        title_of(config): config.run_folder.rl,
        "Preferences": config.run_folder.preference,
        "Warm start (SFT)": config.warm_start_folder,
    }


def keep_run_files(run: RunContext) -> None:
    """Writes the settings and the model's files into the run's folder. Collective.

    Call it after all checks that can refuse the run.
    """

    def write() -> None:
        config = run.config
        write_atomically(config.run_folder.config, format_config(config).encode())
        keep_model_files(run)

    hosts.on_first(write)


def keep_model_files(run: RunContext) -> None:
    """Writes `model/` into the run's folder: all that `tracking.export.export_run` needs besides weights."""
    config, model = run.config, run.model
    directory = config.run_folder.model
    ensure_writable(directory)
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
    """Stores the first answer to a few evaluation problems, if the report shows this evaluation."""
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
        for i in range(min(_REPORT_SAMPLES, len(completions.prompts)))
    ]
    write_atomically(config.run_folder.samples(when), json.dumps(samples, indent=1).encode())


def write_run_report(run: RunContext) -> pathlib.Path:
    """Writes the report of the whole run as one HTML page; returns its path."""
    # Imported late: the plotting libraries take a second to import.
    from jaxrl.tracking import report

    config = run.config
    read = _rows if config.run.resume != "accept_lost_rows" else _readable_rows
    rows = {title: read(folder) for title, folder in _stages(config).items()}
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
    """The stored samples of both evaluations; empty if one of the files is missing or damaged."""
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


def _readable_rows(folder: StageFolder) -> Rows:
    return readable_rows(folder.metrics)


def _minutes(rows: Rows) -> float:
    """Minutes of a stage, even if its log has a row only every few steps."""
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    return float(np.mean(seconds)) * rows[-1]["step"] / 60 if seconds else 0.0


def evaluation_lines(
    rows: Rows, sources: Sequence[str], *, num_samples: int
) -> list[tuple[str, str]]:
    """Describes the first and the last evaluation for the report, each with its step.

    Args:
      rows: rows of the log.
      sources: names of the evaluated data sets; duplicates are allowed.
      num_samples: number of answers per prompt.
    """
    names = list(dict.fromkeys(sources))
    if not names:
        return [("evaluation", NO_EVALUATION)]
    lines = []
    for name in names:
        accuracy = f"{name}/acc/mean@{num_samples}"
        of = "" if len(names) == 1 else f" on {name}"
        found = {int(row["step"]): row for row in rows if f"val-core/{accuracy}" in row}
        for step in dict.fromkeys([*found][:1] + [*found][-1:]):
            when = f"after step {step:,}" if step else "before training"
            last = int(rows[-1]["step"])
            if step and step == max(found) and step < last:
                when += f" of {last:,}, where it was last evaluated"
            shown = f"{found[step][f'val-core/{accuracy}']:.1%}"
            # One problem alone has no standard error.
            if (stderr := found[step].get(f"val-aux/{accuracy}/stderr")) is not None:
                shown += f" ± {stderr:.1%} (standard error)"
            lines.append((f"evaluation accuracy{of} {when}", shown))
    return lines


def _summary(run: RunContext, rows: Mapping[str, Rows]) -> Sequence[tuple[str, str]]:
    """Headline numbers of the report."""
    config = run.config
    rl = rows[title_of(config)]
    entropy = [row["actor/entropy"] for row in rl if "actor/entropy" in row]
    kind = run.meshes["actor"].devices.flat[0].device_kind
    lines = []
    # A supervised run may have no problems; then accuracy is left out.
    if rl:
        lines = evaluation_lines(
            rl, run.evaluation_prompts.sources, num_samples=config.evaluation.num_samples
        )
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
