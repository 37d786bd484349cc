"""Shows what moving weights from a training to a generation layout takes, and what it would take otherwise.

    python launch/mesh.py --train 1-4-2 --generate 1-2-2-2
    python launch/mesh.py --train 1-8-16 --generate 1-4-2-16 --model qwen2.5-32b --topology v5p:4x4x8

Prints the device groups of both phases and what each device holds; bytes received, peak and redundant
bytes of a device for DeepSpeed-Chat, HybridFlow-V and HybridFlow, from the paper's formulas, from the
sharding specs and from the compiled programs; and the collectives that the compiler wrote. Everything is
compiled, nothing is allocated: simulated devices by default, with --topology a TPU slice that need not be
here. What the user can fix is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

# XLA warns of every move that it can only make by gathering everything; here that is what is measured.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.errors import UserError
from jaxrl.mesh.accounting import (
    Costs,
    Measured,
    from_shardings,
    of_gather_and_keep,
    of_transition,
    state_bytes,
    table_2,
)
from jaxrl.mesh.devices import build_mesh, simulate, topology_devices
from jaxrl.mesh.drawing import draw, in_words, phase_groups, strips
from jaxrl.mesh.groupings import GROUPINGS, HYBRID, ZERO, Grouping
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import shardings
from jaxrl.mesh.transition import Transition
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import SHAPES, model_shapes

_WIDTH = 160
_MAX_COLLECTIVES = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """One grouping of one layout, and what it costs.

    Attributes:
      grouping, mesh: of what.
      formula: Table 2 of the paper.
      least: from the sharding specs.
      procedure: the paper's procedure, compiled.
      tables: what the compiler writes when it is given the two rule tables.

    The last two are None where a program does not fit into the memory of a device.
    """

    grouping: Grouping
    mesh: Mesh
    formula: Costs
    least: Costs
    procedure: Measured | None
    tables: Measured | None


def compare(
    model: ModelConfig,
    layout: ParallelLayout,
    groupings: Sequence[Grouping],
    devices: Sequence[Any],
) -> list[Case]:
    """Compiles the transition of a bfloat16 model in every grouping."""
    _, shapes, axes = decoder_graph(model)
    # Collectives of XLA's CPU backend have no bfloat16 and would send float32.
    dtype = jnp.dtype(jnp.uint16 if devices[0].platform == "cpu" else jnp.bfloat16)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    model_bytes = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * dtype.itemsize
    formulas = table_2(layout, model_bytes)
    cases = []
    for grouping in groupings:
        mesh = build_mesh(layout, devices, grouping.axes)
        train, generate = (
            shardings(axes, shapes, rules, mesh) for rules in (grouping.train, grouping.generate)
        )
        # Only HybridFlow's training shards lie inside the generation shards of their devices.
        transition = Transition(shapes, train, generate, dtype, donate=grouping is HYBRID)
        tables = _if_it_fits(of_transition, transition)
        procedure = (
            tables if grouping is HYBRID else _if_it_fits(of_gather_and_keep, transition.weights)
        )
        least = from_shardings(transition.weights)
        cases.append(Case(grouping, mesh, formulas[grouping.name], least, procedure, tables))
    return cases


def _if_it_fits(measure: Callable[[Any], Measured], what: Any) -> Measured | None:
    try:
        return measure(what)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def costs_table(cases: Sequence[Case], model_bytes: int) -> Table:
    """Received, peak and redundant bytes of every case from all sources."""
    table = Table(
        title=f"Bytes of one device, of M = {_size(model_bytes)}",
        title_justify="left",
        box=box.ASCII2,
    )
    table.add_column("")
    table.add_column("source")
    for case in cases:
        table.add_column(case.grouping.system, justify="right", no_wrap=True)
    sources = {
        "Table 2": lambda case: case.formula,
        "specs, at least": lambda case: case.least,
        "compiled: as in the paper": lambda case: case.procedure and case.procedure.costs,
        "compiled: from two tables": lambda case: case.tables and case.tables.costs,
    }
    for field in dataclasses.fields(Costs):
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
    """What a device holds of the training state, by where weights, gradients and moments are shared."""
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
    """The collectives of a case, those of one kind between the same devices in one line."""
    merged: dict[Any, list[int]] = collections.defaultdict(lambda: [0, 0])
    for count, collective in measured.collectives:
        entry = merged[collective.kind, collective.groups]
        entry[0] += count
        entry[1] += count * collective.result_bytes
    lines = []
    for (kind, groups), (count, nbytes) in merged.items():
        # A permute also lists the devices that keep what they have.
        found = [group for group in groups if len(set(group)) > 1]
        where = "from, to" if kind == "collective-permute" else "in"
        lines.append(f"{count:5} x {kind}, {_size(nbytes)} a device, {where} {in_words(found)}")
    return lines


def _size(nbytes: Any) -> str:
    value = float(nbytes)
    return f"{value / 1e9:,.3f} GB" if value >= 1e8 else f"{value / 1e6:,.3f} MB"


def _model(name: str) -> ModelConfig:
    path = pathlib.Path(name)
    if path.suffix == ".json" or path.is_dir():
        return read_config(path if path.is_dir() else path.parent)
    return model_shapes(name)


def _devices(layout: ParallelLayout, train: str, topology: str) -> Sequence[Any]:
    if not topology:
        simulate(layout.num_devices)
        return jax.devices()[: layout.num_devices]
    devices = topology_devices(topology)
    if len(devices) != layout.num_devices:
        raise UserError(
            f"--train {train} has p*t*d = {layout.num_devices} devices, --topology {topology} has "
            f"{len(devices)}; choose sizes that multiply to {len(devices)}"
        )
    return devices


def run(args: argparse.Namespace) -> None:
    """Compares, prints, and draws if there is a folder for it."""
    layout = ParallelLayout.from_config(
        LayoutConfig(train=args.train, generate=args.generate, fsdp=args.fsdp)
    )
    model = _model(args.model)
    names = ("gather_all", "vanilla", "hybrid") if args.grouping == "all" else (args.grouping,)
    groupings = [GROUPINGS[name] for name in names]
    devices = _devices(layout, args.train, args.topology)
    cases = compare(model, layout, groupings, devices)

    console = Console(
        width=_WIDTH, force_terminal=None if sys.stdout.isatty() else False, highlight=False
    )
    where = f"{len(devices)} {devices[0].device_kind} devices"
    console.print(f"{args.model}, {layout.name}, {where}\n", markup=False)
    for case in cases:
        console.print(f"{case.grouping.name} ({case.grouping.system})", markup=False)
        for name, found in phase_groups(case.grouping, case.mesh):
            console.print(f"  {name:22} {in_words(found)}", markup=False)
        for line in strips(case.grouping, layout, case.mesh):
            console.print(f"  {line}", markup=False)
        lines = collective_lines(case.tables) if case.tables else ["    what does not fit"]
        console.print("  the compiler wrote", markup=False)
        for line in lines[:_MAX_COLLECTIVES] or ["    nothing: no weight moves"]:
            console.print(f"  {line}", markup=False, soft_wrap=True)
        if len(lines) > _MAX_COLLECTIVES:
            console.print(f"    ... {len(lines)} kinds in all", markup=False)
        console.print()
    console.print(costs_table(cases, model.num_params * 2))
    console.print(state_table(model, layout, cases[-1].mesh))
    if args.out:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--out {args.out} cannot be made ({error.strerror}); name another folder"
            ) from error
        paths = [args.out / f"mesh.{ending}" for ending in ("png", "svg")]
        draw([(case.grouping, case.mesh) for case in cases], layout, paths)
        console.print(f"drawn to {' and '.join(map(str, paths))}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and compares; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", required=True, help="p-t-d: pipeline, tensor, data parallel")
    parser.add_argument("--generate", default="", help="p_g-t_g-d_g-d; default: as in training")
    parser.add_argument("--fsdp", type=int, default=1, help="devices of d that share one copy")
    parser.add_argument(
        "--model",
        default="qwen3-8b",
        help=f"{', '.join(SHAPES)}, or the path of a config.json (default: %(default)s)",
    )
    parser.add_argument("--grouping", choices=(*GROUPINGS, "all"), default="all")
    parser.add_argument("--topology", default="", help="a TPU slice, for example v5p:4x4x8")
    parser.add_argument("--out", type=pathlib.Path, help="folder for mesh.png and mesh.svg")
    args = parser.parse_args(argv)
    try:
        run(args)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
