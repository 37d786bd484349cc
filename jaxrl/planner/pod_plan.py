"""What a run would take of a pod that is not here: a plan, for people, for programs and as a page.

Memory and traffic are the compiler's figures; what lies beside a program is counted from shapes; seconds and
hours are predicted, and marked so.
"""

from __future__ import annotations

import dataclasses
import html
import io
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.compiled.programs import StepLoad
from jaxrl.planner.compiled.roofline import Seconds, chip_hours, seconds_of
from jaxrl.planner.hardware.topologies import Topology
from jaxrl.planner.memory import Holding

_GB = 1e9
_WIDTH = 130


@dataclasses.dataclass(frozen=True)
class PlannedPool:
    """A pool of devices.

    Attributes:
      name: of it.
      layout: training and generation, for people.
      num_devices: of it.
      holdings: what lies on each device from one program to the next.
      programs: of its roles, compiled.
    """

    name: str
    layout: str
    num_devices: int
    holdings: tuple[Holding, ...]
    programs: tuple[CompiledProgram, ...]


@dataclasses.dataclass(frozen=True)
class PodPlan:
    """What a run would take of a topology.

    Attributes:
      title: of the run.
      topology: what was compiled for.
      dtype: of most products.
      pools: and what was compiled for each.
      load: what a step is taken to do.
      num_steps: of the run.
      notes: (what, which) for people.
    """

    title: str
    topology: Topology
    dtype: str
    pools: tuple[PlannedPool, ...]
    load: StepLoad
    num_steps: int
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """Of all pools."""
        return tuple(program for pool in self.pools for program in pool.programs)

    @property
    def fits(self) -> bool:
        """Every program does."""
        return all(program.fits for program in self.programs)

    @property
    def compiled_s(self) -> float:
        """Seconds of compiling, when it was done."""
        return sum(program.compiled_s for program in self.programs)

    def seconds(self, program: CompiledProgram) -> Seconds:
        """Predicted, of a program in a step."""
        return seconds_of(program, self.topology, self.dtype)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: programs of a pool one after the other, pools side by side."""
        return max(sum(self.seconds(p).total for p in pool.programs) for pool in self.pools)

    @property
    def chip_hours(self) -> float:
        """Predicted, of the run."""
        return chip_hours([self.step_s], len(self.topology.devices), self.num_steps)

    def as_json(self) -> dict[str, Any]:
        """Everything, in bytes and seconds."""
        return {
            "title": self.title,
            "topology": self.topology.name,
            "device": self.topology.kind,
            "devices": len(self.topology.devices),
            "memory_bytes": self.topology.memory_bytes,
            "fits": self.fits,
            "notes": [list(note) for note in self.notes],
            "load": dataclasses.asdict(self.load),
            "compiled_s": round(self.compiled_s, 1),
            "predicted": {
                "step_s": self.step_s,
                "steps": self.num_steps,
                "chip_hours": self.chip_hours,
            },
            "pools": [self._pool_json(pool) for pool in self.pools],
        }

    def _pool_json(self, pool: PlannedPool) -> dict[str, Any]:
        return {
            "name": pool.name,
            "layout": pool.layout,
            "devices": pool.num_devices,
            "holdings": [dataclasses.asdict(held) for held in pool.holdings],
            "programs": [self._program_json(program) for program in pool.programs],
        }

    def _program_json(self, program: CompiledProgram) -> dict[str, Any]:
        named = ("role", "name", "phase", "arguments", "temporaries", "peak", "beside")
        seconds = self.seconds(program)
        return {
            **{name: getattr(program, name) for name in named},
            "total": program.total,
            "spare": program.spare,
            "fits": program.fits,
            "compiled_s": round(program.compiled_s, 1),
            "cached": program.cached,
            "flops": program.flops,
            "reads": program.reads,
            "traffic": [dataclasses.asdict(each) for each in program.traffic],
            "predicted": {**dataclasses.asdict(seconds), "total": seconds.total},
        }

    # For people

    def tables(self, *, plain: bool = False) -> Iterator[Table]:
        """Memory by program, time by program, traffic by axis, what lies there."""
        for pool in self.pools:
            yield self._memory_table(pool, plain)
            yield self._time_table(pool, plain)
            yield self._traffic_table(pool, plain)
            yield self._holdings_table(pool, plain)

    def show(self, console: Console) -> None:
        """Prints all of it."""
        plain = not console.is_terminal
        device, count = self.topology.kind, len(self.topology.devices)
        memory = self.topology.memory_bytes / _GB
        console.print(
            f"{self.title}\n{self.topology.name}: {count} x {device}, {memory:.0f} GB each",
            markup=False,
        )
        for what, which in self.notes:
            console.print(f"  {what}: {which}", markup=False)
        for table in self.tables(plain=plain):
            console.print(table)
        console.print("\n".join(self.verdict()), markup=False)

    def verdict(self) -> list[str]:
        """A few lines: fits or not, and what the run would take."""
        tightest = min(self.programs, key=lambda program: program.spare)
        share = tightest.spare / tightest.memory
        where = f"{tightest.role} {tightest.name}"
        lines = [
            f"fits: {tightest.spare / _GB:.1f} GB of each device ({share:.0%}) are left at the worst moment, "
            f"{where}"
            if self.fits
            else f"DOES NOT FIT: {where} lacks {-tightest.spare / _GB:.1f} GB of each device"
        ]
        load = self.load
        lines.append(
            f"predicted: {self.step_s:,.0f} s a step at least, {self.chip_hours:,.0f} chip-hours for "
            f"{self.num_steps:,} steps, if answers have {load.response_tokens:,.0f} tokens on average and "
            "everything runs at the vendor's rates; 1.5 to 3 times as long is usual"
        )
        lines.append(f"compiled in {self.compiled_s:,.0f} s")
        return lines

    def as_html(self) -> str:
        """The same as a page of its own."""
        console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
        self.show(console)
        page = console.export_html(inline_styles=True)
        return page.replace("<head>", f"<head>\n<title>{html.escape(self.title)}</title>", 1)

    def _memory_table(self, pool: PlannedPool, plain: bool) -> Table:
        title = f"memory of a device, GB ({pool.name}: {pool.num_devices} devices, {pool.layout})"
        table = _table(title, plain, "program", "")
        for name in ("arguments", "temporary", "peak", "beside it", "together", "left", "compiled"):
            table.add_column(name, justify="right", no_wrap=True)
        for p in pool.programs:
            numbers = (p.arguments, p.temporaries, p.peak, p.beside, p.total, p.spare)
            table.add_row(
                f"{p.role} {p.name}",
                "fits" if p.fits else "NO",
                *(f"{n / _GB:.2f}" for n in numbers),
                "kept" if p.cached else f"{p.compiled_s:.0f} s",
            )
        return table

    def _time_table(self, pool: PlannedPool, plain: bool) -> Table:
        table = _table("seconds of a step at least, PREDICTED", plain, "program")
        for name in ("PFLOP", "products", "memory", "traffic", "at least", "bound by"):
            table.add_column(name, justify="right", no_wrap=True)
        for p in pool.programs:
            s = self.seconds(p)
            times = (s.products, s.memory, s.traffic, s.total)
            table.add_row(
                f"{p.role} {p.name}",
                f"{p.flops / 1e15:,.1f}",
                *(f"{t:,.1f}" for t in times),
                s.bound,
            )
        return table

    def _traffic_table(self, pool: PlannedPool, plain: bool) -> Table:
        title = "between devices, received by one in a step"
        table = _table(title, plain, "program", "collective", "along", "links")
        for name in ("calls", "GB"):
            table.add_column(name, justify="right", no_wrap=True)
        for p in pool.programs:
            for t in p.traffic:
                links = "network" if t.across_hosts else "near"
                size = f"{t.nbytes / _GB:,.2f}" if t.nbytes > 1e7 else f"{t.nbytes / _GB:.1e}"
                table.add_row(
                    *(
                        f"{p.role} {p.name}",
                        t.kind,
                        ", ".join(t.axes),
                        links,
                        f"{t.calls:,.0f}",
                        size,
                    )
                )
            table.add_section()
        return table

    def _holdings_table(self, pool: PlannedPool, plain: bool) -> Table:
        table = _table("what lies on a device", plain, "what", "how")
        table.add_column("GB", justify="right", no_wrap=True)
        for held in pool.holdings:
            table.add_row(held.name, held.layout, f"{held.bytes_per_device / _GB:.2f}")
        return table


def _table(title: str, plain: bool, *columns: str) -> Table:
    lines = box.ASCII2 if plain else box.ROUNDED
    table = Table(title=title, title_justify="left", box=lines)
    for name in columns:
        table.add_column(name)
    return table
