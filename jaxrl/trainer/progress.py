"""What a person sees while a stage trains: a live view on a terminal, plain lines elsewhere.

    DAPO  step 42/200 ━━━━━━━━━━━━──────────────────────────────── 21%  eta 3:12  generate 4s
    reward           0.412 ▁▁▂▂▃▃▄▅▅▆▇█       entropy          0.44 █▇▇▅▄▄▃▃▂▂▁▁
    accuracy         62.1% ▁▁▂▂▃▄▄▅▅▆▇█       length           31.2 ▅▅▄▄▅▆▆▅▅▆▇█

Not covered: which host prints (the caller builds a Progress on one host only).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import statistics
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.tracking.metrics import evaluation_accuracy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

_RECENT_STEPS = 20  # the ETA is the median over these
_TREND_STEPS = 16  # characters of a sparkline
_BARS = "▁▂▃▄▅▆▇█"

# Everything that moves a terminal's cursor or state; tab and newline are harmless.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True)
class _Shown:
    key: str
    label: str
    format: Callable[[float], str]


@dataclasses.dataclass(frozen=True)
class _Entry:
    label: str
    value: str
    trend: str


def _number(value: float) -> str:
    """Three significant digits, without an exponent where that reads better."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _fixed(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _small_percent(value: float) -> str:
    return f"{100 * value:.2f}%"


_BEFORE_HELD_OUT = (
    _Shown("critic/rewards/mean", "reward", _fixed),
    _Shown("critic/score/mean", "score", _fixed),
    _Shown("train/accuracy", "accuracy", _percent),
)
_AFTER_HELD_OUT = (
    _Shown("actor/entropy", "entropy", _fixed),
    _Shown("response_length/mean", "length", _number),
    _Shown("actor/pg_clipfrac_high", "clip high", _small_percent),
    _Shown("actor/pg_clipfrac_low", "clip low", _small_percent),
    _Shown("actor/pg_loss", "loss", _number),
    _Shown("sft/loss", "loss", _fixed),
    _Shown("sft/token_accuracy", "token accuracy", _percent),
    _Shown("train/num_gen_batches", "gen batches", _number),
    _Shown("perf/throughput", "tokens/s", _number),
)


