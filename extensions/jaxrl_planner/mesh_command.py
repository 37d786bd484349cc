"""Shows the cost of resharding weights from a training to a generation layout, with several methods.

    python launch/mesh.py --train 1-4-2 --generate 1-2-2-2
    python launch/mesh.py --train 1-8-16 --generate 1-4-2-16 --model qwen2.5-32b --topology v5p:4x4x8

Prints the device groups of both phases. It compares DeepSpeed-Chat, HybridFlow-V and HybridFlow by bytes
received, peak and redundant bytes of a device, from the paper's formulas, from the sharding specs and from
the compiled programs. It also lists the collectives in the compiled programs. Nothing is allocated: it
compiles for simulated devices, or with --topology for a TPU slice that need not be present. User errors are
one line on stderr with exit status 2.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

# XLA warns of each resharding that needs a full gather; here those are being measured.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.devices import build_mesh, simulate
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.mesh.sharding_strategies import GATHER_ALL, HYBRID, STRATEGIES, ShardingStrategy
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import SHAPES, model_shapes
from jaxrl_planner.compiled.traffic import Collective
from jaxrl_planner.hardware.cluster import read_topology
from jaxrl_planner.resharding_costs import (
    Measured,
    ReshardingCosts,
    from_shardings,
    of_gather_and_keep,
    of_resharding,
    table_2,
)

_WIDTH = 160
_MAX_COLLECTIVES, _MAX_GROUPS, _MAX_IDS = 12, 8, 24

_TENSOR, _STAGE = TRAIN_RULES["heads"], ("stage_gen", "stage_micro")
# Names of the device groups of a tensor- and pipeline-parallel strategy, and the mesh axes inside a group.
_TRAIN_GROUPS = {"tensor": _TENSOR, "pipeline": _STAGE}
_GENERATE_GROUPS = {
    "tensor": GENERATE_RULES["heads"],
    "pipeline": ("stage_gen",),
    "micro data": ("tensor_micro", "stage_micro"),
}
_SHARES = {"fsdp": TRAIN_RULES["embed"], "expert": ("expert",), "context": ("context",)}


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    # Nothing runs, so use the CPU: the accelerators of this machine may be busy.
    jax.config.update("jax_platforms", "cpu")
    parser = command_parser(program, __doc__)
    parser.add_argument("--train", required=True, help="p-t-d: pipeline, tensor, data parallel")
    parser.add_argument("--generate", default="", help="p_g-t_g-d_g-d; default: as in training")
    parser.add_argument("--fsdp", type=int, default=1, help="devices of d that share one copy")
    parser.add_argument(
        "--model",
        default="qwen3-8b",
        help=f"{', '.join(SHAPES)}, or the path of a config.json (default: %(default)s)",
    )
    parser.add_argument("--grouping", choices=(*STRATEGIES, "all"), default="all")
    parser.add_argument(
        "--topology",
        default="",
        help="a TPU slice such as v5p:4x4x8, or hosts of GPUs such as h100:16x8",
    )
    args = parser.parse_args(arguments)
    config = LayoutConfig(train=args.train, generate=args.generate, fsdp=args.fsdp)
    layout, path = ParallelLayout.from_config(config), pathlib.Path(args.model)
    if path.suffix == ".json" or path.is_dir():
        model = read_config(path if path.is_dir() else path.parent)
    else:
        model = model_shapes(args.model)
    if args.topology:
        devices = read_topology(args.topology).devices
        if len(devices) != layout.num_devices:
            raise UserError(
                f"--train {args.train} has p*t*d = {layout.num_devices} devices, --topology {args.topology} "
                f"has {len(devices)}; choose sizes that multiply to {len(devices)}"
            )
    else:
        simulate(layout.num_devices)
        devices = jax.devices()[: layout.num_devices]
    names = ("gather_all", "vanilla", "hybrid") if args.grouping == "all" else (args.grouping,)
    cases = [compiled_case(model, layout, STRATEGIES[name], devices) for name in names]
    console = Console(
        width=_WIDTH, force_terminal=None if sys.stdout.isatty() else False, highlight=False
    )
    where = f"{len(devices)} {devices[0].device_kind} devices"
    console.print(f"{args.model}, {layout.name}, {where}\n", markup=False)
    for case in cases:
        for line in _lines(case):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
    console.print(_costs_table(cases, model.num_params * 2))
    return 0


@dataclasses.dataclass(frozen=True)
class Case:
    """A sharding strategy and its costs.

    Attributes:
      strategy, mesh: the strategy, and the mesh in its order of devices.
      costs: costs by source: Table 2 of the paper, their lower bound from the shardings, and those of
        programs: of the paper's procedure, and of what the compiler derives from the two sets of rules. None
        if a program does not fit into a device.
      collectives: those of the last source, as (number of runs, collective); None if it does not fit.
    """

    strategy: ShardingStrategy
    mesh: Mesh
    costs: Mapping[str, ReshardingCosts | None]
    collectives: Sequence[tuple[int, Collective]] | None


def compiled_case(
    model: ModelConfig, layout: ParallelLayout, strategy: ShardingStrategy, devices: Sequence[Any]
) -> Case:
    """Compiles the resharding of a bfloat16 model in a strategy."""
    _, shapes, axes = decoder_graph(model)
    # XLA's CPU backend has no bfloat16 collectives and would send float32.
    dtype = jnp.dtype(jnp.uint16 if devices[0].platform == "cpu" else jnp.bfloat16)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    model_bytes = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * dtype.itemsize
    mesh = build_mesh(layout, devices, strategy.axes)
    train, generate = (
        shardings(axes, shapes, rules, mesh) for rules in (strategy.train, strategy.generate)
    )
    # Only with HybridFlow is the training shard of a device a part of its generation shard.
    resharding = Resharding(shapes, train, generate, dtype, donate=strategy is HYBRID)

    def if_it_fits(measure: Callable[[Any], Measured], what: Any) -> Measured | None:
        try:
            return measure(what)
        except jax.errors.JaxRuntimeError as error:
            # Too large for a device is a result here: whole weights are gathered.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None

    rules = if_it_fits(of_resharding, resharding)
    procedure = rules if strategy is HYBRID else if_it_fits(of_gather_and_keep, resharding.weights)
    costs = {
        "Table 2": table_2(layout, model_bytes)[strategy.name],
        "specs, at least": from_shardings(resharding.weights),
        "compiled: as in the paper": procedure and procedure.costs,
        "compiled: from two tables": rules and rules.costs,
    }
    return Case(strategy, mesh, costs, rules and rules.collectives)


def groups(sizes: Mapping[str, int], axes: Iterable[str]) -> list[tuple[int, ...]]:
    """Groups of devices that differ only along `axes`; devices are numbered in the order of the mesh."""
    axes = set(axes)
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = list(sizes)
    kept = [i for i, name in enumerate(names) if name not in axes]
    moved = [i for i, name in enumerate(names) if name in axes]
    size = math.prod(ids.shape[i] for i in moved)
    return sorted(map(tuple, ids.transpose(*kept, *moved).reshape(-1, size).tolist()))


def phase_groups(strategy: ShardingStrategy, mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """Groups of more than one device by phase and kind, in the paper's notation: "[G1,G3] [G2,G4]"."""
    sizes = dict(mesh.shape)
    split_by_model = strategy is not GATHER_ALL
    train = _TRAIN_GROUPS | _SHARES if split_by_model else {"ZeRO-3": tuple(sizes)}
    named = {f"training {kind}": groups(sizes, axes) for kind, axes in train.items()}
    named |= {f"generation {kind}": groups(sizes, axes) for kind, axes in _GENERATE_GROUPS.items()}
    return {name: in_words(found) for name, found in named.items() if len(found[0]) > 1}


