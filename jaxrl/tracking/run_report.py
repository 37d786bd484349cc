"""The report of a run: what it shows besides metrics, read from the run's folder and written as a page."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.problems import NO_EVALUATION
from jaxrl.tracking.metrics import (
    evaluation_accuracy,
    evaluation_stderr,
    read_metrics,
)
from jaxrl.tracking.run_folder import RunFolder, StageFolder

logger = logging.getLogger(__name__)

_SAMPLE_FIELDS = ("prompt", "answer", "text", "correct")

Rows = list[dict[str, Any]]


def stored_samples(folder: RunFolder, when: str) -> list[dict[str, Any]]:
    """The stored samples of an evaluation; empty if the file is missing or damaged.

    Args:
      folder: folder of the run.
      when: "before" or "after" training.
    """
    path = folder.samples(when)
    if not path.exists():
        return []
    # A run that has trained must not fail here.
    try:
        return [
            {name: sample[name] for name in _SAMPLE_FIELDS}
            for sample in json.loads(path.read_text())
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged (%s): its answers are left out", path, error)
        return []


def rows_of(folder: StageFolder, *, accepts_lost_rows: bool) -> Rows:
    """The rows of a stage's log; empty without a log.

    Args:
      folder: folder of the stage.
      accepts_lost_rows: whether damaged rows are skipped instead of refused.
    """
    path = folder.metrics
    return read_metrics(path, skips_damaged=accepts_lost_rows) if path.exists() else []


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


def shown_accuracy(row: Mapping[str, Any], name: str) -> str:
    """An accuracy with its standard error: "78.9% ± 4.4%". A single problem has no error.

    Args:
      row: metric row with the accuracy.
      name: name of the accuracy, as in `evaluation_accuracy`.
    """
    stderr = evaluation_stderr(row).get(name)
    return f"{evaluation_accuracy(row)[name]:.1%}" + ("" if stderr is None else f" ± {stderr:.1%}")


Lines = Sequence[tuple[str, str]]


def write_run_report(
    folder: RunFolder,
    stages: Mapping[str, StageFolder],
    *,
    title: str,
    config_text: str,
    accepts_lost_rows: bool,
    evaluation_sources: Sequence[str],
    num_samples: int,
    facts: Lines,
) -> pathlib.Path:
    """Writes the report as one HTML page; returns its path.

    Args:
      folder: folder of the run.
      stages: folder of each stage, by section title; reinforcement learning first.
      title: title of the page.
      config_text: settings of the run, as text.
      accepts_lost_rows: whether to continue if rows of the metrics are damaged.
      evaluation_sources: names of the evaluation's data sets, one per problem.
      num_samples: number of answers per evaluation problem.
      facts: further headline numbers.
    """
    # Imported late: the plotting libraries take a second to import.
    from jaxrl.tracking.report import page

    rows = {
        name: rows_of(stage, accepts_lost_rows=accepts_lost_rows) for name, stage in stages.items()
    }
    rl = rows[next(iter(stages))]
    # A supervised run may have no problems; then accuracy is left out.
    accuracy = evaluation_lines(rl, evaluation_sources, num_samples=num_samples) if rl else []
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
    page.write_report(
        folder.report,
        title=title,
        summary=[*accuracy, *lengths, *facts],
        sections=[(name, found) for name, found in rows.items() if found],
        samples=[
            page.PromptResponses(
                before["prompt"],
                before["answer"],
                [
                    (heading, page.Response(sample["text"], sample["correct"]))
                    for heading, sample in (("Before", before), ("After", after))
                ],
            )
            for before, after in pairs
        ],
        config_text=config_text,
    )
    return folder.report
