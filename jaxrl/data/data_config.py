"""Settings of the data: where problems come from, how they become prompts, and the tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.checks import (
    NAME,
    PATH,
    PROSE,
    at_least,
    between,
    check_fields,
    positive,
    token_count,
)
from jaxrl.data.chat import RESERVED_VARIABLES
from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat, check_template
from jaxrl.data.records import MAX_TASK_SEED, MAX_TASK_SIZE, check_task_options
from jaxrl.errors import UserError
from jaxrl.user_code import names_function

MAX_ROWS = 10**9
"""Of a file; the largest published data sets of problems have some millions."""


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where problems come from: a file, a function that makes them, or a procedural task of reasoning-gym.

    Attributes:
      source: name under which metrics are kept; "" takes what the rows say (data_source), else the name of
        the file, the function or the task.
      path: JSONL, JSON, Parquet, Arrow or ArrayRecord, or a folder of these; or a function that makes rows,
        "package.module:function" or "path/to/file.py:function"; "" takes the task instead.
      prompt_field, answer_field: its fields, dotted where one lies in another; "" recognises them.
      solution_field: with worked solutions, for supervised training; None takes one if there is one.
      task: reasoning-gym data set.
      size, seed, options: of a task or a function: how many problems, its seed and its own settings. With a
        size of 0 they are made without end, as they are drawn; what is evaluated with needs a number.
      limit: use only the first so many problems; 0 uses all.
      weight: how often its prompts are drawn, compared with other sources to train on; for evaluation it
        means nothing.
      grader, grader_options: who reads its answers, as reward.grader; "" takes that one.
      template: text around its problems; "" takes data.template.
      chat: its problems go through the chat template; None takes data.chat.
    """

    source: Annotated[str, NAME] = ""
    path: Annotated[str, PATH] = ""
    prompt_field: Annotated[str, NAME] = ""
    answer_field: Annotated[str, NAME] = ""
    solution_field: Annotated[str, NAME] | None = None
    task: Annotated[str, NAME] = ""
    size: Annotated[int, at_least(0, at_most=MAX_TASK_SIZE)] = 0
    seed: Annotated[int, between(0, MAX_TASK_SEED)] = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit: Annotated[int, at_least(0, at_most=MAX_ROWS)] = 0
    weight: Annotated[float, positive(at_most=MAX_ROWS)] = 1.0
    grader: Annotated[str, PATH] = ""
    grader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    template: Annotated[str, PROSE] = ""
    chat: bool | None = None

    def __post_init__(self):
        check_fields(self)
        if self.grader_options and not self.grader:
            raise ValueError(
                "grader_options are those of a grader of its own, and grader is empty; set grader, or set "
                "reward.grader_options"
            )
        check_task_options(self.options)
        if self.template:
            check_template(self.template)

    @property
    def is_named(self) -> bool:
        """There are problems here."""
        return bool(self.path or self.task)

    @property
    def has_function(self) -> bool:
        """The path is a function's that makes rows."""
        return names_function(self.path)

    @property
    def num_made(self) -> int:
        """Problems that a task or a function makes; 0 for no end."""
        return min(filter(None, (self.size, self.limit)), default=0)

    @property
    def is_endless(self) -> bool:
        """Problems are made without end."""
        return (bool(self.task) or self.has_function) and not self.num_made


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """How often problems are drawn that the policy always or never solves.

    Attributes:
      by: "off" draws every problem once per epoch. "pass_rate" mostly skips problems whose next group of
        answers is likely to be all right or all wrong, judged by the groups graded in the run.
    """

    by: Literal["off", "pass_rate"] = "off"

    def __post_init__(self):
        check_fields(self)

    def check_rewards(self, grader_weight: float) -> None:
        """Raises UserError if problems are drawn by right and wrong, and no grader tells them apart."""
        if self.by == "pass_rate" and not grader_weight:
            raise UserError(
                "data.curriculum.by 'pass_rate' goes by which answers are right, and reward.grader_weight 0 "
                "says that this run rewards something else; set it above 0, or data.curriculum.by to off"
            )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts.

    Attributes:
      train, evaluation: problems to train on and to evaluate with; no evaluation question is trained on. A
        run without problems to evaluate with reports no accuracy.
      sources, evaluations: further ones, by names of your own.
      template: text around a problem, which stands for "{prompt}"; as it is here, words that a file has
        around each problem stay there.
      chat: send the prompt through the tokenizer's chat template, as one user message; prompts that are
        conversations always go through it.
      system_prompt: what a conversation begins with; without chat, a line before the prompt.
      chat_options: further variables of the chat template, such as {"enable_thinking": False}.
      answer_prefix: text that every response starts after, such as "<think>\\n"; it belongs to the prompt.
      max_prompt_tokens: longest prompt, template included.
      overlong: what happens to longer ones: left out, cut (from the left, from the right, in the middle), or
        refused.
      bad_rows: rows that cannot be used, and truths that their grader cannot read: left out and counted, or
        refused.
      duplicates: a problem that stands in a file again: left out and counted, or kept. What tasks draw twice
        is kept.
      curriculum: problems to train on that are drawn rarely.
    """

    train: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    evaluation: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    sources: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    evaluations: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    template: Annotated[str, PROSE] = "{prompt}"
    chat: bool = False
    system_prompt: Annotated[str, PROSE] = ""
    chat_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    answer_prefix: Annotated[str, PROSE] = ""
    max_prompt_tokens: Annotated[int, token_count(1)] = 64
    overlong: Literal["drop", "left", "right", "middle", "error"] = "drop"
    bad_rows: Literal["drop", "error"] = "drop"
    duplicates: Literal["drop", "keep"] = "drop"
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)

    def __post_init__(self):
        check_fields(self)
        check_template(self.template)
        taken = RESERVED_VARIABLES & self.chat_options.keys()
        if taken:
            raise ValueError(
                f"chat_options.{min(taken)} is set by the program; name other variables of the chat template"
            )

    @property
    def training_sources(self) -> dict[str, SourceConfig]:
        """Every source to train on, by the name of its setting."""
        # A recipe may have all of its sources in the group.
        first = {"data.train": self.train} if self.train.is_named or not self.sources else {}
        return first | _further("sources", self.sources)

    @property
    def evaluation_sources(self) -> dict[str, SourceConfig]:
        """Every source to evaluate with, by the name of its setting; none where none is named."""
        first = {"data.evaluation": self.evaluation} if self.evaluation.is_named else {}
        return first | _further("evaluations", self.evaluations)

    def format_of(self, source: SourceConfig, own_template: str = "") -> PromptFormat:
        """How problems of a source become prompts.

        Args:
          source: its settings.
          own_template: words that its file has around every problem; they stay where no others are set.
        """
        is_set = self.template != PLAIN_FORMAT.template
        template = self.template if is_set or not own_template else own_template
        return PromptFormat(
            template=source.template or template,
            chat=self.chat if source.chat is None else source.chat,
            system_prompt=self.system_prompt,
            chat_options=self.chat_options,
            answer_prefix=self.answer_prefix,
        )


def _further(group: str, sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
    return {f"data.{group}.{name}": source for name, source in sources.items()}


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer.

    Attributes:
      path: a Hugging Face tokenizer directory; "" trains a small one on the task's own text.
      vocab_size: upper bound of the small one, at least 258.
    """

    path: Annotated[str, PATH] = ""
    vocab_size: Annotated[int, between(258, 2**20)] = 320

    def __post_init__(self):
        check_fields(self)
