"""The plots of a report: the metrics of each plot, their formats and how they are drawn."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from jaxrl.tracking.metrics import evaluation_accuracy
from jaxrl.tracking.readable import number
from jaxrl.tracking.report.svg import COLORS, NUM_COLORS

Rows = Sequence[dict[str, Any]]  # metric rows, as `read_metrics` returns them

_MAX_DOTS = 500  # points drawn per curve; the line uses all values
_MAX_MARKERS = 40  # markers per evaluation curve
_MAX_BARS = 60  # bars of the plot of seconds per phase
_MAX_PHASES = NUM_COLORS - 1  # phases with a colour; the others are summed

# Phases in the order of a step. Unlisted phases follow alphabetically.
_PHASE_ORDER = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("update_weights", "testing", "save_checkpoint"),
)


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of the report.

    Attributes:
      title: heading.
      unit: label of the vertical axis.
      last: number beside the heading, usually the last value of the first curve.
      legend: names of the curves in the order of `svg.COLORS`; empty for a single curve.
      draw: draws the curves.
    """

    title: str
    unit: str
    last: str
    legend: Sequence[str]
    draw: Callable[[Axes], None]


@dataclasses.dataclass(frozen=True)
class _Curves:
    """The metrics of one plot.

    Attributes:
      title: heading.
      unit: label of the vertical axis.
      keys: (metric, label in the legend) of each curve.
      show: formats a value, for the axis and the headline.
      floor: value that the vertical axis must reach down to; None for no such value.
    """

    title: str
    unit: str
    keys: Sequence[tuple[str, str]]
    show: Callable[[float], str] = number
    floor: float | None = None


@dataclasses.dataclass(frozen=True)
class _Series:
    """A curve: values at steps."""

    label: str
    steps: np.ndarray
    values: np.ndarray


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


_REWARD = _Curves(
    "Reward",
    "mean reward of a response",
    [("critic/rewards/mean", "reward"), ("critic/score/mean", "score alone, without shaping")],
)
_OTHERS = (
    _Curves("Entropy", "nats per token", [("actor/entropy", "entropy")], floor=0.0),
    _Curves("Mean token probability", "probability", [("actor/mean_token_prob", "probability")]),
    _Curves("Response length", "tokens per response", [("response_length/mean", "mean length")]),
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
    _Curves("Loss", "nats per token", [("sft/loss", "loss")]),
    _Curves(
        "Token accuracy", "share of target tokens", [("sft/token_accuracy", "accuracy")], _percent
    ),
    _Curves("Throughput", "tokens per second", [("perf/throughput", "tokens")], floor=0.0),
)


def plots_of(rows: Rows) -> Iterator[Plot]:
    """The plots of a section; plots without data are left out."""
    plots = [
        _reward_plot(rows),
        _accuracy_plot(rows),
        *(_curves_plot(curves, _named_series(curves, rows)) for curves in _OTHERS),
        _phases_plot(rows),
    ]
    return (plot for plot in plots if plot is not None)


def _reward_plot(rows: Rows) -> Plot | None:
    """The reward, and the score if shaping makes it different."""
    found = _named_series(_REWARD, rows)
    if len(found) == 2 and np.array_equal(found[0].values, found[1].values):
        found = found[:1]
    return _curves_plot(_REWARD, found)


def _named_series(curves: _Curves, rows: Rows) -> list[_Series]:
    found = [_series(label, key, rows) for key, label in curves.keys]
    return [series for series in found if series.values.size]


def _series(label: str, key: str, rows: Rows) -> _Series:
    """The finite values of `key`."""
    points = [(row["step"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return _Series(label, np.array(steps, np.int64), np.array(values, np.float64))


def _curves_plot(curves: _Curves, found: Sequence[_Series]) -> Plot | None:
    """A plot with a dot per step and a line of the moving mean."""
    if not found:
        return None

    def draw(axes: Axes) -> None:
        for color, series in zip(COLORS, found, strict=False):
            _draw_smoothed(axes, series, color)
        _format_values(axes, curves.show)
        if curves.floor is not None:
            _reach_down_to(axes, curves.floor)

    last = curves.show(float(_smooth(found[0].values)[-1]))
    legend = [series.label for series in found] if len(found) > 1 else []
    return Plot(curves.title, curves.unit, last, legend, draw)


def _accuracy_plot(rows: Rows) -> Plot | None:
    """The accuracy on each evaluation set, and that on the sampled training prompts."""
    evaluations = _evaluation_series(rows)
    train = _series("training prompts, as sampled", "train/accuracy", rows)
    if not evaluations and not train.values.size:
        return None

    def draw(axes: Axes) -> None:
        if train.values.size:
            _draw_smoothed(axes, train, COLORS[len(evaluations) % NUM_COLORS])
        for i, series in enumerate(evaluations):
            color = COLORS[i % NUM_COLORS]
            stride = math.ceil(len(series.steps) / _MAX_MARKERS)
            style = {"marker": "o", "markersize": 4.5, "markevery": stride}
            axes.plot(series.steps, series.values, color=color, **style)
        _format_values(axes, _percent)
        _reach_down_to(axes, 0.0)

    legend = [f"evaluation: {series.label}" for series in evaluations]
    legend += [train.label] if train.values.size else []
    last = evaluations[0].values[-1] if evaluations else _smooth(train.values)[-1]
    return Plot("Accuracy", "share of answers correct", _percent(float(last)), legend, draw)


def _evaluation_series(rows: Rows) -> list[_Series]:
    points = [{"step": row["step"], **evaluation_accuracy(row)} for row in rows]
    names = sorted({name for point in points for name in point} - {"step"})
    found = [_series(name, name, points) for name in names]
    return [series for series in found if series.values.size]


def _phases_plot(rows: Rows) -> Plot | None:
    """The seconds per step, stacked by phase. Many steps are averaged in bins."""
    seconds = _phase_seconds(rows)
    if not seconds:
        return None
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

    mean = number(sum(values.sum() for values in seconds.values()) / len(rows))
    return Plot("Time by phase", "seconds per step", f"{mean} s", list(seconds), draw)


def _phase_seconds(rows: Rows) -> dict[str, np.ndarray]:
    """Phase -> seconds of each step, in the order of a step. The smallest phases are summed as "other"."""
    keys = {key for row in rows for key in row if re.fullmatch(r"timing_s/[^/]+", key)}
    seconds = {
        key.removeprefix("timing_s/"): np.array([row.get(key, 0.0) for row in rows], np.float64)
        for key in sorted(keys - {"timing_s/step"})  # the step is the sum of its phases
    }
    by_size = sorted(seconds, key=lambda name: -seconds[name].sum())
    shown = {name: seconds[name] for name in sorted(by_size[:_MAX_PHASES], key=_phase_rank)}
    rest = [seconds[name] for name in by_size[_MAX_PHASES:]]
    return shown | ({"other": np.sum(rest, axis=0)} if rest else {})


def _phase_rank(name: str) -> tuple[int, str]:
    return (_PHASE_ORDER.index(name) if name in _PHASE_ORDER else len(_PHASE_ORDER), name)


def _draw_smoothed(axes: Axes, series: _Series, color: str) -> None:
    stride = math.ceil(len(series.steps) / _MAX_DOTS)
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
    axes.plot(series.steps, _smooth(series.values), color=color, linewidth=1.8)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The centred moving mean over about 5% of the points. The window shrinks at the ends."""
    reach = len(values) // 40 + (len(values) > 8)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _format_values(axes: Axes, show: Callable[[float], str]) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: show(value))


def _reach_down_to(axes: Axes, floor: float) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, floor), high)
