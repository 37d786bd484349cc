"""Output of the progress view on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from jaxrl.tracking import progress
from jaxrl.tracking.progress import Progress

METRICS = {
    "critic/rewards/mean": 0.41234,
    "train/accuracy": 0.625,
    "actor/entropy": 0.5,
    "actor/pg_clipfrac_high": 0.0012,
    "response_length/mean": 31.25,
    "perf/throughput": 12345.6,
    "something/else": 1.0,
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def _log():
    return Console(file=io.StringIO(), width=80)


def _terminal(width=100):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def test_a_log_gets_one_plain_line_per_step():
    console = _log()
    with Progress("DAPO", 200, console=console) as shown:
        shown.phase("generate")
        shown.update(1, METRICS)
        shown.update(2, {"critic/rewards/mean": float("nan")})
    text = console.file.getvalue()
    assert text.isascii() and "\x1b" not in text
    first, second = text.splitlines()
    assert first == (
        "DAPO  step   1/200  reward 0.412  accuracy 62.5%  entropy 0.500  length 31.2  "
        "clip high 0.12%  tokens/s 12,346"
    )
    assert second.startswith("DAPO  step   2/200  eta ")
    assert second.endswith("reward nan")


def test_a_log_prints_each_evaluation_once():
    console = _log()
    with Progress("DAPO", 9, console=console, line_every_s=3600) as shown:
        for step, accuracy in [(1, 0.25), (2, None), (3, 0.75), (4, None), (9, None)]:
            shown.update(step, {} if accuracy is None else {"val-core/sums/acc/mean@4": accuracy})
    first, second, last = console.file.getvalue().splitlines()
    assert first == "DAPO  step 1/9  evaluation sums 25.0%"
    assert second.startswith("DAPO  step 3/9") and second.endswith("evaluation sums 75.0%")
    assert last.startswith("DAPO  step 9/9") and "evaluation" not in last


def test_the_eta_is_the_median_pace_and_ignores_the_step_that_compiles(clock):
    shown = Progress("DAPO", 10, console=_log())
    assert shown.eta_s() is None
    for step, seconds in [(1, 300.0), (2, 2.0), (3, 50.0), (4, 3.0)]:
        clock[0] += seconds
        shown.update(step, {})
    assert shown.eta_s() == 6 * 3.0


def test_a_terminal_gets_a_live_view(clock):
    console = _terminal()
    with Progress("DAPO", 4, console=console) as shown:
        shown.update(1, METRICS)
        clock[0] += 2.0
        shown.update(2, METRICS | {"critic/rewards/mean": 0.9})
        shown.phase("generate")
        clock[0] += 5.0
        console.print(shown._view())
    text = console.file.getvalue()
    assert "step 2/4" in text
    assert "eta 4s" in text
    assert "generate 5s" in text
    assert "▁█" in text  # the reward rose


@pytest.mark.parametrize("width", [80, 100])
def test_the_live_view_fits_and_cuts_nothing(width):
    console = _terminal(width)
    shown = Progress("DAPO", 200, console=console)
    for step in range(1, 40):
        shown.update(step, METRICS | {"val-core/chain_sum/acc/mean@4": 0.5, "actor/pg_loss": -0.1})
    console.print(shown._view())
    assert "…" not in console.file.getvalue()


def test_messages_are_printed_as_they_are_except_terminal_controls():
    console = _log()
    with Progress("DAPO", 1, console=console) as shown:
        shown.message("[bold]saved[/bold] \x1b[2J\x07\tstep 1\nnext")
    text = console.file.getvalue()
    assert "[bold]saved[/bold] \N{REPLACEMENT CHARACTER}[2J" in text
    assert not {"\x1b", "\x07"} & set(text)
    assert text.endswith("next\n")
