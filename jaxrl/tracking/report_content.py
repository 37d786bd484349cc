"""Reads the content of a run's report from its files: answers, metric rows, accuracies and minutes."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.problems import NO_EVALUATION
from jaxrl.mesh import hosts
from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.metrics import read_metrics, readable_rows
from jaxrl.tracking.run_folder import RunFolder, StageFolder
from jaxrl.types import Scored

logger = logging.getLogger(__name__)

# Number of problems whose answers the report shows before and after training.
_REPORT_SAMPLES = 8
# The evaluations whose answers the report shows.
_SAMPLES_KEPT = ("before", "after")
_SAMPLE_FIELDS = ("prompt", "answer", "text", "correct")

Rows = list[dict[str, Any]]


def keep_samples(folder: RunFolder, scored: Scored, when: str) -> None:
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
    write_atomically(folder.samples(when), json.dumps(samples, indent=1).encode())


def sample_pairs(folder: RunFolder) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The stored samples of both evaluations; empty if one of the files is missing or damaged."""
    paths = [folder.samples(when) for when in _SAMPLES_KEPT]
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
        {name: sample[name] for name in _SAMPLE_FIELDS} for sample in json.loads(path.read_text())
    ]


def rows_of(folder: StageFolder, *, accepts_lost_rows: bool) -> Rows:
    """The rows of a stage's log; empty without a log.

    Args:
      folder: folder of the stage.
      accepts_lost_rows: whether damaged rows are skipped instead of refused.
    """
    path = folder.metrics
    if accepts_lost_rows:
        return readable_rows(path)
    return read_metrics(path) if path.exists() else []


def minutes_of(rows: Rows) -> float:
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
