"""Writes the report of a run from the files in its folder."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tracking import report_content
from jaxrl.tracking.run_folder import RunFolder, StageFolder

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
    from jaxrl.tracking import report

    rows = {
        name: report_content.rows_of(stage, accepts_lost_rows=accepts_lost_rows)
        for name, stage in stages.items()
    }
    rl = rows[next(iter(stages))]
    # A supervised run may have no problems; then accuracy is left out.
    accuracy = (
        report_content.evaluation_lines(rl, evaluation_sources, num_samples=num_samples)
        if rl
        else []
    )
    report.write_report(
        folder.report,
        title=title,
        summary=[*accuracy, *_summary(rows), *facts],
        sections=[report.Section(name, found) for name, found in rows.items() if found],
        samples=[
            report.PromptResponses(
                before["prompt"],
                before["answer"],
                [
                    (heading, report.Response(sample["text"], sample["correct"]))
                    for heading, sample in (("Before", before), ("After", after))
                ],
            )
            for before, after in report_content.sample_pairs(folder)
        ],
        config_text=config_text,
    )
    return folder.report


def _summary(rows: Mapping[str, list[dict[str, Any]]]) -> Lines:
    """The steps and minutes of each stage."""
    return [
        (
            f"{title}, steps and minutes",
            f"{found[-1]['step']:,}, {report_content.minutes_of(found):.1f}",
        )
        for title, found in rows.items()
        if found
    ]
