"""Predicts memory and time of a recipe, at one of three depths. Nothing runs and nothing is allocated.

    jaxrl plan --config configs/dapo_qwen32b.py                                          traces: seconds
    jaxrl plan --config configs/dapo_qwen32b.py --topology v5p:4x4x8 --trace             traces, simulates
    jaxrl plan --config configs/dapo_qwen32b.py --topology v5p:4x4x8                     compiles: minutes
    jaxrl plan --config configs/dapo_qwen7b.py --topology h100:1x8 --search              searches, compiles
    jaxrl plan --compare h100.json v5p.json                                              compares two plans

A traced plan counts the buffers of every role on a device from shapes, and the operations of every program;
`jaxrl train --dry_run` prints the same. With --topology the seconds of a step are predicted too: simulated,
with the terms of each phase, above a lower bound. The plan is then compiled for accelerators that need not be
present, and has the compiler's figures: arguments, temporaries, peak memory, fits or not; collectives by mesh
axis. --trace compiles nothing; a kind of device from a file is never compiled for. --search first looks for
the fastest mapping of roles to devices. TPUs need the extra `aot`, GPUs `aot-gpu`. User errors are one line
on stderr with exit status 2; a run that does not fit has exit status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence

# XLA logs an error for each host of the topology that is not present.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from jaxrl.checks import check_path
from jaxrl.config import command_line, config_tree
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.compilation_cache import compiled_programs_not_kept
from jaxrl.mesh.hardware import ACCELERATORS
from jaxrl.planner import plan_tables
from jaxrl.planner.compare_plans import compare_plans
from jaxrl.planner.compile_plan import compile_plan
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.topologies import check_topology, read_topology
from jaxrl.planner.measured_run import MeasuredRun, read_measured_run
from jaxrl.planner.plan import Plan
from jaxrl.planner.plan_page import write_plan_page
from jaxrl.planner.search.mapping_choice import propose, setting_lines
from jaxrl.planner.simulation.systems import OURS, SYSTEMS
from jaxrl.planner.step_load import RESPONSE_SHARE, assumed_lengths
from jaxrl.planner.trace_plan import trace_plan
from jaxrl.tracking.durable import disk_errors, ensure_writable

_DOES_NOT_FIT = 1
# Share of the seconds of a step; the page says the same.
_ALTERNATIVES_WITHIN = 0.1


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    # Nothing runs, so use the CPU: the accelerators of this machine may be busy.
    jax.config.update("jax_platforms", "cpu")
    parser = _parser(program)
    overrides, rest = command_line.take_overrides(arguments, config_tree.leaf_types(Config))
    args = parser.parse_args(rest)
    _check_page(args.html)
    if args.compare:
        compare_plans(args.compare, args.html)
        return 0
    if not args.config:
        raise UserError("no recipe is named; add --config RECIPE, or --compare A.json B.json")
    config = command_line.load_config(Config, args.config, overrides)
    # The planner has its own cache of compiled programs, with the figures read from them.
    with compiled_programs_not_kept(), disk_errors("."):
        plan = run(args, config)
    return 0 if plan.fits else _DOES_NOT_FIT


def run(args: argparse.Namespace, config: Config) -> Plan:
    """Makes the plan, prints it, and writes the requested files."""
    for name in ("topology", "save", "lengths"):
        if getattr(args, name) is not None:
            check_path(f"--{name}", getattr(args, name))
    price = args.price_per_hour
    if price is not None and not 0 < price < 1e9:
        raise UserError(
            f"--price-per-hour {price:g} is no price; give the price of one device for an hour, above 0"
        )
    plan = _on_topology(args, config) if args.topology else _traced(args, config)
    if args.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        plan_tables.show(plan)
    if args.html:
        write_plan_page(args.html, plan)
    return plan


def _check_page(path: pathlib.Path | None) -> None:
    """Raises UserError if the page cannot be written, before minutes of compiling."""
    if path is None:
        return
    check_path("--html", path)
    if path.is_dir():
        raise UserError(f"--html {path} is a directory; name a file")
    ensure_writable(path.parent)


def _traced(args: argparse.Namespace, config: Config) -> Plan:
    unused = {
        "--search": args.search,
        "--save": args.save,
        "--trace": args.trace,
        "--response-tokens": args.response_tokens,
        "--cut-off": args.cut_off is not None,
        "--lengths": args.lengths,
        "--as": args.system != OURS.name,
        "--price-per-hour": args.price_per_hour is not None,
    }
    for name, given in unused.items():
        if given:
            raise UserError(
                f"{name} is about a topology, and none is named; add --topology h100:16x8, or what you have"
            )
    return trace_plan(config)


def _on_topology(args: argparse.Namespace, config: Config) -> Plan:
    kind, shape = check_topology(args.topology)
    cluster, run, system = Cluster(kind, shape), _measured(args, config), SYSTEMS[args.system]
    system.check_runs_on(cluster)
    lengths = assumed_lengths(config, args.response_tokens, args.cut_off)
    lengths = run.lengths if run else lengths
    alternatives = None
    if args.search or config.mesh.layout == "auto":
        found, proposed = propose(
            config, cluster, lengths=lengths, system=system, within=_ALTERNATIVES_WITHIN
        )
        alternatives = found.alternatives
        lines = [*found.lines(), "settings of this mapping:", *setting_lines(config, proposed)]
        print("\n".join(lines), file=sys.stderr if args.json else sys.stdout)
        config = proposed
    # The compiler has no description of a kind that is in a file only.
    if args.trace or cluster.accelerator.name not in ACCELERATORS:
        if args.save:
            raise UserError(
                f"--save {args.save} keeps executables, and --trace or a kind from a file compiles nothing; "
                "leave one of them out"
            )
        plan = trace_plan(config, cluster, lengths=lengths, system=system)
    else:
        topology = read_topology(args.topology)
        plan = compile_plan(
            config, topology, lengths=lengths, system=system, save=args.save, watch=_progress
        )
    return dataclasses.replace(
        plan, measured=run, price_per_hour=args.price_per_hour, alternatives=alternatives
    )


def _measured(args: argparse.Namespace, config: Config) -> MeasuredRun | None:
    if not args.lengths:
        return None
    if args.response_tokens or args.cut_off is not None:
        raise UserError(
            f"--lengths {args.lengths} has the lengths already; leave out --response-tokens and --cut-off"
        )
    return read_measured_run(args.lengths, config)


def _progress(program: CompiledProgram) -> None:
    took = "kept from before" if program.cached else f"compiled in {program.compiled_s:.1f} s"
    print(f"{program.role} {program.name}: {took}", file=sys.stderr, flush=True)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = command_parser(
        program, __doc__, epilog="--config.NAME=VALUE changes a setting, as for training"
    )
    parser.add_argument("--config", help="the recipe, with its layout after a colon")
    parser.add_argument(
        "--compare",
        type=pathlib.Path,
        nargs=2,
        metavar="PLAN",
        help="two files that --json printed: shows both side by side, and plans nothing",
    )
    parser.add_argument(
        "--topology",
        default="",
        help="compiles for it: a TPU slice (v5p:4x4x8) or hosts of GPUs (h100:16x8)",
    )
    parser.add_argument(
        "--response-tokens",
        type=_positive,
        default=0.0,
        help=f"mean length of an answer, for predictions; default: {RESPONSE_SHARE} of the limit",
    )
    parser.add_argument(
        "--cut-off",
        type=_share,
        help="share of answers that reach the limit, for predictions; with the mean it gives the spread",
    )
    parser.add_argument(
        "--lengths",
        type=pathlib.Path,
        help="folder of a run, whose lengths are used, and whose measured seconds are compared",
    )
    parser.add_argument(
        "--as",
        dest="system",
        choices=SYSTEMS,
        default=OURS.name,
        help="the system whose fixed costs a predicted step has, to hold predictions against its paper",
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        help="price of one device for an hour, in any currency; prints the price of the run",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="compiles nothing: counts memory from shapes, and simulates a step on the topology",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="looks for the fastest mapping to the topology first, and plans that",
    )
    parser.add_argument(
        "--json", action="store_true", help="prints JSON instead of tables, in bytes and seconds"
    )
    parser.add_argument(
        "--html", type=pathlib.Path, help="writes a page: what is rented, seconds, memory"
    )
    parser.add_argument(
        "--save", type=pathlib.Path, help="folder that keeps the executables, for the pod"
    )
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; use a number between 0 and 1")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; use one above 0")
    return value
