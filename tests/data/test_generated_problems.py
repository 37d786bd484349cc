"""Problems that a function or a task makes while they are drawn."""

import dataclasses
import itertools
import json
import pathlib
import re
import sys

import pytest
from extras import import_extra

from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.data.generated_problems import NUM_FIRST, TaskProblems
from jaxrl.data.problems import UNREADABLE, Source, read_source
from jaxrl.data.prompt_encoding import encode_prompts, stream_inputs
from jaxrl.data.row_layouts import NO_TRUTH
from jaxrl.data.stream import PromptStream
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError

TOKENIZER = train_tokenizer(["1 + 1"], vocab_size=258)
SUMS = """
def make(index, rng, *, most=1000):
    a, b = rng.integers(most, size=2)
    return {"problem": f"{a} + {b} =", "answer": a + b, "numbers": rng.integers(9, size=2), "index": index}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def function(body: str, name: str = "puzzles.py") -> str:
    """Where a function is that has the body."""
    pathlib.Path(name).write_text(
        body if "def make" in body else f"def make(index, rng):\n    {body}"
    )
    return f"{name}:make"


def read(path: str, **settings) -> Source:
    return read_source(SourceConfig(path=path, **settings), "data.train", may_be_endless=True)


def stream(*sources: Source, per_batch=4, max_prompt_tokens=30, **settings) -> PromptStream:
    data = DataConfig(max_prompt_tokens=max_prompt_tokens)
    first = [
        encode_prompts(source.records, TOKENIZER, max_prompt_tokens=max_prompt_tokens)
        for source in sources
    ]
    made = stream_inputs(sources, first, data, TOKENIZER)
    weights = [source.settings.weight for source in sources]
    return PromptStream(made, prompts_per_batch=per_batch, seed=0, weights=weights, **settings)


def texts(prompts: PromptStream, num_batches: int) -> list[str]:
    return [text for batch in itertools.islice(prompts, num_batches) for text in batch.texts]


# Rows of a function


def test_a_function_is_a_source_without_end():
    source = read(function(SUMS))
    assert len(source.records) == NUM_FIRST
    record = source.records[3]
    a, b = map(int, re.findall(r"\d+", str(record.prompt)))
    assert (record.answer, record.source) == (str(a + b), "make")
    # What NumPy made is in JSON's types.
    assert json.loads(json.dumps(record.extra)) == record.extra
    assert record.extra["index"] == 3 and len(record.extra["numbers"]) == 2
    prompts = stream(source)
    drawn = texts(prompts, 100)
    assert drawn[:NUM_FIRST] == [record.prompt for record in source.records]
    assert len(set(drawn)) > 390
    assert next(prompts).ids_N.tolist() == [400, 401, 402, 403]


def test_problems_hang_on_the_seed_and_the_options():
    path = function(SUMS)
    given = read(path).records
    assert read(path).records == given
    assert read(path, seed=1).records != given
    small = read(path, options={"most": 5}).records
    assert all(max(map(int, re.findall(r"\d+", str(r.prompt)))) < 5 for r in small)
    with pytest.raises(UserError, match=r"cannot be called with \(index, rng, least=\)"):
        read(path, options={"least": 5})


def test_a_stream_of_made_prompts_resumes_at_its_number():
    settings = {"max_prompt_tokens": 10}  # longer sums are left out
    sources = read(function(SUMS)), read(function(SUMS, "more.py"), seed=1, weight=3.0)
    prompts = stream(*sources, **settings)
    before = texts(prompts, 20)
    state = json.loads(json.dumps(prompts.state()))
    expected = texts(prompts, 20)
    restored = stream(*sources, **settings)
    restored.restore(state)
    assert texts(restored, 20) == expected
    assert not set(before) & set(expected)
    assert restored.counts() == prompts.counts() and prompts.counts()["data/made_problems_left_out"]
    with pytest.raises(UserError, match="in other data"):
        stream(read(function(SUMS), options={"most": 9}), sources[1], **settings).restore(state)


def test_a_size_makes_a_function_a_file_that_is_read_once():
    source = read(function(SUMS), size=10)
    assert (source.generated, len(source.records), source.num_rows) == (None, 10, 10)
    assert source.records == read(function(SUMS)).records[:10]
    assert source.records[7].place == "puzzles.py:make index 7"
    with pytest.raises(UserError, match=r"is endless: puzzles\.py:make.* set data\.x\.size"):
        read_source(SourceConfig(path="puzzles.py:make"), "data.x")


def test_rows_have_the_layouts_of_files():
    row = '{"question": "1 + 1?", "answer": f"so\\n#### {index}", "data_source": "gsm"}'
    source = read(function(f"return {row}"))
    assert "made by a function, layout GSM8K" in source.origin
    assert (source.records[5].answer, source.records[5].source) == ("5", "gsm")
    path = function('return {"q": "1?", "x": {"y": index}}', "named.py")
    named = read(path, fields={"prompt": "q", "answer": "x.y"}, source="own")
    assert (named.records[5].answer, named.records[5].source) == ("5", "own")


def test_rows_that_cannot_be_used_are_counted_and_passed_over(caplog):
    body = 'return {"question": f"{index} = ?", "answer": "" if index % 4 == 0 else str(index)}'
    path = function(body)
    source = read(path)
    assert {reason: dropped.count for reason, dropped in source.dropped.items()} == {NO_TRUTH: 16}
    assert (
        source.dropped[NO_TRUTH].named[0].startswith("puzzles.py:make index 0: field 'answer' is")
    )
    prompts = stream(source)
    assert texts(prompts, 1) == ["1 = ?", "2 = ?", "3 = ?", "5 = ?"]
    assert prompts.counts() == {"data/made_problems_left_out": 2}
    texts(prompts, 5)
    assert len(caplog.records) == 3 and "puzzles.py:make index 0: field 'answer'" in caplog.text


def test_truths_and_held_out_prompts_are_looked_at_as_they_are_made():
    def validate(answer, extra, source):
        return "is odd" if int(answer) % 2 else None

    source = read(function('return {"question": f"{index} = ?", "answer": index}'))
    held_out = [dataclasses.replace(source, records=source.records[2:3])]
    checked = source.without_problems_of(held_out).with_readable_truths(validate)
    assert [record.answer for record in checked.records] == [
        str(n) for n in range(0, 64, 2) if n != 2
    ]
    assert checked.dropped[UNREADABLE].count == 32
    drawn = [answer for batch in itertools.islice(stream(checked), 50) for answer in batch.answers]
    assert drawn == [str(n) for n in range(0, 402, 2) if n != 2]


def test_a_function_that_never_makes_a_problem_does_not_run_for_ever():
    late = "return {'question': 'x' * (9 if index < 100 else 99), 'answer': 1}"
    prompts = stream(read(function(late)))
    assert len(texts(prompts, 25)) == 100
    with pytest.raises(
        UserError, match="1000 problems in succession are left out, the last one being "
    ):
        next(prompts)
    with pytest.raises(
        UserError, match=r"never\.py:make has no row that can be used: rows without a truth, "
    ):
        read(function("return {'question': 'x', 'answer': ''}", "never.py"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", r"index 0: TypeError.*must return a row of JSON's types, such"),
        ("return '1 + 1'", "index 0: ValueError"),
        ("return {'question': object(), 'answer': 1}", "object is none of JSON's types"),
        ("return {'question': '1?', 'answer': 1 // (9 - index)}", "index 9: ZeroDivision"),
        ("return {'only': 'a field'}", "puzzles.py:make has a layout that is not known.*'only'"),
        (
            "import random; return {'question': f'{random.random()}', 'answer': 1}",
            "index 0: the function made .* and, asked again, .*Draw from its argument `rng` alone",
        ),
    ],
)
def test_functions_that_misbehave_are_named(body, message):
    with pytest.raises(UserError, match=message):
        read(function(body))


# Tasks of reasoning-gym


def test_a_task_without_a_size_has_no_end():
    import_extra("tasks", "reasoning_gym")
    settings = {"seed": 3, "options": {"min_terms": 2, "max_terms": 2}}

    def task(**further) -> Source:
        return read_source(
            SourceConfig(path="reasoning-gym:chain_sum", **settings, **further),
            "x",
            may_be_endless=True,
        )

    source, fixed = task(), task(size=1200)
    assert source.generated is not None and fixed.generated is None
    # One problem for each number, whether it is asked for alone or among others, and in whichever order.
    for number in (1199, 0, 499, 500, 1000, 501):
        made, record = source.generated(number), fixed.records[number]
        assert (made.prompt, made.answer, made.solution) == (
            record.prompt,
            record.answer,
            record.solution,
        )
    assert source.generated(1_000_005) == fixed.records[5]
    assert texts(stream(source, max_prompt_tokens=99), 2) == [
        record.prompt for record in fixed.records[:8]
    ]
    assert source.origin == "reasoning-gym task chain_sum, without end; of the first 64:"


def of_task(task: str, size: int, seed: int = 0, **options) -> list:
    problems = TaskProblems(task, seed=seed, options=options, size=size)
    return [problems.record(number) for number in range(size)]


def test_same_seed_same_problems_and_neighbouring_seeds_share_no_run():
    import_extra("tasks", "reasoning_gym")
    sums = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2}
    records = of_task("chain_sum", 100, 3, **sums)
    assert records == of_task("chain_sum", 100, 3, **sums)
    # What reasoning-gym itself would do: seed 4 is seed 3 from its second item on.
    assert not set(records[1:]) & set(of_task("chain_sum", 99, 4, **sums)[:98])
    assert of_task("gcd", 2)[0].solution is None


def test_what_a_scorer_looks_at_comes_along():
    import_extra("tasks", "reasoning_gym")
    for record in of_task("countdown", 3):
        metadata = record.extra["metadata"]
        assert metadata["source_dataset"] == "countdown"
        assert str(metadata["target"]) in str(record.prompt)
        assert json.loads(json.dumps(metadata)) == metadata


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, "no task 'chain_sums'.*did you mean chain_sum"),
        ("chain_sum", {"max_term": 4}, "refuses its settings .*'max_term'"),
        ("chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(task, options, message):
    import_extra("tasks", "reasoning_gym")
    with pytest.raises(UserError, match=message):
        of_task(task, 5, **options)


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install reasoning-gym"):
        of_task("chain_sum", 5)
