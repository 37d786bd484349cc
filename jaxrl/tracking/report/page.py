"""The page of a report: what it shows, put into `page.html` and `page.css`.

Equal input gives equal bytes. Prompts and responses are untrusted text: the template escapes all that it
is given but the drawings, and the page forbids itself to run scripts or to load anything.
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
    """A part of the page with curves over steps of its own, such as "SFT" or "DAPO".

    Attributes:
      name: heading of its curves; no two sections have the same.
      rows: what `read_metrics` returns for it.
    """

    name: str
    rows: Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Response:
    """What a model answered, and whether the grader took it."""

    text: str
    correct: bool


@dataclasses.dataclass(frozen=True)
class SamplePair:
    """Answers to one prompt before and after training."""

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
    """Writes the report to `path`, whole or not at all.

    Args:
      path: the HTML file.
      title: heading of the page.
      summary: (label, value) of the headline numbers, already formatted.
      sections: curves, section by section; a curve whose metrics a section does not have is left out.
      samples: completions to show side by side.
      config_text: the resolved config.
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
    """Templates of a package, and this page's style; what is put into them is escaped and can be seen."""
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
    """A text with what cannot be seen in it shown by its code; anything else as it is."""
    return visible(value) if type(value) is str else value
