"""Published files, as they are and in the layout of verl's Parquet: every row loads without a setting."""

import json
import pathlib
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.messages import PromptFormat
from jaxrl.data.problems import DUPLICATES, read_source
from jaxrl.data.prompt_encoding import encode_prompts
from jaxrl.data.row_layouts import DAPO_AFTER, DAPO_BEFORE, NO_TRUTH
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.rewards import Graders, GradingTask, Response

DATA = pathlib.Path(__file__).parents[2] / "../shared/data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no data beside the repository")

LOADED = {
    "dapo_math_17k": (17_243, "problem/answer"),
    "math500": (500, "problem/answer"),
    "gsm8k_train": (7_473, "GSM8K"),
    "gsm8k_test": (1_319, "GSM8K"),
    "aime_2024": (30, "problem/answer"),
    "aime_1983_2023": (975, "problem/answer"),
    "math_train": (7_470, "problem/answer"),
}


def read(path, **settings):
    return read_source(SourceConfig(path=str(path), **settings), "data.train")


def rows_of(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def as_published(rows, source, *, before="", after=""):
    """The rows as verl writes them."""
    return pa.Table.from_pylist(
        [
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": before + row["problem"] + after}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(row["answer"]), "style": "rule"},
                "extra_info": {"index": str(i)},
            }
            for i, row in enumerate(rows)
        ]
    )


@pytest.mark.parametrize("name", LOADED)
def test_every_row_loads_without_a_setting(name):
    source = read(DATA / f"{name}.jsonl")
    count, layout = LOADED[name]
    assert len(source.records) == count
    assert f"layout {layout})" in source.origin
    assert source.source_names == (name,)
    left_out = {reason: (d.count, len(d.named)) for reason, d in source.dropped.items()}
    # Two truths are empty, and named.
    assert left_out == ({NO_TRUTH: (2, 2)} if name == "math_train" else {})


@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test"])
def test_gsm8ks_own_grader_takes_its_rows_and_their_solutions_are_right(name):
    graders = Graders(("gsm8k", {}))
    records = read(DATA / f"{name}.jsonl").records
    rows = [GradingTask(record.answer, record.extra, record.source) for record in records]
    assert [row for row in rows if graders.validate(row)] == []
    none = np.zeros(0, np.int32)
    samples = [Response(r.solution or "", none, row) for r, row in zip(records, rows, strict=True)]
    assert all(verdict.correct for verdict in graders.grade(samples))


def test_dapo_as_published_gives_the_same_prompts(tmp_path):
    rows = rows_of("dapo_math_17k")
    table = as_published(rows, "math_dapo", before=DAPO_BEFORE, after=DAPO_AFTER)
    # The published file has every problem a hundred times; three are enough here.
    with pq.ParquetWriter(tmp_path / "dapo.parquet", table.schema) as writer:
        for _ in range(3):
            writer.write_table(table)
    start = time.process_time()
    published = read(tmp_path / "dapo.parquet")
    assert time.process_time() - start < 30
    bare = read(DATA / "dapo_math_17k.jsonl")
    assert "layout DAPO-Math-17k as published" in published.origin
    assert {k: d.count for k, d in published.dropped.items()} == {DUPLICATES: 2 * len(rows)}
    assert [(r.prompt, r.answer) for r in published.records] == [
        (r.prompt, r.answer) for r in bare.records
    ]
    tokenizer = load_tokenizer(DATA / "tokenizers/qwen2.5")
    words = PromptFormat(template=f"{DAPO_BEFORE}{{prompt}}{DAPO_AFTER}", chat=True)
    ours, theirs = (
        encode_prompts(s.records[:200], tokenizer, max_prompt_tokens=2048, prompt_format=words)
        for s in (bare, published)
    )
    assert ours.prompts.texts == theirs.prompts.texts
    # To the model they are what verl would send.
    sent = tokenizer.render_chat(table.slice(0, 1).to_pylist()[0]["prompt"])
    assert theirs.prompts.texts[0] == sent


@pytest.mark.parametrize("name", ["math500", "aime_2024", "math_train"])
def test_verl_rows_give_the_same_problems(name, tmp_path):
    pq.write_table(as_published(rows_of(name), name), tmp_path / "rows.parquet")
    published, bare = read(tmp_path / "rows.parquet"), read(DATA / f"{name}.jsonl")
    assert "layout verl)" in published.origin
    assert [(r.prompt, r.answer, r.source) for r in published.records] == [
        (r.prompt, r.answer, r.source) for r in bare.records
    ]
    assert {k: d.count for k, d in published.dropped.items()} == {
        k: d.count for k, d in bare.dropped.items()
    }
