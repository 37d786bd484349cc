"""What a recipe would take of accelerators that are not here: its programs, compiled for them.

    jaxrl plan --config configs/dapo_qwen32b.py --topology v5p:4x4x8
    jaxrl plan --config configs/dapo_qwen32b.py:h100-128 --topology h100:16x8 --json

Per device and program: arguments, temporaries, peak, what lies beside it, fits or not; collectives by mesh
axis; operations; and, predicted, seconds at the vendors' rates. Nothing runs and nothing is allocated. TPUs
need the extra `aot`, GPUs `aot-gpu`. What the user can fix is one line on stderr and exit status 2; a run
that does not fit is exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence

# XLA complains of every host that is not there.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
from rich.console import Console

from jaxrl.checks import check_path
from jaxrl.config import command_line, config_tree
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_USER_ERROR, UserError
from jaxrl.mesh.compilation_cache import compiled_programs_not_kept
from jaxrl.planner.ahead_of_time import plan_for
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.topologies import check_topology, read_topology
from jaxrl.planner.pod_plan import PodPlan
from jaxrl.planner.search.mapping_choice import propose, setting_lines
from jaxrl.planner.step_load import RESPONSE_SHARE

_WIDTH = 140
_DOES_NOT_FIT = 1


def main(argv: Sequence[str]) -> int:
    """Plans as the program's name and its arguments say; returns the exit status."""
    program, *arguments = argv
    # Nothing runs: accelerators that are here may be at work.
    jax.config.update("jax_platforms", "cpu")
    parser = _parser(program)
    try:
        overrides, rest = command_line.take_overrides(arguments, config_tree.leaf_types(Config))
        args = parser.parse_args(rest)
        config = command_line.load_config(Config, args.config, overrides)
        # What is compiled here is kept by the planner, with what it reads from it.
        with compiled_programs_not_kept():
            plan = run(args, config)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0 if plan.fits else _DOES_NOT_FIT


def run(args: argparse.Namespace, config: Config) -> PodPlan:
    """Compiles, prints, and writes what was asked for."""
    check_path("--topology", args.topology)
    for name, path in (("--html", args.html), ("--save", args.save)):
        if path is not None:
            check_path(name, path)
    kind, shape = check_topology(args.topology)
    if args.search or config.mesh.layout == "auto":
        cluster = Cluster(kind, shape)
        found, proposed = propose(config, cluster, response_tokens=args.response_tokens)
        lines = [*found.lines(), "settings of this mapping:", *setting_lines(config, proposed)]
        print("\n".join(lines), file=sys.stderr if args.json else sys.stdout)
        config = proposed
    topology = read_topology(args.topology)
    plan = plan_for(
        config,
        topology,
        response_tokens=args.response_tokens,
        save=args.save,
        watch=_progress,
    )
    if args.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        console = Console(
            width=None if sys.stdout.isatty() else _WIDTH,
            force_terminal=None if sys.stdout.isatty() else False,
            highlight=False,
        )
        plan.show(console)
    if args.html:
        _write(args.html, plan.as_html())
    return plan


def _progress(program: CompiledProgram) -> None:
    took = "kept from before" if program.cached else f"compiled in {program.compiled_s:.1f} s"
    print(f"{program.role} {program.name}: {took}", file=sys.stderr, flush=True)


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"--html {path} cannot be written ({error.strerror}); name another file"
        ) from error


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=pathlib.Path(program).name,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--config.NAME=VALUE changes a setting, as for training",
    )
    parser.add_argument("--config", required=True, help="the recipe, with its layout after a colon")
    parser.add_argument(
        "--topology", required=True, help="a TPU slice (v5p:4x4x8) or hosts of GPUs (h100:16x8)"
    )
    parser.add_argument(
        "--response-tokens",
        type=_positive,
        default=0.0,
        help=f"of an answer on average, for what is predicted; default: {RESPONSE_SHARE} of the limit",
    )
    parser.add_argument(
        "--search", action="store_true", help="looks for the fastest mapping first, and plans that"
    )
    parser.add_argument("--json", action="store_true", help="for programs: bytes and seconds")
    parser.add_argument("--html", type=pathlib.Path, help="writes the tables to a page")
    parser.add_argument(
        "--save", type=pathlib.Path, help="folder that keeps the executables, for the pod"
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; use one above 0")
    return value
