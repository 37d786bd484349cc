"""Renders the report of a run and the comparison of several runs, with one template (`page.html`).

Equal input gives equal bytes. Prompts and responses are untrusted: the template escapes all values except the
plots, and the page's content security policy forbids scripts and foreign resources.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2

from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.readable import visible
from jaxrl.tracking.report.plots import Plot, Rows, compared_plots, draw_svg, plots_of


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
        plots = compared_plots(rows)
        main, others = _drawn(plots.main, name), _drawn(plots.others, name)
        sections.append((name, "", main, others, plots.constant))
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
    page = environment_of("jaxrl.tracking.report").get_template("page.html").render(**values)
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
                for name in dict.fromkeys((package, "jaxrl.tracking.report"))
            ]
        ),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
