"""Folders of runs in a store in memory: lock, rows, checkpoints. tests/clients has whole runs."""

import json
import os
import pathlib
import shutil
import threading
import zlib

import fsspec
import pytest

from jaxrl.errors import UserError
from jaxrl.files import local_folder
from jaxrl_buckets import bucket_lock, mirror, run_output
from jaxrl_buckets.bucket_lock import BucketLock, LockLost
from jaxrl_buckets.mirror import Mirror, PartMirror
from jaxrl_buckets.paths_of_commands import with_local_paths
from jaxrl_buckets.stored_runs import StepName, read_run

URL = "memory://b/run"


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.mkdir("/b")
    yield system
    system.rm("/b", recursive=True)


def lock_of(store, owner: str, process: int = 0) -> BucketLock:
    return BucketLock(store, "/b/run", URL, owner, process or os.getpid())


def host(store, folder: pathlib.Path, *, keep: int = 2) -> Mirror:
    """A run on a host with a disk of its own, which has begun."""
    folder.mkdir(exist_ok=True)
    opened = Mirror(URL, folder, keep, lock_of(store, folder.name))
    opened.lock.take()
    opened.open()
    return opened


def leave(opened: Mirror) -> None:
    opened.send(everything=True)
    opened.lock.beat("released")


def save(folder: pathlib.Path, step: int, content: bytes = b"weights") -> None:
    """A checkpoint and its manifest, as `tracking.checkpoints` writes them."""
    files = {"actor/d/0": content, "record": b"%d" % step}
    for name, each in files.items():
        path = folder / f"rl/checkpoints/{step}/{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(each)
    sums = {name: [len(each), zlib.crc32(each)] for name, each in files.items()}
    path = folder / f"rl/checkpoints.manifests/{step}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(sums | {"../../metrics.jsonl": [0, 0, 0, step]}))


def drop(folder: pathlib.Path, step: int) -> None:
    (folder / f"rl/checkpoints.manifests/{step}.json").unlink()
    shutil.rmtree(folder / f"rl/checkpoints/{step}")


def write_rows(folder: pathlib.Path, steps: range) -> bytes:
    content = b"".join(b'{"step": %d}\n' % step for step in steps)
    (folder / "rl").mkdir(exist_ok=True)
    (folder / "rl/metrics.jsonl").write_bytes(content)
    return content


def names(store, below: str = "") -> list[str]:
    return sorted(x.removeprefix("/b/run/") for x in store.find(f"/b/run/{below}"))


def steps_in(store) -> list[str]:
    return [x.rpartition("/")[2] for x in names(store, "rl/checkpoints.manifests")]


def test_a_run_at_work_keeps_others_out(store):
    lock_of(store, "process 7 on here").take()
    with pytest.raises(UserError, match=f"{URL} is in use by process 7 on here; wait"):
        lock_of(store, "second").take()


def test_a_released_lock_and_that_of_an_ended_process_are_free(store):
    first, second, third = (lock_of(store, name) for name in "abc")
    first.take()
    first.beat("released")
    second.take()
    assert (second.before, second.number) == (1, 2)
    # Its process is not there any more: no id is that large.
    content = json.loads(store.cat_file("/b/run/lock/00000002"))
    store.pipe_file("/b/run/lock/00000002", json.dumps(content | {"mirror": 2**30}).encode())
    third.take()
    third.remove_older()
    assert names(store, "lock") == ["lock/00000003"]


def test_another_host_is_known_by_what_it_counts(store, monkeypatch):
    holder = lock_of(store, "process 7 on far")
    holder.take()
    here = bucket_lock._machine()
    monkeypatch.setattr(bucket_lock, "_machine", lambda: f"not {here}")
    counts = threading.Timer(0.5, holder.beat)
    counts.start()
    with pytest.raises(UserError, match="in use by process 7 on far"):
        lock_of(store, "second").take()
    counts.join()


def test_a_lost_host_loses_the_lock(store, monkeypatch, capsys):
    holder, second = lock_of(store, "process 7 on far"), lock_of(store, "second")
    holder.take()
    monkeypatch.setattr(bucket_lock, "_machine", lambda: "")
    monkeypatch.setattr(bucket_lock, "STALE_S", 0.5)
    second.take()
    assert "last held by process 7 on far; waiting" in capsys.readouterr().err
    with pytest.raises(LockLost, match="second"):
        holder.beat()


def test_one_of_many_takes_the_lock(store):
    locks = [lock_of(store, str(number)) for number in range(8)]
    taken = []

    def take(lock: BucketLock) -> None:
        try:
            lock.take()
            taken.append(lock)
        except UserError:
            pass

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and names(store, "lock") == ["lock/00000001"]


