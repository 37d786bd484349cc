"""Settings of what a run leaves behind."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import NAME, check_fields, count, steps
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
        none left; "or_restart" begins such a stage again, with what is there moved aside; "never" refuses a
        folder that holds a run.
      wandb_project: also log to this wandb project (extra `wandb`); "" does not.
      rollouts_every: steps between two whose samples are kept to be looked at (`jaxrl browse`); those of the
        first step are kept too. 0 keeps none.
      rollouts_prompts: how many prompts of such a step are kept, with all their samples; 0 keeps all.
    """

    output: str = "runs"
    num_steps: Annotated[int, steps(1)] = 100
    save_every: Annotated[int, steps(1)] = 10
    keep_checkpoints: Annotated[int, count(1)] = 2
    collapse: CollapseConfig = dataclasses.field(default_factory=CollapseConfig)
    resume: Literal["auto", "or_restart", "never"] = "auto"
    wandb_project: Annotated[str, NAME] = ""
    rollouts_every: Annotated[int, steps(0)] = 10
    rollouts_prompts: Annotated[int, count(0)] = 8

    def __post_init__(self):
        check_fields(self)
