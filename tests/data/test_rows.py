"""Files of rows, in every format."""

import datetime
import functools
import gzip
import io
import json
import lzma
import pathlib
import pickle
import re
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extras import import_extra

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


def packed(path: pathlib.Path, *, codec: str, ending: str, make=jsonl) -> pathlib.Path:
    plain = make(path)
    packed_path = plain.with_name(f"rows{plain.suffix or '.jsonl'}.{ending}")
    with pa.CompressedOutputStream(str(packed_path), codec) as file:
        file.write(plain.read_bytes())
    plain.unlink()
    return packed_path


def xz(path: pathlib.Path) -> pathlib.Path:
    packed_path = path.with_name("rows.jsonl.xz")
    packed_path.write_bytes(lzma.compress(jsonl(path).read_bytes()))
    return packed_path


gzipped = functools.partial(packed, codec="gzip", ending="gz")
FORMATS = [
    *(jsonl, json_list, parquet, arrow_stream, arrow_file, saved, shards, gzipped),
    functools.partial(gzipped, make=json_list),
    functools.partial(packed, codec="zstd", ending="zst"),
    functools.partial(packed, codec="bz2", ending="bz2"),
    functools.partial(packed, codec="lz4", ending="lz4"),
    xz,
]


def read(path) -> list:
    return [row for _, row in open_rows(path)]


@pytest.mark.parametrize("make", FORMATS)
def test_every_format_gives_the_same_rows(make, tmp_path):
    rows = open_rows(make(tmp_path / "rows"))
    assert [row for _, row in rows] == ROWS == [row for _, row in rows]


CSV = (
    "\ufeff,problem, answer,note\r\n"
    "0,1 + 1?,007,NA\r\n"
    '1,"a ""b"", c\n2nd line",1.0,\r\n'
    "\r\n"
    "2, x ,true,null\r\n"
    "3,é 東京,-1e5,2024-01-31\r\n"
)
CSV_ROWS = [
    {"problem": "1 + 1?", "answer": "007", "note": "NA"},
    {"problem": 'a "b", c\n2nd line', "answer": "1.0", "note": ""},
    {"problem": " x ", "answer": "true", "note": "null"},
    {"problem": "é 東京", "answer": "-1e5", "note": "2024-01-31"},
]


def tsv_of(text: str) -> str:
    return text.replace(",", "\t").replace('b""\t c', 'b"", c')


