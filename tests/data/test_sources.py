"""Sources of problems: every row is a problem, or is counted and named."""

import dataclasses
import json
import pathlib

import pytest

from jaxrl.data import Record
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import DUPLICATES, HELD_OUT, UNREADABLE, read_source
from jaxrl.data.row_layouts import NO_PROMPT, NO_TRUTH
from jaxrl.data.rows import MALFORMED
from jaxrl.errors import UserError

GOOD = '{"q": "1 + 1?", "a": "2"}'


def read(path, **settings):
    given = {"fields": {"prompt": "q", "answer": "a"}, "source": "s", **settings}
    return read_source(SourceConfig(path=str(path), **given), "data.train")


def write(tmp_path, *lines: str | bytes) -> pathlib.Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


def counts(source) -> dict[str, int]:
    return {reason: dropped.count for reason, dropped in source.dropped.items()}


# Rows.


def test_rows_become_problems_in_their_order(tmp_path):
    path = write(tmp_path, GOOD, "", '{"q": "é\u2028?", "a": -3, "w": "so", "x": null}\r', "")
    source = read(path)
    assert source.records == (
        Record("1 + 1?", "2", "s"),
        Record("é\u2028?", "-3", "s", extra={"w": "so", "x": None}),
    )
    assert [record.place for record in source.records] == [f"{path}:1", f"{path}:3"]
    assert (source.num_rows, source.dropped) == (2, {})


def test_solutions_are_taken_when_named_or_called_so(tmp_path):
    row = '{"q": "1 + 1?", "a": "2", "w": "so", "solution": "thus"}'
    named = {"prompt": "q", "answer": "a", "solution": "w"}
    assert read(write(tmp_path, row), fields=named).records[0].solution == "so"
    path = write(tmp_path, row.replace('"a"', '"answer"'))
    assert read(path, fields={"prompt": "q"}).records[0].solution == "thus"


@pytest.mark.parametrize(
    ("number", "text"),
    [("4", "4"), ("4.0", "4"), ("-0.5", "-0.5"), ("1e3", "1000"), ('"04"', "04"), ("2.50", "2.5")],
)
def test_numbers_become_their_shortest_text(tmp_path, number, text):
    assert read(write(tmp_path, f'{{"q": "?", "a": {number}}}')).records[0].answer == text


BAD = [
    ('{"q": "1 + 1?", "a": ', MALFORMED, "no valid JSON"),
    ("[" * 100_000, MALFORMED, "no valid JSON"),
    ('["1 + 1?", "2"]', MALFORMED, "a JSON list; every line must be an object"),
    ("\0" * 512, MALFORMED, "no valid JSON"),
    (b'{"q": "\xff", "a": "2"}', MALFORMED, "no valid JSON"),
    ('{"question": "?", "a": "2"}', NO_PROMPT, "no field 'q'; the row has 'question' (text), 'a'"),
    ('{"q": 7, "a": "2"}', NO_PROMPT, "field 'q' is 7; it must be text"),
    ('{"q": " ", "a": "2"}', NO_PROMPT, "field 'q' is \" \"; it must be text and not empty"),
    ('{"q": [], "a": "2"}', NO_PROMPT, "a list of messages and not empty"),
    (
        '{"q": [{"role": "user"}], "a": "2"}',
        NO_PROMPT,
        "message 1 of field 'q': content must be a text",
    ),
    ('{"q": "\\ud800", "a": "2"}', NO_PROMPT, "surrogate"),
    ('{"q": "1\\u0000", "a": "2"}', NO_PROMPT, "NUL"),
    ('{"q": "?", "answer": "2"}', NO_TRUTH, "no field 'a'"),
    ('{"q": "?", "a": ""}', NO_TRUTH, "field 'a' is \"\""),
    ('{"q": "?", "a": null}', NO_TRUTH, "field 'a' is null; an answer must be text or a number"),
    ('{"q": "?", "a": true}', NO_TRUTH, "field 'a' is true"),
    ('{"q": "?", "a": [["2"]]}', NO_TRUTH, "field 'a' is "),
    ('{"q": "?", "a": NaN}', NO_TRUTH, "finite"),
]


@pytest.mark.parametrize(("row", "reason", "message"), BAD)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, reason, message):
    path = write(tmp_path, GOOD, "", row)
    (named,) = read(path).dropped[reason].named
    assert named.startswith(f"{path}:3: ") and message in named


