"""What a dry run found, as one table: for a terminal, or as plain text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.mesh.hardware import accelerator
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.planner.memory import Holding, generate_name, phase_bytes, train_name

# Devices that the totals are compared with, by growing memory.
_COMPARED = ("v5e", "v6e", "a100-40", "h100", "v5p", "h200", "b200")

_GB = 1e9
_PLAIN_WIDTH = 200


@dataclasses.dataclass(frozen=True)
class PoolHoldings:
    """A pool of other devices than the actor's.

    Attributes:
      name: of it.
      layout: of its mesh.
      holdings: what lies on its devices.
    """

    name: str
    layout: ParallelLayout
    holdings: tuple[Holding, ...]


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a run would take. `show` prints it as one table.

    Attributes:
      title: of the run.
      layout: of the actor's mesh.
      holdings: what lies on its devices.
      flow: (what, how many) of a step, in the order in which they happen.
      left_out: (what, why) is not among all this.
      elsewhere: other pools of devices.
    """

    title: str
    layout: ParallelLayout
    holdings: tuple[Holding, ...]
    flow: tuple[tuple[str, str], ...]
    left_out: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[PoolHoldings, ...] = ()

    @property
    def sampling_bytes(self) -> int:
        """Bytes per device while responses are sampled, before what compiled programs need."""
        return phase_bytes(self.holdings, "sampling")

    @property
    def learning_bytes(self) -> int:
        """Bytes per device while weights are updated, before what compiled programs need besides."""
        return phase_bytes(self.holdings, "learning")

    def table(self, *, plain: bool = False) -> Table:
        """Everything as one table; `plain` draws its lines with ASCII."""
        table = Table(
            title=f"{self.title}: {self.layout.num_devices} devices, training {train_name(self.layout)}, "
            f"generation {generate_name(self.layout)}",
            title_justify="left",
            box=box.ASCII2 if plain else box.ROUNDED,
        )
        table.add_column("role or event")
        table.add_column("layout")
        table.add_column("values", justify="right", no_wrap=True)
        table.add_column("per device", justify="right", no_wrap=True)
        for section in self._sections():
            for row in section:
                table.add_row(*row)
            table.add_section()
        return table

    def _sections(self) -> Iterator[list[tuple[str, str, str, str]]]:
        """Rows that belong together."""
        yield [_row(held) for held in self.holdings]
        yield _totals("", self.holdings)
        for pool in self.elsewhere:
            where = f"pool {pool.name}, {pool.layout.num_devices} devices"
            yield [(where, pool.layout.name, "", ""), *map(_row, pool.holdings)]
            yield _totals(f"pool {pool.name}, ", pool.holdings)
        yield [(event, amount, "", "") for event, amount in self.flow]
        yield [(f"not counted: {name}", reason, "", "") for name, reason in self.left_out]

    def show(self, console: Console | None = None) -> None:
        """Prints the table: for a terminal, or as plain text of its own width elsewhere."""
        # FORCE_COLOR, which CI systems set, would make a log look like a terminal to rich.
        if console is None:
            console = Console(force_terminal=None if sys.stdout.isatty() else False)
        if console.is_terminal:
            console.print(self.table())
        else:
            plain = Console(
                file=console.file, width=_PLAIN_WIDTH, force_terminal=False, color_system=None
            )
            plain.print(self.table(plain=True))


def _size(nbytes: int) -> str:
    return f"{nbytes / _GB:,.2f} GB" if nbytes >= _GB / 10 else f"{nbytes / 1e6:,.2f} MB"


def _row(held: Holding) -> tuple[str, str, str, str]:
    return held.name, held.layout, f"{held.num_values:,}", _size(held.bytes_per_device)


def _totals(where: str, holdings: Sequence[Holding]) -> list[tuple[str, str, str, str]]:
    totals = {phase: phase_bytes(holdings, phase) for phase in ("sampling", "learning")}
    return [
        (f"{where}{phase}, before temporaries", _left(n), "", _size(n))
        for phase, n in totals.items()
    ]


def _left(nbytes: int) -> str:
    """What the smallest device that holds so much has left, and which do not."""
    sizes = {name: accelerator(name).memory_gb * _GB for name in _COMPARED}
    fitting = [name for name, size in sizes.items() if size > nbytes]
    too_small = [name for name in sizes if name not in fitting]
    parts = (
        [f"too much for {too_small[-1]}" + " or less" * (len(too_small) > 1)] if too_small else []
    )
    if fitting:
        parts.append(f"leaves {(sizes[fitting[0]] - nbytes) / _GB:.1f} GB of {fitting[0]}")
    return "; ".join(parts)
