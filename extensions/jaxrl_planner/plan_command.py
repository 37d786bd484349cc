"""Predicts memory and time of a recipe, at one of three depths. Nothing runs and nothing is allocated.

    jaxrl plan --config configs/dapo_qwen32b.py                                          traces: seconds
    jaxrl plan --config configs/dapo_qwen32b.py --topology v5p:4x4x8 --trace             traces, simulates
    jaxrl plan --config configs/dapo_qwen32b.py --topology v5p:4x4x8                     compiles: minutes
    jaxrl plan --config configs/dapo_qwen7b.py --topology h100:1x8 --search              searches, compiles
    jaxrl plan --config configs/ppo_llama8b.py --topology h100:2x8+a100:2x8 --search     searches, simulates

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
import json
import os
import sys
from collections.abc import Sequence

# XLA logs an error for each host of the topology that is not present.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.compilation_cache import compiled_programs_not_kept
from jaxrl.tracking.durable import disk_errors
from jaxrl_planner import plan_output
from jaxrl_planner.compiled.ahead import CompiledProgram
from jaxrl_planner.hardware.accelerators import ACCELERATORS
from jaxrl_planner.hardware.cluster import MixedCluster, read_cluster, read_topology
from jaxrl_planner.make_plan import compile_plan, trace_plan
from jaxrl_planner.plan import Plan
from jaxrl_planner.search.mapping_choice import propose, setting_lines
from jaxrl_planner.step_load import RESPONSE_SHARE, response_lengths

_DOES_NOT_FIT = 1


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    # Nothing runs, so use the CPU: the accelerators of this machine may be busy.
    jax.config.update("jax_platforms", "cpu")
    parser = _parser(program)
    overrides, rest = command_line.take_overrides(arguments, Config)
    args = parser.parse_args(rest)
    if not args.config:
        raise UserError("no recipe is named; add --config RECIPE")
    config = command_line.load_config(Config, args.config, overrides)
    if not args.topology:
        for name in ("search", "trace", "response_tokens"):
            if getattr(args, name) not in (None, False):
                raise UserError(
                    f"--{name.replace('_', '-')} is about a topology, and none is named; add --topology "
                    "h100:16x8, or what you have"
                )
    # The planner has its own cache of compiled programs, with the figures read from them.
    with compiled_programs_not_kept(), disk_errors("."):
        plan = _plan(args, config) if args.topology else trace_plan(config)
        if args.json:
            print(json.dumps(plan.as_json(), indent=1))
        else:
            plan_output.show(plan)
    return 0 if plan.fits else _DOES_NOT_FIT


def show_traced(config: Config) -> None:
    """Prints the traced plan of a config, as `jaxrl train --dry_run`."""
    plan_output.show(trace_plan(config))


def _plan(args: argparse.Namespace, config: Config) -> Plan:
    # The plan for a topology, of the searched mapping if one is asked for.
    cluster = read_cluster(args.topology)
    mixed = isinstance(cluster, MixedCluster)
    responses = None
    if args.response_tokens is not None:
        responses = response_lengths(config, args.response_tokens)
    if args.search or config.mesh.searched:
        found, proposed = propose(config, cluster, responses=responses)
        which = (
            ", for plans (a run has pools of some hosts only with hosts.pools_apart)"
            if mixed
            else ""
        )
        settings = setting_lines(config, proposed)
        lines = [*found.lines(), f"settings of this mapping{which}:", *settings]
        print("\n".join(lines), file=sys.stderr if args.json else sys.stdout)
        config = proposed
    # The compiler has no description of a kind that is in a file only, and compiles for one kind.
    if args.trace or mixed or cluster.accelerator.name not in ACCELERATORS:
        return trace_plan(config, cluster, responses=responses)
    topology = read_topology(args.topology)
    return compile_plan(config, topology, responses=responses, watch=_progress)


def _progress(program: CompiledProgram) -> None:
    took = "kept from before" if program.cached else f"compiled in {program.compiled_s:.1f} s"
    print(f"{program.role} {program.name}: {took}", file=sys.stderr, flush=True)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = command_parser(
        program, __doc__, epilog="--config.NAME=VALUE changes a setting, as for training"
    )
    parser.add_argument("--config", help="the recipe, with its layout after a colon")
    parser.add_argument(
        "--topology",
        default="",
        help="compiles for it: a TPU slice (v5p:4x4x8) or hosts of GPUs (h100:16x8); simulates groups of "
        "hosts of different kinds (h100:2x8+a100:2x8)",
    )
    parser.add_argument(
        "--response-tokens",
        type=float,
        help=f"mean length of an answer, for predictions; default: {RESPONSE_SHARE} of the limit",
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
    return parser
