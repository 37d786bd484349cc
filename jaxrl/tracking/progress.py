"""Shows the progress of a training stage: a live view on a terminal, plain lines elsewhere.

    DAPO step 42/200 ━━━━━━━━━━━━─────────────────────────────────  21% eta 3:12 generate 4s
    reward           0.412 ▁▁▂▂▃▃▄▅▅▆▇█       entropy          0.44 █▇▇▅▄▄▃▃▂▂▁▁
    accuracy         62.1% ▁▁▂▂▃▄▄▅▅▆▇█       length           31.2 ▅▅▄▄▅▆▆▅▅▆▇█

Not covered: several hosts. The caller creates a Progress on one host only.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import rich.progress
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from jaxrl.tracking.metrics import evaluation_accuracy
from jaxrl.tracking.readable import CONTROL, duration, number

_RECENT_STEPS = 20  # the ETA is the median over these
_TREND_STEPS = 16  # characters of a sparkline
_BARS = "▁▂▃▄▅▆▇█"


@dataclasses.dataclass(frozen=True)
class _Entry:
    label: str
    value: str
    trend: str


_FIXED, _PERCENT, _SMALL_PERCENT = "{:.3f}".format, "{:.1%}".format, "{:.2%}".format

# (metric, label, how its value is shown)
_BEFORE_EVALUATION = (
    ("critic/rewards/mean", "reward", _FIXED),
    ("critic/score/mean", "score", _FIXED),
    ("train/accuracy", "accuracy", _PERCENT),
)
_AFTER_EVALUATION = (
    ("actor/entropy", "entropy", _FIXED),
    ("response_length/mean", "length", number),
    ("agent/failed", "failed agents", number),
    ("reward/abstained", "without reward", number),
    ("actor/pg_clipfrac_high", "clip high", _SMALL_PERCENT),
    ("actor/pg_clipfrac_low", "clip low", _SMALL_PERCENT),
    ("actor/pg_loss", "loss", number),
    ("sft/loss", "loss", _FIXED),
    ("sft/mean_token_prob", "token probability", _PERCENT),
    ("train/num_gen_batches", "gen batches", number),
    ("perf/throughput", "tokens/s", number),
)


class Progress:
    """Shows the progress of a training stage. Use it as a context manager.

    Args:
      title: name of the training stage.
      total_steps: last step of the stage.
      console: console to print to; None for stdout. The live view needs an interactive terminal.
      line_every_s: smallest number of seconds between two plain lines. Evaluations and the last step
        always print one.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        console: Console | None = None,
        line_every_s: float = 0.0,
    ):
        # CI systems set FORCE_COLOR, which makes rich assume a terminal. A log file needs plain lines.
        self._console = console or Console(force_interactive=None if sys.stdout.isatty() else False)
        self._steps = rich.progress.Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TaskProgressColumn(),
            TextColumn("{task.fields[eta]}"),
            _PhaseColumn(),
            get_time=time.monotonic,
            expand=True,
        )
        self._task_id = self._steps.add_task(title, total=total_steps, eta="", **_phase("starting"))
        self._live: Live | None = None
        self._line_every_s = line_every_s
        self._last_line_s = -math.inf
        self._entries: list[_Entry] = []
        self._evaluations: dict[str, _Entry] = {}
        self._trends: dict[str, collections.deque[float]] = {}
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._last_update_s: float | None = None

    def __enter__(self) -> Progress:
        if self._console.is_interactive:
            self._live = Live(console=self._console, get_renderable=self._view)
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the live view and restores the cursor. Any thread may call it."""
        if self._live is not None:
            self.phase("")
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """Shows the current phase, such as "generate" or "update"; "" for none. Live view only."""
        self._steps.update(self._task_id, **_phase(name))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step. Unknown metrics are ignored.

        The live view keeps the accuracy of the latest evaluation until the next one.
        """
        now_s = time.monotonic()
        num_steps = step - self._task.completed
        # The first step of a process compiles, so it is not timed. After a resume it is not step 1.
        if self._last_update_s is not None and num_steps > 0:
            self._step_seconds.append((now_s - self._last_update_s) / num_steps)
        self._last_update_s = now_s
        # First the step, which the steps left follow from.
        self._steps.update(self._task_id, completed=step)
        eta_s = self.eta_s()
        eta = "" if eta_s is None else f"eta {duration(eta_s)}"
        self._steps.update(self._task_id, eta=eta)
        # Rewards stand before evaluations, and what explains them after.
        before, after = (
            [self._entry(label, metrics[key], show) for key, label, show in table if key in metrics]
            for table in (_BEFORE_EVALUATION, _AFTER_EVALUATION)
        )
        measured = {
            name: self._entry(f"evaluation {name.rsplit(' ', 1)[0]}", accuracy, _PERCENT)
            for name, accuracy in evaluation_accuracy(metrics).items()
        }
        self._evaluations |= measured
        self._entries = [*before, *self._evaluations.values(), *after]
        waited = now_s - self._last_line_s >= self._line_every_s
        if self._live is None and (waited or measured or self._task.finished):
            self._last_line_s = now_s
            task = self._task
            text = f"step {task.completed:>{len(str(task.total))}}/{task.total}"
            shown = [*before, *measured.values(), *after]
            values = [f"{entry.label} {entry.value}" for entry in shown]
            line = "  ".join(filter(None, [task.description, text, eta, *values]))
            self._console.print(Text(line), soft_wrap=True, highlight=False)

    def message(self, text: str) -> None:
        """Prints a text, above the live view if there is one. Control characters are replaced."""
        harmless = Text(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
        self._console.print(harmless, soft_wrap=True, highlight=False)

    def eta_s(self) -> float | None:
        """The estimated seconds left, from the median time of recent steps; None before a step was timed."""
        if not self._step_seconds:
            return None
        return statistics.median(self._step_seconds) * max(self._task.remaining or 0, 0)

    @property
    def _task(self) -> Task:
        (task,) = self._steps.tasks
        return task

    def _entry(self, label: str, value: float, show: Callable[[float], str]) -> _Entry:
        trend = self._trends.setdefault(label, collections.deque(maxlen=_TREND_STEPS))
        trend.append(value)
        finite = [v for v in trend if math.isfinite(v)] or [0.0]
        low, span = min(finite), (max(finite) - min(finite)) or 1.0
        # A value that is not finite leaves a gap.
        bars = (
            _BARS[round((v - low) / span * (len(_BARS) - 1))] if math.isfinite(v) else " "
            for v in trend
        )
        return _Entry(label, show(value), "".join(bars))

    def _view(self) -> Group:
        # Two columns, filled one after the other, so that related metrics stay below each other.
        half = (len(self._entries) + 1) // 2
        trend_width = _TREND_STEPS if self._console.width >= 100 else _TREND_STEPS // 2
        if self._console.options.ascii_only:  # such a terminal cannot print the bars
            trend_width = 0
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
        return Group(self._steps, columns)


class _PhaseColumn(ProgressColumn):
    """Shows the current phase and its duration."""

    def render(self, task: Task) -> Text:
        """Returns the text of the column, empty outside of phases."""
        name, seconds = task.fields["phase"], task.get_time() - task.fields["phase_start_s"]
        return Text(f"{name} {duration(seconds)}" if name else "", style="cyan")


def _phase(name: str) -> dict[str, Any]:
    return {"phase": name, "phase_start_s": time.monotonic()}
