"""Paths of the files of a run and of an evaluation; docs/runs.md describes the files.

<output>/<name>/seed<seed>      RunFolder          settings, model files, report
  profile/                                         traces of single steps
  rollouts/                     RolloutFolder      samples of some steps
  sft/ rl/ preference/          StageFolder        metric rows and checkpoints of one training stage
    checkpoints/                CheckpointFolder   checkpoints, their manifests, damaged ones
"""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """Paths of the checkpoints of a training stage.

    Attributes:
      path: folder of the checkpoints, which has a subfolder for each step.
    """

    path: pathlib.Path

    def step(self, step: int) -> pathlib.Path:
        """The checkpoint of one step."""
        return self.path / str(step)

    @property
    def manifests(self) -> pathlib.Path:
        """The folder of the manifests (`tracking.checkpoints`)."""
        return self._beside("seals")

    def manifest(self, step: int) -> pathlib.Path:
        """The manifest of one checkpoint."""
        return self.manifests / f"{step}.json"

    @property
    def damaged(self) -> pathlib.Path:
        """The folder of damaged checkpoints, which a run could not resume from."""
        return self._beside("damaged")

    def _beside(self, what: str) -> pathlib.Path:
        return self.path.with_name(f"{self.path.name}.{what}")


@dataclasses.dataclass(frozen=True)
class StageFolder:
    """Paths of the files of a training stage.

    Attributes:
      path: folder "sft", "rl" or "preference" of a run.
    """

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def run(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.path.parent)

    @property
    def metrics(self) -> pathlib.Path:
        """Metrics, one JSON row per step."""
        return self.path / "metrics.jsonl"

    @property
    def schedule(self) -> pathlib.Path:
        """The schedule of a free-running sampler, one JSON row per version of the weights."""
        return self.path / "schedule.jsonl"

    @property
    def tensorboard(self) -> pathlib.Path:
        """The same metrics for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints of the stage."""
        return CheckpointFolder(self.path / "checkpoints")


@dataclasses.dataclass(frozen=True)
class RolloutFolder:
    """Paths of the saved samples of reinforcement learning.

    Attributes:
      path: folder with a file for each saved step.
    """

    path: pathlib.Path

    def step(self, step: int) -> pathlib.Path:
        """The samples of one step, as rows of `tracking.sample_rows`."""
        return self.path / f"step_{step}.jsonl"

    def steps(self) -> dict[int, pathlib.Path]:
        """The files by step, in ascending order. Files with other names are ignored."""
        found = {}
        for path in self.path.glob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and path == self.step(int(number)) and not path.is_dir():
                found[int(number)] = path
        return dict(sorted(found.items()))


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of the files of a run.

    Attributes:
      path: <output>/<name>/seed<seed>.
    """

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> pathlib.Path:
        """All settings, one per line."""
        return self.path / "config.txt"

    @property
    def lock(self) -> pathlib.Path:
        """The lock file, which the run holds while it is running."""
        return self.path / "lock"

    @property
    def model(self) -> pathlib.Path:
        """The files of an exported model besides the weights: config.json and the tokenizer."""
        return self.path / "model"

    @property
    def trained_model(self) -> pathlib.Path:
        """The trained reward or cost model, as a Hugging Face directory."""
        return self.path / "trained_model"

    @property
    def report(self) -> pathlib.Path:
        """The report of the run, one HTML page."""
        return self.path / "report.html"

    def samples(self, when: str) -> pathlib.Path:
        """Answers to evaluation problems for the report.

        Args:
          when: "before" or "after" training.
        """
        return self.path / f"samples_{when}.json"

    @property
    def profile(self) -> pathlib.Path:
        """Traces of single steps."""
        return self.path / "profile"

    @property
    def rollouts(self) -> RolloutFolder:
        """The saved training samples."""
        return RolloutFolder(self.path / "rollouts")

    @property
    def sft(self) -> StageFolder:
        """The stage of supervised fine-tuning."""
        return StageFolder(self.path / "sft")

    @property
    def rl(self) -> StageFolder:
        """The stage of reinforcement learning."""
        return StageFolder(self.path / "rl")

    @property
    def preference(self) -> StageFolder:
        """The stage of preference training."""
        return StageFolder(self.path / "preference")


@dataclasses.dataclass(frozen=True)
class EvaluationFolder:
    """Paths of the files of an evaluation without training.

    Attributes:
      path: folder of the evaluation: <out>, or evaluations/<model>-<checksum>.
    """

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def samples(self) -> pathlib.Path:
        """The answers, one row of `tracking.sample_rows` each."""
        return self.path / "samples.jsonl"

    @property
    def results(self) -> pathlib.Path:
        """The settings of the evaluation, and the metrics of each problem set."""
        return self.path / "results.json"


def parse_config(text: str) -> dict[str, str]:
    """Parses the content of `RunFolder.config`: the text of each value by setting.

    Raises:
      ValueError: a line is not "name = value".
    """
    return dict(line.split(" = ", 1) for line in text.splitlines())
