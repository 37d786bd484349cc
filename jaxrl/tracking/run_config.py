"""Settings of the length, the folder and the checkpoints of a run."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import NAME, PATH, at_least, check_fields, count, steps
from jaxrl.tracking.divergence import DivergenceConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The length, the folder and the checkpoints of a run.

    Attributes:
      output: parent folder of runs; a run is in <output>/<name>/seed<seed>.
      num_steps: number of rollout steps.
      save_every: number of steps between checkpoints; the last step is always saved.
      keep_checkpoints: number of newest checkpoints to keep. After a divergence one from before is kept too.
      divergence: thresholds of metrics that detect divergence.
      resume: what a command does in the folder of an earlier run. "auto" continues from the newest intact
        checkpoint; it refuses a stage that has begun and has no intact checkpoint, or has lost metric rows.
        "or_restart" starts such a stage again and moves its old files aside. "accept_lost_rows" continues
        without the lost rows. "never" refuses a folder that contains a run.
      stop_within_s: seconds between SIGTERM or Ctrl-C and the end of the run; a step that takes longer is
        abandoned. A checkpoint that is being saved at that time is completed first.
      wandb_project: Weights & Biases project to log to (needs the extra `wandb`); "" disables it.
      rollouts_every: number of steps between saved samples (`jaxrl browse` shows them). Samples of the first
        step are saved too. 0 saves none.
      rollouts_prompts: number of prompts per saved step, each with all of its samples; 0 saves all.
    """

    output: Annotated[str, PATH] = "runs"
    num_steps: Annotated[int, steps(1)] = 100
    save_every: Annotated[int, steps(1)] = 10
    keep_checkpoints: Annotated[int, count(1)] = 2
    divergence: DivergenceConfig = dataclasses.field(default_factory=DivergenceConfig)
    resume: Literal["auto", "or_restart", "accept_lost_rows", "never"] = "auto"
    wandb_project: Annotated[str, NAME] = ""
    rollouts_every: Annotated[int, steps(0)] = 10
    stop_within_s: Annotated[float, at_least(0.1, at_most=86_400)] = 20.0
    rollouts_prompts: Annotated[int, count(0)] = 8

    def __post_init__(self):
        check_fields(self)
