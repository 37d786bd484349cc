"""Where everything of a run lies; docs/runs.md has the same as a table.

<output>/<name>/seed<seed>      RunFolder          settings, the model's files, the report
  profile/                                         traces of single steps
  rollouts/                     RolloutFolder      samples of some steps, to be looked at
  sft/ rl/ preference/          StageFolder        rows and checkpoints of one training stage
    checkpoints/                CheckpointFolder   with its seals, and what could not be gone on from
"""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints of a stage.

    Attributes:
      path: where they lie, each under the number of its step.
    """

    path: pathlib.Path

    def step(self, step: int) -> pathlib.Path:
        """One checkpoint."""
        return self.path / str(step)

    @property
    def seals(self) -> pathlib.Path:
        """Checksums of the files of each."""
        return self._beside("seals")

    def seal(self, step: int) -> pathlib.Path:
        """Those of one checkpoint."""
        return self.seals / f"{step}.json"

    @property
    def damaged(self) -> pathlib.Path:
        """Those that a run could not go on from."""
        return self._beside("damaged")

    @property
    def deleted(self) -> pathlib.Path:
        """Those that are being removed."""
        return self._beside("deleted")

    def _beside(self, what: str) -> pathlib.Path:
        return self.path.with_name(f"{self.path.name}.{what}")


@dataclasses.dataclass(frozen=True)
class StageFolder:
    """What a training stage leaves.

    Attributes:
      path: "sft", "rl" or "preference" in the folder of its run.
    """

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def run(self) -> RunFolder:
        """The folder of the run that keeps it."""
        return RunFolder(self.path.parent)

    @property
    def metrics(self) -> pathlib.Path:
        """A row for every step, the source of truth of all curves."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> pathlib.Path:
        """The same for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> CheckpointFolder:
        """What the stage goes on from."""
        return CheckpointFolder(self.path / "checkpoints")


@dataclasses.dataclass(frozen=True)
class RolloutFolder:
    """Samples of some steps of reinforcement learning.

    Attributes:
      path: where they lie, a file for each step.
    """

    path: pathlib.Path

    def step(self, step: int) -> pathlib.Path:
        """Those of one step, rows of `tracking.sample_rows`."""
        return self.path / f"step_{step}.jsonl"

    def steps(self) -> dict[int, pathlib.Path]:
        """Every file by its step, in order of step; files of other names are nobody's."""
        found = {}
        for path in self.path.glob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and path == self.step(int(number)) and not path.is_dir():
                found[int(number)] = path
        return dict(sorted(found.items()))


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """What a run leaves.

    Attributes:
      path: <output>/<name>/seed<seed>.
    """

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> pathlib.Path:
        """Every setting, one a line."""
        return self.path / "config.txt"

    @property
    def lock(self) -> pathlib.Path:
        """Held by the run while it is at work."""
        return self.path / "lock"

    @property
    def model(self) -> pathlib.Path:
        """What an export needs beside the weights: config.json, the tokenizer's files."""
        return self.path / "model"

    @property
    def trained_model(self) -> pathlib.Path:
        """A trained reward or cost model as a Hugging Face directory."""
        return self.path / "trained_model"

    @property
    def report(self) -> pathlib.Path:
        """The whole run on one page."""
        return self.path / "report.html"

    def samples(self, when: str) -> pathlib.Path:
        """Answers of an evaluation that the report shows, "before" or "after"."""
        return self.path / f"samples_{when}.json"

    @property
    def profile(self) -> pathlib.Path:
        """Traces of single steps."""
        return self.path / "profile"

    @property
    def rollouts(self) -> RolloutFolder:
        """Samples that were trained on."""
        return RolloutFolder(self.path / "rollouts")

    @property
    def sft(self) -> StageFolder:
        """Supervised fine-tuning."""
        return StageFolder(self.path / "sft")

    @property
    def rl(self) -> StageFolder:
        """Reinforcement learning."""
        return StageFolder(self.path / "rl")

    @property
    def preference(self) -> StageFolder:
        """Training on pairs."""
        return StageFolder(self.path / "preference")


@dataclasses.dataclass(frozen=True)
class EvaluationFolder:
    """What an evaluation without training leaves.

    Attributes:
      path: <out>, or evaluations/<model>-<checksum>.
    """

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def settings(self) -> pathlib.Path:
        """What was asked, of which model."""
        return self.path / "settings.json"

    @property
    def samples(self) -> pathlib.Path:
        """A row for each answer, of `tracking.sample_rows`."""
        return self.path / "samples.jsonl"

    @property
    def results(self) -> pathlib.Path:
        """Statistics of each set."""
        return self.path / "results.json"

    @property
    def page(self) -> pathlib.Path:
        """Results and some answers, to look at."""
        return self.path / "samples.html"
