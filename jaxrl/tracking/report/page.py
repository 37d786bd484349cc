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
from jaxrl.tracking.report.plots import Plot, compared_plots, draw_svg, plots_of


@dataclasses.dataclass(frozen=True)
class Section:
    """The curves of one training stage, such as "SFT" or "DAPO".

    Attributes:
      name: heading; unique in the report.
      rows: metric rows of the stage, as `read_metrics` returns them.
    """

    name: str
    rows: Sequence[dict[str, Any]]


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
    sections: Sequence[Section],
    samples: Sequence[PromptResponses],
    config_text: str,
) -> None:
    """Writes the report to `path` atomically.

    Args:
      path: the HTML file.
      title: heading of the page.
      summary: (label, formatted value) of the headline numbers.
      sections: sections with curves; curves without data are left out.
      samples: responses to show side by side.
      config_text: all settings of the run.
    """
    stages = [
        (section.name, f"{section.rows[-1]['step']:,} steps", drawn, [], [])
        for section in sections
        if (drawn := _drawn(plots_of(section.rows), section.name))
    ]
    counted = [(heading.lower(), count) for heading, count in _num_correct(samples)]
    write_page(
        path,
        "page.html",
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
    stages: Sequence[tuple[str, Sequence[tuple[str, Sequence[dict[str, Any]]]]]],
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
    write_page(
        path,
        "page.html",
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


def write_page(
    path: str | os.PathLike[str],
    template: str,
    *,
    package: str = "jaxrl.tracking.report",
    **values: Any,
) -> None:
    """Renders a template of a package with these values, and writes the page to `path` atomically."""
    page = environment_of(package).get_template(template).render(**values)
    write_atomically(path, page.encode("utf-8", errors="backslashreplace"))


def _drawn(plots: Iterable[Plot], section: str) -> list[tuple[Plot, str]]:
    return [
        (
            plot,
            draw_svg(
                plot.draw,
                unit=plot.unit,
                salt=f"{section}/{plot.title}",
                label=_described(plot),
            ),
        )
        for plot in plots
    ]


def _described(plot: Plot) -> str:
    """A plot in words: "Entropy over steps, in nats per token; last value 0.08"."""
    curves = [f"{entry.label} {entry.value}".strip() for entry in plot.legend]
    last = [f"last value {plot.last}"] if plot.last else []
    return "; ".join([f"{plot.title} over steps, in {plot.unit}", *last, *curves])


def _num_correct(samples: Sequence[PromptResponses]) -> list[tuple[str, int]]:
    """Number of correct responses under each heading."""
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
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    """Shows invisible characters of a text by their codes; other values are unchanged."""
    return visible(value) if type(value) is str else value