def test_rows_are_sent_in_parts_and_taken_back(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_PART_BYTES", 60)
    opened = host(store, tmp_path / "a")
    # 12 bytes a row.
    for last in (2, 5, 7, 9):
        content = write_rows(tmp_path / "a", range(last + 1))
        opened.send(everything=False)
    # Up to 60 bytes a part is put again: rows 0 to 5, then 6 to 9.
    parts = "rl/metrics.jsonl.parts"
    assert names(store, parts) == [f"{parts}/{0:016d}", f"{parts}/{6 * 12:016d}"]
    assert b"".join(store.cat_file(f"/b/run/{x}") for x in names(store, parts)) == content
    # A run that goes on from step 3 writes other rows.
    again = write_rows(tmp_path / "a", range(4)) + b'{"step": 4, "x": 1}\n{"st'
    (tmp_path / "a/rl/metrics.jsonl").write_bytes(again)
    opened.send(everything=False)
    assert names(store, parts) == [f"{parts}/{0:016d}"]
    leave(opened)
    host(store, tmp_path / "b")
    assert (tmp_path / "b/rl/metrics.jsonl").read_bytes() == again[:-4]


def test_a_manifest_is_put_last_and_old_checkpoints_are_removed(store, tmp_path):
    opened, folder = host(store, tmp_path / "a"), tmp_path / "a"
    for step in (10, 20, 30):
        write_rows(folder, range(step))
        save(folder, step)
        opened.send(everything=False)
        if step == 20:
            # As the run does, once a newer one is there.
            drop(folder, 10)
    assert steps_in(store) == ["20.json", "30.json"]
    assert not names(store, "rl/checkpoints/10")
    times = {name: store.created(f"/b/run/{name}") for name in names(store)}
    manifest = times.pop("rl/checkpoints.manifests/30.json")
    assert manifest > max(time for name, time in times.items() if "lock" not in name)


def test_a_checkpoint_that_the_run_removes_meanwhile_is_sent(store, tmp_path, monkeypatch):
    opened, folder = host(store, tmp_path / "a"), tmp_path / "a"
    save(folder, 10)
    send_files = opened._send_files

    def remove_first(**settings) -> None:
        drop(folder, 10)
        send_files(**settings)

    monkeypatch.setattr(opened, "_send_files", remove_first)
    opened.send(everything=False)
    assert steps_in(store) == ["10.json"]


def test_a_host_without_files_gets_the_newest_intact_checkpoint(store, tmp_path, capsys):
    opened, folder = host(store, tmp_path / "a", keep=0), tmp_path / "a"
    for step in (10, 20, 30):
        save(folder, step)
        opened.send(everything=False)
    (folder / "rollouts").mkdir()
    (folder / "rollouts/step_1.jsonl").write_bytes(b"{}\n")
    leave(opened)
    store.pipe_file("/b/run/rl/checkpoints/30/actor/d/0", b"WEIGHTS")
    store.pipe_file("/b/run/rl/checkpoints/40/actor/d/0", b"half")
    other = host(store, tmp_path / "b", keep=0)
    said = capsys.readouterr().err
    assert f"{URL}/rl/checkpoints/30/ is damaged" in said
    assert f"{URL}/rl/checkpoints/40/ is half written: it has no manifest" in said
    found = sorted(x.name for x in (tmp_path / "b/rl/checkpoints").iterdir())
    assert found == ["20", "30"] and (tmp_path / "b/rollouts/step_1.jsonl").exists()
    # The run moves 30 aside, goes on from 20, and writes 25: what is after it is gone.
    drop(tmp_path / "b", 30)
    save(tmp_path / "b", 25)
    other.send(everything=True)
    assert steps_in(store) == ["10.json", "20.json", "25.json"]
    assert not names(store, "rl/checkpoints/30") + names(store, "rl/checkpoints/40")


def test_a_step_that_is_saved_again_replaces_the_damaged_one(store, tmp_path):
    opened, folder = host(store, tmp_path / "a"), tmp_path / "a"
    save(folder, 10)
    save(folder, 20)
    leave(opened)
    # Orbax gives its files other names each time.
    store.pipe_file("/b/run/rl/checkpoints/20/actor/d/0", b"WEIGHTS")
    store.pipe_file("/b/run/rl/checkpoints/20/actor/d/1", b"of a mirror that was killed")
    other = host(store, tmp_path / "b")
    drop(tmp_path / "b", 20)
    save(tmp_path / "b", 20, b"others!")
    leave(other)
    assert names(store, "rl/checkpoints/20") == [
        "rl/checkpoints/20/actor/d/0",
        "rl/checkpoints/20/record",
    ]
    host(store, tmp_path / "c")
    assert (tmp_path / "c/rl/checkpoints/20/actor/d/0").read_bytes() == b"others!"
    assert [x.name for x in (tmp_path / "c/rl/checkpoints").iterdir()] == ["20"]


def test_the_next_start_on_a_host_sends_what_is_left(store, tmp_path):
    opened, folder = host(store, tmp_path / "a"), tmp_path / "a"
    (folder / "config.txt").write_text("a = 1\n")
    save(folder, 10)
    leave(opened)
    save(folder, 20)
    assert opened.left() == ["rl/checkpoints/20/"]
    again = host(store, folder)
    before = store.created("/b/run/rl/checkpoints/10/record")
    again.send(everything=True)
    assert steps_in(store) == ["10.json", "20.json"] and not again.left()
    assert store.created("/b/run/rl/checkpoints/10/record") == before


def test_a_host_that_was_overtaken_starts_from_the_bucket(store, tmp_path, capsys):
    first = host(store, tmp_path / "a")
    save(tmp_path / "a", 10)
    leave(first)
    second = host(store, tmp_path / "b")
    save(tmp_path / "b", 20)
    leave(second)
    save(tmp_path / "a", 15)
    host(store, tmp_path / "a")
    assert "has gone on elsewhere" in capsys.readouterr().err
    assert [x.name for x in (tmp_path / "a/rl/checkpoints").iterdir()] == ["20"]
    assert len([*tmp_path.glob("a.aside.*/rl/checkpoints/15")]) == 1


def test_an_emptied_bucket_gets_all_again(store, tmp_path):
    opened = host(store, tmp_path / "a")
    save(tmp_path / "a", 10)
    leave(opened)
    store.rm("/b/run", recursive=True)
    host(store, tmp_path / "a").send(everything=True)
    assert steps_in(store) == ["10.json"]
    # Also what was copied here without a note.
    store.rm("/b/run", recursive=True)
    (tmp_path / "a/.bucket.json").unlink()
    host(store, tmp_path / "a").send(everything=True)
    assert steps_in(store) == ["10.json"] and not [*tmp_path.glob("a.aside*")]


def test_a_run_is_read_by_its_newest_intact_checkpoint(store, tmp_path, capsys):
    opened = host(store, tmp_path / "a")
    (tmp_path / "a/config.txt").write_text("a = 1\n")
    for step in (10, 20):
        save(tmp_path / "a", step)
    content = write_rows(tmp_path / "a", range(3))
    leave(opened)
    assert read_run(URL, "rows").joinpath("rl/metrics.jsonl").read_bytes() == content
    assert not read_run(URL, "rows").joinpath("rl/checkpoints").exists()
    assert read_run(URL, "weights").parts[-2:] == ("b", "run")
    assert [x.name for x in (read_run(URL, "weights") / "rl/checkpoints").iterdir()] == ["20"]
    store.rm_file("/b/run/rl/checkpoints/20/record")
    assert [x.name for x in (read_run(URL, "weights") / "rl/checkpoints").iterdir()] == ["10"]
    assert "rl/checkpoints/20/ is damaged" in capsys.readouterr().err
    with pytest.raises(UserError, match="is no run: it has no config"):
        read_run("memory://b", "rows")


def test_commands_read_and_write_folders_of_this_host(store, monkeypatch, tmp_path, capsys):
    # `is_bucket` knows gs:// and s3:// alone.
    monkeypatch.setattr("jaxrl_buckets.paths_of_commands.is_bucket", lambda x: "memory:" in x)
    opened = host(store, tmp_path / "a")
    (tmp_path / "a/config.txt").write_text("a = 1\n")
    leave(opened)
    seen = []

    def command(argv) -> int:
        seen.extend(argv)
        folder = pathlib.Path(argv[-1].rpartition("=")[2])
        folder.mkdir()
        (folder / "x.txt").write_text((pathlib.Path(argv[1]) / "config.txt").read_text())
        return 0

    for out in (["--out", "memory://b/o"], ["--out=memory://b/p"]):
        assert with_local_paths("browse", command, ["jaxrl browse", URL, *out]) == 0
    assert store.cat_file("/b/o/x.txt") == store.cat_file("/b/p/x.txt") == b"a = 1\n"
    assert not any("memory:" in text for text in seen)
    with pytest.raises(UserError, match="memory://b/o exists"):
        with_local_paths("convert", command, ["jaxrl convert", "--out=memory://b/o"])


@pytest.mark.parametrize(("address", "folder"), [("gs://b/runs", "gs/b/runs"), ("s3:/b", "s3/b")])
def test_a_run_in_a_bucket_has_a_folder_in_the_cache(address, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert local_folder(address) == tmp_path / "jaxrl/runs" / folder
    assert local_folder("runs") == pathlib.Path("runs")


def two_hosts(store, folder: pathlib.Path) -> tuple[Mirror, PartMirror]:
    """A run on two hosts with a disk each, which has begun."""
    disks = [folder / "a", folder / "b"]
    for disk in disks:
        disk.mkdir(exist_ok=True)
    first = Mirror(URL, disks[0], 2, lock_of(store, "a"), parts=2)
    first.lock.take()
    first.open()
    number = first.lock.number
    second = PartMirror(URL, disks[1], 2, lock_of(store, "b"), parts=2, part=1, number=number)
    second.open()
    return first, second


def save_parts(first: pathlib.Path, second: pathlib.Path, step: int) -> None:
    """A checkpoint of which each host has one file, and both have the record, with other bytes."""
    for host, name in enumerate((first, second)):
        save(name, step, b"part %d" % host)
        (name / f"rl/checkpoints/{step}/actor/d/0").rename(
            name / f"rl/checkpoints/{step}/actor/d/{host}"
        )
        path = name / f"rl/checkpoints.manifests/{step}.json"
        sums = json.loads(path.read_text())
        sums[f"actor/d/{host}"] = sums.pop("actor/d/0")
        path.write_text(json.dumps(sums | {"../../hosts": [host]}))


def send_both(first: Mirror, second: PartMirror) -> None:
    sends = threading.Thread(target=first.send, kwargs={"everything": True})
    sends.start()
    while sends.is_alive():
        second.send(everything=False)
        sends.join(0.05)


def test_two_hosts_bring_their_parts(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mirror, "_ASK_S", 0.01)
    first, second = two_hosts(store, tmp_path)
    save_parts(tmp_path / "a", tmp_path / "b", 10)
    send_both(first, second)
    whole = json.loads(store.cat_file("/b/run/rl/checkpoints.manifests/10.json"))
    assert whole.keys() == {"actor/d/0", "actor/d/1", "record", "../../metrics.jsonl"}
    assert not names(store, "parts")
    # The second host is lost before it has sent its part of step 20.
    save_parts(tmp_path / "a", tmp_path / "b", 20)
    monkeypatch.setattr(mirror, "_PATIENCE_S", 0.05)
    with pytest.raises(UserError, match="process 1 sends no part of rl/checkpoints/20/"):
        first.send(everything=True)
    # Or the end would wait again and again.
    before_s = first.progress.at_s
    with pytest.raises(UserError, match="process 1 sends no part"):
        first._with_parts(StepName("rl/", 20), {})
    assert first.progress.at_s == before_s
    assert steps_in(store) == ["10.json"]
    first.lock.beat("released")
    two_hosts(store, tmp_path)
    assert f"{URL}/rl/checkpoints/20/ is half written" in capsys.readouterr().err
    for disk in ("a", "b"):
        files = sorted(x.name for x in (tmp_path / disk / "rl/checkpoints/10/actor/d").iterdir())
        assert files == ["0", "1"] and not (tmp_path / disk / "rl/checkpoints/20").exists()
        # What the bucket lacks is kept.
        assert len([*tmp_path.glob(f"{disk}.aside.*/rl/checkpoints/20")]) == 1


def test_a_step_that_a_host_has_no_more_is_left_out(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mirror, "_ASK_S", 0.01)
    first, second = two_hosts(store, tmp_path)
    save_parts(tmp_path / "a", tmp_path / "b", 10)
    drop(tmp_path / "b", 10)
    second.ended.set()
    send_both(first, second)
    assert "rl/checkpoints/10/ is left out" in capsys.readouterr().err
    assert not steps_in(store) and not names(store, "rl/checkpoints/10") and not first.left()


def test_the_mirror_of_a_part_ends_with_the_first_one(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_ASK_S", 0.01)
    monkeypatch.setattr(mirror, "STALE_S", 0.3)
    _, second = two_hosts(store, tmp_path)
    second.ended.set()
    # Nobody counts up in the lock.
    thread = threading.Thread(target=second.run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("seen", "is_apart"), [([1, 1, 1], True), ([3, 3, 3], False), ([2, 2, 1], None)]
)
def test_processes_share_a_disk_all_or_none(seen, is_apart, monkeypatch, tmp_path):
    monkeypatch.setattr(run_output.hosts, "num_processes", lambda: 3)
    monkeypatch.setattr(run_output.hosts, "on_first", lambda function: function())
    monkeypatch.setattr(run_output.hosts, "gather", lambda function: (function(), seen)[1])
    if is_apart is None:
        with pytest.raises(
            UserError, match="others do not; start one process on each host, or let XDG"
        ):
            run_output._are_apart(tmp_path / "seed0")
    else:
        assert run_output._are_apart(tmp_path / "seed0") == is_apart
    assert not [*tmp_path.iterdir()]
