"""Files of rows by index, in every format."""

import datetime
import json
import pathlib

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extras import import_extra

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.row_files import open_rows
from jaxrl.data.row_records import DUPLICATES, MALFORMED
from jaxrl.data.row_writers import write_rows
from jaxrl.data.rows import BadRow
from jaxrl.data.source_reader import read_source
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


def arrow_stream(path: pathlib.Path) -> pathlib.Path:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=1000)
    return path


def arrow_file(path: pathlib.Path) -> pathlib.Path:
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=1000)
    return path


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


def array_record(path: pathlib.Path) -> pathlib.Path:
    module = import_extra("dev", "array_record.python.array_record_module")
    path = path.with_suffix(".array_record")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for row in ROWS:
        writer.write(json.dumps(row).encode())
    writer.close()
    return path


FORMATS = [jsonl, json_list, parquet, arrow_stream, arrow_file, saved, shards, array_record]


@pytest.mark.parametrize("make", FORMATS)
def test_every_format_gives_the_same_rows_in_any_order(make, tmp_path):
    rows = open_rows(make(tmp_path / "rows"))
    assert len(rows) == len(ROWS)
    order = np.random.default_rng(0).permutation(len(ROWS))[:200].tolist()
    for index in [*order, *range(990, 1110), 0, -1, np.int64(7)]:
        assert rows[index] == ROWS[index]
    with pytest.raises(IndexError):
        rows[len(ROWS)]


@pytest.mark.parametrize("make", FORMATS)
def test_grain_reads_them(make, tmp_path):
    rows = open_rows(make(tmp_path / "rows"))
    dataset = grain.MapDataset.source(rows).shuffle(seed=1)
    assert sorted(dataset[i]["extra_info"]["index"] for i in range(300)) == sorted(
        grain.MapDataset.range(len(ROWS)).shuffle(seed=1)[i] for i in range(300)
    )


def test_rows_say_where_they_stand(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"q": 1}\n\n{"q": 2}')
    assert [open_rows(path).place(i) for i in range(2)] == [f"{path}:2", f"{path}:4"]
    folder = shards(tmp_path / "shards")
    assert open_rows(folder).place(1301) == f"{folder / 'train-1.parquet'} row 1"


