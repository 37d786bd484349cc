import json
import pathlib
import re
import sys
import time

import pytest

from jaxrl.data import JsonlRecords, ReasoningGymRecords, Record, disjoint
from jaxrl.errors import UserError

DATA = pathlib.Path(__file__).parents[2] / "../shared/data"
GOOD = '{"q": "1 + 1?", "a": "2"}'
SUMS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2}


def read(path, **fields):
    return JsonlRecords(path, **{"prompt_field": "q", "answer_field": "a", "source": "s", **fields})


def write(tmp_path, *lines: str) -> pathlib.Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# JSONL.


def test_rows_are_read_by_index(tmp_path):
    rows = read(
        write(tmp_path, GOOD, "", '{"q": "é\u2028?", "a": -3, "w": "so", "x": null}\r', ""),
    )
    assert len(rows) == 2
    assert rows[0] == Record("1 + 1?", "2", "s", None)
    assert rows[-1] == Record("é\u2028?", "-3", "s", None)


def test_solutions_are_taken_when_named(tmp_path):
    rows = read(write(tmp_path, '{"q": "1 + 1?", "a": "2", "w": "so"}'), solution_field="w")
    assert rows[0].solution == "so"


@pytest.mark.parametrize(
    ("number", "text"),
    [("4", "4"), ("4.0", "4"), ("-0.5", "-0.5"), ("1e3", "1000"), ('"04"', "04"), ("2.50", "2.5")],
)
def test_numbers_become_their_shortest_text(tmp_path, number, text):
    assert read(write(tmp_path, f'{{"q": "?", "a": {number}}}'))[0].answer == text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"q": "1 + 1?", "a": ', "no valid JSON"),
        ("[" * 100_000, "no valid JSON"),
        ('["1 + 1?", "2"]', "a JSON list; every line must be an object"),
        ('{"question": "?", "a": "2"}', "no field 'q'; the row has 'question', 'a'"),
        ('{"q": "?", "answer": "2"}', "no field 'a'"),
        ('{"q": 7, "a": "2"}', "field 'q' is 7; it must be text"),
        ('{"q": " ", "a": "2"}', "field 'q' is \" \"; it must be text and not empty"),
        ('{"q": "?", "a": ""}', "field 'a' is \"\""),
        ('{"q": "?", "a": null}', "field 'a' is null; an answer must be text or a number"),
        ('{"q": "?", "a": true}', "field 'a' is true"),
        ('{"q": "?", "a": ["2"]}', "field 'a' is "),
        ('{"q": "?", "a": NaN}', "finite"),
        ('{"q": "\\ud800", "a": "2"}', "surrogate"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, row, message):
    path = write(tmp_path, GOOD, "", row)
    with pytest.raises(UserError, match=re.escape(f"{path}:3: ") + f".*{re.escape(message)}"):
        read(path)


def test_bytes_that_are_no_utf8_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"q": "\xff", "a": "2"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: no valid JSON"):
        read(path)


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read(path)[0].answer == "2"


def test_missing_and_empty_files_say_what_to_put_there(tmp_path):
    with pytest.raises(UserError, match=r'does not exist; put one JSON object a line.*"q"'):
        read(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="is empty; put one JSON object a line"):
        read(write(tmp_path, "", ""))


@pytest.mark.skipif(not DATA.is_dir(), reason="no data beside the repository")
def test_the_largest_common_set_is_checked_quickly():
    start = time.monotonic()
    rows = read(DATA / "dapo_math_17k.jsonl", prompt_field="problem", answer_field="answer")
    assert time.monotonic() - start < 5
    assert (len(rows), rows[0].answer) == (17_243, "34")


# Procedural tasks.


def test_sums_come_with_right_answers_and_solutions():
    rows = ReasoningGymRecords("chain_sum", size=200, seed=3, **SUMS)

    assert len(rows) == 200
    for row in rows:
        assert row.source == "chain_sum"
        assert row.prompt.endswith(" =")
        assert row.solution is not None
        # Who shows no work may be wrong; see worked_sums.
        assert "=" not in row.solution or row.solution.endswith(f"\nAnswer: {row.answer}")
    styles = {row.solution.startswith("First") for row in rows if row.solution}
    assert styles == {True, False}


def test_same_seed_same_rows_and_neighbouring_seeds_share_no_run():
    rows = ReasoningGymRecords("chain_sum", size=100, seed=3, **SUMS)

    assert list(rows) == list(ReasoningGymRecords("chain_sum", size=100, seed=3, **SUMS))
    # What reasoning-gym itself would do: seed 4 is seed 3 from its second item on.
    following = ReasoningGymRecords("chain_sum", size=99, seed=4, **SUMS)
    assert not set(rows[1:]) & set(following[:98])


def test_tasks_without_worked_solutions_have_none():
    assert ReasoningGymRecords("gcd", size=2, seed=0)[0].solution is None


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chain_sums", {}, "no task 'chain_sums'.*did you mean chain_sum"),
        ("chain_sum", {"max_term": 4}, "no setting 'max_term'.*did you mean max_terms"),
        ("chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
        ("chain_sum", {"size": 0}, "size 0 and seed 0"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(task, config, message):
    with pytest.raises(UserError, match=message):
        ReasoningGymRecords(task, **{"size": 5, "seed": 0, **config})


def test_without_the_extra_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install jaxrl\[demo\]"):
        ReasoningGymRecords("chain_sum", size=5, seed=0)


# Evaluation data.


def test_no_evaluation_question_is_trained_on(caplog):
    # 2,000 possible sums of three digits: many questions fall into both sets.
    small = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    everything = ReasoningGymRecords("chain_sum", size=2000, seed=0, **small)
    evaluation = ReasoningGymRecords("chain_sum", size=100, seed=1, **small)
    questions = {row.prompt for row in evaluation}
    assert questions & {row.prompt for row in everything}

    train = disjoint(everything, evaluation)

    assert not questions & {row.prompt for row in train}
    assert list(train) == [row for row in everything if row.prompt not in questions]
    assert f"{2000 - len(train)} of 2000 training rows dropped" in caplog.text


def test_case_and_spacing_do_not_hide_an_evaluation_question():
    rows = [Record("What is 1 + 1?", "2", "s"), Record("What is 1 + 2?", "3", "s")]
    assert disjoint(rows, [Record("what is  1 + 1?\n", "2", "t")]) == (rows[1],)


def test_holding_out_everything_is_refused():
    rows = [Record("?", "2", "s")]
    with pytest.raises(UserError, match="all 1 training prompts"):
        disjoint(rows, rows)


def test_rows_are_json_like_plain_text(tmp_path):
    record = ReasoningGymRecords("chain_sum", size=1, seed=0, **SUMS)[0]
    line = json.dumps({"q": record.prompt, "a": record.answer, "w": record.solution})
    back = read(write(tmp_path, line), source="chain_sum", solution_field="w")
    assert back[0] == record
