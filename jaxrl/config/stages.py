"""Settings of supervised learning, of learning from pairs, and of evaluation."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from jaxrl.checks import FOLDER_NAME, NAME, PATH, count, settings, steps
from jaxrl.roles.optimizer import StageOptimConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import GREEDY_OR_TEMPERATURE, TOP_P, truncation_of
from jaxrl.user_code import names_function


@settings
class SftConfig:
    """Supervised learning (SFT), before reinforcement learning or by itself."""

    num_steps: Annotated[int, steps(0)] = 0
    """Number of optimiser updates; 0 skips the stage."""
    path: Annotated[str, PATH] = ""
    """JSONL file of conversations, or of questions with answers, in the format of
    `data.demonstrations.read_demonstrations`; "" uses the written solutions of the training
    problems.
    """
    run: Annotated[str, FOLDER_NAME] = ""
    """Name of the run whose folder holds the result, so that several runs can share it; "" is
    this run.
    """
    examples_per_step: Annotated[int, count(1)] = 32
    """Number of examples per update."""
    optim: StageOptimConfig = dataclasses.field(default_factory=StageOptimConfig)
    """Optimiser of this stage."""
    save_every: Annotated[int, steps(1)] = 200
    """Number of steps between checkpoints."""
    log_every: Annotated[int, steps(1)] = 1
    """Number of steps between rows of the log."""

    def __post_init__(self):
        if self.run and not self.num_steps:
            raise ValueError(
                f"run {self.run!r} names an SFT stage to begin with, and num_steps 0 skips it; set num_steps "
                "as that run has it, or leave run empty"
            )


@settings
class PreferenceConfig:
    """Learning from pairs of answers, one chosen and one rejected: reward models, cost models, DPO.

    It uses the optimiser `optim`, runs for `run.num_steps` updates and measures its accuracy every
    `evaluation.every` steps.
    """

    path: Annotated[str, PATH] = ""
    """JSONL file of pairs, in the format of `data.preferences.read_preferences`; or a function
    that makes pairs of the problems of `data`, for training and for evaluation,
    "path/to/file.py:function": it takes `data.Record`s and returns `data.Preference`s.
    """
    evaluation_path: Annotated[str, PATH] = ""
    """JSONL file of evaluation pairs. With "" nothing is evaluated if `path` is a file."""
    loss: Annotated[str, NAME] = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name of `algos.preference_losses.PREFERENCE_LOSSES`, and its keyword arguments.
    "bradley_terry" and "cost_preference" train a scalar model, "dpo" and "ipo" a policy. ""
    learns from no pairs.
    """
    pairs_per_step: Annotated[int, count(1)] = 16
    """Number of pairs per update."""

    def __post_init__(self):
        if self.evaluation_path and not self.path:
            raise ValueError(
                f"evaluation_path {self.evaluation_path!r} is a file of pairs, and path names none to train "
                "on; set path"
            )

    @property
    def makes_pairs(self) -> bool:
        """Whether `path` names a function."""
        return not self.path or names_function(self.path)


@settings
class EvaluationConfig:
    """Evaluation of the policy on the evaluation problems."""

    every: Annotated[int, steps(1)] = 10
    """Number of steps between evaluations. One more runs before the first step and after the
    last.
    """
    num_samples: Annotated[int, count(1)] = 8
    """Number of answers per problem; accuracy is their mean (avg@n)."""
    temperature: Annotated[float, GREEDY_OR_TEMPERATURE] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, TOP_P] = 1.0
    """Limit on the tokens that can be drawn, as in `rollout.sampling.Truncation`."""

    def sampling(self, training: SamplingOptions, *, step: int) -> SamplingOptions:
        """Options of sampling answers to the evaluation prompts, with the sampling keys of `step`.

        Stop strings belong to the task, so they are those of training.
        """
        return dataclasses.replace(
            training,
            num_samples=self.num_samples,
            step=step,
            temperature=self.temperature,
            truncation=truncation_of(top_k=0, top_p=self.top_p),
            keeps_routes=False,
        )
