"""Settings of what a run leaves behind."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import NAME, PATH, at_least, check_fields, count, steps
from jaxrl.tracking.collapse import CollapseConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run leaves behind and how long it goes on.

    Attributes:
      output: folder under which each run has its own, <output>/<name>/seed<seed>.
      num_steps: rollout steps.
      save_every: steps between checkpoints; the last step is always saved.
      keep_checkpoints: how many of the newest stay, besides one from before a collapse.
      collapse: what counts as one.
      resume: "auto" goes on from the newest intact checkpoint, and refuses a stage that has begun and has
        none left, or has lost rows of its metrics; "or_restart" begins a stage without a checkpoint again,
        with what is there moved aside; "accept_lost_rows" goes on without the lost rows; "never" refuses a
        folder that holds a run.
      stop_within_s: seconds after SIGTERM or Ctrl-C by which the run has ended, unless it is saving a
        checkpoint by then. A step that takes longer is given up.
      wandb_project: also log to this wandb project (extra `wandb`); "" does not.
      rollouts_every: steps between two whose samples are kept to be looked at (`jaxrl browse`); those of the
        first step are kept too. 0 keeps none.
      rollouts_prompts: how many prompts of such a step are kept, with all their samples; 0 keeps all.
    """

    output: Annotated[str, PATH] = "runs"
    num_steps: Annotated[int, steps(1)] = 100
    save_every: Annotated[int, steps(1)] = 10
    keep_checkpoints: Annotated[int, count(1)] = 2
    collapse: CollapseConfig = dataclasses.field(default_factory=CollapseConfig)
    resume: Literal["auto", "or_restart", "accept_lost_rows", "never"] = "auto"
    wandb_project: Annotated[str, NAME] = ""
    rollouts_every: Annotated[int, steps(0)] = 10
    stop_within_s: Annotated[float, at_least(0.1, at_most=86_400)] = 20.0
    rollouts_prompts: Annotated[int, count(0)] = 8

    def __post_init__(self):
        check_fields(self)