@pytest.mark.parametrize(("name", "write"), [("a.csv", str), ("a.tsv", tsv_of), ("A.CSV", str)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_values_of_csv_are_the_texts_that_stand_there(name, write, pack, tmp_path):
    path = tmp_path / (name if pack is bytes else f"{name}.gz")
    path.write_bytes(pack(write(CSV).encode()))
    assert list(open_rows(path)) == [
        (f"{path}:{line}", row) for line, row in zip((2, 3, 6, 7), CSV_ROWS, strict=True)
    ]
    source = read_source(SourceConfig(path=str(path)), "data.train")
    assert [record.answer for record in source.records] == ["007", "1.0", "true", "-1e5"]
    assert source.source_names == (name.partition(".")[0],)


def test_csv_is_what_pandas_writes(tmp_path):
    pandas = import_extra("dev", "pandas")
    frame = pandas.DataFrame([row | {"extra_info": "x"} for row in ROWS[:5]])
    frame.loc[5] = {"problem": 'Is "a\tb" one?\n\n', "answer": "", "extra_info": "'"}
    expected = frame.to_dict("records")
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        frame.to_csv(tmp_path / name, sep=separator)
        assert read(tmp_path / name) == expected


@pytest.mark.parametrize("begin", ["", "\ufeff", "sep={}\n"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("separator", list(",;\t|"))
def test_the_line_of_names_says_what_separates(separator, name, begin, tmp_path):
    lines = ["problem{}answer", '"1{}5 + 1"{}"2;5"', "2,5 + 1{}3"]
    if separator == ",":
        lines[2] = '"2,5 + 1"{}3'
    text = begin + "".join(f"{line}\n" for line in lines)
    (tmp_path / name).write_bytes(text.replace("{}", separator).encode())
    assert read(tmp_path / name) == [
        {"problem": f"1{separator}5 + 1", "answer": "2;5"},
        {"problem": "2,5 + 1", "answer": "3"},
    ]


def test_a_long_value_of_csv_is_whole(tmp_path):
    (tmp_path / "a.csv").write_text(f'problem,answer\n"{"x" * 3_000_000}",1\n')
    ((row),) = read(tmp_path / "a.csv")
    assert len(row["problem"]) == 3_000_000


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("1 + 2?,3,4", "3 values, and 2 columns have names"),
        ("1 + 2?", "1 values, and 2 columns have names"),
        ('"1 + 2?" x,3', "quotes that do not match"),
    ],
)
def test_a_broken_row_of_csv_spoils_itself_alone(line, fault, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"problem,answer\n1 + 1?,2\n{line}\n2 + 2?,4\n")
    source = read_source(SourceConfig(path=str(path)), "data.train")
    assert [record.answer for record in source.records] == ["2", "4"]
    assert source.dropped[MALFORMED].named == (f"{path}:3: {fault}",) or fault.startswith("quotes")
    assert f"{path}:3: {fault}" in source.dropped[MALFORMED].named[0]


def test_bytes_that_are_no_utf8_spoil_their_row_of_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"problem,answer\n\xff,1\n2?,2\n")
    source = read_source(SourceConfig(path=str(tmp_path / "a.csv")), "data.train")
    assert [record.answer for record in source.records] == ["2"]


def test_a_quote_that_never_ends_is_told(tmp_path):
    (tmp_path / "a.csv").write_text('problem,answer\n1?,1\n"2?,2\n3?,3\n')
    source = read_source(SourceConfig(path=str(tmp_path / "a.csv")), "data.train")
    assert [record.answer for record in source.records] == ["1"]
    assert source.dropped[MALFORMED].count == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"problem,answer,problem\n1,2,3\n", "has two columns of one name"),
        ("a.csv", b"problem,answer\n", "a.csv is empty"),
        ("a.csv", b"", "a.csv is empty"),
        ("a.jsonl.xz", lzma.compress(b'{"problem": "1?", "answer": 1}\n' * 99)[:60], "is broken"),
        ("a.csv.xz", b"\xfd7zXZ not xz", "a.csv.xz is broken"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"problem": "1?", "answer": 1}\n' * 9999, mtime=0)[:90],
            "is broken",
        ),
        ("a.csv.gz", b"\x1f\x8b not gzip", "a.csv.gz is broken"),
        (
            "a.parquet.gz",
            gzip.compress(b"PAR1 and so on", mtime=0),
            "is a compressed table; unpack it",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        read_source(SourceConfig(path=str(tmp_path / name)), "data.train")
    assert "\n" not in str(raised.value)


def test_parts_of_a_compressed_file_follow_each_other(tmp_path):
    parts = [gzip.compress(json.dumps(row).encode() + b"\n", mtime=0) for row in ROWS[:3]]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(parts))
    assert read(tmp_path / "a.jsonl.gz") == ROWS[:3]


def test_a_folder_may_hold_compressed_files(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.jsonl.gz").write_bytes(
            gzip.compress(json.dumps(ROWS[i]).encode(), mtime=0)
        )
    assert read(tmp_path) == ROWS[:2]


def test_rows_say_where_they_stand(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"q": 1}\n\n{"q": 2}')
    assert [place for place, _ in open_rows(path)] == [f"{path}:2", f"{path}:4"]
    folder = shards(tmp_path / "shards")
    places = [place for place, _ in open_rows(folder)]
    assert places[1301] == f"{folder / 'train-1.parquet'} row 1"


