"""Files of rows, in every format."""

import datetime
import functools
import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import DUPLICATES, read_source
from jaxrl.data.rows import MALFORMED, BadRow, open_rows, write_rows
from jaxrl.errors import UserError

ROWS = [
    {"problem": f"{i} + {i}?", "answer": str(2 * i), "extra_info": {"index": i, "tags": ["a"]}}
    for i in range(2500)
]
TABLE = pa.Table.from_pylist(ROWS)


def jsonl(path: pathlib.Path) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def json_list(path: pathlib.Path) -> pathlib.Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(ROWS, indent=1))
    return path


def parquet(path: pathlib.Path) -> pathlib.Path:
    pq.write_table(TABLE, path, row_group_size=1100)
    return path


def arrow_stream(path: pathlib.Path, new=pa.ipc.new_stream) -> pathlib.Path:
    with new(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=1000)
    return path


arrow_file = functools.partial(arrow_stream, new=pa.ipc.new_file)


def saved(path: pathlib.Path) -> pathlib.Path:
    """As `datasets.save_to_disk` leaves it, in two files that the alphabet would take in another order."""
    path.mkdir()
    names = ["data-9.arrow", "data-10.arrow"]
    for name, start in zip(names, (0, 1300), strict=True):
        part = TABLE.slice(start, 1300)
        with pa.ipc.new_stream(path / name, part.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")
    return path


def shards(path: pathlib.Path) -> pathlib.Path:
    path.mkdir()
    for i, start in enumerate((0, 1300)):
        pq.write_table(TABLE.slice(start, 1300), path / f"train-{i}.parquet")
    return path


FORMATS = [jsonl, json_list, parquet, arrow_stream, arrow_file, saved, shards]


def read(path) -> list:
    return [row for _, row in open_rows(path)]


@pytest.mark.parametrize("make", FORMATS)
def test_every_format_gives_the_same_rows(make, tmp_path):
    rows = open_rows(make(tmp_path / "rows"))
    assert [row for _, row in rows] == ROWS == [row for _, row in rows]


def test_rows_say_where_they_stand(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"q": 1}\n\n{"q": 2}')
    assert [place for place, _ in open_rows(path)] == [f"{path}:2", f"{path}:4"]
    folder = shards(tmp_path / "shards")
    places = [place for place, _ in open_rows(folder)]
    assert places[1301] == f"{folder / 'train-1.parquet'} row 1"


def test_values_become_those_of_json(tmp_path):
    day = datetime.date(2024, 1, 31)
    table = pa.table({"day": [day], "picture": [b"\x89PNG"], "parts": [[{"n": None, "x": 0.5}]]})
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet")
    assert row == {"day": "2024-01-31", "picture": None, "parts": [{"n": None, "x": 0.5}]}


@pytest.mark.parametrize("make", [parquet, arrow_stream, arrow_file])
@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_truncated_file_is_one_line(make, kept, tmp_path):
    path = make(tmp_path / "rows")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_row_group_is_one_line(tmp_path):
    path = parquet(tmp_path / "rows.parquet")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = b"\xff" * 4000
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is broken from row .* on"):
        read(path)


def test_text_that_is_not_utf8_spoils_its_own_row(tmp_path):
    texts = pa.array([b"a", b"\xff", b"c", b"a"]).cast(pa.binary())
    invalid = pa.Array.from_buffers(pa.string(), 4, texts.buffers())
    pq.write_table(pa.table({"problem": invalid, "answer": list("1231")}), tmp_path / "a.parquet")
    source = read_source(SourceConfig(path=str(tmp_path / "a.parquet")), "data.train")
    assert [record.answer for record in source.records] == ["1", "3"]
    assert {reason: dropped.count for reason, dropped in source.dropped.items()} == {
        MALFORMED: 1,
        DUPLICATES: 1,
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"{}", "a.parquet is broken from row 0 on"),
        ("a.arrow", b"ARROW1\0\0", "a.arrow is broken from row 0 on"),
        ("a.json", b"[1, 2", "is no JSON list"),
        ("a.jsonl", b"", "is empty; put one JSON object a line"),
    ],
)
def test_what_is_no_file_of_rows_says_so(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_folders_that_cannot_be_read_say_what_to_name(tmp_path):
    with pytest.raises(UserError, match="has no file of rows; name a file"):
        open_rows(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.parquet").write_text("{}")
    with pytest.raises(UserError, match="has files of 2 kinds"):
        open_rows(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="holds several splits; name the folder of one"):
        open_rows(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": [{"filename": "x.arrow"}]}, "x.arrow does not exist"),
        (
            {"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "i"}]},
            "flatten_indices",
        ),
    ],
)
def test_a_saved_data_set_that_is_not_whole_says_so(state, message, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_an_entry_that_is_no_object_is_a_bad_row(tmp_path):
    (tmp_path / "a.json").write_text("[1, {}]")
    bad, empty = read(tmp_path / "a.json")
    assert isinstance(bad, BadRow) and "a JSON int" in str(bad) and empty == {}


# Writing.


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_is_written_is_read_back(suffix, tmp_path):
    path = tmp_path / f"new/out{suffix}"
    write_rows(ROWS, path)
    assert read(path) == ROWS
    with pytest.raises(UserError, match="exists; remove it"):
        write_rows(ROWS, path)


def test_a_field_of_several_types_is_left_to_jsonl(tmp_path):
    rows = [{"a": 1}, {"a": "x"}]
    with pytest.raises(UserError, match=r"Parquet does not hold these rows .*; name a \.jsonl"):
        write_rows(rows, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []
    write_rows(rows, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl") == rows


def test_a_time_beyond_pythons_spoils_its_own_row_alone(tmp_path):
    times = pa.array([0, 10**15, 0], pa.timestamp("s"))
    pq.write_table(pa.table({"at": times}), tmp_path / "a.parquet")
    first, bad, last = read(tmp_path / "a.parquet")
    assert first == last == {"at": "1970-01-01 00:00:00"}
    assert isinstance(bad, BadRow) and "a value that cannot be read" in str(bad)
