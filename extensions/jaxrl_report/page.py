"""Lays out the report of a run, and the comparison of several runs.

Both are one HTML page, of one template (`page.html`). Equal input gives equal bytes. Prompts and responses
are untrusted: the template escapes all values except the plots, and the page's content security policy
forbids scripts and foreign resources.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from jaxrl.files import read_text
from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.metrics import evaluation_accuracy, evaluation_stderr
from jaxrl.tracking.readable import visible
from jaxrl.tracking.run_folder import RunFolder
from jaxrl_report.plots import Plot, Rows, compared_plots, draw_svg, plots_of

logger = logging.getLogger(__name__)

_SAMPLE_FIELDS = ("prompt", "answer", "text", "correct")


@dataclasses.dataclass(frozen=True)
class Response:
    """A response of the model, whether it is correct, and a note to show beside it."""

    text: str
    correct: bool
    note: str = ""


@dataclasses.dataclass(frozen=True)
class PromptResponses:
    """Responses to one prompt, side by side.

    Attributes:
      prompt: text of the prompt.
      answer: ground truth.
      responses: (heading, response); None where there is no response.
    """

    prompt: str
    answer: str
    responses: Sequence[tuple[str, Response | None]]


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary: Sequence[tuple[str, str]],
    sections: Sequence[tuple[str, Rows]],
    samples: Sequence[PromptResponses],
    config_text: str,
) -> None:
    """Writes the report to `path` atomically.

    Args:
      path: the HTML file.
      title: heading of the page.
      summary: (label, formatted value) of the headline numbers.
      sections: (unique heading, metric rows) of the training stages; curves without data are left out.
      samples: responses to show side by side.
      config_text: all settings of the run.
    """
    stages = [
        (name, f"{rows[-1]['step']:,} steps", drawn, [], [])
        for name, rows in sections
        if (drawn := _drawn(plots_of(rows), name))
    ]
    counted = [(heading.lower(), count) for heading, count in _num_correct(samples)]
    _write_page(
        path,
        title=title,
        summary=summary,
        runs=(),
        stages=stages,
        samples=[("Samples", samples, counted)] if samples else [],
        config_text=config_text,
    )


Table = Sequence[tuple[str, Sequence[str]]]  # (name of a row, value of each run)


def write_comparison(
    path: str | os.PathLike[str],
    *,
    title: str,
    runs: Sequence[str],
    headline: Table,
    stages: Sequence[tuple[str, Sequence[tuple[str, Rows]]]],
    settings: Table,
    num_settings: int,
    samples: Sequence[tuple[str, Sequence[PromptResponses]]],
) -> None:
    """Writes a page that compares runs to `path` atomically.

    Args:
      path: the HTML file.
      title: heading of the page.
      runs: label of each run; at most `NUM_COLORS`.
      headline: the most important numbers.
      stages: (heading, (label, metric rows) of each run) of the training stages.
      settings: settings that differ.
      num_settings: number of all settings.
      samples: (heading, prompts with a response of each run).
    """
    sections = []
    for name, rows in stages:
        main, others, constant = compared_plots(rows)
        sections.append((name, "", _drawn(main, name), _drawn(others, name), constant))
    _write_page(
        path,
        title=title,
        summary=(),
        runs=runs,
        headline=headline,
        stages=sections,
        settings=settings,
        num_settings=num_settings,
        samples=[(heading, shown, _num_correct(shown)) for heading, shown in samples if shown],
        config_text="",
    )


def _write_page(path: str | os.PathLike[str], **values: Any) -> None:
    page = environment_of("jaxrl_report").get_template("page.html").render(**values)
    write_atomically(path, page.encode("utf-8", errors="backslashreplace"))


def _drawn(plots: Iterable[Plot], section: str) -> list[tuple[Plot, str]]:
    drawn = []
    for plot in plots:
        # The plot in words: "Entropy over steps, in nats per token; last value 0.08".
        label = [f"{plot.title} over steps, in {plot.unit}"]
        label += [f"last value {plot.last}"] if plot.last else []
        label += [f"{entry.label} {entry.value}".strip() for entry in plot.legend]
        salt = f"{section}/{plot.title}"
        drawn.append((plot, draw_svg(plot.draw, unit=plot.unit, salt=salt, label="; ".join(label))))
    return drawn


def _num_correct(samples: Sequence[PromptResponses]) -> list[tuple[str, int]]:
    # Number of correct responses under each heading.
    counts: dict[str, int] = {}
    for shown in samples:
        for heading, response in shown.responses:
            counts[heading] = counts.get(heading, 0) + bool(response and response.correct)
    return list(counts.items())


def environment_of(package: str) -> jinja2.Environment:
    """Loads the templates of a package and of this one. Values are escaped, invisible characters shown."""
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [
                jinja2.PackageLoader(name, package_path="")
                for name in dict.fromkeys((package, "jaxrl_report"))
            ]
        ),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


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
            {"problem_key": sample.get("problem_key"), **{k: sample[k] for k in _SAMPLE_FIELDS}}
            for sample in json.loads(read_text(path, absent=""))
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is damaged (%s): its answers are left out", path, error)
        return []


def shown_accuracy(row: Mapping[str, Any], name: str) -> str:
    """An accuracy with its standard error: "78.9% ± 4.4%". A single problem has no error.

    Args:
      row: metric row with the accuracy.
      name: name of the accuracy, as in `evaluation_accuracy`.
    """
    stderr = evaluation_stderr(row).get(name)
    return f"{evaluation_accuracy(row)[name]:.1%}" + ("" if stderr is None else f" ± {stderr:.1%}")
