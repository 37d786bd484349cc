"""The report of a run: one HTML file that needs nothing else, to read, keep and send.

Curves are inline SVG whose colours are CSS variables, so they follow the reader's light or dark
theme. Equal input gives equal bytes. Prompts and responses are untrusted text: they are escaped,
and the page forbids itself to run scripts or to load anything.
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
import os
import re
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jaxrl.trainer.durable import write_atomically
from jaxrl.trainer.metrics import held_out_accuracy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the run with a step count of its own, such as "SFT" or "DAPO".

    Attributes:
      name: heading of its curves.
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
    stages: Sequence[Stage],
    samples: Sequence[SamplePair],
    config_text: str,
) -> None:
    """Writes the report to `path`, whole or not at all.

    Args:
      path: the HTML file.
      title: heading of the page.
      summary: (label, value) of the headline numbers, already formatted.
      stages: curves, stage by stage; a curve whose metrics a stage does not have is left out.
      samples: completions to show side by side.
      config_text: the resolved config.
    """
    sections = [
        _summary_html(summary),
        *(_stage_html(stage) for stage in stages),
        _samples_html(samples),
        _config_html(config_text),
    ]
    page = _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(sections))
    # A lone surrogate, which a broken decoder may emit, has no UTF-8; it is shown by its number.
    write_atomically(path, page.encode("utf-8", errors="backslashreplace"))


# ---------------------------------------------------------------------------------------- curves

_MAX_DOTS = 500  # raw points drawn per series; the line is drawn from all of them
_MAX_MARKERS = 40  # evaluations marked per data set
_MAX_BARS = 60  # bins of the seconds per phase
_MAX_PHASES = 7  # with names of their own; the rest is summed
_NUM_COLORS = 8  # --c0 ... --c7 in the style sheet

# The order of events in a step; phases that are not listed follow by name.
_PHASE_ORDER = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("update_weights", "testing", "save_checkpoint"),
)

# Matplotlib writes literal colours. These stand for CSS variables and are replaced in its output.
_INK, _GRID = "#010203", "#010204"
_COLORS = tuple(f"#0102{0x10 + i:02x}" for i in range(_NUM_COLORS))
_CSS_VARIABLES = {
    _INK: "var(--muted)",
    _GRID: "var(--line)",
    **{color: f"var(--c{i})" for i, color in enumerate(_COLORS)},
}

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it scales, can be found, and takes the page's font
    "text.parse_math": False,  # a data set may have a dollar in its name
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


@dataclasses.dataclass(frozen=True)
class _Series:
    """One curve of a plot: values at steps."""

    label: str
    steps: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Plot:
    """A plot of metrics by name.

    Attributes:
      title: heading.
      unit: label of the vertical axis.
      keys: (metric, label in the legend) of each curve.
      show: formats a value, for the axis and the headline.
      floor: lowest value the vertical axis must reach, if any.
    """

    title: str
    unit: str
    keys: tuple[tuple[str, str], ...]
    show: Callable[[float], str]
    floor: float | None = None


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


_REWARD = _Plot(
    "Reward",
    "mean reward of a response",
    (("critic/rewards/mean", "reward"), ("critic/score/mean", "score alone, without shaping")),
    _number,
)
_OTHER_PLOTS = (
    _Plot("Entropy", "nats per token", (("actor/entropy", "entropy"),), _number, 0.0),
    _Plot(
        "Mean token probability",
        "probability",
        (("actor/mean_token_prob", "probability"),),
        _number,
    ),
    _Plot(
        "Response length",
        "tokens per response",
        (("response_length/mean", "mean length"),),
        _number,
    ),
    _Plot(
        "Clipped tokens",
        "share of response tokens",
        (
            ("actor/pg_clipfrac_high", "ratio above 1 + high"),
            ("actor/pg_clipfrac_low", "ratio below 1 - low"),
            ("actor/pg_clipfrac_lower", "dual clip"),
        ),
        _percent,
        0.0,
    ),
    _Plot(
        "Generation batches",
        "batches per step",
        (("train/num_gen_batches", "batches"),),
        _number,
        0.0,
    ),
    _Plot("Loss", "nats per token", (("sft/loss", "loss"),), _number),
    _Plot(
        "Token accuracy",
        "share of target tokens",
        (("sft/token_accuracy", "accuracy"),),
        _percent,
    ),
    _Plot("Throughput", "tokens per second", (("perf/throughput", "tokens"),), _number, 0.0),
)


def _stage_html(stage: Stage) -> str:
    plots = "".join(_stage_plots(stage))
    if not plots:
        return ""
    return (
        f"<section><h2>{html.escape(stage.name)} <small>{stage.rows[-1]['step']:,} steps</small>"
        f'</h2><div class="plots">{plots}</div></section>'
    )


def _stage_plots(stage: Stage) -> Iterator[str]:
    """HTML of every plot, empty where its metrics are missing."""
    yield _reward_html(stage)
    yield _accuracy_html(stage)
    for plot in _OTHER_PLOTS:
        yield _curves_html(plot, _named_series(plot, stage), stage)
    yield _phases_html(stage)


def _reward_html(stage: Stage) -> str:
    """Reward, and the score beside it where shaping sets them apart."""
    curves = _named_series(_REWARD, stage)
    if len(curves) == 2 and np.array_equal(curves[0].values, curves[1].values):
        curves = curves[:1]
    return _curves_html(_REWARD, curves, stage)


def _named_series(plot: _Plot, stage: Stage) -> list[_Series]:
    found = [_series(label, key, stage.rows) for key, label in plot.keys]
    return [series for series in found if series.values.size]


def _series(label: str, key: str, rows: Sequence[dict[str, Any]]) -> _Series:
    """The finite values of `key`."""
    points = [(row["step"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return _Series(label, np.array(steps, np.int64), np.array(values, np.float64))


def _curves_html(plot: _Plot, curves: Sequence[_Series], stage: Stage) -> str:
    """Dots for the steps and a line for their moving mean."""
    if not curves:
        return ""

    def draw(axes: Axes) -> None:
        for color, series in zip(_COLORS, curves, strict=False):
            _draw_smoothed(axes, series, color)
        _format_values(axes, plot.show)
        if plot.floor is not None:
            _reach_down_to(axes, plot.floor)

    last = plot.show(float(_smooth(curves[0].values)[-1]))
    legend = [series.label for series in curves] if len(curves) > 1 else []
    return _figure_html(plot.title, last, legend, _draw(stage, plot.title, plot.unit, draw))


def _accuracy_html(stage: Stage) -> str:
    """Held-out accuracy of each data set, and that of the sampled training prompts behind it."""
    held_out = _held_out_series(stage.rows)
    train = _series("training prompts, as sampled", "train/accuracy", stage.rows)
    if not held_out and not train.values.size:
        return ""

    def draw(axes: Axes) -> None:
        if train.values.size:
            _draw_smoothed(axes, train, _COLORS[len(held_out) % _NUM_COLORS])
        for i, series in enumerate(held_out):
            color = _COLORS[i % _NUM_COLORS]
            stride = math.ceil(len(series.steps) / _MAX_MARKERS)
            style = {"marker": "o", "markersize": 4.5, "markevery": stride}
            axes.plot(series.steps, series.values, color=color, **style)
        _format_values(axes, _percent)
        _reach_down_to(axes, 0.0)

    legend = [f"held out: {series.label}" for series in held_out]
    legend += [train.label] if train.values.size else []
    last = _percent(held_out[0].values[-1] if held_out else float(_smooth(train.values)[-1]))
    return _figure_html(
        "Accuracy", last, legend, _draw(stage, "Accuracy", "share of answers correct", draw)
    )


def _held_out_series(rows: Sequence[dict[str, Any]]) -> list[_Series]:
    points = [{"step": row["step"], **held_out_accuracy(row)} for row in rows]
    names = sorted({name for point in points for name in point} - {"step"})
    found = [_series(name, name, points) for name in names]
    return [series for series in found if series.values.size]


def _phases_html(stage: Stage) -> str:
    """Seconds of each step, stacked by phase; many steps are averaged in bins."""
    rows = stage.rows
    seconds = _phase_seconds(rows)
    if not seconds:
        return ""
    bounds = np.linspace(0, len(rows), min(len(rows), _MAX_BARS) + 1).astype(np.int64)
    first, counts = bounds[:-1], np.diff(bounds)
    steps = np.array([row["step"] for row in rows])
    edges = np.append(steps[first], steps[-1] + 1) - 0.5

    def draw(axes: Axes) -> None:
        bottom = np.zeros(len(first))
        for color, values in zip(_COLORS, seconds.values(), strict=False):
            top = bottom + np.add.reduceat(values, first) / counts
            axes.stairs(top, edges, baseline=bottom, fill=True, color=color, linewidth=0)
            bottom = top
        axes.set_ylim(0, None)
        _format_values(axes, _number)

    mean = _number(sum(values.sum() for values in seconds.values()) / len(rows))
    svg = _draw(stage, "Time by phase", "seconds per step", draw)
    return _figure_html("Time by phase", f"{mean} s", list(seconds), svg)


def _phase_seconds(rows: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Seconds of each step by phase, in the order of events; the smallest are summed as "other"."""
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
    """Centred moving mean over about a twentieth of the points; the window shrinks at the ends."""
    reach = len(values) // 40 + (len(values) > 8)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _format_values(axes: Axes, show: Callable[[float], str]) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def _reach_down_to(axes: Axes, floor: float) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, floor), high)


