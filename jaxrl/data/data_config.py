"""Settings of the data: the sources of problems, the format of prompts, and the tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypeVar

from jaxrl.checks import (
    NAME,
    PATH,
    PROSE,
    at_least,
    between,
    positive,
    settings,
    token_count,
)
from jaxrl.data.chat import RESERVED_VARIABLES
from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat, check_template
from jaxrl.errors import UserError
from jaxrl.user_code import names_function

# Distance between the seeds of a procedural task. Some tasks seed NumPy, which accepts 32 bits, so there are
# 4,294 seeds.
MAX_TASK_SIZE = 1_000_000
MAX_TASK_SEED = 2**32 // MAX_TASK_SIZE - 1

MAX_ROWS = 10**9
"""Limit for the rows of a file. The largest published data sets of problems have some millions."""


@settings
class EvaluationSourceConfig:
    """A source of problems: a file, a function that generates them, or a procedural task of reasoning-gym."""

    source: Annotated[str, NAME] = ""
    """Name of the data set in metrics; "" takes the field data_source of the rows, or else the
    name of the file, the function or the task.
    """
    path: Annotated[str, PATH] = ""
    """JSONL, JSON, Parquet or Arrow file, or a folder of these; or a function that generates
    rows, "package.module:function" or "path/to/file.py:function"; "" takes the task instead.
    """
    prompt_field: Annotated[str, NAME] = ""
    answer_field: Annotated[str, NAME] = ""
    """Fields of the problem and of its ground truth, with dots for a field inside another; ""
    recognises them.
    """
    solution_field: Annotated[str, NAME] | None = None
    """Field with worked solutions, for supervised training; None recognises one, if there is."""
    task: Annotated[str, NAME] = ""
    """Name of a reasoning-gym data set."""
    size: Annotated[int, at_least(0, at_most=MAX_ROWS)] = 0
    """Number of problems, from the first on. 0 uses all problems of a file. A task or a
    function then generates problems without end, when they are drawn; evaluation needs a size.
    """
    seed: Annotated[int, between(0, MAX_TASK_SEED)] = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Seed of a task or a function, and its own settings."""
    grader: Annotated[str, PATH] = ""
    grader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Grader of its answers, as reward.grader; "" takes that one."""
    template: Annotated[str, PROSE] = ""
    """Text around its problems; "" takes data.template."""
    chat: bool | None = None
    """Whether the chat template renders its problems; None takes data.chat."""

    def __post_init__(self):
        if self.grader_options and not self.grader:
            raise ValueError(
                "grader_options are those of a grader of its own, and grader is empty; set grader, or set "
                "reward.grader_options"
            )
        if self.template:
            check_template(self.template)

    @property
    def is_named(self) -> bool:
        """Whether the source names a file, a function or a task."""
        return bool(self.path or self.task)

    @property
    def has_function(self) -> bool:
        """Whether the path names a function that generates rows."""
        return names_function(self.path)

    @property
    def is_endless(self) -> bool:
        """Whether problems are generated without end."""
        return (bool(self.task) or self.has_function) and not self.size


@settings
class SourceConfig(EvaluationSourceConfig):
    """A source of training problems; `EvaluationSourceConfig` documents the inherited settings."""

    weight: Annotated[float, positive(at_most=MAX_ROWS)] = 1.0
    """Share of its prompts among the training sources, relative to theirs."""


@settings
class CurriculumConfig:
    """How often problems are drawn that the policy always or never solves."""

    by: Literal["off", "pass_rate"] = "off"
    """"off" draws every problem once per epoch. "pass_rate" mostly skips problems whose next
    group of answers is likely to be all right or all wrong, judged by the groups graded in the
    run.
    """

    def check_rewards(self, grader_weight: float) -> None:
        """Raises UserError if problems are drawn by their pass rates, and no grader decides what passes."""
        if self.by == "pass_rate" and not grader_weight:
            raise UserError(
                "data.curriculum.by 'pass_rate' goes by which answers are right, and reward.grader_weight 0 "
                "says that this run rewards something else; set it above 0, or data.curriculum.by to off"
            )


@settings
class DataConfig:
    """Problems and prompts."""

    train: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    evaluation: EvaluationSourceConfig = dataclasses.field(default_factory=EvaluationSourceConfig)
    """Problems for training and for evaluation. Training leaves out evaluation problems. A run
    without evaluation problems reports no accuracy.
    """
    sources: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    evaluations: dict[str, EvaluationSourceConfig] = dataclasses.field(default_factory=dict)
    """Further sources of both kinds, by names of your own."""
    template: Annotated[str, PROSE] = "{prompt}"
    """Text around a problem, with "{prompt}" in its place. The default keeps the words that a
    file has around each problem.
    """
    chat: bool = False
    """Whether the tokenizer's chat template renders a problem, as one user message. It always
    renders conversations.
    """
    system_prompt: Annotated[str, PROSE] = ""
    """System message of every conversation; without chat, a line before the prompt."""
    chat_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further variables of the chat template, such as {"enable_thinking": False}."""
    answer_prefix: Annotated[str, PROSE] = ""
    """Text at the end of the prompt that every response continues, such as "<think>\n"."""
    max_prompt_tokens: Annotated[int, token_count(1)] = 64
    """Largest number of tokens of a prompt, template included."""
    overlong: Literal["drop", "left", "right", "middle", "error"] = "drop"
    """Treatment of longer prompts: leave out, cut (left, right, middle), or refuse."""
    bad_rows: Literal["drop", "error"] = "drop"
    """Treatment of rows that cannot be used, and of ground truths that their grader cannot
    read: leave out and count, or refuse.
    """
    duplicates: Literal["drop", "keep"] = "drop"
    """Treatment of a problem that a file repeats: leave out and count, or keep. Generated
    problems are always kept.
    """
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)
    """Training problems that are drawn rarely."""

    def __post_init__(self):
        check_template(self.template)
        taken = RESERVED_VARIABLES & self.chat_options.keys()
        if taken:
            raise ValueError(
                f"chat_options.{min(taken)} is set by the program; name other variables of the chat template"
            )

    @property
    def training_sources(self) -> dict[str, SourceConfig]:
        """Every training source, by the name of its setting."""
        # A recipe may name all of its sources in `sources`.
        first = {"data.train": self.train} if self.train.is_named or not self.sources else {}
        return first | _further("sources", self.sources)

    @property
    def evaluation_sources(self) -> dict[str, SourceConfig]:
        """Every evaluation source, by the name of its setting; empty if none is named."""
        first = {"data.evaluation": self.evaluation} if self.evaluation.is_named else {}
        sources = first | _further("evaluations", self.evaluations)
        return {name: SourceConfig(**vars(source)) for name, source in sources.items()}

    def format_of(self, source: SourceConfig, own_template: str = "") -> PromptFormat:
        """Returns the prompt format of a source.

        Args:
          source: Settings of the source.
          own_template: Words that its file has around every problem; kept unless a template is set.
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


_Source = TypeVar("_Source", bound=EvaluationSourceConfig)


def _further(group: str, sources: dict[str, _Source]) -> dict[str, _Source]:
    return {f"data.{group}.{name}": source for name, source in sources.items()}


@settings
class TokenizerConfig:
    """The tokenizer."""

    path: Annotated[str, PATH] = ""
    """Hugging Face tokenizer directory; "" trains a small tokenizer on the problems."""
    vocab_size: Annotated[int, between(258, 2**20)] = 320
    """Largest vocabulary of the small tokenizer, at least 258."""
