"""Settings of a run, and the paths of its files and of those of an evaluation; docs/runs.md describes them.

<output>/<name>/seed<seed>      RunFolder          settings, model files, report
  rollouts/                     RolloutFolder      samples of some steps
  sft/ rl/ preference/          StageFolder        metric rows and checkpoints of one training stage
    checkpoints/                CheckpointFolder   checkpoints, their manifests, damaged ones
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Literal

from pydantic import AfterValidator

from jaxrl.checks import NAME, PATH, at_least, count, settings, steps

CONTENT = "content of "
"""What a line of `RunFolder.config` begins with that has the digest of a file, by its setting's name."""

LOGGERS = ("tensorboard", "wandb", "trackio")
"""Names of loggers (`tracking.loggers`). Each but TensorBoard needs the extra of its name."""


def split_logger(entry: str) -> tuple[str, str]:
    """The logger and the project of an entry of `run.loggers`; "" if it names no project."""
    name, _, project = entry.partition(":")
    return name, project


def _logger(entry: str) -> str:
    name, colon, project = entry.partition(":")
    if name not in LOGGERS or (colon and (name == "tensorboard" or not project)):
        raise ValueError(f"is no logger; use {', '.join(LOGGERS)}, or wandb:PROJECT")
    return entry


@settings
class RunConfig:
    """The length, the folder and the checkpoints of a run."""

    output: Annotated[str, PATH] = "runs"
    """Parent folder of runs; a run is in <output>/<name>/seed<seed>."""
    num_steps: Annotated[int, steps(0)] = 100
    """Number of rollout steps, or of updates on pairs. 0 trains the supervised stage alone."""
    save_every: Annotated[int, steps(0)] = 10
    """Number of steps between checkpoints; the last step is always saved. 0 saves it alone."""
    keep_checkpoints: Annotated[int, count(0)] = 2
    """Number of newest checkpoints to keep; 0 keeps all."""
    resume: Literal["auto", "or_restart", "accept_lost_rows", "accept_other_settings", "never"] = (
        "auto"
    )
    """What a command does in the folder of an earlier run. "auto" continues from the newest
    intact checkpoint; it refuses a stage that has started and has no intact checkpoint, or has
    lost metric rows, and a run that was made with other settings. "or_restart" starts such a
    stage again and moves its old files aside. "accept_lost_rows" continues without the lost rows,
    "accept_other_settings" with the settings of now. "never" refuses a folder that contains a
    run.
    """
    loggers: tuple[Annotated[str, NAME, AfterValidator(_logger)], ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: "tensorboard", "wandb" (Weights & Biases),
    "trackio". The last two need the extra of their name. "wandb:PROJECT" names a project; it is
    the recipe's name by default.
    """
    rollouts_every: Annotated[int, steps(0)] = 10
    """Number of steps between saved samples (`jaxrl browse` shows them): those of 8 prompts.
    Samples of the first step are saved too. 0 saves none.
    """
    stop_within_s: Annotated[float, at_least(0.1, at_most=86_400)] = 20.0
    """Seconds between SIGTERM or Ctrl-C and the end of the run; a step that takes longer is
    abandoned. A checkpoint that is being saved at that time is completed first.
    """
    certificate: Annotated[str, PATH] = ""
    """File of `jaxrl certify`. A run ends at its start if the file is about another model, layout,
    type or version of the code, or if what it requires did not hold (docs/proofs.md). "" asks for none.
    """

    def __post_init__(self):
        names = [split_logger(entry)[0] for entry in self.loggers]
        if len(set(names)) < len(names):
            raise ValueError(f"loggers {self.loggers} has a logger twice; name each once")


# Hashed by its path though not frozen: the subclasses set further paths, and none is changed.
@dataclasses.dataclass(unsafe_hash=True)
class _Folder:
    """A folder, equal to another one of its kind with the same path; `path` is the folder itself."""

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path)


class CheckpointFolder(_Folder):
    """The checkpoints of a training stage, which has a subfolder for each step.

    Attributes:
      manifests: folder of the manifests (`tracking.checkpoints`).
      damaged: folder of damaged checkpoints, which a run could not resume from.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path)
        self.manifests = path.with_name(f"{path.name}.manifests")
        self.damaged = path.with_name(f"{path.name}.damaged")

    def step(self, step: int) -> pathlib.Path:
        return self.path / str(step)

    def manifest(self, step: int) -> pathlib.Path:
        return self.manifests / f"{step}.json"


class StageFolder(_Folder):
    """Folder "sft", "rl" or "preference" of a run.

    Attributes:
      metrics: metrics, one JSON row per step.
      schedule: the schedule of a free-running sampler, one JSON row per version of the weights.
      tensorboard: folder of the same metrics for TensorBoard.
      checkpoints: the checkpoints of the stage.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path)
        self.metrics = path / "metrics.jsonl"
        self.schedule = path / "schedule.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = CheckpointFolder(path / "checkpoints")

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path.parent)


class RolloutFolder(_Folder):
    """The saved samples of reinforcement learning, a file of `tracking.sample_rows` for each saved step."""

    def step(self, step: int) -> pathlib.Path:
        return self.path / f"step_{step}.jsonl"

    def steps(self) -> dict[int, pathlib.Path]:
        """The files by step, in ascending order. Files with other names are ignored."""
        found = {}
        for path in self.path.glob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            # "step_007" and the like are not ours: `step` would not find them again.
            if number.isdecimal() and path == self.step(int(number)) and not path.is_dir():
                found[int(number)] = path
        return dict(sorted(found.items()))


class RunFolder(_Folder):
    """Folder <output>/<name>/seed<seed> of a run.

    Attributes:
      config: all settings, one per line, and digests of the files that they name.
      inputs: objects that a call of `jaxrl.api` has kept, under the digests of their contents.
      lock: the lock file, which the run holds while it is running.
      model: folder of the files of an exported model besides the weights: config.json and the tokenizer.
      trained_model: the trained reward or cost model, as a Hugging Face directory.
      report: the report of the run, one HTML page.
      rollouts: the saved training samples.
      sft, rl, preference: the training stages.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path)
        self.config = path / "config.txt"
        self.inputs = path / "inputs"
        self.lock = path / "lock"
        self.model = path / "model"
        self.trained_model = path / "trained_model"
        self.report = path / "report.html"
        self.rollouts = RolloutFolder(path / "rollouts")
        self.sft, self.rl = StageFolder(path / "sft"), StageFolder(path / "rl")
        self.preference = StageFolder(path / "preference")

    def samples(self, when: str) -> pathlib.Path:
        """Answers to evaluation problems for the report, "before" or "after" training."""
        return self.path / f"samples_{when}.json"


class EvaluationFolder(_Folder):
    """Folder of an evaluation without training: <out>, or evaluations/<model>-<checksum>.

    Attributes:
      samples: the answers, one row of `tracking.sample_rows` each.
      results: the settings of the evaluation, and the metrics of each problem set.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path)
        self.samples = path / "samples.jsonl"
        self.results = path / "results.json"


def parse_config(text: str) -> dict[str, str]:
    """Parses the content of `RunFolder.config`: the text of each value by setting.

    Raises:
      ValueError: a line is not "name = value".
    """
    return dict(line.split(" = ", 1) for line in text.splitlines())
