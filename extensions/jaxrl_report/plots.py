"""The plots of a report: the metrics of each plot, their formats, and how they are drawn as inline SVG.

Colours are CSS variables, so plots follow the theme of the page.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxrl.tracking.metrics import evaluation_accuracy, evaluation_stderr
from jaxrl.tracking.readable import number

Rows = Sequence[dict[str, Any]]  # metric rows, as `read_metrics` returns them

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

_MAX_DOTS = 500  # points drawn per curve; the line uses all values
_MAX_MARKERS = 40  # markers per evaluation curve
_MAX_BARS = 60  # bars of the plot of seconds per phase
_MAX_PHASES = NUM_COLORS - 1  # phases with a colour; the others are summed

# Phases in the order of a step. Unlisted phases follow alphabetically.
_PHASE_ORDER = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("update_weights", "testing", "save_checkpoint"),
)


class LegendEntry(NamedTuple):
    """A curve in the legend: index of its colour in `svg.COLORS`, its name, and its last value or ""."""

    color: int
    label: str
    value: str = ""


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of the report.

    Attributes:
      title: heading.
      unit: label of the vertical axis.
      last: number beside the heading, usually the last value of the first curve.
      legend: the curves; empty for a single curve.
      draw: draws the curves.
    """

    title: str
    unit: str
    last: str
    legend: Sequence[LegendEntry]
    draw: Callable[[Axes], None]


@dataclasses.dataclass(frozen=True)
class _Curves:
    """The metrics of one plot."""

    # Heading.
    title: str
    # Label of the vertical axis.
    unit: str
    # (metric, label in the legend) of each curve.
    keys: Sequence[tuple[str, str]]
    # Formats a value, for the axis and the headline.
    show: Callable[[float], str] = number
    # Value that the vertical axis must reach down to; None for no such value.
    floor: float | None = None


@dataclasses.dataclass(frozen=True)
class _Series:
    """A curve: values at steps."""

    # Name in the legend.
    label: str
    # Float64 [N].
    steps: np.ndarray
    values: np.ndarray
    # Standard error of an evaluation's accuracies, float64 [N], NaN where there is none.
    stderr: np.ndarray | None = None
    # Index of the colour in `COLORS`.
    color: int = 0


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


_REWARD = _Curves(
    "Reward",
    "mean reward of a response",
    [("critic/rewards/mean", "reward"), ("critic/score/mean", "score alone, without shaping")],
)
_ENTROPY = _Curves("Entropy", "nats per token", [("actor/entropy", "entropy")], floor=0.0)
_LENGTH = _Curves(
    "Response length", "tokens per response", [("response_length/mean", "mean length")]
)
_LOSSES = (
    _Curves("Loss", "nats per token", [("sft/loss", "loss")]),
    _Curves(
        "Token probability",
        "mean of target tokens",
        [("sft/mean_token_prob", "probability")],
        _percent,
    ),
    _Curves("Loss of pairs", "nats per pair", [("pairs/loss", "loss")]),
    _Curves(
        "Accuracy on pairs", "share of pairs in order", [("pairs/accuracy", "accuracy")], _percent
    ),
)
_OTHERS = (
    _ENTROPY,
    _Curves("Mean token probability", "probability", [("actor/mean_token_prob", "probability")]),
    _LENGTH,
    _Curves(
        "Clipped tokens",
        "share of response tokens",
        [
            ("actor/pg_clipfrac_high", "ratio above 1 + high"),
            ("actor/pg_clipfrac_low", "ratio below 1 - low"),
            ("actor/pg_clipfrac_lower", "dual clip"),
        ],
        _percent,
        floor=0.0,
    ),
    _Curves(
        "Generation batches", "batches per step", [("train/num_gen_batches", "batches")], floor=0.0
    ),
    *_LOSSES,
    _Curves("Throughput", "tokens per second", [("perf/throughput", "tokens")], floor=0.0),
)
# The first plots of a comparison of runs, in this order. Each draws the first metric of its curves.
_COMPARED = (
    *_LOSSES,
    _REWARD,
    _LENGTH,
    _ENTROPY,
    _Curves("Gradient norm", "norm before clipping", [("actor/grad_norm", "norm")], floor=0.0),
    _Curves("Seconds a step", "seconds", [("timing_s/step", "seconds")], floor=0.0),
)


def plots_of(rows: Rows) -> Iterator[Plot]:
    """The plots of a section; plots without data are left out."""
    reward = _named_series(_REWARD, rows)
    # The score alone is shown if shaping makes it different.
    if len(reward) == 2 and np.array_equal(reward[0].values, reward[1].values):
        reward = reward[:1]
    plots = [
        _curves_plot(_REWARD, reward),
        _accuracy_plot(rows),
        *(_curves_plot(curves, _named_series(curves, rows)) for curves in _OTHERS),
        _phases_plot(rows),
    ]
    return (plot for plot in plots if plot is not None)


