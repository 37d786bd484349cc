"""Compares runs on one HTML page: accuracy, curves, settings that differ, samples on the same prompts.

    jaxrl report runs/grpo_tiny/seed0 runs/dapo_tiny/seed0
    jaxrl report runs/dapo_tiny/seed* --out seeds.html

The page is one file without scripts that loads nothing. Runs may still be at work. The report of a single run
is the file report.html in its folder.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl.files import read_bytes, read_text
from jaxrl.flags import command_parser
from jaxrl.tracking.durable import disk_errors, ensure_writable
from jaxrl.tracking.metrics import evaluation_accuracy, read_metrics
from jaxrl.tracking.readable import number
from jaxrl.tracking.run_folder import RunFolder, parse_config
from jaxrl.tracking.sample_rows import read_head
from jaxrl_report.page import (
    PromptResponses,
    Response,
    Rows,
    shown_accuracy,
    stored_samples,
    write_comparison,
)
from jaxrl_report.plots import NUM_COLORS

Table = list[tuple[str, list[str]]]
# (key of the problem, prompt, answer) -> text of a response, correct
Samples = dict[tuple[str | None, str, str], tuple[str, bool]]

_NO_RUN = "name the folder of a run, such as runs/dapo_tiny/seed0"
_ABSENT = "-"
# Headings of the stages, the most important first.
_STAGES = {
    "rl": "Reinforcement learning",
    "preference": "Preference training",
    "sft": "Supervised fine-tuning",
}
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
      UserError: there are too few or too many runs, a folder holds no run, or the page cannot be written.
    """
    runs = read_runs(paths)
    if not 2 <= len(runs) <= NUM_COLORS:
        number = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        raise UserError(
            f"{number} named; name 2 to {NUM_COLORS} (the report of a single run is "
            f"{runs[0].folder.report})"
        )
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name, _ABSENT) for run in runs] for name in names}
    settings = [(name, each) for name, each in values.items() if len(set(each)) > 1]
    # No rows where a run lacks a stage; a stage of one run alone is left out.
    stages = [
        (heading, [(run.label, run.stages.get(name, [])) for run in runs])
        for name, heading in _STAGES.items()
        if sum(name in run.stages for run in runs) > 1
    ]
    evaluated: list[tuple[Samples, str]] = []
    for run in runs:
        after = stored_samples(run.folder, "after")
        found = after or stored_samples(run.folder, "before")
        answers = {_key(s): (s["text"], s["correct"]) for s in found}
        evaluated.append((answers, "" if after else "before training"))
    step, trained = training_samples(runs)
    training = _side_by_side(runs, [(samples, "") for samples in trained])
    ensure_writable(out.parent)
    with disk_errors(out.parent):
        write_comparison(
            out,
            title=f"{len(runs)} runs compared",
            runs=[run.label for run in runs],
            headline=headline(runs),
            stages=stages,
            settings=settings,
            num_settings=len(names),
            samples=[
                ("Answers to evaluation problems", _side_by_side(runs, evaluated)),
                (f"Samples of training step {step}", training[:_MAX_TRAINING_PROMPTS]),
            ],
        )


