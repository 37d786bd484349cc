"""Settings of the data: the sources of problems, the format of prompts, and the tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.checks import (
    NAME,
    PATH,
    PROSE,
    at_least,
    between,
    one_of,
    positive,
    settings,
    token_count,
)
from jaxrl.data.chat import RESERVED_VARIABLES
from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat, check_template
from jaxrl.user_code import names_function

# Distance between the seeds of a procedural task. Some tasks seed NumPy, which accepts 32 bits, so there are
# 4,294 seeds.
MAX_TASK_SIZE = 1_000_000
MAX_TASK_SEED = 2**32 // MAX_TASK_SIZE - 1

TASK = "reasoning-gym:"
"""What a path to a data set of reasoning-gym begins with."""

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
    """JSONL, JSON, CSV, TSV, Parquet or Arrow file, or a folder of these; or a function that generates
    rows, "package.module:function" or "path/to/file.py:function"; or a data set of reasoning-gym,
    "reasoning-gym:NAME".
    """
    fields: dict[Annotated[str, one_of("prompt", "answer", "solution")], Annotated[str, NAME]] = (
        dataclasses.field(default_factory=dict)
    )
    """Fields of the rows, with dots for a field inside another: {"prompt": the problem, "answer":
    its ground truth, "solution": a worked solution, for supervised training}. Those left out are
    recognised by their names.
    """
    size: Annotated[int, at_least(0, at_most=MAX_ROWS)] = 0
    """Number of problems, from the first on. 0 uses all problems of a file. A task or a
    function then generates problems without end, when they are drawn; evaluation needs a size.
    """
    seed: Annotated[int, between(0, MAX_TASK_SEED)] = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Seed of a task or a function, and its own settings."""
    grader: Annotated[str, PATH] = ""
    """Grader of its answers, as reward.grader, without options; "" takes that one with its options.
    """

    @property
    def task(self) -> str:
        """Name of the reasoning-gym data set; "" for a file or a function."""
        return self.path.removeprefix(TASK) if self.path.startswith(TASK) else ""

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
    sampler: Annotated[str, PATH] = ""
    """Class that chooses the next training prompt and learns from every graded group, a
    `data.curriculum.CurriculumSampler`: "path/to/file.py:Class" or "package.module:Class". ""
    takes every prompt once an epoch, in a random order.
    """
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
    max_prompt_tokens: Annotated[int, token_count(1)] = 64
    """Largest number of tokens of a prompt, template included."""
    overlong: Literal["drop", "left", "right", "middle", "error"] = "drop"
    """Treatment of longer prompts: leave out, cut (left, right, middle), or refuse."""

    def __post_init__(self):
        check_template(self.template)
        taken = RESERVED_VARIABLES & self.chat_options.keys()
        if taken:
            raise ValueError(
                f"chat_options.{min(taken)} is set by the program; name other variables of the chat template"
            )
        for name, source in self.training_sources.items() if self.sampler else ():
            if source.is_endless:
                raise ValueError(
                    f"sampler {self.sampler!r} chooses among problems that are there, and {name} generates "
                    f"its problems without end; set {name}.size"
                )
            if source.weight != 1:
                raise ValueError(
                    f"sampler {self.sampler!r} chooses the prompts of all sources, so {name}.weight "
                    f"{source.weight:g} has no effect; set it to 1"
                )

    @property
    def training_sources(self) -> dict[str, SourceConfig]:
        """Every training source, by the name of its setting."""
        # A recipe may name all of its sources in `sources`.
        first = {"data.train": self.train} if self.train.path or not self.sources else {}
        return first | {f"data.sources.{name}": source for name, source in self.sources.items()}

    @property
    def evaluation_sources(self) -> dict[str, SourceConfig]:
        """Every evaluation source, by the name of its setting; empty if none is named."""
        first = {"data.evaluation": self.evaluation} if self.evaluation.path else {}
        further = {f"data.evaluations.{name}": s for name, s in self.evaluations.items()}
        sources = first | further
        # With the weight of training, which nothing reads here, so that one type serves both.
        return {name: SourceConfig(**vars(source)) for name, source in sources.items()}

    def format_of(self, own_template: str = "") -> PromptFormat:
        """Returns the prompt format of a source.

        Args:
          own_template: Words that its file has around every problem; kept unless a template is set.
        """
        is_set = self.template != PLAIN_FORMAT.template
        return PromptFormat(
            template=self.template if is_set or not own_template else own_template,
            chat=self.chat,
            system_prompt=self.system_prompt,
            chat_options=self.chat_options,
        )


@settings
class TokenizerConfig:
    """The tokenizer."""

    path: Annotated[str, PATH] = ""
    """Hugging Face tokenizer directory; "" trains a small one on the problems, of at
    most `model.vocab_size` tokens.
    """
    chat_template: Annotated[str, PATH] = ""
    """File with a chat template in place of the tokenizer's own, for example one with tools; or the name of
    one of its own, if it has several. "" keeps it, and takes "tool_use" for chats with tools.
    """
