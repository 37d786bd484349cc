"""Draws plots over steps as inline SVG. Colours are CSS variables, so plots follow the theme of the page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

NUM_COLORS = 8  # --c0 ... --c7 in the style sheet

# Matplotlib needs literal colours. These placeholders are replaced by CSS variables in its output.
_INK, _GRID = "#010203", "#010204"
COLORS = tuple(f"#0102{0x10 + i:02x}" for i in range(NUM_COLORS))
_CSS_VARIABLES = {
    _INK: "var(--muted)",
    _GRID: "var(--line)",
    **{color: f"var(--c{i})" for i, color in enumerate(COLORS)},
}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text: it can be searched and uses the font of the page
    "text.parse_math": False,  # the name of a data set may contain a dollar
    "font.size": 10.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.left": False,
    "ytick.labelcolor": _INK,
}

# Leave out the program's name and the date: equal input must give equal bytes.
_NO_METADATA: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def draw_svg(draw: Callable[[Axes], None], *, unit: str, salt: str, label: str) -> str:
    """Draws a plot as an <svg> element.

    Args:
      draw: draws the curves, in `COLORS`.
      unit: label of the vertical axis.
      salt: salt of the hashes that are element ids; it must be unique on a page. Equal salts give equal ids.
      label: what a screen reader says in place of the plot.
    """
    out = io.StringIO()
    # "default" first, to ignore the user's matplotlibrc.
    with (
        matplotlib.style.context(["default", _STYLE]),
        matplotlib.rc_context({"svg.hashsalt": salt}),
    ):
        figure = Figure(figsize=(4.5, 2.6), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.margins(x=0.02)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        draw(axes)
        FigureCanvasSVG(figure).print_svg(out, metadata=_NO_METADATA)
    return _inline_svg(out.getvalue(), label)


def _inline_svg(document: str, label: str) -> str:
    """Converts an SVG document to an <svg> element for an HTML page, with its colours as CSS variables."""
    svg = document[document.index("<svg") :]
    # The ids of groups repeat in each plot, and nothing refers to them.
    svg = re.sub(r' id="[a-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    label = html.escape(label)
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        lambda found: f'<svg {found[1]} role="img" aria-label="{label}">',
        svg,
        count=1,
    )
    svg = re.sub(r"; font-family: [^;\"]*", "", svg)
    # Round coordinates: hundredths of a point are finer than any screen.
    svg = re.sub(r' (d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    return re.sub("#0102[0-9a-f]{2}", lambda match: _CSS_VARIABLES[match[0]], svg).strip()
