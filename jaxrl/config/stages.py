"""Settings of the stages around reinforcement learning: supervised, pairs, evaluation."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from jaxrl.checks import NAME, PATH, check_fields, count, steps
from jaxrl.roles.optim_config import StageOptimConfig
from jaxrl.rollout.sampling import GREEDY_OR_TEMPERATURE, MIN_P, TOP_K, TOP_P


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised learning before reinforcement learning, or alone: answers to imitate.

    Attributes:
      num_steps: optimiser updates; 0 skips the stage.
      path: JSONL file of conversations, or of questions with answers, as of
        `data.demonstrations.read_demonstrations`; "" takes the training problems' written solutions.
      prompt_field, response_field, messages_field: its fields. Of messages all that the assistant says is
        trained on.
      run: name of the run whose folder keeps the stage, so that several can start from one; "" is this run.
      examples_per_step: solutions of one update.
      optim: of this stage.
      save_every: steps between checkpoints.
      log_every: steps between rows of the log.
    """

    num_steps: Annotated[int, steps(0)] = 0
    path: Annotated[str, PATH] = ""
    prompt_field: Annotated[str, NAME] = "prompt"
    response_field: Annotated[str, NAME] = "response"
    messages_field: Annotated[str, NAME] = "messages"
    run: Annotated[str, NAME] = ""
    examples_per_step: Annotated[int, count(1)] = 32
    optim: StageOptimConfig = dataclasses.field(default_factory=StageOptimConfig)
    save_every: Annotated[int, steps(1)] = 200
    log_every: Annotated[int, steps(1)] = 1

    def __post_init__(self):
        check_fields(self)
        if self.run and not self.num_steps:
            raise ValueError(
                f"run {self.run!r} names a warm start to begin with, and num_steps 0 skips it; set num_steps "
                "as that run has it, or leave run empty"
            )


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Learning from pairs of answers, of which one was chosen: reward models, cost models, DPO.

    Its optimiser is `optim`, its updates `run.num_steps`, and it measures every `evaluation.every` steps.

    Attributes:
      path: JSONL file of pairs, as of `data.preferences.read_preferences`; "" makes pairs of the problems of
        `data` instead, to train on and to evaluate with.
      evaluation_path: JSONL file of pairs to measure the accuracy on; "" measures none, where path is set.
      made: how, a name of `data.made_pairs.MADE_PAIRS`.
      margin_field: field of the files with margins; "" has none.
      harm_fields: the two fields that say which answer does harm; () has none.
      loss, options: a name of `algos.preference_losses.PREFERENCE_LOSSES`, and its keywords: "bradley_terry"
        or "cost_preference" of a model that scores, "dpo" or "ipo" of a policy.
      pairs_per_step: of one update.
      evaluation_pairs: how many pairs the accuracy is measured on.
    """

    path: Annotated[str, PATH] = ""
    evaluation_path: Annotated[str, PATH] = ""
    made: Annotated[str, NAME] = "right_or_wrong"
    margin_field: Annotated[str, NAME] = ""
    harm_fields: tuple[Annotated[str, NAME], ...] = ()
    loss: Annotated[str, NAME] = "bradley_terry"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    pairs_per_step: Annotated[int, count(1)] = 16
    evaluation_pairs: Annotated[int, count(1)] = 256

    def __post_init__(self):
        check_fields(self)
        if self.evaluation_path and not self.path:
            raise ValueError(
                f"evaluation_path {self.evaluation_path!r} is a file of pairs, and path names none to train "
                "on; set path, or leave evaluation_path empty to make pairs of problems"
            )
        if len(self.harm_fields) not in (0, 2):
            raise ValueError(
                f"harm_fields {self.harm_fields}: name the fields of the chosen and of the rejected answer"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the evaluation problems.

    Attributes:
      every: steps between evaluations; there is also one before the first step and one after the last.
      num_samples: answers to each problem; accuracy is their mean (avg@n).
      temperature: 0 is greedy.
      top_k, top_p, min_p: which tokens may be drawn, as of `rollout.sampling.Truncation`.
    """

    every: Annotated[int, steps(1)] = 10
    num_samples: Annotated[int, count(1)] = 8
    temperature: Annotated[float, GREEDY_OR_TEMPERATURE] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    top_p: Annotated[float, TOP_P] = 1.0
    min_p: Annotated[float, MIN_P] = 0.0

    def __post_init__(self):
        check_fields(self)
