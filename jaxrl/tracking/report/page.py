"""Renders the report from the templates `page.html` and `page.css`.

Equal input gives equal bytes. Prompts and responses are untrusted: the template escapes all values except the
plots, and the page's content security policy forbids scripts and foreign resources.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jinja2

from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.readable import visible
from jaxrl.tracking.report.plots import Plot, plots_of
from jaxrl.tracking.report.svg import NUM_COLORS, draw_svg


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
    """A response of the model, and whether it is correct."""

    text: str
    correct: bool


@dataclasses.dataclass(frozen=True)
class SamplePair:
    """Responses to one prompt before and after training.

    Attributes:
      prompt: text of the prompt.
      answer: ground truth.
      before, after: the two responses.
    """

    prompt: str
    answer: str
    before: Response
    after: Response


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    samples: Sequence[SamplePair],
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
    page = _template().render(
        title=title,
        summary=summary,
        sections=[(section, _drawn_plots(section)) for section in sections],
        samples=samples,
        config_text=config_text,
        num_colors=NUM_COLORS,
    )
    write_atomically(path, page.encode("utf-8", errors="backslashreplace"))


def _drawn_plots(section: Section) -> list[tuple[Plot, str]]:
    return [
        (plot, draw_svg(plot.draw, unit=plot.unit, salt=f"{section.name}/{plot.title}"))
        for plot in plots_of(section.rows)
    ]


def _template() -> jinja2.Template:
    return environment_of("jaxrl.tracking.report").get_template("page.html")


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