def test_bad_rows_are_counted_named_and_survived(tmp_path):
    path = write(tmp_path, GOOD, *(row for row, _, _ in BAD), '{"q": "1 + 2?", "a": "3"}')
    source = read(path)
    assert [record.answer for record in source.records] == ["2", "3"]
    assert source.num_rows == len(BAD) + 2
    expected = [reason for _, reason, _ in BAD]
    assert counts(source) == {reason: expected.count(reason) for reason in set(expected)}
    assert source.dropped[NO_PROMPT].named[0].startswith(f"{path}:7: no field 'q'")
    assert len(source.dropped[NO_PROMPT].named) == 3


def test_a_long_line_and_a_byte_order_mark_are_no_error(tmp_path):
    long = json.dumps({"q": "x" * 10_000_000, "a": "2"})
    source = read(write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode(), long, GOOD))
    assert [len(record.prompt) for record in source.records] == [6, 10_000_000]


def test_a_file_of_which_nothing_is_left_is_refused(tmp_path):
    path = write(tmp_path, '{"q": "", "a": "2"}', '{"q": "", "a": "3"}')
    with pytest.raises(UserError, match=r"no row that can be used: rows without a prompt, .*:1: "):
        read(path)


def test_missing_and_empty_files_say_what_to_put_there(tmp_path):
    with pytest.raises(UserError, match=r'does not exist; put one JSON object a line.*"problem"'):
        read(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="is empty; put one JSON object a line"):
        read(write(tmp_path, "", ""))


def test_a_size_takes_the_first(tmp_path):
    path = write(tmp_path, GOOD, GOOD, '{"q": "?", "a": 3}', "{")
    source = read(path, size=2)
    assert [record.answer for record in source.records] == ["2", "3"]
    assert source.num_rows == 3


@pytest.mark.parametrize("size", [3, 0])
def test_a_task_has_the_name_that_its_settings_give_it(size):
    settings = SourceConfig(path="reasoning-gym:countdown", size=size)
    for name in ("", "puzzles"):
        named = dataclasses.replace(settings, source=name)
        source = read_source(named, "data.train", may_be_endless=True)
        assert source.source_names == (name or "countdown",)
        # The scorer goes by the task.
        assert source.records[0].extra["metadata"]["source_dataset"] == "countdown"
    if source.generated is not None:
        assert source.generated(99).source == "puzzles"


def test_a_source_without_a_path_is_refused():
    with pytest.raises(UserError, match=r"data.x names no problems; set data.x.path to a file"):
        read_source(SourceConfig(), "data.x")


# Duplicates.


def test_a_problem_that_stands_there_again_is_counted(tmp_path):
    rows = [GOOD, '{"q": " 1 + 1?\\r\\n", "a": "2 "}', GOOD, '{"q": "1 + 1 ?", "a": "2"}']
    source = read(write(tmp_path, *rows))
    assert [record.prompt for record in source.records] == ["1 + 1?", "1 + 1 ?"]
    assert counts(source) == {DUPLICATES: 2}


SAME = {"q": "Play.", "a": "win", "env": {"seed": 1, "size": [2, 3]}}


@pytest.mark.parametrize(
    "other",
    [
        {"a": "lose"},
        {"env": {"seed": 2, "size": [2, 3]}},
        {"env": {"seed": 1, "size": [3, 2]}},
        {"env": {"seed": True, "size": [2, 3]}},
        {"env": None},
        {"env": {}},
        {"level": 0},
        {"level": ""},
        {"data_source": "b"},
        {"solution": "Move left."},
        {"q": "play."},
        {"q": [{"role": "user", "content": "Play."}, {"role": "assistant", "content": "Hm."}]},
    ],
)
def test_rows_that_differ_anywhere_are_two_problems(other, tmp_path):
    for rows in ([SAME, SAME | other], [SAME | other, SAME]):
        source = read(write(tmp_path, *map(json.dumps, rows)), source="")
        assert (len(source.records), source.dropped) == (2, {})


def test_a_solution_that_is_no_text_is_a_field_like_others(tmp_path):
    rows = [SAME | {"solution": steps} for steps in (["add"], ["count"], ["add"])]
    source = read(write(tmp_path, *map(json.dumps, rows)), source="")
    assert (len(source.records), counts(source)) == (2, {DUPLICATES: 1})


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"q": "\r\n Play. "},
        {"q": [{"role": "user", "content": "Play.\n"}]},
        {"a": "win\r\n"},
        {"env": {"size": [2, 3], "seed": 1}},
    ],
)
def test_equal_rows_are_one_problem(other, tmp_path):
    source = read(write(tmp_path, *map(json.dumps, [SAME, SAME | other, SAME])))
    assert (len(source.records), counts(source)) == (1, {DUPLICATES: 2})