def _side_by_side(
    runs: Sequence[ComparedRun], found: Sequence[tuple[Samples, str]]
) -> list[PromptResponses]:
    # The prompts that at least two runs have, in the order of the first run that has them.
    prompts = dict.fromkeys(key for samples, _ in found for key in samples)
    return [
        PromptResponses(
            *key[1:],
            [
                (run.label, Response(*samples[key], note) if key in samples else None)
                for run, (samples, note) in zip(runs, found, strict=True)
            ],
        )
        for key in prompts
        if sum(key in samples for samples, _ in found) > 1
    ]


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison.

    Attributes:
      label: the part of the path that tells the runs apart.
      folder: folder of the run.
      settings: text of each value by setting.
      stages: metric rows of each stage that has any; "rl", "preference" or "sft".
    """

    label: str
    folder: RunFolder
    settings: Mapping[str, str]
    stages: Mapping[str, Rows]


def read_runs(paths: Sequence[pathlib.Path]) -> list[ComparedRun]:
    """Reads the runs; the folders are not changed, and a run may be at work.

    Raises:
      UserError: a folder holds no run, or one without metrics.
    """
    found = []
    for path, label in zip(paths, labels_of([path.resolve() for path in paths]), strict=True):
        folder = RunFolder(path)
        settings = parse_config(read_text(folder.config, absent=_NO_RUN))
        metrics = {name: getattr(folder, name).metrics for name in _STAGES}
        rows = {name: read_metrics(file) for name, file in metrics.items() if file.exists()}
        stages = {name: of_stage for name, of_stage in rows.items() if of_stage}
        if not stages:
            raise UserError(f"{path} has no metrics; compare it after its first step")
        found.append(ComparedRun(label, folder, settings, stages))
    return found


def labels_of(paths: Sequence[pathlib.Path]) -> list[str]:
    """The parts of different paths that tell them apart: a/x/seed0 and b/x/seed0 are a and b."""
    parts = [list(path.parts) for path in paths]
    # Parts that all paths share at their beginning or end say nothing.
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({names[end] for names in parts}) == 1:
            for names in parts:
                del names[end]
    if len({len(names) for names in parts}) == 1:
        columns = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
        parts = list(zip(*columns, strict=True)) or parts
    return [os.path.join(*names) for names in parts]


def headline(runs: Sequence[ComparedRun]) -> Table:
    """The most important numbers of each run's most important stage."""
    stages = [next(name for name in _STAGES if name in run.stages) for run in runs]
    rows = [run.stages[stage] for run, stage in zip(runs, stages, strict=True)]
    table: Table = []
    # The accuracy of each evaluation set before training and at the last evaluation.
    for name in sorted(
        {name for each in rows for row in each for name in evaluation_accuracy(row)}
    ):
        before, last = [], []
        for each in rows:
            found = [row for row in each if name in evaluation_accuracy(row)]
            shown = shown_accuracy(found[0], name) if found and not found[0]["step"] else _ABSENT
            before.append(shown)
            trained = found and found[-1]["step"]
            last.append(
                f"{shown_accuracy(found[-1], name)}, step {trained:,}" if trained else _ABSENT
            )
        table += [(f"accuracy before training, {name}", before), (f"last accuracy, {name}", last)]
    steps = []
    for run, stage, each in zip(runs, stages, rows, strict=True):
        setting = "sft.num_steps" if stage == "sft" else "run.num_steps"
        planned, done = run.settings.get(setting, _ABSENT), str(each[-1]["step"])
        rest = "" if done == planned else ", not finished"
        steps.append(f"{each[-1]['step']:,} of {planned}{rest}")
    table.append(("steps", steps))
    for label, key, of in (
        ("seconds a step, median", "timing_s/step", np.median),
        ("tokens a second on a device, median", "perf/throughput", np.median),
        ("peak memory, GB", "perf/peak_memory_gb", np.max),
    ):
        values = [
            [row[key] for row in each if math.isfinite(row.get(key, math.nan))] for each in rows
        ]
        table.append((label, [number(float(of(found))) if found else _ABSENT for found in values]))
    table.append(("folder", [str(run.folder) for run in runs]))
    return table


def training_samples(runs: Sequence[ComparedRun]) -> tuple[int | None, list[Samples]]:
    """The first response to each prompt of the newest step whose samples most runs have.

    Returns:
      The step, None if no two runs have samples of the same step; and the samples of each run.
    """
    files = [run.folder.rollouts.steps() for run in runs]
    counts = {step: sum(step in each for each in files) for each in files for step in each}
    if max(counts.values(), default=0) < 2:
        return None, [{} for _ in runs]
    # Of steps that equally many runs have, the newest: it shows what they have learned.
    step = max(counts, key=lambda step: (counts[step], step))
    samples: list[Samples] = []
    for each in files:
        samples.append({})
        content = read_bytes(each[step], absent="remove it") if step in each else b""
        for line in content.splitlines():
            row = read_head(line)
            answer = row["completion"], row["correct"]
            samples[-1].setdefault(_key(row), answer)
    return step, samples


def _key(sample: Mapping[str, Any]) -> tuple[str | None, str, str]:
    # Two problems may have one prompt and one answer.
    return sample.get("problem_key"), sample["prompt"], sample["answer"]
