"""Writes the report of a run from the files of its folder."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxrl.config.config_tree import format_config
from jaxrl.data.problems import NO_EVALUATION
from jaxrl.tracking.metrics import read_metrics
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.run_files import stage_folders
from jaxrl_report.page import (
    PromptResponses,
    Response,
    shown_accuracy,
    stored_samples,
    write_report,
)
from jaxrl_report.plots import Rows

logger = logging.getLogger(__name__)


def write_run_report(run: RunContext) -> pathlib.Path:
    """Writes the report of a whole run as one HTML page; returns its path."""
    config, folder = run.config, run.config.run_folder
    stages = stage_folders(config)
    accepts_lost = config.run.resume == "accept_lost_rows"
    rows = {
        name: read_metrics(stage.metrics, skips_damaged=accepts_lost)
        for name, stage in stages.items()
        if stage.metrics.exists()
    }
    rl = rows.get(next(iter(stages)), [])
    sources = sources_of(run.evaluation_prompts.sources, config.rollout.learning_roles)
    # A supervised run may have no problems; then accuracy is left out.
    num_samples = config.evaluation.num_samples
    accuracy = evaluation_lines(rl, sources, num_samples=num_samples) if rl else []
    lengths = []
    for name, found in rows.items():
        if found:
            # The log may have a row only every few steps.
            seconds = [row["timing_s/step"] for row in found if "timing_s/step" in row]
            step = found[-1]["step"]
            minutes = float(np.mean(seconds)) * step / 60 if seconds else 0.0
            lengths.append((f"{name}, steps and minutes", f"{step:,}, {minutes:.1f}"))
    before, after = (stored_samples(folder, when) for when in ("before", "after"))
    pairs = list(zip(before, after, strict=False))
    if before and after and len(before) != len(after):
        logger.warning("%s has %d and %d answers", folder, len(before), len(after))
        pairs = []
    kind = run.meshes["actor"].devices.flat[0].device_kind
    write_report(
        folder.report,
        title=f"{config.name}, seed {config.seed}",
        summary=[
            *accuracy,
            *lengths,
            ("parameters", f"{run.model.num_params:,}"),
            ("devices", f"{run.placement.num_devices} x {kind}"),
        ],
        sections=[(name, found) for name, found in rows.items() if found],
        samples=[
            PromptResponses(
                before["prompt"],
                before["answer"],
                [
                    (heading, Response(sample["text"], sample["correct"]))
                    for heading, sample in (("Before", before), ("After", after))
                ],
            )
            for before, after in pairs
        ],
        config_text=format_config(config),
    )
    return folder.report


def sources_of(sources: Sequence[str], roles: Sequence[str]) -> Sequence[str]:
    """The names under which an evaluation has its metrics: a source for each role of an agent."""
    return [f"{source}/{role}" for source in sources for role in roles] or sources


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
        scored = (row for row in rows if f"val-core/{accuracy}" in row)
        # An evaluation beside a step is of the weights before it.
        found = {int(row.get("val-aux/version", row["step"])): row for row in scored}
        # The first and the last evaluation; a run with one has it once.
        for step in dict.fromkeys([*found][:1] + [*found][-1:]):
            when = f"after step {step:,}" if step else "before training"
            last = int(rows[-1]["step"])
            if step and step == max(found) and step < last:
                when += f" of {last:,}, where it was last evaluated"
            shown = shown_accuracy(found[step], f"{name} mean@{num_samples}")
            error = " (± standard error)" if "±" in shown else ""
            lines.append((f"evaluation accuracy{of} {when}{error}", shown))
    return lines
