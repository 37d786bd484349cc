"""Reports the costs of resharding between two layouts, for several sharding strategies.

    model, layout, strategy --> Resharding, compiled --> bytes, collectives --> tables
                            +-> Table 2 of the paper, sharding specs ---------------^

Everything is compiled; nothing is allocated.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import shardings
from jaxrl.mesh.sharding_strategies import HYBRID, ZERO, ShardingStrategy
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.layouts.accounting import (
    Measured,
    ReshardingCosts,
    from_shardings,
    of_gather_and_keep,
    of_resharding,
    state_bytes,
    table_2,
)
from jaxrl.planner.layouts.drawing import in_words, phase_groups, strips

_MAX_COLLECTIVES = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A sharding strategy and its costs.

    Attributes:
      strategy, mesh: the strategy, and the mesh in its order of devices.
      formula: costs by Table 2 of the paper.
      least: lower bound of the costs, from the shardings.
      procedure: costs of the paper's procedure, compiled; None if a program does not fit into a device.
      rules: costs of the programs that the compiler derives from the two sets of sharding rules; None if a
        program does not fit into a device.
    """

    strategy: ShardingStrategy
    mesh: Mesh
    formula: ReshardingCosts
    least: ReshardingCosts
    procedure: Measured | None
    rules: Measured | None


def compare(
    model: ModelConfig,
    layout: ParallelLayout,
    strategies: Sequence[ShardingStrategy],
    devices: Sequence[Any],
) -> list[Case]:
    """Compiles the resharding of a bfloat16 model in every strategy."""
    _, shapes, axes = decoder_graph(model)
    # XLA's CPU backend has no bfloat16 collectives and would send float32.
    dtype = jnp.dtype(jnp.uint16 if devices[0].platform == "cpu" else jnp.bfloat16)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    model_bytes = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * dtype.itemsize
    formulas = table_2(layout, model_bytes)
    cases = []
    for strategy in strategies:
        mesh = build_mesh(layout, devices, strategy.axes)
        train, generate = (
            shardings(axes, shapes, rules, mesh) for rules in (strategy.train, strategy.generate)
        )
        # Only with HybridFlow is the training shard of a device a part of its generation shard.
        resharding = Resharding(shapes, train, generate, dtype, donate=strategy is HYBRID)
        by_rules = _if_it_fits(of_resharding, resharding)
        procedure = (
            by_rules if strategy is HYBRID else _if_it_fits(of_gather_and_keep, resharding.weights)
        )
        least = from_shardings(resharding.weights)
        cases.append(Case(strategy, mesh, formulas[strategy.name], least, procedure, by_rules))
    return cases


def _if_it_fits(measure: Callable[[Any], Measured], what: Any) -> Measured | None:
    try:
        return measure(what)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def show(
    cases: Sequence[Case], model: ModelConfig, layout: ParallelLayout, console: Console
) -> None:
    """Prints the result of `compare`: device groups and collectives of each case, then the tables."""
    for case in cases:
        console.print(f"{case.strategy.name} ({case.strategy.system})", markup=False)
        for line in _layout_lines(case, layout):
            console.print(line, markup=False)
        for line in _compiled_lines(case):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
    console.print(costs_table(cases, model.num_params * 2))
    console.print(state_table(model, layout, cases[-1].mesh))


def _layout_lines(case: Case, layout: ParallelLayout) -> Iterator[str]:
    """Device groups of both phases, and the shards of each device."""
    for name, found in phase_groups(case.strategy, case.mesh):
        yield f"  {name:22} {in_words(found)}"
    for line in strips(case.strategy, layout, case.mesh):
        yield f"  {line}"


def _compiled_lines(case: Case) -> Iterator[str]:
    """The first collectives of a case."""
    yield "  the compiler wrote"
    lines = collective_lines(case.rules) if case.rules else ["    what does not fit"]
    for line in lines[:_MAX_COLLECTIVES] or ["    nothing: no weight moves"]:
        yield f"  {line}"
    if len(lines) > _MAX_COLLECTIVES:
        yield f"    ... {len(lines)} kinds in all"


def costs_table(cases: Sequence[Case], model_bytes: int) -> Table:
    """A table of received, peak and redundant bytes of every case, from all sources."""
    table = Table(
        title=f"Bytes of one device, of M = {_size(model_bytes)}",
        title_justify="left",
        box=box.ASCII2,
    )
    table.add_column("")
    table.add_column("source")
    for case in cases:
        table.add_column(case.strategy.system, justify="right", no_wrap=True)
    sources = {
        "Table 2": lambda case: case.formula,
        "specs, at least": lambda case: case.least,
        "compiled: as in the paper": lambda case: case.procedure and case.procedure.costs,
        "compiled: from two tables": lambda case: case.rules and case.rules.costs,
    }
    for field in dataclasses.fields(ReshardingCosts):
        for number, (source, costs_of) in enumerate(sources.items()):
            shown = []
            for case in cases:
                costs = costs_of(case)
                value = costs and getattr(costs, field.name)
                share = f"  {float(value / model_bytes):6.4f} M" if costs else ""
                shown.append(_size(value) + share if costs else "does not fit")
            table.add_row("" if number else field.name, source, *shown)
        table.add_section()
    return table


def state_table(model: ModelConfig, layout: ParallelLayout, mesh: Mesh) -> Table:
    """A table of the training state's bytes per device, by sharding of weights, gradients and moments."""
    _, shapes, axes = decoder_graph(model)
    table = Table(
        title="Training state of a device, float32 with Adam", title_justify="left", box=box.ASCII2
    )
    for column in ("", "weights", "gradients", "moments", "sum"):
        table.add_column(column, justify="right" if column else "left")
    for name, tables in ZERO.items():
        parts = ((tables.weights, 4), (tables.gradients, 4), (tables.optimizer, 8))
        sizes = [
            state_bytes(shapes, shardings(axes, shapes, rules, mesh), nbytes)
            for rules, nbytes in parts
        ]
        name = f"{name} over {layout.fsdp}" if name == "FSDP" else name
        table.add_row(name, *map(_size, sizes), _size(sum(sizes)))
    return table


def collective_lines(measured: Measured) -> list[str]:
    """Lines of text, one per kind of collective and device groups."""
    merged: dict[Any, list[int]] = collections.defaultdict(lambda: [0, 0])
    for count, collective in measured.collectives:
        entry = merged[collective.kind, collective.groups]
        entry[0] += count
        entry[1] += count * collective.result_bytes
    lines = []
    for (kind, groups), (count, nbytes) in merged.items():
        # A permute also lists devices that send to themselves.
        found = [group for group in groups if len(set(group)) > 1]
        where = "from, to" if kind == "collective-permute" else "in"
        lines.append(f"{count:5} x {kind}, {_size(nbytes)} a device, {where} {in_words(found)}")
    return lines


def _size(nbytes: Any) -> str:
    value = float(nbytes)
    return f"{value / 1e9:,.3f} GB" if value >= 1e8 else f"{value / 1e6:,.3f} MB"
