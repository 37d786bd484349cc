"""Measures the machine at hand for the planner: jaxrl calibrate --out here.json.

It measures matmuls by data type, memory bandwidth by size, and an all-gather over the local devices. The file
describes a kind of device, for `--topology here.json:1x8` or `mesh.hardware = "here.json"` (docs/planner.md).
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxrl.checks import check_path
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.devices import simulate
from jaxrl.planner.hardware.calibration import calibrate
from jaxrl.planner.hardware.hardware_files import write_accelerator


def main(argv: Sequence[str]) -> int:
    """Measures and writes the file; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--name", default="here", help="name of the kind (default: %(default)s)")
    parser.add_argument(
        "--side", type=int, default=1024, help="side of the square matrices; 8192 keeps a GPU busy"
    )
    parser.add_argument(
        "--megabytes", type=int, default=64, help="size of the sweep; must exceed the caches"
    )
    parser.add_argument(
        "--simulated-devices", type=int, default=0, help="number of simulated devices on this CPU"
    )
    args = parser.parse_args(arguments)
    check_path("--out", args.out)
    for name, value in (("--side", args.side), ("--megabytes", args.megabytes)):
        if not 1 <= value <= 100_000:
            raise UserError(
                f"{name} {value} is not from 1 to 100,000; use {parser.get_default(name[2:])}"
            )
    if args.simulated_devices:
        simulate(args.simulated_devices)
    found = calibrate(args.name, side=args.side, megabytes=args.megabytes)
    write_accelerator(found, args.out)
    print(
        f"{args.out}: {found.float32_tflops:.3g} TFLOP/s in float32, {found.bfloat16_tflops:.3g} in "
        f"bfloat16, {found.memory_gbs:.3g} GB/s of memory, {found.link_gbs:.3g} between devices; "
        f"{found.source}"
    )
    return 0
