"""Reads the sets of an evaluation and encodes their prompts."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat
from jaxrl.data.problems import Source, read_source
from jaxrl.data.prompt_encoding import Overlong, encode_prompts
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.evaluation.evaluate_config import EvaluateConfig
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.grading import GradingTask
from jaxrl.types import Prompts
from jaxrl.user_code import names_function

# Problems of a task without --limit.
_TASK_PROBLEMS = 100


def read_sets(
    config: EvaluateConfig, graders: Graders, of_run: Sequence[SourceConfig] = ()
) -> dict[str, Source]:
    """Reads the problems of each set: name -> problems. An invalid row is an error.

    Args:
      config: settings of the evaluation, with files and tasks.
      graders: the grader, which checks each ground truth.
      of_run: evaluation sources of the model's run. They are the sets if `config` names none, and a task of
        theirs has their options if `config` has none.

    Raises:
      UserError: if there is no set, two sets have the same name, a file is missing or invalid, a task or an
        option of it is unknown, or the grader cannot read a ground truth.
    """
    named = [(_name_of(path), path, _of_file(config, path)) for path in config.sets]
    named += [(_name_of(task), task, _of_task(config, task, of_run)) for task in config.tasks]
    if not named:
        named = [
            (
                source.source or _name_of(where),
                where,
                dataclasses.replace(source, size=config.limit or source.size),
            )
            for source in of_run
            for where in (source.path or source.task,)
        ]
    if not named:
        raise UserError("there is nothing to answer; name at least one --set FILE or --task NAME")
    if config.task_options and not config.tasks:
        raise UserError("--task_options are options of a --task, and there is none; add one")
    times = collections.Counter(name for name, *_ in named)
    twice = [name for name, count in times.items() if count > 1]
    if twice:
        raise UserError(
            f"{len(named)} sets, and several are called {', '.join(map(repr, twice))}, which is what results "
            "are kept by; rename the files"
        )
    sets: dict[str, Source] = {}
    for name, where, settings in named:
        flag = "--task" if where in config.tasks else "--set"
        source = read_source(settings, f"{flag} {where}", refuse_bad_rows=True)
        sets[name] = source.with_readable_truths(
            lambda answer, extra, origin: graders.validate(GradingTask(answer, extra, origin)),
            refuse=True,
        )
    return sets


def _name_of(where: str) -> str:
    """The name of a set: that of the file, the task or the function."""
    return where.rpartition(":")[2] if names_function(where) else pathlib.Path(where).stem


def _of_file(config: EvaluateConfig, path: str) -> SourceConfig:
    return SourceConfig(
        source=_name_of(path),
        path=path,
        prompt_field=config.prompt_field,
        answer_field=config.answer_field,
        size=config.limit,
    )


def _of_task(config: EvaluateConfig, task: str, of_run: Sequence[SourceConfig]) -> SourceConfig:
    is_function = names_function(task)
    trained = [source.options for source in of_run if task in (source.task, source.path)]
    return SourceConfig(
        source=_name_of(task),
        path=task if is_function else "",
        task="" if is_function else task,
        size=config.limit or _TASK_PROBLEMS,
        seed=config.task_seed,
        options=config.task_options or (trained[0] if trained else {}),
    )


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
