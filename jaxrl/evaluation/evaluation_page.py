"""Writes the page of an evaluation: results and some answers. `jaxrl browse FOLDER` shows all answers."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

from jaxrl.tracking.report.page import write_page
from jaxrl.tracking.run_folder import EvaluationFolder
from jaxrl.tracking.sample_rows import read_head

_PROBLEMS = 50
_ANSWERS_EACH = 2
_LONGEST_CHARS = 20_000


def write_evaluation_page(folder: EvaluationFolder, *, title: str, table: str) -> pathlib.Path:
    """Writes samples.html and returns its path.

    Args:
      folder: folder of the evaluation, with all samples.
      title: heading of the page.
      table: table of the results, as text.
    """
    with folder.samples.open("rb") as file:
        rows = [read_head(line) for line in itertools.islice(file, 100_000)]
    problems: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        problem = (row["source"], row["prompt_id"])
        if problem in problems or len(problems) < _PROBLEMS:
            problems.setdefault(problem, []).append(row)
    write_page(
        folder.page,
        "evaluation_page.html",
        package="jaxrl.evaluation",
        title=title,
        table=table,
        settings=folder.settings.read_text(),
        problems=[(answers[0], answers[:_ANSWERS_EACH], answers) for answers in problems.values()],
        folder=str(folder),
        longest=_LONGEST_CHARS,
    )
    return folder.page
