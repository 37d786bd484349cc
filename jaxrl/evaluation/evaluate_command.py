"""Evaluates a model on sets of problems, without a training config.

    python launch/evaluate.py --model DIR --set aime_2024.jsonl --n 32 --temperature 1 --top_p 0.7
    python launch/evaluate.py --model runs/dapo_tiny/seed0 --n 8
    python launch/evaluate.py --model runs/dapo_tiny/seed0 --set a.jsonl --set b.jsonl --out results/first

DIR is a Hugging Face directory, or the folder of a run, of which the newest intact checkpoint is evaluated.
The table of results is printed to stdout, everything else to stderr. Samples, results and a page are written
to --out; the default is a folder in evaluations/ with a name derived from model and settings. To continue an
interrupted evaluation start the same command again: answered problems are skipped. Several processes with the
same command evaluate together (--coordinator). User errors are one line on stderr, with exit status 2.
docs/evaluation.md explains the statistics.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from jaxrl.errors import EXIT_INTERRUPTED, UserError
from jaxrl.evaluation.evaluate_config import EvaluateConfig
from jaxrl.evaluation.evaluating import EvaluationPlan, evaluate, plan_evaluation, table_of
from jaxrl.evaluation.evaluation_page import write_evaluation_page
from jaxrl.flags import add_flags, command_parser, settings_of
from jaxrl.hub.local_paths import EVALUATION, local_rows
from jaxrl.mesh import hosts
from jaxrl.mesh.compilation_cache import keep_compiled_programs


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, which starts with the program's name; returns the exit status."""
    program, *arguments = argv
    parser = _parser(program)
    args = parser.parse_args(arguments)
    planned: list[EvaluationPlan] = []
    try:
        config = _config_of(args)
        hosts.start(config.hosts)
        keep_compiled_programs()
        with hosts.watched(config.hosts):
            _run(config, planned)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted{_what_is_kept(planned)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _config_of(args: argparse.Namespace) -> EvaluateConfig:
    try:
        return settings_of(
            EvaluateConfig,
            args,
            sets=tuple(args.sets),
            tasks=tuple(args.tasks),
            stop_strings=tuple(args.stop_strings),
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def _run(config: EvaluateConfig, planned: list[EvaluationPlan]) -> None:
    """Evaluates. The plan is appended to `planned`, for the message after an interruption."""
    sets = tuple(local_rows(path, EVALUATION) for path in config.sets)
    planned.append(plan_evaluation(dataclasses.replace(config, sets=sets)))
    results = evaluate(planned[0], say=_say)
    if not results:
        return  # only the first process has results
    table = table_of(results)
    page = write_evaluation_page(planned[0].folder, title=planned[0].found.name, table=table)
    print(table)
    _say(f"{page.parent}: samples.jsonl, results.json, samples.html")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _what_is_kept(planned: Sequence[EvaluationPlan]) -> str:
    if not planned or planned[0].answers is None:
        return ""
    answered, total = len(planned[0].answers.answers), len(planned[0].prompts)
    return (
        f"; {planned[0].folder} has the answers to {answered} of {total} problems, and the same command "
        "goes on from them"
    )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = command_parser(program, __doc__)
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="FILE",
        help="JSONL file of problems; may be given several times",
    )
    parser.add_argument(
        "--task",
        dest="tasks",
        action="append",
        default=[],
        metavar="NAME",
        help="generated task, such as countdown or file.py:make; may be given several times",
    )
    parser.add_argument(
        "--stop",
        dest="stop_strings",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends an answer; may be given several times (default: those of a run's training)",
    )
    add_flags(parser, EvaluateConfig, without=("sets", "tasks", "stop_strings"))
    return parser
