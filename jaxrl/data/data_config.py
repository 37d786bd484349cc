"""Settings of the data: where problems come from, how they become prompts, and the tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.checks import SEED, at_least, between, check_fields, token_count
from jaxrl.data.messages import check_template
from jaxrl.data.records import MAX_TASK_SEED, MAX_TASK_SIZE, check_task_options


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where problems come from: a JSONL file, or a procedural task of reasoning-gym.

    Attributes:
      source: name under which metrics are kept.
      path: JSONL file; "" takes the task instead.
      prompt_field, answer_field, solution_field: its fields; solutions are for supervised training only.
      task, size, seed, options: reasoning-gym data set, how many problems, its seed and its own settings.
      limit: use only the first so many problems; 0 uses all.
    """

    source: str = ""
    path: str = ""
    prompt_field: str = "problem"
    answer_field: str = "answer"
    solution_field: str | None = None
    task: str = ""
    size: Annotated[int, at_least(0, at_most=MAX_TASK_SIZE)] = 0
    seed: Annotated[int, between(0, MAX_TASK_SEED)] = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit: Annotated[int, at_least(0)] = 0

    def __post_init__(self):
        check_fields(self)
        check_task_options(self.options)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts.

    Attributes:
      train, evaluation: problems to train on and to evaluate with; no evaluation question is trained on.
      template: text around a problem, which stands for "{prompt}".
      chat: send the prompt through the tokenizer's chat template, as one user message.
      max_prompt_tokens: longest prompt, template included.
      overlong: what happens to longer ones: left out, cut from the left, or refused.
      shuffle_seed: of the order of training prompts; None takes the run's seed.
    """

    train: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    evaluation: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    template: str = "{prompt}"
    chat: bool = False
    max_prompt_tokens: Annotated[int, token_count(1)] = 64
    overlong: Literal["drop", "left", "error"] = "drop"
    shuffle_seed: Annotated[int, SEED] | None = None

    def __post_init__(self):
        check_fields(self)
        check_template(self.template)


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer.

    Attributes:
      path: a Hugging Face tokenizer directory; "" trains a small one on the task's own text.
      vocab_size: upper bound of the small one, at least 258.
    """

    path: str = ""
    vocab_size: Annotated[int, between(258, 2**20)] = 320

    def __post_init__(self):
        check_fields(self)
