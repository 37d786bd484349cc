r"""Turns rows into problems. The fields of a file are named by settings, or recognised by known names:

    verl                   prompt [{role, content}], reward_model.ground_truth
    DAPO-Math-17k          the same; DAPO's words around the problem are removed
    GSM8K                  question, answer "... #### 72": the ground truth follows the marker
    MATH                   problem, solution "... \boxed{42}": the ground truth is in the last box
    problem/answer         and any other pair of the two lists of names below

Dots name a field inside a field (`reward_model.ground_truth`). Names are compared without case. The data card
shows the recognised layout. Answers stay as written; the grader normalises and compares them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.data.messages import Context, as_context
from jaxrl.data.rows import MALFORMED, BadRow, Row, checked_text, shown
from jaxrl.errors import UserError
from jaxrl.types import TRUTHS

# The first name that a file has is taken.
PROMPT_NAMES = ("problem", "question", "prompt", "query", "instruction", "input")
ANSWER_NAMES = (
    *("answer", "ground_truth", "final_answer", "expected_answer", "gold", "target", "label"),
    *("response", "completion", "output"),
)
SOLUTION_NAMES = ("solution", "rationale", "explanation")
SOURCE_NAME = "data_source"

# Of an object that holds unit tests; as the grader `code` reads them.
_FIELDS_OF_TESTS = {
    *("input", "inputs", "public_tests", "private_tests", "generated_tests"),
    *("test_list", "test_cases", "tests", "assert_case", "official_tests", "test", "test_code"),
}
_VERL_PROMPT, _VERL_ANSWER = "prompt", "reward_model.ground_truth"

# The words around every problem of DAPO-Math-17k and its AIME files.
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

NO_PROMPT = "rows without a prompt"
NO_TRUTH = "rows without a truth"


@dataclasses.dataclass(frozen=True)
class Record:
    """One problem.

    Attributes:
      prompt: The problem without a template, or the conversation before the answer.
      answer: The ground truth, in the grader's notation; "" for none.
      source: Name of the data set; each has its own metrics.
      solution: A worked solution for supervised training, or None.
      extra: The other fields of its row, for graders; JSON's types only.
      place: The place of its row, for messages, such as "train.jsonl:17".
    """

    prompt: Context
    answer: str
    source: str
    solution: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    place: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The fields of a file's rows.

    Attributes:
      name: Name of the layout, for messages.
      prompt, answer: Dotted names of fields; None if none is known.
      solution: Dotted name of the field with worked solutions, or None.
      template: The words around every problem of the file, as a template; "" for none.
      prompt_of: Removes these words.
      answer_of: Extracts the ground truth from the answer's field; BadRow if there is none.
      needs_truth: Whether a row without a ground truth is unusable.
      needs_solution: Whether a row without a solution is unusable.
    """

    name: str
    prompt: str | None
    answer: str | None
    solution: str | None = None
    template: str = ""
    prompt_of: Callable[[Context], Context] = lambda context: context
    answer_of: Callable[[Any], Any] = lambda value: value
    needs_truth: bool = True
    needs_solution: bool = False

    def record(self, row: Row, place: str, *, source: str, default_source: str) -> Record:
        """Reads the problem of a row.

        Args:
          row: The row.
          place: Its place, for messages.
          source: Name of the data set; "" takes the row's field `SOURCE_NAME`, or else `default_source`.
          default_source: Name of the file or function.

        Raises:
          BadRow: It lacks a prompt, or a ground truth or solution that is needed.
        """
        assert self.prompt is not None, "`recognise` demands a field with the problem"
        # What the row lacks if reading it ends here.
        reason = NO_PROMPT
        try:
            prompt = as_context(value_at(row, self.prompt), f"field {self.prompt!r}")
            prompt = self.prompt_of(_unwrapped(prompt))
            reason = NO_TRUTH
            answers = self._answers(row)
            reason, solution = MALFORMED, None
            if self.solution is not None and self.needs_solution:
                solution = checked_text(value_at(row, self.solution), f"field {self.solution!r}")
            elif self.solution is not None:
                text = row.get(self.solution)
                solution = text if isinstance(text, str) and text.strip() else None
        except BadRow as error:
            raise BadRow(f"{place}: {error}", reason) from error
        named = row.get(SOURCE_NAME)
        if not source:
            source = named if isinstance(named, str) and named.strip() else default_source
        # What the layout has read is in the record already.
        read = self.solution if solution is not None else None
        extra = without(row, (self.prompt, self.answer, read))
        if len(answers) > 1:
            extra[TRUTHS] = answers
        return Record(prompt, answers[0], source, solution, extra, place)

    def _answers(self, row: Row) -> list[str]:
        """The ground truths of a row, of which any is right; one that is empty for none."""
        if self.answer is None:
            return [""]
        what = f"field {self.answer!r}"
        try:
            value: Any = self.answer_of(value_at(row, self.answer))
            if isinstance(value, Mapping):
                # Parquet gives a row the fields of all others, as None.
                known = {name: x for name, x in value.items() if x is not None}
                value = known["target"] if known.keys() == {"target"} else value
            # Arrays of NumPy, as pandas reads lists.
            value = getattr(value, "tolist", lambda: value)()
            if _holds_tests(value):
                return [json.dumps(value)]
            members = value if isinstance(value, list) else [value]
            if not members:
                raise BadRow(f"{what} is an empty list; give one answer, or several")
            return list(dict.fromkeys(_answer_text(member, what) for member in members))
        except BadRow:
            if self.needs_truth:
                raise
            return [""]


