"""Reads the problems of a run from all sources of its config, and validates the ground truths."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.data.messages import PromptFormat
from jaxrl.data.prompt_encoding import EncodedPrompts, PromptEncoder, encode_prompts
from jaxrl.data.prompt_sources import GeneratedPrompts
from jaxrl.data.records import Record
from jaxrl.data.source_reader import read_source
from jaxrl.data.sources import Source, Validate
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts

Truths: TypeAlias = Callable[[Mapping[str, SourceConfig]], Validate]
"""Creates the check of ground truths, given the settings of each data set by its name."""

NO_EVALUATION = "none: data.evaluation names no problems, so there is no accuracy"
"""The description of a run without evaluation problems."""


@dataclasses.dataclass(frozen=True)
class Problems:
    """Training and evaluation problems, by source. No problem is in both.

    Attributes:
      train, evaluation: The sources.
    """

    train: tuple[Source, ...] = ()
    evaluation: tuple[Source, ...] = ()

    @property
    def train_records(self) -> tuple[Record, ...]:
        """All training problems; UserError if a source is endless."""
        for source in self.train:
            if source.generated is not None:
                raise UserError(
                    f"{source.name} is made without end while prompts are drawn, and all of its problems are "
                    f"asked for here, as for solutions, pairs or a file of them; set {source.name}.size to a "
                    "number of problems"
                )
        return _records(self.train)

    @property
    def evaluation_records(self) -> tuple[Record, ...]:
        """All evaluation problems."""
        return _records(self.evaluation)

    @property
    def settings(self) -> dict[str, SourceConfig]:
        """The settings of each data set, by the name that its problems have.

        Raises:
          UserError: Two data sets of one name have different graders.
        """
        found: dict[str, Source] = {}
        for source in (*self.train, *self.evaluation):
            for name in source.source_names:
                other = found.setdefault(name, source)
                ours, theirs = source.settings, other.settings
                if (ours.grader, ours.grader_options) != (theirs.grader, theirs.grader_options):
                    raise UserError(
                        f"{other.name} and {source.name} both call their problems {name!r} and have "
                        f"different graders; set {source.name}.source to a name of its own, or give both "
                        "the same grader"
                    )
        return {name: source.settings for name, source in found.items()}

    def formats(self, data: DataConfig) -> dict[str, PromptFormat]:
        """The prompt format of each training data set, by its name."""
        return {
            name: data.format_of(source.settings, source.own_template)
            for source in self.train
            for name in source.source_names
        }


class ProblemReader:
    """Reads the sources of a config, each only once.

    Args:
      data: The settings.
      needs_truths: Whether training problems need a ground truth. Evaluation problems always do.
    """

    def __init__(self, data: DataConfig, *, needs_truths: bool = True):
        self._data = data
        self._needs_truths = needs_truths
        self._found: dict[str, Source] = {}

    @property
    def readers(self) -> dict[str, Callable[[], Source]]:
        """For each source that the config names, by its setting, the function that reads it."""
        return {
            name: functools.partial(self._read, name, settings)
            for name, settings in self._sources.items()
            if settings.is_named
        }

    @property
    def is_named(self) -> bool:
        """Whether the config names any problems."""
        return any(settings.is_named for settings in self._sources.values())

    def read(self, truths: Truths | None) -> Problems:
        """Reads and checks all sources.

        Args:
          truths: Creates the check of ground truths; None, for a run without a grader, checks none.

        Raises:
          UserError: A source cannot be used, no row of it is left, or a bad row is refused.
        """
        evaluation = [self._read(*item) for item in self._data.evaluation_sources.items()]
        return self._checked(evaluation, truths)

    def read_training(self, truths: Truths | None) -> Problems:
        """Reads and checks the training sources alone; see `read`."""
        return self._checked([], truths)

    def _checked(self, evaluation: list[Source], truths: Truths | None) -> Problems:
        train = [self._read(*item) for item in self._data.training_sources.items()]
        held_out = _records(evaluation)
        train = [source.without_prompts_of(held_out) for source in train]
        problems = Problems(tuple(train), tuple(evaluation))
        settings = problems.settings  # raises if a data set would have two graders
        if truths is None:
            return problems
        refuse, validate = self._data.bad_rows == "error", truths(settings)
        of_training = validate if self._needs_truths else _unless_empty(validate)
        return Problems(
            tuple(s.with_readable_truths(of_training, refuse=refuse) for s in train),
            tuple(s.with_readable_truths(validate, refuse=refuse) for s in evaluation),
        )

    @property
    def _sources(self) -> dict[str, SourceConfig]:
        return {**self._data.training_sources, **self._data.evaluation_sources}

    def _read(self, name: str, settings: SourceConfig) -> Source:
        if name not in self._found:
            self._found[name] = read_source(
                settings,
                name,
                refuse_bad_rows=self._data.bad_rows == "error",
                keep_duplicates=self._data.duplicates == "keep",
                may_be_endless=name in self._data.training_sources,
                needs_truth=self._needs_truths or name not in self._data.training_sources,
            )
        return self._found[name]


def _unless_empty(validate: Validate) -> Validate:
    """The same check, which passes an empty ground truth."""
    return lambda answer, extra, source: validate(answer, extra, source) if answer else None


def encode(
    sources: Sequence[Source], data: DataConfig, tokenizer: Tokenizer
) -> tuple[EncodedPrompts, ...]:
    """Encodes the prompts of each source."""
    return tuple(
        encode_prompts(
            source.records,
            tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            prompt_format=data.format_of(source.settings, source.own_template),
            overlong=data.overlong,
        )
        for source in sources
    )


def stream_inputs(
    sources: Sequence[Source],
    encoded: Sequence[EncodedPrompts],
    data: DataConfig,
    tokenizer: Tokenizer,
) -> tuple[Prompts | GeneratedPrompts, ...]:
    """The inputs of a stream: for each source its encoded prompts, or prompts generated on demand."""

    def stream_input(source: Source, first: Prompts) -> Prompts | GeneratedPrompts:
        if source.generated is None:
            return first
        prompt_format = data.format_of(source.settings, source.own_template)
        encoder = PromptEncoder(tokenizer, data.max_prompt_tokens, prompt_format, data.overlong)
        return GeneratedPrompts(source.generated, encoder.encode_one, first=first, name=source.name)

    return tuple(
        stream_input(source, of_source.prompts)
        for source, of_source in zip(sources, encoded, strict=True)
    )


def _records(sources: Sequence[Source]) -> tuple[Record, ...]:
    return tuple(record for source in sources for record in source.records)
