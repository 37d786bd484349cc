"""Reads from a run's files the lengths of its texts and the seconds of its phases.

    rollouts/step_<n>.jsonl    length of every saved response
    rl/metrics.jsonl           prompt lengths, generation batches of dynamic sampling, seconds of each phase

Only the last half of the steps counts: the first ones compile, and lengths change while a policy learns. The
saved samples of dynamic sampling are those that were kept; others may be longer or shorter.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping

from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.planner.simulation.step_tasks import STAGES
from jaxrl.planner.simulation.workload import LengthDistribution
from jaxrl.planner.step_load import StepLengths
from jaxrl.tracking.compared_runs import ComparedRun, read_runs
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.sample_rows import read_head

_TIMER = "timing_s/"
_GENERATION = ("update_weights", "gen", "gen_max")
_TRAINING = ("update_actor", "update_critic")
# In no stage of the simulation. Timers that are not named here belong to roles in preparation.
_OTHERS = ("adv", "testing", "save_checkpoint", "step")
# Settings that change the seconds of a step.
_SECTIONS = ("model.", "mesh.", "placement", "rollout.", "train.", "algorithm.", "data.max_prompt")


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """Medians of the last half of a run's steps.

    Attributes:
      name: the run's folder, as the user named it.
      steps: first and last step that count.
      lengths: lengths of its texts, limited to those of the planned recipe.
      seconds: measured seconds by stage.
      step_s: measured seconds of a whole step, with grading, evaluation and checkpoints.
      differing: names of settings that change the seconds of a step and differ from the planned recipe.
    """

    name: str
    steps: tuple[int, int]
    lengths: StepLengths
    seconds: Mapping[str, float]
    step_s: float
    differing: tuple[str, ...]


def read_measured_run(path: pathlib.Path, config: Config) -> MeasuredRun:
    """Reads a run.

    Args:
      path: folder of the run.
      config: recipe to plan.

    Raises:
      UserError: the folder has no run of reinforcement learning, or its samples cannot be read.
    """
    (run,) = read_runs([path])
    rows = run.stages.get("rl", [])
    rows = [row for row in rows if row["step"] > rows[-1]["step"] / 2]
    if not rows or "response_length/mean" not in rows[-1]:
        raise UserError(
            f"--lengths {path} has no steps of reinforcement learning; name the folder of a run that has "
            "sampled, or use --response-tokens"
        )
    # Checkpoints and evaluations do not happen in every step, so some rows lack a timer.
    named = {name for row in rows for name in row}
    medians = {n: statistics.median(row[n] for row in rows if n in row) for n in named}
    first, last = rows[0]["step"], rows[-1]["step"]
    return MeasuredRun(
        str(path),
        (first, last),
        _lengths(
            run.folder, config, medians, first, f"measured in {path}, steps {first} to {last}"
        ),
        _stages(medians),
        medians[f"{_TIMER}step"],
        _differing(run, config),
    )


def _stages(medians: Mapping[str, float]) -> dict[str, float]:
    """Measured seconds by stage."""
    found: dict[str, float] = {stage: 0.0 for stage in STAGES}
    for metric, seconds in medians.items():
        name = metric.removeprefix(_TIMER)
        if name == metric or name in _OTHERS:
            continue
        stage = "generation" if name in _GENERATION else "preparation"
        found["training" if name in _TRAINING else stage] += seconds
    return found


def _lengths(
    folder: RunFolder, config: Config, medians: Mapping[str, float], first: int, source: str
) -> StepLengths:
    longest = config.rollout.max_response_tokens
    files = [path for step, path in folder.rollouts.steps().items() if step >= first]
    lengths = [length for path in files for length in _response_lengths(path)]
    if lengths:
        responses = LengthDistribution.measured(lengths, longest)
    else:
        # Without saved samples, mean and share of truncated responses give the spread.
        mean = min(medians["response_length/mean"], float(longest))
        cut_off = medians["response_length/clip_ratio"]
        responses = LengthDistribution(mean, longest, "log-normal")
        if 0 < cut_off < 1:
            responses = LengthDistribution.with_cut_off(mean, longest, cut_off)
    limit = config.data.max_prompt_tokens
    prompts = LengthDistribution(min(medians["prompt_length/mean"], float(limit)), limit)
    return StepLengths(prompts, responses, source, medians.get("train/num_gen_batches", 1.0))


def _response_lengths(path: pathlib.Path) -> list[int]:
    try:
        with path.open("rb") as file:
            return [int(read_head(line)["length"]) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no saved samples ({error}); remove it, and its step is left out"
        ) from error


def _differing(run: ComparedRun, config: Config) -> tuple[str, ...]:
    ours = dict(line.split(" = ", 1) for line in format_config(config).splitlines())
    return tuple(
        name
        for name, value in ours.items()
        if name.startswith(_SECTIONS) and run.settings.get(name, value) != value
    )