def _answer_text(value: Any, what: str) -> str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, str):
        return checked_text(value, what)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(
            f"{what} is {shown(value)}; an answer must be text or a number, or a list of them"
        )
    # math.isfinite converts to float, and an int may be too large for that.
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"{what} is {value}; an answer must be a finite number")
    # 72.0 becomes 72, as people write it: tables and JSON have whole numbers as floats, too.
    return str(int(value)) if value == int(value) else str(value)


def _holds_tests(value: Any) -> bool:
    """Whether a value that is no text holds unit tests of the grader `code`, which reads JSON."""
    objects = value if isinstance(value, list) and value else [value]
    return all(isinstance(x, Mapping) and bool(x.keys() & _FIELDS_OF_TESTS) for x in objects)


def recognise(
    rows: Sequence[Row],
    *,
    what: str,
    fields: Mapping[str, str] | None = None,
    needs_truth: bool = True,
) -> RowLayout:
    """Recognises the layout of a file by its first rows.

    Args:
      rows: Some rows of the file, at least one.
      what: Name of the file, for messages.
      fields: Dotted names of the fields "prompt", "answer" and "solution", used as they are; those left out
        are recognised. The solution "" takes none.
      needs_truth: Whether the rows must have a field with the answer.

    Raises:
      UserError: A field does not exist, or none is recognised.
    """
    found, named = _fields(rows), fields or {}
    for name in filter(None, named.values()):
        if name not in found:
            near = difflib.get_close_matches(name, list(found), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UserError(f"{what} has no field {name!r}{hint}; it has {_field_list(found)}")
    known = _known_layout(rows, found)
    changes: dict[str, Any] = {"needs_truth": needs_truth}
    # The content of a field that a setting names is used unchanged.
    if prompt_field := named.get("prompt"):
        changes |= {"prompt": prompt_field, "template": "", "prompt_of": RowLayout.prompt_of}
    if answer_field := named.get("answer"):
        changes |= {"answer": answer_field, "answer_of": RowLayout.answer_of, "solution": None}
    # A field that holds the prompt is no answer, which this run does not need.
    elif known.answer == (prompt_field or known.prompt) and not needs_truth:
        changes["answer"] = None
    if (solution_field := named.get("solution")) is not None:
        changes |= {"solution": solution_field or None, "needs_solution": bool(solution_field)}
    layout = dataclasses.replace(known, **changes)
    prompt, answer = layout.prompt, layout.answer
    if prompt is None or (answer is None and needs_truth) or prompt == answer:
        lacking = " and ".join(
            setting
            for setting, name in (("fields.prompt", prompt), ("fields.answer", answer))
            if name is None or prompt == answer
        )
        raise UserError(
            f"{what} has a layout that is not known; its fields are {_field_list(found)}. Set {lacking} to "
            "the fields with the problem and its true answer, dotted where one lies in another "
            "(reward_model.ground_truth). Prompts to train on need no answer where rewards other than the "
            "grader's score them: reward.grader_weight=0"
        )
    if prompt_field or answer_field or not known.name:
        name = f"{prompt}/{answer}" if answer else f"{prompt} without a truth"
        layout = dataclasses.replace(layout, name=name)
    return layout


def _known_layout(rows: Sequence[Row], fields: Mapping[str, str]) -> RowLayout:
    """A published layout, or else the fields with known names in a layout without a name."""
    # In the spelling of the file; of two spellings the first.
    written = {field.lower(): field for field in reversed(list(fields))}
    first = lambda names: next((written[name] for name in names if name in written), None)  # noqa: E731
    solution = first(SOLUTION_NAMES)
    if {_VERL_PROMPT, _VERL_ANSWER} <= fields.keys():
        verl = RowLayout("verl", _VERL_PROMPT, _VERL_ANSWER, solution)
        prompts = [row.get(_VERL_PROMPT) for row in rows]
        # All of them: the words become the template of every prompt of the file.
        if not all(_has_dapo_words(_unwrapped(prompt)) for prompt in prompts):
            return verl
        return dataclasses.replace(
            verl,
            name="DAPO-Math-17k as published",
            template=f"{DAPO_BEFORE}{{prompt}}{DAPO_AFTER}",
            prompt_of=_without_dapo_words,
        )
    question, answer = first(PROMPT_NAMES), first(ANSWER_NAMES)
    if question and answer and all("####" in str(row.get(answer)) for row in rows):
        return RowLayout("GSM8K", question, answer, solution=answer, answer_of=_after_marker)
    boxed = solution is not None and any(last_box(row.get(solution)) for row in rows)
    # A "response" or "completion" is a whole text, so the truth is in the box.
    if question and boxed and (answer is None or answer.lower() in ("response", "completion")):
        return RowLayout("MATH", question, solution, solution, answer_of=_in_last_box)
    return RowLayout("", question, answer, solution)


def _unwrapped(prompt: Any) -> Any:
    """The text of a single message of the user, which is treated like a question; else the prompt."""
    if isinstance(prompt, list | tuple) and len(prompt) == 1 and isinstance(prompt[0], Mapping):
        message = prompt[0]
        return message.get("content") if message.get("role") == "user" else prompt
    return prompt


def _has_dapo_words(prompt: Any) -> bool:
    return (
        isinstance(prompt, str) and prompt.startswith(DAPO_BEFORE) and prompt.endswith(DAPO_AFTER)
    )


def _without_dapo_words(context: Context) -> Context:
    if not isinstance(context, str) or not _has_dapo_words(context):
        raise BadRow("the prompt has not DAPO's words around it, as the rows before it have")
    problem = context[len(DAPO_BEFORE) : -len(DAPO_AFTER)]
    return checked_text(problem, "the problem in DAPO's words")


def _after_marker(answer: Any) -> str:
    if "####" not in str(answer):
        raise BadRow("the answer has no '####' before its number, as those of other rows have")
    return str(answer).rpartition("####")[2].strip()


def _in_last_box(solution: Any) -> str:
    box = last_box(solution)
    if box is None:
        raise BadRow(rf"no \boxed{{...}} in the solution, which is {shown(solution)}")
    return box


def last_box(text: Any) -> str | None:
    r"""Returns the content of the last \boxed{...} of a text, with nested braces; None if there is none."""
    starts = list(re.finditer(r"\\f?boxed\s*\{", text)) if isinstance(text, str) else []
    if not starts:
        return None
    start = starts[-1].end()
    depth = 1
    # An escaped brace is text, not a group.
    for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start : start + brace.start()].strip()
    return None


# Fields


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a dotted name; BadRow, with the fields of the row, if it is missing."""
    # The whole name first: a field may have dots in its own name.
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
        outer, _, inner = name.partition(".")
        if name in rest:
            del rest[name]
        elif inner and isinstance(rest.get(outer), Mapping):
            rest[outer] = without(rest[outer], [inner])
    return rest


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The dotted names of all fields, in order, each with the name of its type for messages."""
    names = {str: "text", bool: "true or false", int: "number", float: "number", list: "list"}
    names |= {dict: "object", type(None): "null"}
    found: dict[str, str] = {}
    for row in rows:
        for key, value in row.items():
            found.setdefault(key, names.get(type(value), "null"))
            if isinstance(value, Mapping):
                found |= {f"{key}.{name}": kind for name, kind in _fields([value]).items()}
    return found


def _field_list(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({kind})" for name, kind in list(fields.items())[:40]) or "none"