def _named_series(curves: _Curves, rows: Rows) -> list[_Series]:
    found = []
    for key, label in curves.keys:
        series = _series(label, key, rows, color=len(found))
        found += [series] if series.values.size else []
    return found


def _series(label: str, key: str, rows: Rows, *, color: int = 0) -> _Series:
    # The finite values of `key`.
    points = [(row["step"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return _Series(label, np.array(steps, np.int64), np.array(values, np.float64), color=color)


def _curves_plot(
    curves: _Curves, found: Sequence[_Series], *, dots: bool = True, values: bool = False
) -> Plot | None:
    """A plot with lines of the moving mean; None without curves.

    Args:
      curves: what to draw.
      found: the curves.
      dots: whether each step has a dot.
      values: whether the legend has the last values, and stands in place of the number beside the heading.
    """
    if not found:
        return None

    def draw(axes: Axes) -> None:
        for series in found:
            _draw_smoothed(axes, series, dots=dots)
        _format_values(axes, curves.show, floor=curves.floor)

    last = [curves.show(float(_smooth(series.values)[-1])) for series in found]
    legend = [
        LegendEntry(series.color, series.label, value if values else "")
        for series, value in zip(found, last, strict=True)
    ]
    return Plot(
        curves.title,
        curves.unit,
        "" if values else last[0],
        legend if values or len(legend) > 1 else [],
        draw,
    )


def _accuracy_plot(rows: Rows) -> Plot | None:
    # The accuracy on each evaluation set, and that on the sampled training prompts.
    evaluations = _evaluation_series(rows)
    color = len(evaluations) % NUM_COLORS
    train = _series("training prompts, as sampled", "train/accuracy", rows, color=color)
    if not evaluations and not train.values.size:
        return None

    def draw(axes: Axes) -> None:
        if train.values.size:
            _draw_smoothed(axes, train)
        _draw_evaluations(axes, evaluations)

    legend = [LegendEntry(s.color, f"evaluation: {s.label}") for s in evaluations]
    legend += [LegendEntry(train.color, train.label)] if train.values.size else []
    last = evaluations[0].values[-1] if evaluations else _smooth(train.values)[-1]
    return Plot("Accuracy", "share of answers correct", _percent(float(last)), legend, draw)


def _evaluation_series(rows: Rows) -> list[_Series]:
    # The accuracy on each evaluation set, by name of the set.
    points = [(row["step"], evaluation_accuracy(row), evaluation_stderr(row)) for row in rows]
    names = sorted({name for _, accuracy, _ in points for name in accuracy})
    found = []
    for name in names:
        values = [
            (step, accuracy[name], stderr.get(name, math.nan))
            for step, accuracy, stderr in points
            if math.isfinite(accuracy.get(name, math.nan))
        ]
        if values:
            columns = np.array(values, np.float64).T
            found.append(_Series(name, *columns, color=len(found) % NUM_COLORS))
    return found


def _draw_evaluations(axes: Axes, found: Sequence[_Series]) -> None:
    # Draws accuracies with their standard errors.
    for series in found:
        stride = math.ceil(len(series.steps) / _MAX_MARKERS)
        axes.errorbar(
            series.steps,
            series.values,
            yerr=series.stderr,
            color=COLORS[series.color],
            marker="o",
            markersize=4.5,
            markevery=stride,
            errorevery=stride,
            elinewidth=1,
        )
    _format_values(axes, _percent, floor=0.0)


def compared_plots(
    runs: Sequence[tuple[str, Rows]],
) -> tuple[list[Plot], list[Plot], list[tuple[str, str]]]:
    """The plots that compare one training stage of several runs. A run has the same colour in each.

    Args:
      runs: (label, metric rows) of each run; at most `NUM_COLORS`.

    Returns:
      Of metrics that at least two runs share: plots of the most important ones, the most important first;
      plots of all others, by name; and (name, value) of those with one value in all steps of all runs.
    """
    finite = [
        {key for row in rows for key, value in row.items() if math.isfinite(value)}
        for _, rows in runs
    ]
    # The step and the time of a row are no metrics.
    counts = collections.Counter(key for found in finite for key in found - {"step", "time_s"})
    keys = sorted(key for key, count in counts.items() if count > 1)
    # The important metrics have plots of their own titles and units, all others have their names.
    main = [curves for curves in _COMPARED if curves.keys[0][0] in keys]
    drawn = {curves.keys[0][0] for curves in main}
    by_name: dict[str, list[_Series]] = {}
    for i, (label, rows) in enumerate(runs):
        for series in _evaluation_series(rows):
            of_run = dataclasses.replace(series, label=label, color=i)
            by_name.setdefault(series.label, []).append(of_run)
    # A plot for each evaluation set that two runs share.
    sources = {name: found for name, found in sorted(by_name.items()) if len(found) > 1}
    accuracy = []
    for name, found in sources.items():
        legend = [LegendEntry(s.color, s.label, _percent(float(s.values[-1]))) for s in found]
        draw = functools.partial(_draw_evaluations, found=found)
        unit = "share of answers correct"
        accuracy.append(Plot(f"Evaluation accuracy, {name}", unit, "", legend, draw))
    others, constant = [], []
    for key in keys:
        if key in drawn or any(name in evaluation_accuracy({key: 0.0}) for name in sources):
            continue
        found = _run_series(key, runs)
        values = {value for series in found for value in series.values[[0, -1]].tolist()}
        if len(values) == 1 and all(np.ptp(series.values) == 0 for series in found):
            constant.append((key, number(values.pop())))
        else:
            others.append(
                _curves_plot(_Curves(key, "", [(key, key)]), found, dots=False, values=True)
            )
    plots = [_curves_plot(c, _run_series(c.keys[0][0], runs), values=True) for c in main]
    main, others = ([plot for plot in drawn if plot is not None] for drawn in (plots, others))
    return [*accuracy, *main], others, constant


def _run_series(key: str, runs: Sequence[tuple[str, Rows]]) -> list[_Series]:
    found = [_series(label, key, rows, color=i) for i, (label, rows) in enumerate(runs)]
    return [series for series in found if series.values.size]


def _phases_plot(rows: Rows) -> Plot | None:
    # The seconds per step, stacked by phase. Many steps are averaged in bins.
    keys = {key for row in rows for key in row if re.fullmatch(r"timing_s/[^/]+", key)}
    each = {
        key.removeprefix("timing_s/"): np.array([row.get(key, 0.0) for row in rows], np.float64)
        for key in sorted(keys - {"timing_s/step"})  # the step is the sum of its phases
    }
    if not each:
        return None
    # Only so many phases have a colour, so the largest get one. Phases without a place in the order of a
    # step come last, alphabetically.
    by_size = sorted(each, key=lambda name: -each[name].sum())
    ranks = {name: rank for rank, name in enumerate(_PHASE_ORDER)}
    names = sorted(by_size[:_MAX_PHASES], key=lambda name: (ranks.get(name, len(ranks)), name))
    seconds = {name: each[name] for name in names}
    if rest := [each[name] for name in by_size[_MAX_PHASES:]]:
        seconds["other"] = np.sum(rest, axis=0)
    # Bins of nearly equal numbers of steps; a short run has a bar for each step.
    bounds = np.linspace(0, len(rows), min(len(rows), _MAX_BARS) + 1).astype(np.int64)
    first, counts = bounds[:-1], np.diff(bounds)
    steps = np.array([row["step"] for row in rows])
    edges = np.append(steps[first], steps[-1] + 1) - 0.5

    def draw(axes: Axes) -> None:
        bottom = np.zeros(len(first))
        for color, values in zip(COLORS, seconds.values(), strict=False):
            top = bottom + np.add.reduceat(values, first) / counts
            axes.stairs(top, edges, baseline=bottom, fill=True, color=color, linewidth=0)
            bottom = top
        axes.set_ylim(0, None)
        _format_values(axes, number)

    legend = [LegendEntry(i, name) for i, name in enumerate(seconds)]
    mean = number(sum(values.sum() for values in seconds.values()) / len(rows))
    return Plot("Time by phase", "seconds per step", f"{mean} s", legend, draw)


def _draw_smoothed(axes: Axes, series: _Series, *, dots: bool = True) -> None:
    stride = math.ceil(len(series.steps) / _MAX_DOTS)
    color = COLORS[series.color]
    if dots:
        axes.plot(
            series.steps[::stride],
            series.values[::stride],
            color=color,
            linestyle="none",
            marker="o",
            markersize=3,
            markeredgewidth=0,
            alpha=0.35,
        )
    # A line of one point is invisible.
    marker = "o" if len(series.steps) == 1 else ""
    axes.plot(
        series.steps,
        _smooth(series.values),
        color=color,
        linewidth=1.8,
        marker=marker,
        markersize=4.5,
    )


def _smooth(values: np.ndarray) -> np.ndarray:
    # The centred moving mean over about 5% of the points. The window shrinks at the ends.
    reach = len(values) // 40 + (len(values) > 8)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _format_values(axes: Axes, show: Callable[[float], str], *, floor: float | None = None) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: show(value))
    if floor is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, floor), high)


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
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
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
