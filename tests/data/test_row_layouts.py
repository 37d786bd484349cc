"""Layouts of published files are recognised by their fields, and said by name."""

import json

import numpy as np
import pytest

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import read_source
from jaxrl.data.row_layouts import DAPO_AFTER, DAPO_BEFORE, last_box, recognise, value_at, without
from jaxrl.data.rows import BadRow
from jaxrl.errors import UserError
from jaxrl.types import TRUTHS


def verl(content, truth="7", **fields):
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": content}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 3},
        **fields,
    }


def read(tmp_path, *rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return read_source(SourceConfig(path=str(path), **settings), "data.train")


KNOWN = [
    (verl(f"{DAPO_BEFORE}3 + 4?{DAPO_AFTER}"), "DAPO-Math-17k as published", "3 + 4?", "7"),
    (verl("3 + 4?"), "verl", "3 + 4?", "7"),
    ({"question": "3 + 4?", "answer": "3+4=<<3+4=7>>7\n#### 7"}, "GSM8K", "3 + 4?", "7"),
    ({"question": "?", "answer": "so #### 1,080 "}, "GSM8K", "?", "1,080"),
    ({"problem": "?", "solution": r"so $\boxed{\frac{1}{2}}$."}, "MATH", "?", r"\frac{1}{2}"),
    ({"problem": "?", "answer": 7, "solution": r"\boxed{7}"}, "problem/answer", "?", "7"),
    ({"Problem": "?", "Answer": "7"}, "Problem/Answer", "?", "7"),
    ({"prompt": "?", "response": "7"}, "prompt/response", "?", "7"),
    ({"instruction": "?", "output": "7"}, "instruction/output", "?", "7"),
    ({"input": "?", "ground_truth": "7"}, "input/ground_truth", "?", "7"),
]


@pytest.mark.parametrize(("row", "name", "prompt", "answer"), KNOWN)
def test_a_layout_is_recognised_and_named(row, name, prompt, answer, tmp_path):
    source = read(tmp_path, row)
    assert source.origin.endswith(f"rows.jsonl (JSONL, layout {name})")
    (record,) = source.records
    assert (record.prompt, record.answer) == (prompt, answer)


def test_the_other_fields_are_kept_for_graders(tmp_path):
    (record,) = read(tmp_path, verl("3 + 4?")).records
    assert record.extra == {
        "data_source": "toy",
        "ability": "MATH",
        "reward_model": {"style": "rule"},
        "extra_info": {"index": 3},
    }
    assert record.source == "toy"


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        (["4", "four"], ["4", "four"]),
        ([4, 4.0, "four"], ["4", "four"]),
        ({"target": ["Paris", "paris, France"]}, ["Paris", "paris, France"]),
        ({"target": ["Paris", "Lutetia"], "style": None}, ["Paris", "Lutetia"]),
        (np.array(["4", "four"], object), ["4", "four"]),
        ({"target": np.array([4.0, 5.0])}, ["4", "5"]),
        (np.float64(4), ["4"]),
        (["4"], ["4"]),
        ({"target": "4"}, ["4"]),
        ("[0, 1]", ["[0, 1]"]),
    ],
)
def test_a_truth_may_be_a_list(truth, answers):
    row = {"problem": "2 + 2?", "answer": truth, "level": 1}
    record = recognise([row], what="rows").record(row, "row 1", source="s", default_source="")
    assert record.answer == answers[0]
    assert record.extra == {"level": 1} | ({TRUTHS: answers} if len(answers) > 1 else {})


@pytest.mark.parametrize(
    "truth",
    [
        [],
        ["4", None],
        ["4", ["5"]],
        ["4", " "],
        [True],
        {"target": []},
        {"target": 24, "numbers": [1]},
    ],
)
def test_a_list_with_a_member_that_is_no_answer_is_a_bad_row(truth):
    row = {"problem": "2 + 2?", "answer": truth}
    with pytest.raises(BadRow, match="row 1: field 'answer'"):
        recognise([row], what="rows").record(row, "row 1", source="s", default_source="")


