"""Shows the cost of resharding weights from a training to a generation layout, with several methods.

    python launch/mesh.py --train 1-4-2 --generate 1-2-2-2
    python launch/mesh.py --train 1-8-16 --generate 1-4-2-16 --model qwen2.5-32b --topology v5p:4x4x8

Prints the device groups of both phases and the shards of each device. It compares DeepSpeed-Chat,
HybridFlow-V and HybridFlow by bytes received, peak and redundant bytes of a device, from the paper's
formulas, from the sharding specs and from the compiled programs. It also lists the collectives in the
compiled programs. Nothing is allocated: it compiles for simulated devices, or with --topology for a TPU slice
that need not be present. User errors are one line on stderr with exit status 2.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

# XLA warns of each resharding that needs a full gather; here those are being measured.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
from rich.console import Console

from jaxrl.checks import check_path
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.devices import simulate
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.sharding_strategies import STRATEGIES
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import SHAPES, model_shapes
from jaxrl.planner.hardware.topologies import read_topology
from jaxrl.planner.layouts.drawing import draw
from jaxrl.planner.layouts.mesh_report import compare, show

_WIDTH = 160


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    # Nothing runs, so use the CPU: the accelerators of this machine may be busy.
    jax.config.update("jax_platforms", "cpu")
    parser = _parser(program)
    args = parser.parse_args(arguments)
    run(args)
    return 0


def run(args: argparse.Namespace) -> None:
    """Compares the layouts, prints tables, and draws figures if a folder is given."""
    for name, path in (("--model", args.model), ("--topology", args.topology), ("--out", args.out)):
        if path is not None:
            check_path(name, path)
    layout = ParallelLayout.from_config(
        LayoutConfig(train=args.train, generate=args.generate, fsdp=args.fsdp)
    )
    model = _model(args.model)
    names = ("gather_all", "vanilla", "hybrid") if args.grouping == "all" else (args.grouping,)
    devices = _devices(layout, args.train, args.topology)
    cases = compare(model, layout, [STRATEGIES[name] for name in names], devices)
    console = Console(
        width=_WIDTH, force_terminal=None if sys.stdout.isatty() else False, highlight=False
    )
    where = f"{len(devices)} {devices[0].device_kind} devices"
    console.print(f"{args.model}, {layout.name}, {where}\n", markup=False)
    show(cases, model, layout, console)
    if args.out:
        paths = [_folder(args.out) / f"mesh.{ending}" for ending in ("png", "svg")]
        draw([(case.strategy, case.mesh) for case in cases], layout, paths)
        console.print(f"drawn to {' and '.join(map(str, paths))}", markup=False)


def _parser(program: str) -> argparse.ArgumentParser:
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
    parser.add_argument("--out", type=pathlib.Path, help="folder for mesh.png and mesh.svg")
    return parser


def _model(name: str) -> ModelConfig:
    path = pathlib.Path(name)
    if path.suffix == ".json" or path.is_dir():
        return read_config(path if path.is_dir() else path.parent)
    return model_shapes(name)


def _devices(layout: ParallelLayout, train: str, topology: str) -> Sequence[Any]:
    if not topology:
        simulate(layout.num_devices)
        return jax.devices()[: layout.num_devices]
    devices = read_topology(topology).devices
    if len(devices) != layout.num_devices:
        raise UserError(
            f"--train {train} has p*t*d = {layout.num_devices} devices, --topology {topology} has "
            f"{len(devices)}; choose sizes that multiply to {len(devices)}"
        )
    return devices


def _folder(path: pathlib.Path) -> pathlib.Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {path} cannot be made ({error.strerror}); name another folder"
        ) from error
    return path
