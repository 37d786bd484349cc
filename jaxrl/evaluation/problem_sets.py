"""Reads the sets of an evaluation and encodes their prompts."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat
from jaxrl.data.prompt_encoding import Overlong, encode_prompts
from jaxrl.data.source_reader import read_source
from jaxrl.data.sources import Source
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.grading import GradingTask
from jaxrl.types import Prompts


def read_sets(
    paths: Sequence[str], *, prompt_field: str, answer_field: str, limit: int, graders: Graders
) -> dict[str, Source]:
    """Reads the problems of each set: name -> problems. An invalid row is an error.

    Args:
      paths: files of the sets.
      prompt_field, answer_field: field names in the files; "" detects them.
      limit: number of problems per set; 0 reads all.
      graders: the grader, which checks each ground truth.

    Raises:
      UserError: if there is no set, two sets have the same name, a file is missing or invalid, or the grader
        cannot read a ground truth.
    """
    if not paths:
        raise UserError("there is nothing to answer; name at least one --set FILE")
    names = collections.Counter(pathlib.Path(path).stem for path in paths)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise UserError(
            f"{len(paths)} sets, and several are called {', '.join(map(repr, twice))}, which is what results "
            "are kept by; rename the files"
        )
    sets: dict[str, Source] = {}
    for path in paths:
        name = pathlib.Path(path).stem
        settings = SourceConfig(
            source=name,
            path=path,
            prompt_field=prompt_field,
            answer_field=answer_field,
            size=limit,
        )
        source = read_source(settings, f"--set {path}", refuse_bad_rows=True)
        sets[name] = source.with_readable_truths(
            lambda answer, extra, origin: graders.validate(GradingTask(answer, extra, origin)),
            refuse=True,
        )
    return sets


def prompts_of(
    sets: dict[str, Source],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    *,
    keep_own_template: bool,
    max_prompt_tokens: int,
    overlong: Overlong,
) -> Prompts:
    """Encodes all problems as prompts, set after set. Ids are row numbers, so they repeat from set to set.

    Args:
      sets: name -> problems.
      tokenizer: tokenizer of the model.
      prompt_format: format of the prompts.
      keep_own_template: whether a file's own template replaces the plain one of `prompt_format`.
      max_prompt_tokens: maximum length of a prompt.
      overlong: treatment of longer prompts.

    Raises:
      UserError: if a prompt is too long, or the template or the tokenizer cannot encode it.
    """
    parts = []
    for name, source in sets.items():
        try:
            is_plain = prompt_format.template == PLAIN_FORMAT.template
            own = source.own_template if keep_own_template and is_plain else ""
            parts.append(
                encode_prompts(
                    source.records,
                    tokenizer,
                    max_prompt_tokens=max_prompt_tokens,
                    prompt_format=dataclasses.replace(prompt_format, template=own)
                    if own
                    else prompt_format,
                    overlong=overlong,
                ).prompts
            )
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    return Prompts.concatenate(parts)


def longest_prompt_tokens(prompts: Prompts) -> int:
    """The number of tokens of the longest prompt."""
    return int(np.max([len(tokens) for tokens in prompts.tokens]))
