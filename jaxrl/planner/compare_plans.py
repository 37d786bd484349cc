"""Compares two plans that `jaxrl plan --json` printed: settings, memory, seconds, chip-hours and price.

jaxrl plan --compare h100.json v5p.json
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.checks import check_path
from jaxrl.errors import UserError
from jaxrl.planner import plan_tables
from jaxrl.planner.plan import VERSION
from jaxrl.tracking.readable import number
from jaxrl.tracking.report.page import write_page

# (name, a value of each plan)
_Row = tuple[str, list[str]]

_WIDTH = 160


def compare_plans(paths: Sequence[pathlib.Path], page: pathlib.Path | None = None) -> None:
    """Prints the plans side by side, and writes the same tables to a page.

    Args:
      paths: files of the plans.
      page: the page; None writes none.

    Raises:
      UserError: a file cannot be read, is no plan, or is a plan of another version.
    """
    plans = [_read(path) for path in paths]
    names = [str(path) for path in paths]
    columns = [_column(path, plan) for path, plan in zip(paths, plans, strict=True)]
    figures, settings = list(_side_by_side(columns)), list(_settings(plans))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_table("predicted", names, figures))
    if settings:
        console.print(_table("settings that differ", names, settings))
    else:
        console.print("The plans have the same settings.")
    if page is not None:
        write_page(
            page,
            "plan_comparison.html",
            package="jaxrl.planner",
            title=f"{len(plans)} plans compared",
            names=names,
            figures=figures,
            settings=settings,
        )


def _read(path: pathlib.Path) -> dict[str, Any]:
    check_path("--compare", path)
    remedy = "name a file that `jaxrl plan --json` wrote"
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"--compare {path} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--compare {path} is no JSON; {remedy}") from error
    if not isinstance(found, dict) or "pools" not in found or "fits" not in found:
        raise UserError(f"--compare {path} is no plan; {remedy}")
    if (version := found.get("version")) != VERSION:
        had = f"has version {version!r}" if "version" in found else "has no version"
        raise UserError(
            f"--compare {path} {had}, and this jaxrl reads version {VERSION}; make the plan again"
        )
    return found


def _column(path: pathlib.Path, plan: dict[str, Any]) -> dict[str, str]:
    """The figures of a plan by name."""
    try:
        return dict(_of_plan(plan))
    except KeyError as error:
        raise UserError(f"--compare {path} lacks {error}; make the plan again") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"--compare {path} is no plan that jaxrl wrote ({error}); make the plan again"
        ) from error


def _side_by_side(columns: Sequence[dict[str, str]]) -> Iterator[_Row]:
    """Rows with a value of each plan, or "" if it has none."""
    for name in dict.fromkeys(name for column in columns for name in column):
        yield name, [column.get(name, "") for column in columns]


def _of_plan(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of a plan."""
    yield "recipe", str(plan["title"])
    times = plan.get("predicted") or {}
    if times:
        yield "topology", str(times["topology"])
        yield "lengths", str(times["lengths"])
        yield "sampled, kept", f"{times['sampled']:,.0f}, {times['kept']:,.0f}"
    yield "devices", f"{sum(pool['devices'] for pool in plan['pools']):,}"
    # Only the compiler's figures tell.
    if any(pool["programs"] for pool in plan["pools"]):
        yield "fits", "yes" if plan["fits"] else "NO"
    yield from _memory(plan)
    if not times:
        return
    stages: dict[str, float] = {}
    for phase in times["phases"]:
        name = f"{phase['stage']}, {phase['role']}"
        stages[name] = stages.get(name, 0.0) + phase["expected_s"]
    for name, seconds in stages.items():
        yield name, plan_tables.seconds_text(seconds)
    yield "a step", plan_tables.seconds_text(times["step_s"])
    yield "at least", plan_tables.seconds_text(times["at_least_s"])
    hours = times["step_s"] * times["steps"] / 3600
    yield f"hours of {times['steps']:,} steps", number(hours)
    yield "chip-hours", number(times["chip_hours"])
    if plan.get("price") is not None:
        price = f"{number(plan['price'])}, at {plan['price_per_hour']:g} per chip-hour"
        yield "price", price


def _memory(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Bytes of a device at every program, or in both phases of a traced plan."""
    several = len(plan["pools"]) > 1
    for pool in plan["pools"]:
        of_pool = f"{pool['name']}: " if several else ""
        if not pool["programs"]:
            for phase, nbytes in pool["bytes"].items():
                yield f"{of_pool}memory, {phase}", plan_tables.size_text(nbytes)
        for program in pool["programs"]:
            name = f"{of_pool}memory, {program['role']} {program['name']}"
            yield name, plan_tables.size_text(program["total"])


def _settings(plans: Sequence[dict[str, Any]]) -> Iterator[_Row]:
    """The settings that differ."""
    columns = [dict(plan.get("settings") or {}) for plan in plans]
    for name, values in _side_by_side(columns):
        if len(set(values)) > 1:
            yield name, [str(value) for value in values]


def _table(title: str, names: Sequence[str], rows: Sequence[_Row]) -> Table:
    ascii_only = not sys.stdout.isatty()
    found = Table(title=title, title_justify="left", box=box.ASCII2 if ascii_only else box.ROUNDED)
    for name in ("", *names):
        found.add_column(name, overflow="fold")
    for name, values in rows:
        found.add_row(name, *values)
    return found