def _draw(stage: Stage, title: str, unit: str, draw: Callable[[Axes], None]) -> str:
    """SVG of one plot against the step."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever style the user's own matplotlibrc asks for
        # Element ids are hashes with this salt: the same in every run, different in every plot.
        matplotlib.rcParams.update(_RC)
        matplotlib.rcParams["svg.hashsalt"] = f"{stage.name}/{title}"
        figure = Figure(figsize=(4.5, 2.6), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.margins(x=0.02)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        draw(axes)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return _inline_svg(out.getvalue())


def _inline_svg(document: str) -> str:
    """The <svg> element of an SVG document, fit to stand in a page and to take its colours."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Names of groups repeat from plot to plot and nothing refers to them.
    svg = re.sub(r' id="[a-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', svg, count=1)
    svg = re.sub(r"; font-family: [^;\"]*", "", svg)
    # Hundredths of a point are finer than any screen.
    svg = re.sub(r' (d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    return re.sub("#0102[0-9a-f]{2}", lambda match: _CSS_VARIABLES[match[0]], svg).strip()


def _figure_html(title: str, last: str, legend: Sequence[str], svg: str) -> str:
    entries = "".join(
        f'<li><i style="background:var(--c{i % _NUM_COLORS})"></i>{html.escape(label)}</li>'
        for i, label in enumerate(legend)
    )
    legend_html = f'<ul class="legend">{entries}</ul>' if entries else ""
    return (
        f"<figure><figcaption><b>{html.escape(title)}</b>"
        f'<span class="last">{html.escape(last)}</span></figcaption>{svg}{legend_html}</figure>'
    )


# ------------------------------------------------------------------------------------------ page


def _summary_html(summary: Sequence[tuple[str, str]]) -> str:
    cards = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>"
        for label, value in summary
    )
    return f'<dl class="cards">{cards}</dl>' if cards else ""


