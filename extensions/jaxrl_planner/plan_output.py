"""Prints a plan: tables for a terminal, or plain text.

    role or event       layout                              values   per device
    actor in training   float32, 1-8-16 fsdp 16     32,763,876,352      1.02 GB
    sampling, ...       leaves 3.2 GB of v5p                           91.80 GB    traced plans

Compiled plans also have rows for programs, with further columns:

    role or event   layout            values   per device   arguments ... left   at least   bound by
    actor update    fits, kept   12.3 PFLOP      22.14 GB        3.53 ... 72.9    219.2 s   matmuls

If devices are named, a second table has the seconds of a step, by phase, role and cause:

    phase        role, causes   expected, PREDICTED   at least, PREDICTED   bound by
    generation   actor                      1,078 s                 514 s   memory
                   cache read                 465 s
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl_planner.hardware.accelerators import accelerator
from jaxrl_planner.plan import PHASES, Plan, seconds_text, size_text

# Devices that the totals of a traced plan are compared with, by ascending memory.
_COMPARED = ("v5e", "v6e", "a100-40", "h100", "v5p", "h200", "b200")

_GB = 1e9
# Of plain text, without the columns of programs and with them.
_PLAIN_WIDTH, _WIDE = 200, 240
# Causes below this share of a phase are not printed.
_SMALLEST_SHARE = 0.001

# Of programs, in compiled plans: GB of a device, and what a step of theirs takes.
_OF_PROGRAMS = (
    *("arguments", "temporary", "peak", "co-resident", "left"),
    *("at least, PREDICTED", "matmuls", "memory", "traffic", "bound by"),
)
_TEXTS = ("role or event", "layout", "phase", "role, causes", "bound by", "")
# Columns that are left out in medium and in narrow terminals.
_DETAILS = ("arguments", "temporary", "peak", "co-resident", "matmuls", "memory", "traffic")
_MORE_DETAILS = ("values", "left", "bound by")
_NARROW = 80

_Row = tuple[str, ...]
_Sections = Iterable[Iterable[_Row]]


def show(plan: Plan, console: Console | None = None) -> None:
    """Prints the tables in the width of a terminal; elsewhere as plain text, as wide as COLUMNS or whole.

    Where there is too little room, columns are left out and texts folded.

    Args:
      plan: the plan.
      console: where to print; None is the standard output.
    """
    # CI systems set FORCE_COLOR, and rich would then take a log for a terminal.
    if console is None:
        console = Console(force_terminal=None if sys.stdout.isatty() else False)
    if not console.is_terminal:
        whole = _PLAIN_WIDTH if plan.target is None else _WIDE
        width = console.width if "COLUMNS" in os.environ else whole
        console = Console(file=console.file, width=width, force_terminal=False, color_system=None)
    # Names, bytes and seconds are the last to go.
    width = console.width
    out = (*_DETAILS, *_MORE_DETAILS) if width < _NARROW else _DETAILS if width < _WIDE else ()
    for title, names, sections in _tables(plan):
        kept = [n for n, name in enumerate(names) if name not in out]
        lines = box.ROUNDED if console.is_terminal else box.ASCII2
        table = Table(title=title, title_justify="left", box=lines)
        for n in kept:
            left = names[n] in _TEXTS
            table.add_column(names[n], justify="left" if left else "right", overflow="fold")
        for section in sections:
            for row in section:
                table.add_row(*(row[n] for n in kept if n < len(row)))
            table.add_section()
        console.print(table)
    if plan.times is not None:
        console.print("\n".join(_verdict(plan)), markup=False, highlight=False)


def _tables(plan: Plan) -> Iterator[tuple[str, Sequence[str], _Sections]]:
    # (title, columns, groups of rows) of the tables of a plan.
    first, *others = plan.pools
    title = f"{plan.title}: {first.num_devices} devices, {first.layout}"
    if others:
        devices = sum(pool.num_devices for pool in plan.pools)
        title = f"{plan.title}: {devices} devices in {len(plan.pools)} pools"
    names = ("role or event", "layout", "values", "per device")
    if (target := plan.target) is not None:
        kind = target.devices[0].device_kind
        title += f"\n{target.name}: {kind}, {target.memory_bytes / _GB:.0f} GB each"
        names += _OF_PROGRAMS
    yield title, names, _sections(plan)
    if (times := plan.times) is None:
        return
    sections: list[list[_Row]] = []
    for stage in times.stages:
        rows: list[_Row] = []
        for task in times.of_stage(stage):
            costs, least = task.costs, seconds_text(task.at_least_s)
            name = "" if rows else stage
            rows.append((name, task.role, seconds_text(costs.total_s), least, task.bound))
            for cause, seconds in costs.seconds.items():
                if abs(seconds) >= _SMALLEST_SHARE * costs.total_s:
                    rows.append(("", f"  {cause}", seconds_text(seconds), "", ""))
            if costs.idle_s:
                rows.append(("", "  idle slots, part of these", seconds_text(costs.idle_s), "", ""))
        sections.append(rows)
    total = ("a step", "", seconds_text(times.step_s), seconds_text(times.at_least_s), "")
    title = f"a step on {times.cluster.name}: {times.load.lengths_text}"
    names = ("phase", "role, causes", "expected, PREDICTED", "at least, PREDICTED", "bound by")
    yield title, names, [*sections, [total]]


def _sections(plan: Plan) -> Iterator[list[_Row]]:
    # Buffers, programs and traffic of each pool, and notes.
    for pool in plan.pools:
        of_pool = f"pool {pool.name}, " if len(plan.pools) > 1 else ""
        if of_pool:
            yield [(f"{of_pool}{pool.num_devices} devices", pool.layout, "", "")]
        yield [
            (held.name, held.layout, f"{held.num_values:,}", size_text(held.bytes_per_device))
            for held in pool.resident_buffers
        ]
        if plan.target is None:
            totals = {phase: pool.bytes_in(phase) for phase in PHASES}
            yield [
                (f"{of_pool}{phase}, before temporaries", _left(n), "", size_text(n))
                for phase, n in totals.items()
            ]
        yield [
            (
                program.title,
                f"{'fits' if program.fits else 'DOES NOT FIT'}, "
                + ("kept" if program.cached else f"compiled in {program.compiled_s:.0f} s"),
                f"{program.flops / 1e15:,.1f} PFLOP",
                f"{program.total / _GB:,.2f} GB",
                *(
                    f"{getattr(program, part) / _GB:.2f}"
                    for part in ("arguments", "temporaries", "peak", "co_resident", "spare")
                ),
                *map(seconds_text, (program.seconds.total, *program.seconds.parts)),
                program.seconds.bound,
            )
            for program in pool.programs
        ]
        # Bytes that a device receives from others in a step of a program.
        for program in pool.programs:
            yield [
                (
                    f"{program.title}, {t.kind}",
                    f"received along {', '.join(t.axes)}, {'network' if t.network else 'near'}",
                    f"{t.calls:,.0f} calls",
                    f"{t.nbytes / _GB:,.2f} GB" if t.nbytes > 1e7 else size_text(t.nbytes),
                )
                for t in program.traffic
            ]
    yield [(what, which, "", "") for what, which in plan.notes]


def _left(nbytes: int) -> str:
    # Memory left on the smallest device that holds `nbytes`, and the devices that are too small.
    sizes = {name: accelerator(name).memory_gb * _GB for name in _COMPARED}
    fitting = [name for name, size in sizes.items() if size > nbytes]
    too_small = [name for name in sizes if name not in fitting]
    parts = (
        [f"too much for {too_small[-1]}" + " or less" * (len(too_small) > 1)] if too_small else []
    )
    if fitting:
        parts.append(f"leaves {(sizes[fitting[0]] - nbytes) / _GB:.1f} GB of {fitting[0]}")
    return "; ".join(parts)


def _verdict(plan: Plan) -> Iterator[str]:
    # A few lines: whether the run fits, and its predicted time.
    times = plan.times
    assert times is not None, "only plans on a topology have a verdict"
    if plan.target is not None:
        tightest = min(plan.programs, key=lambda program: program.spare)
        spare = tightest.spare / _GB
        if plan.fits:
            yield (
                f"fits: {spare:.1f} GB of each device ({tightest.spare / tightest.memory:.0%}) are left at "
                f"the worst moment, {tightest.title}"
            )
        else:
            yield f"DOES NOT FIT: {tightest.title} lacks {-spare:.1f} GB of each device"
    hours, least = times.chip_hours(times.step_s), times.chip_hours(times.at_least_s)
    yield (
        f"predicted: {seconds_text(times.step_s)} a step, {hours:,.0f} "
        f"chip-hours for {times.num_steps:,} steps; at the vendor's rates and with no slot idle at least "
        f"{seconds_text(times.at_least_s)} and {least:,.0f} chip-hours"
    )
    yield f"a step: {times.load.text}"
    for task in times.tasks:
        if (use := task.costs.slot_use) is not None:
            yield f"{task.stage}, {task.role}: {use.text}"
    if plan.target is not None:
        yield f"compiled in {sum(program.compiled_s for program in plan.programs):,.0f} s"
