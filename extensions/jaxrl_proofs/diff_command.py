"""Where two runs part: what they were made with, then the first step, sample and token that differ.

    jaxrl diff runs/dapo_tiny/seed0 runs/dapo_tiny/seed1
    jaxrl diff evaluations/at20 evaluations/at40

Settings and contents of files come first, since they explain the rest. Equal runs give status 0, others 1.
`jaxrl report RUN RUN` draws their curves. Of two evaluations of the same prompts it says which is better.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence

from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.tracking.run_folder import CONTENT, EvaluationFolder, RunFolder
from jaxrl.trainer.identity import MADE_WITH, differences
from jaxrl_proofs.paired import compared_answers, settings_of
from jaxrl_proofs.parting import Comparison, compared
from jaxrl_proofs.stored_run import STAGES, StoredRun


def main(argv: Sequence[str]) -> int:
    """Compares two runs; returns 0 if they are equal, else 1."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument(
        "runs",
        type=pathlib.Path,
        nargs=2,
        metavar="RUN",
        help="folder of a run, or of an evaluation",
    )
    paths = parser.parse_args(arguments).runs
    evaluations = [EvaluationFolder(path) for path in paths]
    if all(each.results.exists() for each in evaluations):
        return _evaluations(*evaluations)
    before, now = (StoredRun(RunFolder(path)) for path in paths)
    for line in changed(before.texts, now.texts):
        print(line)
    lengths = []
    for run in (before, now):
        steps = {stage: len(run.rows(stage)) for stage in STAGES}
        lengths.append({stage: count for stage, count in steps.items() if count})
        if not lengths[-1]:
            raise UserError(f"{run.folder} has no metrics; compare it after its first step")
    found = compared(before, now)
    for line in told(found):
        print(line)
    if lengths[0] != lengths[1]:
        rows = [", ".join(f"{name} {count}" for name, count in each.items()) for each in lengths]
        print(f"rows: {rows[0]} -> {rows[1]}")
    return int(found.parting is not None)


def _evaluations(*folders: EvaluationFolder) -> int:
    lines = list(compared_answers(*folders))
    print(*changed(*map(settings_of, folders)), *(lines or ["equal: all answers"]), sep="\n")
    return int(bool(lines))


def changed(*texts: Mapping[str, str]) -> Iterator[str]:
    """Lines on settings, contents of files, versions and devices that differ, of two `StoredRun.texts`."""
    # Where a run was made, and how, is not what it was made of.
    ignored = ("name", "run.output", "run.resume")
    free = [
        f"{name}: {old} -> {new}"
        for name in texts[1]
        if not name.startswith((CONTENT, *ignored))
        and (old := texts[0].get(name, new := texts[1][name])) != new
    ]
    of_the_run = [line for line in differences(*texts) if not line.startswith("name:")]
    for line in of_the_run:
        yield f"setting {line}"
    names = {line.partition(":")[0] for line in of_the_run}
    for line in free:
        if line.partition(":")[0] not in names:
            yield f"setting {line} (may change within a run)"
    for name in MADE_WITH:
        versions = [each.get(CONTENT + name, "not recorded") for each in texts]
        if versions[0] != versions[1]:
            yield f"made with {name}: {' -> '.join(versions)}"


def told(found: Comparison) -> Iterator[str]:
    """Lines on what was compared, and on where it parts."""
    same = (
        f"{found.steps:,} rows, {found.numbers:,} numbers, {found.tokens:,} tokens of kept samples"
    )
    if found.parting is None:
        yield f"equal: {same}"
        return
    parting = found.parting
    yield f"equal before: {same}"
    kind = ", by rounding alone" if parting.by_rounding else ""
    yield f"{parting.stage} step {parting.step} parts{kind}, first in its {parting.where}"
    for line in parting.lines:
        yield f"  {line}"
