r"""Finds the fields of the problem and the ground truth in the rows of a file, by settings or by known names:

    verl                   prompt [{role, content}], reward_model.ground_truth
    DAPO-Math-17k          the same; DAPO's words around the problem are removed
    GSM8K                  question, answer "... #### 72": the ground truth follows the marker
    MATH                   problem, solution "... \boxed{42}": the ground truth is in the last box
    problem/answer         and any other pair of the two lists of names below

Dots name a field inside a field (`reward_model.ground_truth`). Names are compared without case. The data card
shows the recognised layout.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.data.messages import Context
from jaxrl.data.rows import BadRow, checked_text, shown
from jaxrl.errors import UserError

# The first name that a file has is taken.
PROMPT_NAMES = ("problem", "question", "prompt", "query", "instruction", "input")
ANSWER_NAMES = (
    *("answer", "ground_truth", "final_answer", "expected_answer", "gold", "target", "label"),
    *("response", "completion", "output"),
)
SOLUTION_NAMES = ("solution", "rationale", "explanation")
# Fields with the name of the data set, and with an identifier of the row.
SOURCE_NAME = "data_source"
ID_NAMES = ("id", "unique_id", "uid", "index", "extra_info.index")

_VERL_PROMPT, _VERL_ANSWER = "prompt", "reward_model.ground_truth"

# The words around every problem of DAPO-Math-17k and its AIME files.
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

_MARKER = "####"


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The fields of a file's rows.

    Attributes:
      name: Name of the layout, for messages.
      prompt, answer: Dotted names of fields; `answer` is None if the rows have no ground truth and need none.
      solution: Dotted name of the field with worked solutions, or None.
      source: Name of the field with the name of a data set, or None.
      template: The words around every problem of the file, as a template; "" for none.
      prompt_of: Removes these words.
      answer_of: Extracts the ground truth from the answer's field; BadRow if there is none.
    """

    name: str
    prompt: str
    answer: str | None
    solution: str | None = None
    source: str | None = None
    template: str = ""
    prompt_of: Callable[[Context], Context] = lambda context: context
    answer_of: Callable[[Any], Any] = lambda value: value


def recognise(
    rows: Sequence[Mapping[str, Any]],
    *,
    prompt_field: str = "",
    answer_field: str = "",
    solution_field: str | None = None,
    needs_truth: bool = True,
    what: str,
) -> RowLayout:
    """Recognises the layout of a file by its first rows.

    Args:
      rows: Some rows of the file, at least one.
      prompt_field, answer_field: Dotted names, used as they are; "" recognises the field.
      solution_field: Dotted name; None takes a field with a known name, "" takes none.
      needs_truth: Whether the rows must have a field with the answer.
      what: Name of the file, for messages.

    Raises:
      UserError: A field does not exist, or none is recognised.
    """
    fields = _fields(rows)
    for name in filter(None, (prompt_field, answer_field, solution_field)):
        if name not in fields:
            raise UserError(f"{what} has no field {name!r}; it has {_field_list(fields)}")
    found = _published_layout(rows, fields)
    prompt = prompt_field or (found.prompt if found else _first_known(PROMPT_NAMES, fields))
    answer = answer_field or (found.answer if found else _first_known(ANSWER_NAMES, fields))
    if answer == prompt and not answer_field and not needs_truth:
        answer = None
    if prompt is None or (answer is None and needs_truth) or prompt == answer:
        lacking = " and ".join(
            setting
            for setting, name in (("prompt_field", prompt), ("answer_field", answer))
            if name is None or prompt == answer
        )
        raise UserError(
            f"{what} has a layout that is not known; its fields are {_field_list(fields)}. Set {lacking} to "
            "the fields with the problem and its true answer, dotted where one lies in another "
            "(reward_model.ground_truth). Prompts to train on need no answer where rewards other than the "
            "grader's score them: reward.grader_weight=0"
        )
    solution = solution_field or None
    if solution_field is None and not answer_field:
        solution = found.solution if found else _first_known(SOLUTION_NAMES, fields)
    source = SOURCE_NAME if SOURCE_NAME in fields else None
    if found and not prompt_field and not answer_field:
        return dataclasses.replace(found, solution=solution, source=source)
    name = f"{prompt}/{answer}" if answer else f"{prompt} without a truth"
    layout = RowLayout(name, prompt, answer, solution, source)
    if found and answer_field and not prompt_field:
        return dataclasses.replace(layout, template=found.template, prompt_of=found.prompt_of)
    if found and prompt_field and not answer_field:
        return dataclasses.replace(layout, answer_of=found.answer_of)
    return layout


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a dotted name; BadRow, with the fields of the row, if it is missing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise BadRow(f"no field {name!r}; the row has {_field_list(_fields([row]))}")
        value = value[part]
    return value


