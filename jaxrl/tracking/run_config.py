"""Settings of the length, the folder and the checkpoints of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl.checks import NAME, PATH, Rule, at_least, count, settings, steps

LOGGERS = ("tensorboard", "wandb", "trackio")
"""Names of loggers (`tracking.loggers`). Each but TensorBoard needs the extra of its name."""


def split_logger(entry: str) -> tuple[str, str]:
    """The logger and the project of an entry of `run.loggers`; "" if it names no project."""
    name, _, project = entry.partition(":")
    return name, project


class _LoggerRule(Rule):
    """Accepts entries of `run.loggers`."""

    def fault(self, value: str) -> str | None:
        """What is wrong with `value`, and the remedy; None if the value is valid."""
        name, colon, project = value.partition(":")
        if name not in LOGGERS or (colon and (name == "tensorboard" or not project)):
            return f"is no logger; use {', '.join(LOGGERS)}, or wandb:PROJECT"
        return NAME.fault(project)


@settings
class RunConfig:
    """The length, the folder and the checkpoints of a run."""

    output: Annotated[str, PATH] = "runs"
    """Parent folder of runs; a run is in <output>/<name>/seed<seed>."""
    num_steps: Annotated[int, steps(0)] = 100
    """Number of rollout steps, or of updates on pairs. 0 trains the supervised stage alone."""
    save_every: Annotated[int, steps(1)] = 10
    """Number of steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int, count(1)] = 2
    """Number of newest checkpoints to keep."""
    resume: Literal["auto", "or_restart", "accept_lost_rows", "never"] = "auto"
    """What a command does in the folder of an earlier run. "auto" continues from the newest
    intact checkpoint; it refuses a stage that has begun and has no intact checkpoint, or has
    lost metric rows. "or_restart" starts such a stage again and moves its old files aside.
    "accept_lost_rows" continues without the lost rows. "never" refuses a folder that contains a
    run.
    """
    loggers: tuple[Annotated[str, _LoggerRule()], ...] = ("tensorboard",)
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

    def __post_init__(self):
        names = [split_logger(entry)[0] for entry in self.loggers]
        if len(set(names)) < len(names):
            raise ValueError(f"loggers {self.loggers} has a logger twice; name each once")
