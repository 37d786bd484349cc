"""Fetching from stores, by fsspec's file system in memory; tests/clients has gcsfs and s3fs."""

import os
import pathlib
import threading

import fsspec
import pytest

from jaxrl import cli
from jaxrl.errors import EXIT_USER_ERROR, UserError
from jaxrl.files import cache_root
from jaxrl.tracking.durable import ensure_writable
from jaxrl_buckets import buckets
from jaxrl_buckets.buckets import Buckets

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"[1]",
    "model-1.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    # Code, formats of other programs, and another model.
    "pytorch_model.bin": b"code",
    "modeling.py": b"code",
    "original/config.json": b"{}",
}


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/b", recursive=True)


def put(store, folder: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        store.pipe_file(f"/b/{folder}/{name}", content)


def held(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_of_a_model_what_is_read_is_fetched_once(store):
    put(store, "qwen", MODEL)
    url = "memory://b/qwen"
    Buckets().check_model(url)
    assert not cache_root().exists()
    folder = Buckets().model(url)
    assert folder.name == "qwen" and held(folder) == dict(list(MODEL.items())[:5])
    assert held(Buckets().model(f"{url}/", tokenizer_only=True)).keys() == MODEL.keys() - {
        "model-1.safetensors",
        "pytorch_model.bin",
        "modeling.py",
        "original/config.json",
    }
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert Buckets().model(url) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_what_has_changed_is_another_folder(store):
    put(store, "qwen", MODEL)
    old = Buckets().model("memory://b/qwen")
    put(store, "qwen", {"model-1.safetensors": b"WEIGHTS"})
    new = Buckets().model("memory://b/qwen")
    assert (old / "model-1.safetensors").read_bytes() == b"weights"
    assert (new / "model-1.safetensors").read_bytes() == b"WEIGHTS"


def test_rows_are_a_file_or_a_folder(store):
    put(store, "data", {"train.jsonl": b"{}\n", "more/a.parquet": b"PAR1", "notes.md": b"#"})
    assert Buckets().rows("memory://b/data/train.jsonl", ()).read_bytes() == b"{}\n"
    assert held(Buckets().rows("memory://b/data", ())).keys() == {"train.jsonl", "more/a.parquet"}


def test_a_fetch_that_breaks_off_leaves_nothing(store, monkeypatch):
    put(store, "qwen", MODEL)
    get = type(store).get_file

    def breaks(self, source, target, *given, **named):
        if source.endswith("safetensors"):
            raise ConnectionResetError("reset by peer\nand more")
        return get(self, source, target, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get_file", breaks)
        with pytest.raises(
            UserError, match=r"^memory://b/qwen cannot be read \(Conn.*: reset by peer\); "
        ):
            Buckets().model("memory://b/qwen")
    assert not held(cache_root()) and not [*(cache_root() / "buckets/memory/b").iterdir()]
    assert held(Buckets().model("memory://b/qwen"))


def test_an_object_that_is_being_written_is_not_taken(store, monkeypatch):
    put(store, "qwen", MODEL)
    monkeypatch.setattr(
        type(store), "get_file", lambda self, source, target: pathlib.Path(target).write_bytes(b"?")
    )
    with pytest.raises(
        UserError, match=r"has 1 bytes, and its store says \d+; somebody is writing it"
    ):
        Buckets().model("memory://b/qwen")


def test_who_fetch_at_once_end_with_one_folder(store, tmp_path):
    # On the disk: the file system in memory is for one thread.
    for name, content in MODEL.items():
        (tmp_path / "qwen" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "qwen" / name).write_bytes(content)
    put(store, "qwen", MODEL)
    found, start = [], threading.Barrier(4)

    def fetch() -> None:
        start.wait()
        found.append(Buckets().model(f"file://{tmp_path}/qwen"))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({*found}) == 1
    assert held(found[0]) == dict(list(MODEL.items())[:5])
    assert [path.name for path in found[0].parents[1].iterdir()] == [found[0].parent.name]


@pytest.mark.parametrize(
    ("files", "fetch", "says"),
    [
        ({}, Buckets().check_model, "nothing is there; list the bucket"),
        ({"a.bin": b"1"}, Buckets().check_model, "no config.json and no tokenizer.json"),
        ({"a.bin": b"1"}, lambda url: Buckets().check_rows(url, ()), "has no file of rows"),
    ],
)
def test_what_is_missing_is_told(store, files, fetch, says):
    put(store, "x", files)
    store.pipe_file("/b/other", b"")
    with pytest.raises(UserError, match=says):
        fetch("memory://b/x")


def test_no_object_leads_out_of_its_folder(store):
    store.store["/b/x/../../../evil.jsonl"] = store.open("/b/made", "wb")
    with pytest.raises(UserError, match="leads out of it"):
        Buckets().rows("memory://b/x", ())


def test_a_disk_that_is_too_small_is_told_before(store, monkeypatch):
    put(store, "qwen", MODEL)
    usage = type(os)("usage")
    usage.free = 3
    monkeypatch.setattr(buckets.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"has 0.0 GB, and .* of room; free some"):
        Buckets().model("memory://b/qwen")


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("s3", "s3")])
def test_a_run_needs_the_client_of_its_bucket(scheme, extra, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status = cli.run(
        "train", ["jaxrl train", "--config=dapo_tiny", f"--config.run.output={scheme}://b/r"]
    )
    said = capsys.readouterr().err
    assert status == EXIT_USER_ERROR and said.count("\n") == 1
    assert f"{scheme}://b/r/dapo_tiny/seed0 needs a client" in said and f"jaxrl[{extra}]" in said


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_what_has_to_be_on_a_disk_is_refused_in_a_bucket(scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address in (f"{scheme}://b/runs", pathlib.Path(f"{scheme}://b/runs")):
        with pytest.raises(UserError, match="is in a bucket, and only a folder on a disk can"):
            ensure_writable(address)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{scheme}://b")
    with pytest.raises(UserError, match=f"XDG_CACHE_HOME={scheme}://b is in a bucket"):
        cache_root()
    assert not [*tmp_path.iterdir()]