# Truths and evaluation.


def numbers_only(answer, extra, source):
    assert (extra, source) == ({"level": 1}, "s")
    return None if answer.isdigit() else f"{answer!r} is no number"


def test_truths_are_put_to_their_grader(tmp_path):
    path = write(
        tmp_path, '{"q": "1?", "a": "1", "level": 1}', '{"q": "2?", "a": "two", "level": 1}'
    )
    source = read(path)
    checked = source.with_readable_truths(numbers_only)
    assert [record.answer for record in checked.records] == ["1"]
    assert checked.dropped[UNREADABLE].named == (f"{path}:2: 'two' is no number",)
    with pytest.raises(UserError, match="no row left: all 2 are ground truths that"):
        source.with_readable_truths(lambda *_: "is odd")


def test_evaluation_problems_are_not_trained_on(tmp_path):
    talk = (
        '{"q": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "B"}], "a": 1}'
    )
    source = read(write(tmp_path, GOOD, '{"q": "1 + 2 = X?", "a": "3"}', talk))
    # Case and spacing do not matter, nor who says it.
    test = read(write(tmp_path, '{"q": "1  + 2 = x?\\n", "a": 3}', '{"q": "A\\nb", "a": 2}'))
    kept = source.without_problems_of([test])
    assert (kept.records, counts(kept)) == (source.records[:1], {HELD_OUT: 2})
    assert source.dropped == {}
    with pytest.raises(UserError, match="no row left: all 1 are prompts of the evaluation"):
        kept.without_problems_of([source])


def trained(tmp_path, rows, *evaluations) -> list[str]:
    """The field `id` of the training rows that are left."""
    train, *held_out = (
        read(write(tmp_path, *map(json.dumps, each))) for each in (rows, *evaluations)
    )
    return [record.extra["id"] for record in train.without_problems_of(held_out).records]


def games(*seeds, **fields):
    return [{"q": "Play.", "a": "win", "id": f"{seed}", **fields} for seed in seeds]


def test_a_prompt_of_the_evaluation_is_held_out_whatever_stands_beside_it(tmp_path):
    sums = [{"q": f"{n} + 1", "a": n + 1, "id": f"{n}"} for n in range(4)]
    test = [{"q": "2 + 1", "a": "3.00", "level": 5, "id": "test/9"}]
    assert trained(tmp_path, sums, test) == ["0", "1", "3"]
    # Two sets of the evaluation have it, each once; a training file has it twice.
    again = [{"q": "2 + 1", "a": 3, "unique_id": 7}]
    assert trained(tmp_path, [*sums, {**sums[2], "id": "4"}], test, again) == ["0", "1", "3"]


def test_problems_that_share_a_prompt_are_held_out_as_whole_rows(tmp_path):
    sums = [{"q": "1 + 1", "a": 2, "id": "sum"}]
    # The evaluation has the prompt of several problems.
    assert trained(tmp_path, [*games(1, 2, 3, 4), *sums], games(2, 9)) == ["1", "3", "4", "sum"]
    # All rows of the training file have it; the evaluation may have one of them.
    assert trained(tmp_path, games(1, 2, 3, 4), games(2)) == ["1", "3", "4"]
    assert trained(tmp_path, games(1, 2, 3, 4), games(8)) == ["1", "2", "3", "4"]
    assert trained(tmp_path, games(1, 2), games(2, data_source="test")) == ["1"]
    with pytest.raises(UserError, match="no row left"):
        trained(tmp_path, games(1, 2), games(1, 2, 3))


def test_a_question_that_a_task_asks_twice_is_held_out(tmp_path):
    train = read(write(tmp_path, GOOD, '{"q": "2 + 2?", "a": "4"}'))
    # Items of a task have their number in their metadata.
    asked = tuple(
        Record("1 + 1?", "2", "s", extra={"metadata": {"source_index": n}}) for n in range(2)
    )
    task = dataclasses.replace(
        train, records=asked, settings=SourceConfig(path="reasoning-gym:sums", size=2)
    )
    assert train.without_problems_of([task]).records == train.records[1:]


def test_metrics_are_kept_under_what_the_rows_say(tmp_path):
    path = write(tmp_path, '{"q": "?", "a": 1, "data_source": "aime"}', GOOD)
    assert read(path, source="").source_names == ("aime", "rows")
    assert read(path).source_names == ("s",)