def test_values_become_those_of_json(tmp_path):
    day = datetime.date(2024, 1, 31)
    table = pa.table({"day": [day], "picture": [b"abc"], "parts": [[{"n": None, "x": 0.5}]]})
    table = table.append_column("id", pa.array([bytes(16)], pa.uuid()))
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet")
    # The example of FIPS 180-2.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert row == {
        "day": "2024-01-31",
        "picture": {"sha256": digest},
        "parts": [{"n": None, "x": 0.5}],
        "id": "00000000-0000-0000-0000-000000000000",
    }


def test_rows_of_one_text_and_several_pictures_are_several_problems(tmp_path):
    pictures = [{"bytes": picture} for picture in (b"a", b"b", b"a")]
    table = pa.table({"q": ["what is it?"] * 3, "a": ["1"] * 3, "picture": pictures})
    pq.write_table(table, tmp_path / "a.parquet")
    fields = {"prompt": "q", "answer": "a"}
    source = read_source(SourceConfig(path=str(tmp_path / "a.parquet"), fields=fields), "x")
    assert len(source.records) == 2 and source.dropped[DUPLICATES].count == 1


def test_bytes_are_no_prompt(tmp_path):
    pq.write_table(pa.table({"q": [b"1 + 1?"], "a": ["2"]}), tmp_path / "a.parquet")
    fields = {"prompt": "q", "answer": "a"}
    with pytest.raises(UserError, match=r"rows without a prompt, .* field 'q' is"):
        read_source(SourceConfig(path=str(tmp_path / "a.parquet"), fields=fields), "x")


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


def zipped(*names: str) -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, "{}")
        return file.getvalue()


PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
JSON_ROW, CSV_ROW = '{"problem": "1?", "answer": "1"}\n', "problem,answer\n1?,1\n"
TAR = b"a.jsonl".ljust(257, b"\0") + b"ustar".ljust(255, b"\0")
NO_ROWS = {
    "is a web page": [PAGE, b"\n <HTML>", b"\xef\xbb\xbf<html>", b"<?xml version='1.0'?><Error/>"],
    "is a pointer of Git LFS": [POINTER],
    "is a pointer of git-annex": [b"/annex/objects/SHA256E-s12--00.jsonl\n"],
    "is a zip archive or an Excel workbook": [
        zipped("a.jsonl"),
        zipped("xl/workbook.xml"),
        zipped(),
    ],
    "is an Excel workbook": [b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"],
    "is an archive": [b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", TAR],
    "is compressed in a way that is not read": [b"\x1f\x9d\x90", b"\xff\x06\0\0sNaPpY"],
    "is text in UTF-16": [
        text.encode(code)
        for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
        for text in (JSON_ROW, CSV_ROW, f"[{JSON_ROW}]", f"\ufeff{JSON_ROW}")
    ],
    "is no file of rows": [
        *(pickle.dumps([1]), b"\x93NUMPY\1\0", b"\x89HDF\r\n", b"SQLite format 3\0", b"ORC\n\x1c"),
        *(b"Obj\x01\4", b"FEA1\0\0\0\0", b"%PDF-1.7"),
    ],
}


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow", "a"]
)
@pytest.mark.parametrize("told", NO_ROWS)
def test_what_is_saved_under_the_name_of_rows_is_told(told, name, tmp_path):
    path = tmp_path / name
    for content in NO_ROWS[told]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path} {told}[^\n]*; [^\n]*$"):
            read(path)
    if path.suffix.startswith((".j", ".c")):
        packed_path = path.with_name(f"{name}.gz")
        packed_path.write_bytes(gzip.compress(NO_ROWS[told][0]))
        with pytest.raises(UserError, match=f"^{packed_path} {told}"):
            read(packed_path)


@pytest.mark.parametrize(
    "first", ["ORCID", "FEA1", "SQLite", "Rar", "PK", "%", "<answer>", "version"]
)
def test_a_name_of_a_column_is_none_of_them(first, tmp_path):
    (tmp_path / "a.csv").write_text(f"{first},answer\n1?,1\n")
    assert read(tmp_path / "a.csv") == [{first: "1?", "answer": "1"}]


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