def _samples_html(samples: Sequence[SamplePair]) -> str:
    if not samples:
        return ""
    before = sum(pair.before.correct for pair in samples)
    after = sum(pair.after.correct for pair in samples)
    pairs = "".join(map(_pair_html, samples))
    return (
        f"<section><h2>Samples <small>of these {len(samples)}, correct before: {before}, "
        f"after: {after}</small></h2>{pairs}</section>"
    )


def _pair_html(pair: SamplePair) -> str:
    return (
        f'<article class="sample"><header><pre>{_untrusted(pair.prompt)}</pre>'
        f'<p class="answer">expected <code>{_untrusted(pair.answer)}</code></p></header>'
        f'<div class="pair">{_response_html("Before", pair.before)}'
        f"{_response_html('After', pair.after)}</div></article>"
    )


def _response_html(when: str, response: Response) -> str:
    mark, word = ("✓", "correct") if response.correct else ("✗", "wrong")
    return (
        f'<div class="response"><h3>{when} <span class="{word}">{mark} {word}</span></h3>'
        f"<pre>{_untrusted(response.text)}</pre></div>"
    )


def _config_html(config_text: str) -> str:
    return f"<details><summary>Config</summary><pre>{_untrusted(config_text)}</pre></details>"


# HTML cannot hold these, not even as references.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _untrusted(text: str) -> str:
    """Escaped text; control characters are shown by their codes."""
    return html.escape(_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --muted: #667085; --line: #e4e7ec;
  --good: #177a4b; --good-soft: #e4f5ec; --bad: #b3382c; --bad-soft: #fcebe9;
  --c0: #3267d6; --c1: #e07b39; --c2: #1f9d7a; --c3: #8a5cc7;
  --c4: #cf4b6b; --c5: #c29a1f; --c6: #2a9dc0; --c7: #8b95a5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11151c; --card: #1a2029; --ink: #e6e9ef; --muted: #98a2b3; --line: #2c3440;
    --good: #6fd3a2; --good-soft: #17352a; --bad: #f0948a; --bad-soft: #3c2222;
    --c0: #79a2ff; --c1: #f0a06a; --c2: #4fcaa6; --c3: #b794f0;
    --c4: #f08aa3; --c5: #e0c060; --c6: #6cc7e6; --c7: #9aa4b5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Inter, Roboto, sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 48px 24px 72px; }
h1 { margin: 0 0 24px; font-size: 28px; font-weight: 650; letter-spacing: -0.02em; }
h2 { margin: 48px 0 16px; font-size: 19px; font-weight: 620; letter-spacing: -0.01em; }
h2 small { margin-left: 8px; color: var(--muted); font-size: 13px; font-weight: 400; }
h3 { margin: 0 0 8px; color: var(--muted); font-size: 12px; font-weight: 600; }
pre, code { font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre {
  margin: 0; max-height: 360px; overflow: auto;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
figure, .cards > div, .sample, details {
  margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
}
.cards {
  display: grid; gap: 12px; margin: 0;
  grid-template-columns: repeat(auto-fit, minmax(160px, 1fr));
}
.cards > div { padding: 14px 18px 16px; }
.cards dt { color: var(--muted); font-size: 13px; }
.cards dd {
  margin: 2px 0 0; font-size: 24px; font-weight: 620; line-height: 1.25;
  letter-spacing: -0.02em; overflow-wrap: anywhere;
}
.plots {
  display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr));
}
figure { padding: 16px 18px 14px; }
figcaption { display: flex; justify-content: space-between; gap: 12px; margin-bottom: 6px; }
figcaption b { font-weight: 600; }
.cards dd, .last, figure svg { font-variant-numeric: tabular-nums; }
.last { color: var(--muted); }
.legend {
  display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 8px 0 0; padding: 0;
  list-style: none; color: var(--muted); font-size: 12px;
}
.legend i {
  display: inline-block; width: 9px; height: 9px; margin-right: 6px; border-radius: 3px;
}
figure svg { display: block; width: 100%; height: auto; }
.sample { margin-bottom: 16px; overflow: hidden; }
.sample header { padding: 14px 18px; border-bottom: 1px solid var(--line); }
.answer { margin: 6px 0 0; color: var(--muted); font-size: 13px; }
.answer code { color: var(--ink); }
.pair { display: grid; grid-template-columns: 1fr 1fr; }
.response { min-width: 0; padding: 14px 18px 16px; }
.response + .response { border-left: 1px solid var(--line); }
.correct, .wrong { margin-left: 6px; padding: 1px 8px; border-radius: 99px; }
.correct { color: var(--good); background: var(--good-soft); }
.wrong { color: var(--bad); background: var(--bad-soft); }
details { margin-top: 48px; padding: 14px 18px; }
summary { cursor: pointer; font-weight: 600; }
details pre { margin-top: 12px; max-height: none; }
@media (max-width: 640px) {
  main { padding: 28px 14px 48px; }
  .pair { grid-template-columns: 1fr; }
  .response + .response { border-left: 0; border-top: 1px solid var(--line); }
}
""".strip()
