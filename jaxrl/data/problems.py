"""The problems of a run: every source of its config, read once, each truth put to its grader."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from jaxrl.data.data_card import CardEntry, data_card
from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.data.messages import PromptFormat
from jaxrl.data.records import Record
from jaxrl.data.sources import FaultOf, Source, read_source
from jaxrl.data.stream import EncodedPrompts, GeneratedPrompts, encode_prompts, prompt_encoder
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts


@dataclasses.dataclass(frozen=True)
class Problems:
    """What is trained on and what is evaluated with, source by source; no problem is in both.

    Attributes:
      train, evaluation: the sources.
    """

    train: tuple[Source, ...] = ()
    evaluation: tuple[Source, ...] = ()

    @property
    def train_records(self) -> tuple[Record, ...]:
        """All problems to train on; UserError where they have no end."""
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
        """All problems to evaluate with."""
        return _records(self.evaluation)

    @property
    def settings(self) -> dict[str, SourceConfig]:
        """The settings of each data set, by the name that its problems carry."""
        return settings_by_name((*self.train, *self.evaluation))

    def formats(self, data: DataConfig) -> dict[str, PromptFormat]:
        """How problems to train on become prompts, by the name of their data set."""
        return {
            name: data.format_of(source.settings, source.own_template)
            for source in self.train
            for name in source.source_names
        }


class ProblemReader:
    """Reads the sources of a config, each once, whoever asks first."""

    def __init__(self, data: DataConfig, *, needs_truths: bool = True):
        """Args: the settings, and whether prompts to train on need a ground truth, as all others do."""
        self._data = data
        self._needs_truths = needs_truths
        self._found: dict[str, Source] = {}

    @property
    def readers(self) -> dict[str, Callable[[], Source]]:
        """What reads each source that the config names, by its setting."""
        return {
            name: functools.partial(self._read, name, settings)
            for name, settings in self._all.items()
            if settings.is_named
        }

    @property
    def is_named(self) -> bool:
        """The config names any problems."""
        return any(settings.is_named for settings in self._all.values())

    def read(self, truths: Callable[[Mapping[str, SourceConfig]], FaultOf] | None) -> Problems:
        """Everything, checked.

        Args:
          truths: makes the check of ground truths, given the settings of each data set by its name; None
            checks none, in a run without a grader.

        Raises:
          UserError: a source cannot be used, nothing is left of it, or a bad row is to be refused.
        """
        evaluation = [self._read(*item) for item in self._data.evaluation_sources.items()]
        return self._checked(evaluation, truths)

    def read_training(
        self, truths: Callable[[Mapping[str, SourceConfig]], FaultOf] | None
    ) -> Problems:
        """Nothing to evaluate with; otherwise as `read`."""
        return self._checked([], truths)

    def _checked(
        self,
        evaluation: list[Source],
        truths: Callable[[Mapping[str, SourceConfig]], FaultOf] | None,
    ) -> Problems:
        train = [self._read(*item) for item in self._data.training_sources.items()]
        held_out = _records(evaluation)
        train = [source.without_prompts_of(held_out) for source in train]
        settings = settings_by_name((*train, *evaluation))
        if truths is not None:
            refuse, validate = self._data.bad_rows == "error", truths(settings)
            of_training = validate if self._needs_truths else _unless_empty(validate)
            train = [s.with_readable_truths(of_training, refuse=refuse) for s in train]
            evaluation = [s.with_readable_truths(validate, refuse=refuse) for s in evaluation]
        return Problems(tuple(train), tuple(evaluation))

    @property
    def _all(self) -> dict[str, SourceConfig]:
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


def _unless_empty(validate: FaultOf) -> FaultOf:
    """The check of a ground truth, where there is one."""
    return lambda answer, extra, source: validate(answer, extra, source) if answer else None


def settings_by_name(sources: Sequence[Source]) -> dict[str, SourceConfig]:
    """The settings of each data set, by the name that its problems carry.

    Raises:
      UserError: one name would have two graders.
    """
    found: dict[str, Source] = {}
    for source in sources:
        for name in source.source_names:
            other = found.setdefault(name, source)
            if _grader_of(other.settings) != _grader_of(source.settings):
                raise UserError(
                    f"{other.name} and {source.name} both call their problems {name!r} and have different "
                    f"graders; set {source.name}.source to a name of its own, or give both the same grader"
                )
    return {name: source.settings for name, source in found.items()}


def encode(
    sources: Sequence[Source], data: DataConfig, tokenizer: Tokenizer
) -> tuple[EncodedPrompts, ...]:
    """The prompts of each source, tokenised."""
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


def prompts_of(
    sources: Sequence[Source],
    encoded: Sequence[EncodedPrompts],
    data: DataConfig,
    tokenizer: Tokenizer,
) -> tuple[Prompts | GeneratedPrompts, ...]:
    """What a stream draws from: the prompts of each source, or what makes them."""
    return tuple(
        _prompts_of(source, of_source.prompts, data, tokenizer)
        for source, of_source in zip(sources, encoded, strict=True)
    )


def _prompts_of(
    source: Source, prompts: Prompts, data: DataConfig, tokenizer: Tokenizer
) -> Prompts | GeneratedPrompts:
    if source.generated is None:
        return prompts
    encode_one = prompt_encoder(
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        prompt_format=data.format_of(source.settings, source.own_template),
        overlong=data.overlong,
    )
    return GeneratedPrompts(source.generated, encode_one, first=prompts, name=source.name)


def card_of(
    problems: Problems,
    train: Sequence[EncodedPrompts] = (),
    evaluation: Sequence[EncodedPrompts] = (),
) -> str:
    """The data card; prompts that were not tokenised have no lengths there."""
    return data_card(_entries(problems.train, train), _entries(problems.evaluation, evaluation))


NO_EVALUATION = "none: data.evaluation names no problems, so there is no accuracy"
"""Of a run that has nothing to evaluate with."""


def _entries(sources: Sequence[Source], encoded: Sequence[EncodedPrompts]) -> list[CardEntry]:
    prompts = encoded or (None,) * len(sources)
    return [CardEntry(*pair) for pair in zip(sources, prompts, strict=True)]


def _grader_of(settings: SourceConfig) -> tuple[str, dict]:
    return settings.grader, settings.grader_options


def _records(sources: Sequence[Source]) -> tuple[Record, ...]:
    return tuple(record for source in sources for record in source.records)
