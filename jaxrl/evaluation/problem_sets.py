"""The sets of an evaluation: files of problems, read and named."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxrl.data.records import JsonlRecords, Record
from jaxrl.data.stream import Overlong, evaluation_prompts
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.rewards.score import Grader, check_answers
from jaxrl.types import Prompts


def read_sets(
    paths: Sequence[str], *, prompt_field: str, answer_field: str, limit: int, grade: Grader
) -> dict[str, Sequence[Record]]:
    """The problems of each set by its name, and every answer shown to the grader.

    Raises:
      UserError: there is no set, two share a name, a file is missing or broken, or the grader cannot read an
        answer.
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
    sets: dict[str, Sequence[Record]] = {}
    for path in paths:
        name = pathlib.Path(path).stem
        records = _read(path, prompt_field, answer_field)
        sets[name] = records[:limit] if limit else records
        check_answers(grade, ((f"a problem of {path}", record.answer) for record in sets[name]))
    return sets


def _read(path: str, prompt_field: str, answer_field: str) -> Sequence[Record]:
    name = pathlib.Path(path).stem
    try:
        return JsonlRecords(path, prompt_field=prompt_field, answer_field=answer_field, source=name)
    except UserError as error:
        if "no field" not in str(error):
            raise
        raise UserError(f"{error}; name them with --prompt_field and --answer_field") from error


def prompts_of(
    sets: dict[str, Sequence[Record]],
    tokenizer: Tokenizer,
    *,
    template: str,
    chat: bool,
    max_prompt_tokens: int,
    overlong: Overlong,
) -> Prompts:
    """All problems as prompts, set after set. Ids are row numbers, which two sets share.

    Raises:
      UserError: a prompt is too long, or the template or the tokenizer cannot make one.
    """
    parts = []
    for name, records in sets.items():
        try:
            parts.append(
                evaluation_prompts(
                    records,
                    tokenizer,
                    max_prompt_tokens=max_prompt_tokens,
                    template=template,
                    chat=chat,
                    overlong=overlong,
                )
            )
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    return Prompts.concatenate(parts)


def longest_of(prompts: Prompts) -> int:
    """Tokens of the longest prompt."""
    return int(np.max([len(tokens) for tokens in prompts.tokens]))
