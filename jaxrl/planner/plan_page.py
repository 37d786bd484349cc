"""The page of a plan: what is rented, what a step takes, what a device holds, and what would be faster.

It is drawn with the parts of a run's report (`tracking.report`): one file without scripts that loads nothing.
All seconds, hours and prices are predictions.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console

from jaxrl.planner import plan_tables
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.plan import Plan, PlannedPool
from jaxrl.planner.step_times import StepTimes, TaskTime
from jaxrl.tracking.readable import number
from jaxrl.tracking.report.page import write_page
from jaxrl.tracking.report.plots import NUM_COLORS

_GB = 1e9
# The drawing of the devices shows whole hosts, up to this many devices.
_MOST_DRAWN = 1024
# Causes below this share of a phase have no advice.
_SMALLEST_SHARE = 0.05

# What lowers the seconds of a cause. Causes without an entry have no remedy in settings or devices.
_REMEDIES: Mapping[str, str] = {
    "cache read": "faster memory, rollout.kv_dtype=int8, or shorter answers",
    "weights read": "faster memory, or more slots a replica: each read then serves more samples",
    "matmuls beyond that": "faster matmuls, or fewer slots a replica",
    "scores beyond that": "faster matmuls, or shorter answers",
    "overhead of each step": "fewer decoding steps: more slots a replica, or shorter answers",
    "host between dispatches": "more rollout.tokens_per_dispatch",
    "tokens to experts": "faster links between devices, or fewer of them in mesh.expert",
    "rows for heads": "faster links between devices, or fewer of them in mesh.context",
    "tensor all-reduces": "faster links between devices, or less tensor parallelism",
    "between stages": "fewer pipeline stages",
    "prompts to slots": "a faster network, or fewer rollout.prefill_prompts",
    "prefill": "faster matmuls, or shorter prompts",
    "resharding": "faster links, or layouts of training and generation that are more alike",
    "compute": "faster matmuls, or more devices",
    "layers computed again": "train.remat=none, if the activations fit",
    "pipeline bubble": "more train.pipeline_microbatches, or fewer stages",
    "weights gathered": "a faster network, fewer devices in mesh.fsdp, or larger microbatches",
    "gradients summed": "a faster network, or fewer and larger microbatches",
    "optimiser": "faster memory, or optim.moments=int8",
    "program call": "fewer and larger microbatches",
}
_IDLE = "shorter longest answers, fewer slots a replica, or rollout.partial=True"


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a bar.

    Attributes:
      label, value: its name and its size, formatted.
      percent: its length, in percent of the track; 0 for entries of the legend alone.
      color: index of a colour of the style sheet.
    """

    label: str
    value: str
    percent: float
    color: int


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar with a legend.

    Attributes:
      label, value: heading and headline.
      segments: its parts, from left to right.
      notes: lines below the legend.
      limit: position of a mark, in percent of the track; None for no mark.
    """

    label: str
    value: str
    segments: Sequence[Segment]
    notes: Sequence[str] = ()
    limit: float | None = None


def write_plan_page(path: pathlib.Path, plan: Plan) -> None:
    """Writes the page of a plan to `path` atomically."""
    times = plan.times
    write_page(
        path,
        "plan_page.html",
        package="jaxrl.planner",
        title=f"{plan.title} on {times.cluster.name}" if times else plan.title,
        cards=list(_cards(plan)),
        assumed=_assumed(plan),
        memory=list(_memory(plan)),
        memory_note="of each program"
        if plan.target
        else "counted from shapes; compiling adds temporaries",
        seconds=list(_seconds(times)) if times else [],
        pools=[(n % NUM_COLORS, pool) for n, pool in enumerate(plan.pools)],
        hosts=_hosts(times.cluster, plan.pools) if times else [],
        hosts_left_out=_left_out(times.cluster) if times else 0,
        alternatives=[(each.name, f"{each.slower:+.1%}") for each in plan.alternatives or ()],
        searched=plan.alternatives is not None,
        advice=list(_advice(times)) if times else [],
        settings=plan.settings,
        tables=_tables(plan),
    )


def _cards(plan: Plan) -> Iterator[tuple[str, str]]:
    """(label, value) of the headline numbers."""
    devices = f"{sum(pool.num_devices for pool in plan.pools):,}"
    yield "devices", f"{devices} {plan.times.cluster.accelerator.name}" if plan.times else devices
    if plan.target is not None:
        tightest = min(plan.programs, key=lambda program: program.spare)
        fits = "fits" if plan.fits else "does not fit"
        yield f"{fits}; left at the worst moment", f"{tightest.spare / _GB:,.1f} GB"
    if (times := plan.times) is None:
        return
    hours = times.step_s * times.num_steps / 3600
    yield "a step, predicted", plan_tables.seconds_text(times.step_s)
    yield "at least", plan_tables.seconds_text(times.at_least_s)
    yield f"hours of {times.num_steps:,} steps", number(hours)
    yield "chip-hours", number(times.chip_hours(times.step_s))
    if plan.price is not None:
        yield f"price, at {plan.price_per_hour:g} an hour", number(plan.price)


def _assumed(plan: Plan) -> list[tuple[str, str]]:
    if plan.times is None:
        return list(plan.notes)
    load = plan.times.load
    return [("lengths", load.lengths.text), ("a step", load.text), *plan.notes]


def _memory(plan: Plan) -> Iterator[Bar]:
    """A bar for every moment of every pool."""
    if plan.target is not None:
        for program in plan.programs:
            yield _program_bar(program, plan.target.topology.memory_bytes)
        return
    there = plan.times.cluster.accelerator.memory_gb * _GB if plan.times else 0.0
    for pool in plan.pools:
        of_pool = f"{pool.name}: " if len(plan.pools) > 1 else ""
        colors = {held.name: n % NUM_COLORS for n, held in enumerate(pool.resident_buffers)}
        for moment, phase, turn in _moments(pool):
            parts = [
                (held.name, float(held.bytes_per_device), colors[held.name])
                for held in pool.resident_buffers
                if getattr(held, phase) and held.at(turn)
            ]
            yield _memory_bar(f"{of_pool}{moment}", parts, there)


def _moments(pool: PlannedPool) -> Iterator[tuple[str, str, str]]:
    """(name, phase, role that updates) of the moments of a traced pool."""
    yield "sampling", "sampling", ""
    turns = dict.fromkeys(held.turn for held in pool.resident_buffers if held.turn)
    for turn in turns or ("",):
        yield f"update of {turn}" if turn else "learning", "learning", turn


def _program_bar(program: CompiledProgram, there: float) -> Bar:
    temporaries = min(program.temporaries, program.peak)
    arguments = min(program.arguments, program.peak - temporaries)
    parts = [
        ("other buffers on the device", program.co_resident, 7),
        ("arguments", arguments, 0),
        ("temporaries", temporaries, 1),
        ("results", program.peak - arguments - temporaries, 2),
    ]
    return _memory_bar(f"{program.role} {program.name}", parts, there)


def _memory_bar(label: str, parts: Sequence[tuple[str, float, int]], there: float) -> Bar:
    total = sum(nbytes for _, nbytes, _ in parts)
    track = max(there, total) or 1.0
    segments = [
        Segment(name, plan_tables.size_text(int(nbytes)), 100 * nbytes / track, color)
        for name, nbytes, color in parts
        if nbytes > 0
    ]
    value = plan_tables.size_text(int(total))
    if not there:
        return Bar(label, value, segments)
    if total > there:
        lacking = f"{(total - there) / _GB:,.1f} GB more than a device has"
        return Bar(label, value, segments, (lacking,), 100 * there / track)
    return Bar(f"{label}", f"{value} of {there / _GB:,.0f} GB", segments)


def _seconds(times: StepTimes) -> Iterator[Bar]:
    """A bar for every role in every phase, against the longest."""
    longest = max(task.expected.total_s for task in times.tasks) or 1.0
    causes = dict.fromkeys(cause for task in times.tasks for cause in task.expected.seconds)
    colors = {cause: n % NUM_COLORS for n, cause in enumerate(causes)}
    for task in times.tasks:
        yield _task_bar(task, longest, colors)


def _task_bar(task: TaskTime, longest: float, colors: Mapping[str, int]) -> Bar:
    """The causes of a task. What is hidden behind others has no length: the causes share the rest."""
    costs, shown = task.expected, plan_tables.seconds_text
    positive = sum(seconds for seconds in costs.seconds.values() if seconds > 0) or 1.0
    scale = 100 * costs.total_s / longest / positive
    segments = [
        Segment(cause, shown(seconds), max(0.0, seconds * scale), colors[cause])
        for cause, seconds in costs.seconds.items()
        if seconds > 0 and seconds >= plan_tables.SMALLEST_SHARE * costs.total_s
    ]
    bound = f", bound by {task.bound}" if task.bound else ""
    notes = [f"at least {shown(task.at_least_s)}{bound}"]
    notes += [f"{cause}: {shown(-s)}" for cause, s in costs.seconds.items() if s < 0]
    if costs.idle_s:
        notes.append(f"idle slots, part of these: {shown(costs.idle_s)}")
    if costs.slot_use is not None:
        notes.append(costs.slot_use.text)
    value, mark = shown(costs.total_s), 100 * task.at_least_s / longest
    return Bar(f"{task.stage}, {task.role}", value, segments, notes, min(mark, 100.0))


def _hosts(cluster: Cluster, pools: Sequence[PlannedPool]) -> list[list[tuple[str, int | None]]]:
    """Devices of each host: (number in its pool, colour of the pool), or ("", None) if it is idle."""
    owners: dict[int, tuple[str, int | None]] = {
        position: (f"G{local + 1}", index % NUM_COLORS)
        for index, pool in enumerate(pools)
        for local, position in enumerate(pool.devices)
    }
    per_host, drawn = cluster.host_devices, min(cluster.num_devices, _MOST_DRAWN)
    return [
        [owners.get(n, ("", None)) for n in range(first, min(first + per_host, drawn))]
        for first in range(0, drawn, per_host)
    ]


def _left_out(cluster: Cluster) -> int:
    return max(0, cluster.num_devices - _MOST_DRAWN)


def _advice(times: StepTimes) -> Iterator[tuple[str, str, Sequence[str]]]:
    """(phase, its share of the step, what would lower it) of the phases, the longest first."""
    stages = sorted(times.stages, key=times.stage_s, reverse=True)
    for stage in stages:
        seconds = times.stage_s(stage)
        if not seconds:
            continue
        tasks = max(_by_pool(times.of_stage(stage)), key=_total)
        total = _total(tasks)
        causes = _causes(tasks)
        lines = [
            f"{cause}, {plan_tables.seconds_text(s)}: {remedy}"
            for cause, s, remedy in sorted(causes, key=lambda each: -each[1])
            if s >= _SMALLEST_SHARE * total
        ]
        share = f"{seconds / times.step_s:.0%} of a step"
        bounds = dict.fromkeys(task.bound for task in tasks if task.bound)
        bound = f", bound by {' and '.join(bounds)}" if bounds else ""
        yield stage, f"{share}{bound}", lines


def _by_pool(tasks: Iterable[TaskTime]) -> list[list[TaskTime]]:
    pools: dict[int, list[TaskTime]] = {}
    for task in tasks:
        pools.setdefault(task.pool, []).append(task)
    return list(pools.values())


def _total(tasks: Iterable[TaskTime]) -> float:
    return sum(task.expected.total_s for task in tasks)


def _causes(tasks: Sequence[TaskTime]) -> Iterator[tuple[str, float, str]]:
    """(cause, seconds, remedy) of the causes that something lowers."""
    several = len(tasks) > 1
    for task in tasks:
        of_role = f"{task.role}, " if several else ""
        for cause, seconds in task.expected.seconds.items():
            if cause in _REMEDIES:
                yield f"{of_role}{cause}", seconds, _REMEDIES[cause]
        yield f"{of_role}idle slots", task.expected.idle_s, _IDLE


def _tables(plan: Plan) -> str:
    """The tables of the terminal, as text."""
    console = Console(file=(out := io.StringIO()), force_terminal=False, width=240)
    plan_tables.show(plan, console)
    return out.getvalue()