def in_words(found: Sequence[tuple[int, ...]]) -> str:
    """Groups as many as fit in a line; device 0 is G1."""
    limit = max(2, min(_MAX_GROUPS, _MAX_IDS // len(found[0])))
    words = []
    for group in found[:limit]:
        steps = {b - a for a, b in itertools.pairwise(group)}
        text = ",".join(f"G{i + 1}" for i in group)
        # Long groups with a constant interval are abbreviated, to fit in a line.
        if len(group) > _MAX_GROUPS and len(steps) == 1:
            step = steps.pop()
            text = f"G{group[0] + 1}..G{group[-1] + 1}" + (f" by {step}" if step > 1 else "")
        words.append(f"[{text}]")
    rest = [f"... {len(found)} in all"] if len(found) > limit else []
    return " ".join(words + rest)


def _lines(case: Case) -> Iterator[str]:
    # Device groups of both phases, and the first collectives of a case.
    yield f"{case.strategy.name} ({case.strategy.system})"
    for name, found in phase_groups(case.strategy, case.mesh).items():
        yield f"  {name:22} {found}"
    yield "  the compiler wrote"
    merged: dict[Any, list[int]] = collections.defaultdict(lambda: [0, 0])
    for count, collective in case.collectives or ():
        entry = merged[collective.kind, collective.groups]
        entry[0] += count
        entry[1] += count * collective.result_bytes
    for (kind, found), (count, nbytes) in list(merged.items())[:_MAX_COLLECTIVES]:
        # A permute also lists devices that send to themselves.
        words = in_words([group for group in found if len(set(group)) > 1])
        where = "from, to" if kind == "collective-permute" else "in"
        yield f"  {count:5} x {kind}, {_size(nbytes)} a device, {where} {words}"
    if not merged:
        fits = case.collectives is not None
        yield "      nothing: no weight moves" if fits else "      what does not fit"
    if len(merged) > _MAX_COLLECTIVES:
        yield f"    ... {len(merged)} kinds in all"


def _costs_table(cases: Sequence[Case], model_bytes: int) -> Table:
    # A table of received, peak and redundant bytes of every case, from all sources.
    title = f"Bytes of one device, of M = {_size(model_bytes)}"
    table = Table(title=title, title_justify="left", box=box.ASCII2)
    table.add_column("")
    table.add_column("source")
    for case in cases:
        table.add_column(case.strategy.system, justify="right", no_wrap=True)
    for field in dataclasses.fields(ReshardingCosts):
        for number, source in enumerate(cases[0].costs):
            shown = ["does not fit"] * len(cases)
            for i, case in enumerate(cases):
                if (costs := case.costs[source]) is not None:
                    value = getattr(costs, field.name)
                    shown[i] = f"{_size(value)}  {float(value / model_bytes):6.4f} M"
            table.add_row("" if number else field.name, source, *shown)
        table.add_section()
    return table


def _size(nbytes: Any) -> str:
    value = float(nbytes)
    return f"{value / 1e9:,.3f} GB" if value >= 1e8 else f"{value / 1e6:,.3f} MB"