class Progress:
    """Shows how a stage is going. Used as a context manager.

    Args:
      title: name of the stage.
      total_steps: step at which the stage ends.
      console: where to print; None takes stdout. The live view needs an interactive terminal.
      line_every_s: without a live view, least seconds between two lines; the last step always has one.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        console: Console | None = None,
        line_every_s: float = 0.0,
    ):
        self._title = title
        self._line_every_s = line_every_s
        self._last_line_s = -math.inf
        self._total_steps = total_steps
        # FORCE_COLOR, which CI systems set, makes rich believe in a terminal; a log wants lines.
        self._console = console or Console(force_interactive=None if sys.stdout.isatty() else False)
        self._live: Live | None = None
        self._step = 0
        self._entries: list[_Entry] = []
        self._held_out: dict[str, _Entry] = {}
        self._trends: dict[str, collections.deque[float]] = {}
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._last_update_s: float | None = None
        self._phase = "starting"
        self._phase_start_s = time.monotonic()

    def __enter__(self) -> Progress:
        if self._console.is_interactive:
            live = Live(console=self._console, get_renderable=self._view)
            live.start()
            self._live = live
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._phase = ""
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """Tells what the program does now, such as "generate" or "update". Live view only."""
        self._phase = name
        self._phase_start_s = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of `step`; keys that are missing or unknown are not shown.

        The latest held-out accuracy stays in view until the next one.
        """
        self._note_time(step)
        self._step = step
        self._held_out |= {
            name: self._entry(f"held-out {name.rsplit(' ', 1)[0]}", accuracy, _percent)
            for name, accuracy in evaluation_accuracy(metrics).items()
        }
        self._entries = [
            *(self._entry(*shown) for shown in _present(_BEFORE_HELD_OUT, metrics)),
            *self._held_out.values(),
            *(self._entry(*shown) for shown in _present(_AFTER_HELD_OUT, metrics)),
        ]
        now_s = time.monotonic()
        due = now_s - self._last_line_s >= self._line_every_s or step == self._total_steps
        if self._live is None and due:
            self._last_line_s = now_s
            self._print(self._plain_line())

    def message(self, text: str) -> None:
        """Prints `text`, above the live view if there is one. The text may come from a model."""
        self._print(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))

    def eta_s(self) -> float | None:
        """Seconds left at the median pace of recent steps; None until a step was timed."""
        if not self._step_seconds:
            return None
        return statistics.median(self._step_seconds) * max(self._total_steps - self._step, 0)

    def _note_time(self, step: int) -> None:
        now_s = time.monotonic()
        # The first step compiles, and after a resume it is not step 1: its time says nothing.
        if self._last_update_s is not None and step > self._step:
            self._step_seconds.append((now_s - self._last_update_s) / (step - self._step))
        self._last_update_s = now_s

    def _entry(self, label: str, value: float, show: Callable[[float], str]) -> _Entry:
        trend = self._trends.setdefault(label, collections.deque(maxlen=_TREND_STEPS))
        trend.append(value)
        return _Entry(label, show(value), _sparkline(trend))

    def _plain_line(self) -> str:
        width = len(str(self._total_steps))
        parts = [f"{self._title}  step {self._step:>{width}}/{self._total_steps}"]
        eta_s = self.eta_s()
        if eta_s is not None:
            parts.append(f"eta {_duration(eta_s)}")
        parts += [f"{entry.label} {entry.value}" for entry in self._entries]
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def _view(self) -> RenderableType:
        view = Table.grid(expand=True)
        view.add_row(self._headline())
        if self._entries:
            view.add_row(self._entry_columns())
        return view

    def _headline(self) -> Table:
        eta_s = self.eta_s()
        fraction = self._step / self._total_steps if self._total_steps else 1.0
        cells = {
            "title": Text(self._title, style="bold"),
            "step": Text(f"step {self._step}/{self._total_steps}"),
            "bar": ProgressBar(total=1.0, completed=fraction),
            "percent": Text(f"{100 * fraction:.0f}%"),
            "eta": Text("" if eta_s is None else f"eta {_duration(eta_s)}"),
            "phase": Text(self._phase_text(), style="cyan"),
        }
        line = Table.grid(padding=(0, 1), expand=True)
        for name in cells:
            line.add_column(no_wrap=True, ratio=1 if name == "bar" else None)
        line.add_row(*cells.values())
        return line

    def _phase_text(self) -> str:
        if not self._phase:
            return ""
        return f"{self._phase} {_duration(time.monotonic() - self._phase_start_s)}"

    def _entry_columns(self) -> Table:
        """The entries in two columns, down the first and then down the second."""
        half = (len(self._entries) + 1) // 2
        trend_width = self._trend_width()
        columns = Table.grid(padding=(0, 2))
        for _ in range(2):
            columns.add_column(style="dim", no_wrap=True)
            columns.add_column(justify="right", no_wrap=True)
            columns.add_column(style="cyan", width=trend_width, no_wrap=True)
        for row in range(half):
            cells = []
            for entry in self._entries[row::half]:
                trend = entry.trend[max(len(entry.trend) - trend_width, 0) :]
                cells += [Text(entry.label), Text(entry.value), Text(trend)]
            columns.add_row(*cells)
        return columns

    def _trend_width(self) -> int:
        if self._console.options.ascii_only:  # cannot print the bars
            return 0
        return _TREND_STEPS if self._console.width >= 100 else _TREND_STEPS // 2


def _present(
    table: Sequence[_Shown], metrics: Mapping[str, float]
) -> Iterator[tuple[str, float, Callable[[float], str]]]:
    for shown in table:
        if shown.key in metrics:
            yield shown.label, metrics[shown.key], shown.format


def _sparkline(values: collections.deque[float]) -> str:
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    if span == 0:
        span = 1.0
    return "".join(
        _BARS[round((v - low) / span * (len(_BARS) - 1))] if math.isfinite(v) else " "
        for v in values
    )


def _duration(seconds: float) -> str:
    """45s, 3:07 (minutes) or 1:02:03 (hours)."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}" if minutes else f"{whole}s"
