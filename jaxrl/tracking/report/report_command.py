"""Compares runs on one HTML page: accuracy, curves, settings that differ, samples on the same prompts.

    jaxrl report runs/grpo_tiny/seed0 runs/dapo_tiny/seed0
    jaxrl report runs/dapo_tiny/seed* --out seeds.html

The page is one file without scripts that loads nothing. Runs may still be at work. The report of a single run
is the file report.html in its folder.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxrl.checks import check_path
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.tracking.compared_runs import (
    ComparedRun,
    Samples,
    check_shared_metrics,
    differing_settings,
    evaluation_samples,
    headline,
    read_runs,
    shared_stages,
    training_samples,
)
from jaxrl.tracking.durable import disk_errors, ensure_writable
from jaxrl.tracking.report.page import PromptResponses, Response, write_comparison
from jaxrl.tracking.report.plots import NUM_COLORS

# Prompts of a training step that are shown; evaluations store 8.
_MAX_TRAINING_PROMPTS = 4


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, which starts with the program's name; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("runs", type=pathlib.Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("comparison.html"),
        help="the page (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    compare(args.runs, args.out)
    print(f"report: {args.out}")
    return 0


def compare(paths: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    """Writes a page that compares runs.

    Args:
      paths: folders of two or more runs.
      out: the page; a file of this name is replaced.

    Raises:
      UserError: there are too few or too many runs, a folder holds no run, a run is named twice or shares no
        metric with the others, or the page cannot be written.
    """
    check_path("--out", out)
    runs = read_runs(paths)
    if not 2 <= len(runs) <= NUM_COLORS:
        number = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        raise UserError(
            f"{number} named; name 2 to {NUM_COLORS} (the report of a single run is "
            f"{runs[0].folder.report})"
        )
    check_shared_metrics(runs)
    settings, num_settings = differing_settings(runs)
    if out.is_dir():
        raise UserError(f"--out {out} is a directory; name a file")
    ensure_writable(out.parent)
    with disk_errors(out.parent):
        write_comparison(
            out,
            title=f"{len(runs)} runs compared",
            runs=[run.label for run in runs],
            headline=headline(runs),
            stages=shared_stages(runs),
            settings=settings,
            num_settings=num_settings,
            samples=_samples(runs),
        )


def _samples(runs: Sequence[ComparedRun]) -> list[tuple[str, list[PromptResponses]]]:
    """(heading, prompts that two runs have answered) of evaluation problems and of training prompts."""
    evaluated = [evaluation_samples(run) for run in runs]
    step, trained = training_samples(runs)
    training = _side_by_side(runs, [(samples, "") for samples in trained])
    return [
        ("Answers to evaluation problems", _side_by_side(runs, evaluated)),
        (f"Samples of training step {step}", training[:_MAX_TRAINING_PROMPTS]),
    ]


def _side_by_side(
    runs: Sequence[ComparedRun], found: Sequence[tuple[Samples, str]]
) -> list[PromptResponses]:
    """The prompts that at least two runs have, in the order of the first run that has them."""
    prompts = dict.fromkeys(key for samples, _ in found for key in samples)
    return [
        PromptResponses(
            *key,
            [
                (run.label, Response(*samples[key], note) if key in samples else None)
                for run, (samples, note) in zip(runs, found, strict=True)
            ],
        )
        for key in prompts
        if sum(key in samples for samples, _ in found) > 1
    ]