def without(row: Mapping[str, Any], names: Sequence[str | None]) -> dict[str, Any]:
    """Returns the row without the fields of some dotted names."""
    rest = dict(row)
    for name in filter(None, names):
        if name in rest:
            del rest[name]
            continue
        outer, _, inner = name.partition(".")
        if inner and isinstance(rest.get(outer), Mapping):
            rest[outer] = without(rest[outer], [inner])
    return rest


def unwrapped_question(context: Context) -> Context:
    """Returns the text of a single user message; any other conversation as it is."""
    if not isinstance(context, str) and len(context) == 1 and context[0]["role"] == "user":
        return context[0]["content"]
    return context


# Layouts by name


def _published_layout(
    rows: Sequence[Mapping[str, Any]], fields: Mapping[str, str]
) -> RowLayout | None:
    if {_VERL_PROMPT, _VERL_ANSWER} <= fields.keys():
        solution = _first_known(SOLUTION_NAMES, fields)
        verl = RowLayout("verl", _VERL_PROMPT, _VERL_ANSWER, solution)
        if all(_is_dapo(row.get(_VERL_PROMPT)) for row in rows):
            return dataclasses.replace(
                verl,
                name="DAPO-Math-17k as published",
                template=f"{DAPO_BEFORE}{{prompt}}{DAPO_AFTER}",
                prompt_of=_without_dapo_words,
            )
        return verl
    question, answer = _first_known(PROMPT_NAMES, fields), _first_known(ANSWER_NAMES, fields)
    if question and answer and all(_has_marker(row.get(answer)) for row in rows):
        return RowLayout("GSM8K", question, answer, solution=answer, answer_of=_after_marker)
    solution = _first_known(SOLUTION_NAMES, fields)
    boxed = solution is not None and any(last_box(row.get(solution)) for row in rows)
    if question and boxed and (answer is None or answer.lower() in ("response", "completion")):
        return RowLayout("MATH", question, str(solution), solution, answer_of=_in_last_box)
    return None


def _is_dapo(prompt: Any) -> bool:
    if not isinstance(prompt, list) or len(prompt) != 1 or not isinstance(prompt[0], Mapping):
        return False
    content = prompt[0].get("content")
    return isinstance(content, str) and _problem_in_dapo_words(content) is not None


def _problem_in_dapo_words(content: str) -> str | None:
    if content.startswith(DAPO_BEFORE) and content.endswith(DAPO_AFTER):
        return content[len(DAPO_BEFORE) : -len(DAPO_AFTER)]
    return None


def _without_dapo_words(context: Context) -> Context:
    problem = _problem_in_dapo_words(context) if isinstance(context, str) else None
    if problem is None:
        raise BadRow("the prompt has not DAPO's words around it, as the rows before it have")
    return checked_text(problem, "the problem in DAPO's words")


def _has_marker(answer: Any) -> bool:
    return isinstance(answer, str) and _MARKER in answer


def _after_marker(answer: Any) -> str:
    if not _has_marker(answer):
        raise BadRow(
            f"the answer has no {_MARKER!r} before its number, as those of other rows have"
        )
    return answer.rpartition(_MARKER)[2].strip()


def _in_last_box(solution: Any) -> str:
    box = last_box(solution)
    if box is None:
        raise BadRow(rf"no \boxed{{...}} in the solution, which is {shown(solution)}")
    return box


def last_box(text: Any) -> str | None:
    r"""Returns the content of the last \boxed{...} of a text, with nested braces; None if there is none."""
    if not isinstance(text, str):
        return None
    starts = list(re.finditer(r"\\f?boxed\s*\{", text))
    if not starts:
        return None
    start = starts[-1].end()
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start : start + brace.start()].strip()
    return None


# Fields


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The dotted names of all fields, in order, each with the name of its type for messages."""
    found: dict[str, str] = {}
    for row in rows:
        for key, value in row.items():
            found.setdefault(str(key), _type_name(value))
            if isinstance(value, Mapping):
                found |= {f"{key}.{name}": kind for name, kind in _fields([value]).items()}
    return found


def _type_name(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
        return "messages"
    names = {str: "text", bool: "true or false", int: "number", float: "number", list: "list"}
    return names.get(type(value), "object" if isinstance(value, Mapping) else "null")


def _field_list(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({kind})" for name, kind in list(fields.items())[:40]) or "none"


def _first_known(names: Sequence[str], fields: Mapping[str, str]) -> str | None:
    """The first of some names that a file has, in the spelling of the file."""
    written = {field.lower(): field for field in reversed(list(fields))}
    return next((written[name] for name in names if name in written), None)