def test_unit_tests_that_are_objects_stay_json():
    for tests in {"inputs": ["1"], "outputs": ["2"]}, [{"input": "1", "output": "2"}]:
        row = {"problem": "Add 1.", "answer": tests}
        record = recognise([row], what="rows").record(row, "", source="s", default_source="")
        assert json.loads(record.answer) == tests


def test_worked_solutions_come_along(tmp_path):
    text = "3+4=<<3+4=7>>7\n#### 7"
    (record,) = read(tmp_path, {"question": "3 + 4?", "answer": text}).records
    assert (record.answer, record.solution, record.extra) == ("7", text, {})


def test_fields_that_are_named_win(tmp_path):
    row = {"problem": "?", "answer": "#### 7", "q": {"text": "3 + 4?"}, "truth": 8}
    source = read(tmp_path, row, fields={"prompt": "q.text", "answer": "truth"})
    assert (source.records[0].prompt, source.records[0].answer) == ("3 + 4?", "8")
    assert "layout q.text/truth" in source.origin
    # What is named is taken as it is; the other is still recognised.
    assert read(tmp_path, row, fields={"answer": "answer"}).records[0].answer == "#### 7"
    assert read(tmp_path, row, fields={"prompt": "q.text"}).records[0].answer == "7"


def test_a_conversation_stays_one(tmp_path):
    talk = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "3 + 4?"}]
    (record,) = read(tmp_path, verl("x", prompt=talk)).records
    assert record.prompt == tuple(talk)


def test_a_row_of_another_layout_is_a_bad_row(tmp_path):
    gsm8k = {"question": "?", "answer": "#### 7"}
    rows = [gsm8k] * 64 + [{"question": "x?", "answer": "7"}]
    *_, reason = read(tmp_path, *rows).dropped.values()
    assert "rows.jsonl:65: the answer has no '####'" in reason.named[0]
    dapo = verl(f"{DAPO_BEFORE}3 + 4?{DAPO_AFTER}")
    *_, reason = read(tmp_path, *[dapo] * 64, verl("bare")).dropped.values()
    assert "rows.jsonl:65: the prompt has not DAPO's words" in reason.named[0]


@pytest.mark.parametrize(
    ("row", "lacking"),
    [
        ({"text": "?", "meta": {"n": 1, "parts": []}}, r"Set fields\.prompt and fields\.answer to"),
        ({"problem": "?", "chosen": "a", "rejected": "b"}, r"Set fields\.answer to"),
        ({"answer": "7", "text": "?"}, r"Set fields\.prompt to"),
    ],
)
def test_a_layout_that_is_not_known_lists_the_fields(row, lacking, tmp_path):
    with pytest.raises(UserError, match=lacking) as caught:
        read(tmp_path, row)
    assert all(f"'{name}' (" in str(caught.value) for name in row)


def test_dotted_fields_are_listed_and_a_wrong_name_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no field 'info.n' .*; it has .*'info.index' \(number\)"):
        recognise([{"info": {"index": 1}}], fields={"prompt": "info.n"}, what="x.jsonl")


def test_a_dotted_name_may_be_a_field_itself():
    row = {"a.b": 1, "a": {"b": 2, "c": 3}}
    assert (value_at(row, "a.b"), value_at(row, "a.c")) == (1, 3)
    assert without(row, ["a.b", None]) == {"a": {"b": 2, "c": 3}}
    assert without(row, ["a.c", "x.y"]) == {"a.b": 1, "a": {"b": 2}}
    assert row["a"] == {"b": 2, "c": 3}


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\left\{1, \frac{2}{3}\right\}}", r"\left\{1, \frac{2}{3}\right\}"),
        (r"\boxed { 3 }", "3"),
        (r"\boxed{1", None),
        ("none", None),
        (7, None),
    ],
)
def test_the_last_box_is_taken_with_its_braces(text, box):
    assert last_box(text) == box
