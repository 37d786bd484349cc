"""Formats a plan as tables for a terminal, or as plain text.

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

from jaxrl.mesh.hardware import accelerator
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.compiled.traffic import Traffic
from jaxrl.planner.measured_run import MeasuredRun
from jaxrl.planner.memory import ResidentBuffers
from jaxrl.planner.plan import Plan, PlannedPool
from jaxrl.planner.simulation.systems import OURS
from jaxrl.planner.step_times import StepTimes, TaskTime
from jaxrl.tracking.readable import number

# Devices that the totals of a traced plan are compared with, by ascending memory.
_COMPARED = ("v5e", "v6e", "a100-40", "h100", "v5p", "h200", "b200")

_GB = 1e9
# Of plain text, without the columns of programs and with them.
_PLAIN_WIDTH, _WIDE = 200, 240
# Causes below this share of a phase are not printed.
SMALLEST_SHARE = 0.001
# Settings that the comparison with a run names.
_MOST_NAMED = 6

# Of programs, in compiled plans: GB of a device, and what a step of theirs takes.
_OF_PROGRAMS = (
    *("arguments", "temporary", "peak", "co-resident", "left"),
    *("at least, PREDICTED", "matmuls", "memory", "traffic", "bound by"),
)
_TEXTS = ("role or event", "layout", "phase", "role, causes", "bound by")
# Columns that a table leaves out if it has less than its whole width, and if it is narrow.
_DETAILS = ("arguments", "temporary", "peak", "co-resident", "matmuls", "memory", "traffic")
_MORE_DETAILS = ("values", "left", "bound by")
_NARROW = 80

TableRow = tuple[str, ...]


def show(plan: Plan, console: Console | None = None) -> None:
    """Prints the tables in the width of a terminal; elsewhere as plain text, as wide as COLUMNS or whole.

    Where there is too little room, columns are left out and texts folded.
    """
    # CI systems set FORCE_COLOR, and rich would then take a log for a terminal.
    if console is None:
        console = Console(force_terminal=None if sys.stdout.isatty() else False)
    plain = not console.is_terminal
    if plain:
        whole = _PLAIN_WIDTH if plan.target is None else _WIDE
        width = console.width if "COLUMNS" in os.environ else whole
        console = Console(file=console.file, width=width, force_terminal=False, color_system=None)
    for each in tables(plan, plain=plain, width=console.width):
        console.print(each)
    if plan.times is not None:
        console.print("\n".join(verdict(plan, plan.times)), markup=False, highlight=False)


def tables(plan: Plan, *, plain: bool = False, width: int = _WIDE) -> Iterator[Table]:
    """The tables of a plan, for a console of some width; `plain` draws their lines with ASCII."""
    names = ("role or event", "layout", "values", "per device")
    names += _OF_PROGRAMS if plan.target else ()
    yield _table(_title(plan), names, _sections(plan), plain, width)
    if plan.times is not None:
        yield _times_table(plan.times, plain, width)
        if plan.measured is not None:
            yield _measured_table(plan.times, plan.measured, plain, width)


def _table(
    title: str,
    names: Sequence[str],
    sections: Iterable[Iterable[TableRow]],
    plain: bool,
    width: int,
) -> Table:
    out = (*_DETAILS, *_MORE_DETAILS) if width < _NARROW else _DETAILS if width < _WIDE else ()
    kept = [n for n, name in enumerate(names) if name not in out]
    found = Table(title=title, title_justify="left", box=box.ASCII2 if plain else box.ROUNDED)
    for n in kept:
        left = names[n] in _TEXTS
        found.add_column(names[n], justify="left" if left else "right", overflow="fold")
    for section in sections:
        for row in section:
            found.add_row(*(row[n] for n in kept if n < len(row)))
        found.add_section()
    return found


def _times_table(times: StepTimes, plain: bool, width: int) -> Table:
    """Expected seconds of a step and their lower bounds, by phase, role and cause."""
    named = times.load.system
    system = "" if named is OURS else f" with the fixed costs of {named.name} ({named.title})"
    title = f"a step on {times.cluster.name}{system}: {times.load.lengths.text}"
    names = ("phase", "role, causes", "expected, PREDICTED", "at least, PREDICTED", "bound by")
    sections: list[list[TableRow]] = [
        [
            row
            for i, task in enumerate(times.of_stage(stage))
            for row in _task_rows(stage if not i else "", task)
        ]
        for stage in times.stages
    ]
    total = ("a step", "", seconds_text(times.step_s), seconds_text(times.at_least_s), "")
    return _table(title, names, [*sections, [total]], plain, width)


def _measured_table(times: StepTimes, run: MeasuredRun, plain: bool, width: int) -> Table:
    """Predicted seconds of each phase beside those that a run measured, on its own devices and settings."""
    title = f"beside {run.name}: medians of steps {run.steps[0]} to {run.steps[1]}"
    if run.differing:
        named = ", ".join(run.differing[:_MOST_NAMED])
        more = len(run.differing) - _MOST_NAMED
        title += f"\nother settings there: {named}" + (f" and {more} more" if more > 0 else "")
    seconds = [(stage, times.stage_s(stage), run.seconds[stage]) for stage in times.stages]
    rows = [
        (
            *(name, seconds_text(expected), seconds_text(measured)),
            f"{expected / measured - 1:+.1%}" if measured else "not measured",
        )
        for name, expected, measured in (*seconds, ("a step", times.step_s, run.step_s))
    ]
    names = ("phase", "expected, PREDICTED", "measured", "off by")
    return _table(title, names, [rows], plain, width)


def _task_rows(stage: str, task: TaskTime) -> Iterator[TableRow]:
    costs = task.expected
    total, least = seconds_text(costs.total_s), seconds_text(task.at_least_s)
    yield (stage, task.role, total, least, task.bound)
    for cause, seconds in costs.seconds.items():
        if abs(seconds) >= SMALLEST_SHARE * costs.total_s:
            yield ("", f"  {cause}", seconds_text(seconds), "", "")
    if costs.idle_s:
        yield ("", "  idle slots, part of these", seconds_text(costs.idle_s), "", "")


def seconds_text(seconds: float) -> str:
    """Formats seconds, with three digits below 10, and as ms or us below 1 s: "99 us"."""
    size = abs(seconds)
    if size >= 10 or not size:
        return f"{seconds:,.1f} s" if size else "0 s"
    unit, name = (1, "s") if size >= 1 else (1e-3, "ms") if size >= 1e-3 else (1e-6, "us")
    return f"{seconds / unit:.3g} {name}"


def verdict(plan: Plan, times: StepTimes) -> list[str]:
    """A few lines: whether the run fits, and its predicted time."""
    lines = [] if plan.target is None else [_fits(plan)]
    lines.append(
        f"predicted: {seconds_text(times.step_s)} a step, {times.chip_hours(times.step_s):,.0f} "
        f"chip-hours for {times.num_steps:,} steps; at the vendor's rates and with no slot idle at least "
        f"{seconds_text(times.at_least_s)} and {times.chip_hours(times.at_least_s):,.0f} chip-hours"
    )
    lines.append(f"a step: {times.load.text}")
    for task in times.tasks:
        if (use := task.expected.slot_use) is not None:
            lines.append(f"{task.stage}, {task.role}: {use.text}")
    if plan.price is not None:
        lines.append(
            f"price: {number(plan.price)}, at {plan.price_per_hour:g} for a device and hour"
        )
    if plan.target is not None:
        lines.append(f"compiled in {plan.compiled_s:,.0f} s")
    return lines


def _fits(plan: Plan) -> str:
    tightest = min(plan.programs, key=lambda program: program.spare)
    if not plan.fits:
        return (
            f"DOES NOT FIT: {_name(tightest)} lacks {-tightest.spare / _GB:.1f} GB of each device"
        )
    share = tightest.spare / tightest.memory
    return (
        f"fits: {tightest.spare / _GB:.1f} GB of each device ({share:.0%}) are left at the worst moment, "
        f"{_name(tightest)}"
    )


def _title(plan: Plan) -> str:
    first, *others = plan.pools
    where = f"{first.num_devices} devices, {first.layout}"
    if others:
        where = f"{sum(p.num_devices for p in plan.pools)} devices in {len(plan.pools)} pools"
    if plan.target is None:
        return f"{plan.title}: {where}"
    topology = plan.target.topology
    memory = topology.memory_bytes / _GB
    return f"{plan.title}: {where}\n{topology.name}: {topology.kind}, {memory:.0f} GB each"


def _sections(plan: Plan) -> Iterator[list[TableRow]]:
    """Groups of rows, separated by lines in the table."""
    for pool in plan.pools:
        of_pool = f"pool {pool.name}, " if len(plan.pools) > 1 else ""
        if of_pool:
            yield [(f"{of_pool}{pool.num_devices} devices", pool.layout, "", "")]
        yield [_held(held) for held in pool.resident_buffers]
        if plan.target is None:
            yield _totals(of_pool, pool)
        yield [_program(plan, program) for program in pool.programs]
        for program in pool.programs:
            yield [_received(program, traffic) for traffic in program.traffic]
    yield [(what, which, "", "") for what, which in plan.notes]
    yield [(f"not counted: {name}", reason, "", "") for name, reason in plan.left_out]


def _held(held: ResidentBuffers) -> TableRow:
    return held.name, held.layout, f"{held.num_values:,}", size_text(held.bytes_per_device)


def _totals(of_pool: str, pool: PlannedPool) -> list[TableRow]:
    totals = {phase: pool.bytes_in(phase) for phase in ("sampling", "learning")}
    return [
        (f"{of_pool}{phase}, before temporaries", _left(n), "", size_text(n))
        for phase, n in totals.items()
    ]


def _program(plan: Plan, program: CompiledProgram) -> TableRow:
    """Memory of a compiled program, and the predicted seconds of a step."""
    seconds = plan.seconds(program)
    fits = "fits" if program.fits else "DOES NOT FIT"
    compiled = "kept" if program.cached else f"compiled in {program.compiled_s:.0f} s"
    memory = (
        program.arguments,
        program.temporaries,
        program.peak,
        program.co_resident,
        program.spare,
    )
    times = (seconds.matmuls, seconds.memory, seconds.traffic)
    return (
        _name(program),
        f"{fits}, {compiled}",
        f"{program.flops / 1e15:,.1f} PFLOP",
        f"{program.total / _GB:,.2f} GB",
        *(f"{nbytes / _GB:.2f}" for nbytes in memory),
        seconds_text(seconds.total),
        *(seconds_text(each) for each in times),
        seconds.bound,
    )


def _received(program: CompiledProgram, traffic: Traffic) -> TableRow:
    """Bytes that a device receives from others in a step of a program."""
    links = "network" if traffic.across_hosts else "near"
    where = f"received along {', '.join(traffic.axes)}, {links}"
    size = f"{traffic.nbytes / _GB:,.2f}" if traffic.nbytes > 1e7 else f"{traffic.nbytes / _GB:.1e}"
    name = f"{_name(program)}, {traffic.kind}"
    return name, where, f"{traffic.calls:,.0f} calls", f"{size} GB"


def _name(program: CompiledProgram) -> str:
    return f"{program.role} {program.name}"


def size_text(nbytes: int) -> str:
    """Formats bytes, as GB from 0.1 GB on."""
    return f"{nbytes / _GB:,.2f} GB" if nbytes >= _GB / 10 else f"{nbytes / 1e6:,.2f} MB"


def _left(nbytes: int) -> str:
    """Memory left on the smallest device that holds `nbytes`, and the devices that are too small."""
    sizes = {name: accelerator(name).memory_gb * _GB for name in _COMPARED}
    fitting = [name for name, size in sizes.items() if size > nbytes]
    too_small = [name for name in sizes if name not in fitting]
    parts = (
        [f"too much for {too_small[-1]}" + " or less" * (len(too_small) > 1)] if too_small else []
    )
    if fitting:
        parts.append(f"leaves {(sizes[fitting[0]] - nbytes) / _GB:.1f} GB of {fitting[0]}")
    return "; ".join(parts)