def test_rows_that_repeat_have_equal_keys(tmp_path):
    messages = [[{"role": "user", "content": text}] for text in "abab"]
    table = pa.table({"prompt": messages, "reward_model": [{"truth": x} for x in "1213"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    rows = open_rows(tmp_path / "a.parquet")
    first, second, third, fourth = rows.keys(["prompt", "reward_model.truth"])
    assert first == third and len({first, second, fourth}) == 3
    # Two messages are no single value.
    table = pa.table({"prompt": [messages[0] + messages[1]] * 4, "truth": list("1213")})
    pq.write_table(table, tmp_path / "b.parquet")
    assert open_rows(tmp_path / "b.parquet").keys(["prompt", "truth"]) is None


def test_values_become_those_of_json(tmp_path):
    day = datetime.date(2024, 1, 31)
    table = pa.table({"day": [day], "picture": [b"\x89PNG"], "parts": [[{"n": None, "x": 0.5}]]})
    pq.write_table(table, tmp_path / "a.parquet")
    row = open_rows(tmp_path / "a.parquet")[0]
    assert row == {"day": "2024-01-31", "picture": None, "parts": [{"n": None, "x": 0.5}]}


@pytest.mark.parametrize("make", [parquet, arrow_stream, arrow_file, array_record])
@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_truncated_file_is_one_line(make, kept, tmp_path):
    path = make(tmp_path / "rows")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError) as caught:
        rows = open_rows(path)
        [rows[i] for i in range(len(rows))]
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_row_group_is_one_line(tmp_path):
    path = parquet(tmp_path / "rows.parquet")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = b"\xff" * 4000
    path.write_bytes(content)
    rows = open_rows(path)
    with pytest.raises(UserError, match=r"is broken from row .* on"):
        [rows[i] for i in range(len(rows))]


def test_text_that_is_not_utf8_spoils_its_own_row(tmp_path):
    texts = pa.array([b"a", b"\xff", b"c", b"a"]).cast(pa.binary())
    invalid = pa.Array.from_buffers(pa.string(), 4, texts.buffers())
    pq.write_table(pa.table({"problem": invalid, "answer": list("1231")}), tmp_path / "a.parquet")
    rows = open_rows(tmp_path / "a.parquet")
    assert [rows[i]["problem"] for i in (0, 2, 3)] == ["a", "c", "a"]
    with pytest.raises(BadRow, match="not UTF-8"):
        rows[1]
    source = read_source(SourceConfig(path=str(tmp_path / "a.parquet")), "data.train")
    assert [record.answer for record in source.records] == ["1", "3"]
    assert {reason: dropped.count for reason, dropped in source.dropped.items()} == {
        MALFORMED: 1,
        DUPLICATES: 1,
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        ("a.jsonl", b"\x1f\x8b\x08\x00", "is compressed; unpack it first"),
        ("a.parquet", b"{}", "is no whole Parquet file"),
        ("a.arrow", b"ARROW1\0\0", "is no whole Arrow file"),
        ("a.array_record", b"RIFF", "is no ArrayRecord"),
        ("a.json", b"[1, 2", "is no JSON list"),
        ("a.jsonl", b"", "is empty; put one JSON object a line"),
    ],
)
def test_what_is_no_file_of_rows_says_so(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_rows(tmp_path / name)


def test_folders_that_cannot_be_read_say_what_to_name(tmp_path):
    with pytest.raises(UserError, match="has no file of rows; name a file"):
        open_rows(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.parquet").write_text("{}")
    with pytest.raises(UserError, match="has files of 2 kinds"):
        open_rows(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="holds the splits train, test; name the folder of one"):
        open_rows(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "names no data files"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "files outside its folder"),
        ({"_data_files": [{"filename": "x.arrow"}]}, "has no x.arrow"),
        (
            {"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "i"}]},
            "flatten_indices",
        ),
    ],
)
def test_a_saved_data_set_that_is_not_whole_says_so(state, message, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=message):
        open_rows(tmp_path)


def test_an_entry_that_is_no_object_is_a_bad_row(tmp_path):
    (tmp_path / "a.json").write_text("[1, {}]")
    with pytest.raises(BadRow, match="a JSON int"):
        open_rows(tmp_path / "a.json")[0]


# Writing.


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_is_written_is_read_back(suffix, tmp_path):
    path = tmp_path / f"new/out{suffix}"
    write_rows(ROWS, path)
    rows = open_rows(path)
    assert [rows[i] for i in range(len(rows))] == ROWS
    with pytest.raises(UserError, match="exists; remove it"):
        write_rows(ROWS, path)


def test_columns_of_several_types_are_written_as_json(tmp_path, caplog):
    write_rows([{"a": 1, "b": {}}, {"a": "x"}], tmp_path / "out.parquet")
    rows = open_rows(tmp_path / "out.parquet")
    assert [rows[0], rows[1]] == [{"a": "1", "b": "{}"}, {"a": '"x"', "b": None}]
    assert "a holds values of several types" in caplog.text


def test_another_format_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"neither \.jsonl nor \.parquet"):
        write_rows(ROWS, tmp_path / "out.csv")


def test_nanoseconds_are_read_to_the_microsecond(tmp_path):
    moments = pa.array(np.array([1_577_836_800_123_456_789])).cast(pa.timestamp("ns"))
    zoned = moments.cast(pa.timestamp("ns", "UTC"))
    table = pa.table(
        {
            "at": moments,
            "took": pa.array(np.array([1_000_000_001])).cast(pa.duration("ns")),
            "clock": pa.array([[datetime.time(1, 2)]], pa.list_(pa.time64("ns"))),
            "inner": pa.StructArray.from_arrays([zoned, pa.array(["x"])], ["at", "text"]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert open_rows(tmp_path / "a.parquet")[0] == {
        "at": "2020-01-01 00:00:00.123456",
        "took": "0:00:01",
        "clock": ["01:02:00"],
        "inner": {"at": "2020-01-01 00:00:00.123456+00:00", "text": "x"},
    }


def test_a_time_beyond_pythons_spoils_its_own_row_alone(tmp_path):
    times = pa.array([0, 10**15, 0], pa.timestamp("s"))
    pq.write_table(pa.table({"at": times}), tmp_path / "a.parquet")
    rows = open_rows(tmp_path / "a.parquet")
    assert rows[0] == rows[2] == {"at": "1970-01-01 00:00:00"}
    with pytest.raises(BadRow, match="a value that cannot be read"):
        rows[1]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, name):
    table = pa.table([pa.array(["1 + 1"]), pa.array(["2"])], names=["problem", "problem"])
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match=r"a\.\w+ has several columns named 'problem'; rename all"):
        open_rows(tmp_path / name)


def test_two_inner_fields_of_one_name_spoil_their_row(tmp_path):
    twice = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["x", "x"])
    pq.write_table(pa.table({"problem": twice}), tmp_path / "a.parquet")
    with pytest.raises(BadRow, match="duplicate field names"):
        open_rows(tmp_path / "a.parquet")[0]


TEXT = "x" * 1_000_000


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), TEXT),
        (pa.large_binary(), TEXT.encode()),
        (pa.list_(pa.string()), [TEXT]),
        (pa.list_(pa.string(), 1), [TEXT]),
        (pa.map_(pa.string(), pa.string()), [("a", TEXT)]),
        (pa.struct([("x", pa.list_(pa.struct([("y", pa.string())])))]), {"x": [{"y": TEXT}]}),
    ],
    ids=lambda x: str(x)[:20],
)
def test_rows_that_are_too_large_together_are_refused(tmp_path, kind, value):
    column = pa.array([value if row < 200 else None for row in range(300)], kind)
    pq.write_table(pa.table({"problem": column}), tmp_path / "a.parquet")
    rows = open_rows(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet has 200,000,\d+ bytes of text in 256 rows"):
        rows[0]
    assert rows[299] == {"problem": None}
