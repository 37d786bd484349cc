"""Checkpoints of a few numbers after kills, damage and concurrent reads at any moment."""

import os
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tokens import prompts_of

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.roles.learner import TrainState
from jaxrl.rollout.samples import Sample, UnfinishedGroups
from jaxrl.tracking.checkpoints import Checkpoints, StoredCheckpoints
from jaxrl.types import Stretch


class Died(BaseException):
    """Simulates a kill: no code catches it."""


def state_of(step: int) -> TrainState:
    return TrainState({"w": jnp.full(3, float(step))}, {"m": jnp.zeros(3)}, jnp.int32(step))


def save(checkpoints: Checkpoints, step: int, **options) -> None:
    checkpoints.save(step, {"actor": state_of(step)}, {"step": step})
    checkpoints.commit(**options)
    checkpoints.wait()


def written(folder: pathlib.Path, *steps: int, keep: int | None = None) -> pathlib.Path:
    """Writes checkpoints of the steps and returns their folder."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=keep)
    checkpoints.prepare(None)
    for step in steps:
        save(checkpoints, step)
    checkpoints.close()
    return folder / "checkpoints"


def manifest_of(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder.with_name("checkpoints.manifests") / f"{step}.json"


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def resumes_from(folder: pathlib.Path) -> int | None:
    """The step that the next run resumes from. Checks that it can save further checkpoints."""
    step = StoredCheckpoints(folder).newest_intact()
    checkpoints = Checkpoints(folder, keep=1)
    if step is not None:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(0))
        assert int(checkpoints.restore(step, {"actor": like})["actor"].step) == step
        assert checkpoints.read_record(step)["step"] == step
    checkpoints.prepare(step)
    for later in (1, 2):
        save(checkpoints, (step or 0) + later)
    checkpoints.close()
    assert StoredCheckpoints(folder).newest_intact() == (step or 0) + 2
    assert StoredCheckpoints(folder).steps == [(step or 0) + 2]
    assert not list(folder.glob("*tmp*"))
    return step


def test_the_newest_checkpoints_stay(tmp_path):
    folder = written(tmp_path / "two", *range(1, 6), keep=2)
    assert StoredCheckpoints(folder).steps == [4, 5]
    assert [path.name for path in sorted(manifest_of(folder, 4).parent.iterdir())] == [
        "4.json",
        "5.json",
    ]


# Death


@pytest.fixture
def death(monkeypatch):
    """Kills the commit thread just before its n-th change of the disk; returns the list of changes."""

    def arrange(at: int) -> list[str]:
        done: list[str] = []

        def guarded(name, function):
            def call(*args, **kwargs):
                if threading.current_thread().name.startswith("commit"):
                    if len(done) == at:
                        raise Died(name)
                    done.append(name)
                return function(*args, **kwargs)

            return call

        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (os, "rename"),
            (os, "unlink"),
            (pathlib.Path, "rename"),
            (pathlib.Path, "unlink"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, guarded(name, getattr(owner, name)))
        return done

    return arrange


def dies_while_committing(folder: pathlib.Path, step: int) -> bool:
    """Commits a checkpoint that Orbax has written, keeping one; returns whether the thread was killed."""
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints._saving = step
    try:
        checkpoints.commit()
        checkpoints.wait()
    except Died:
        return True
    finally:
        checkpoints.close()
    return False


def test_a_kill_at_any_point_of_a_save_leaves_a_checkpoint(tmp_path, death, monkeypatch):
    begun = written(tmp_path / "begun", 1, 2)
    manifest_of(begun, 2).unlink()
    found = {}
    for at in range(200):
        folder = shutil.copytree(begun.parent, tmp_path / str(at)) / "checkpoints"
        done = death(at)
        died = dies_while_committing(folder, 2)
        monkeypatch.undo()
        if not died:
            break
        newest = StoredCheckpoints(folder).newest_intact()
        assert newest == (2 if manifest_of(folder, 2).exists() else 1), done
        found[newest] = folder
    assert len(done) == at and {"fsync", "replace", "unlink", "rmtree"} == set(done)
    # Deaths before the manifest is written and after it; the next run goes on from both.
    for step, folder in found.items():
        assert resumes_from(folder) == step
    assert set(found) == {1, 2}


def test_a_kill_while_orbax_writes_leaves_the_previous_checkpoint(tmp_path):
    folder = written(tmp_path, 1)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(2, {"actor": state_of(2)}, {})
    checkpoints.close()
    # No manifest yet; and one that Orbax has not finished, under the name that it writes under.
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    assert resumes_from(folder) == 1


def test_a_kill_before_the_first_checkpoint_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    for _ in range(2):
        checkpoints.prepare(None)
        checkpoints.save(0, {"actor": state_of(0)}, {})
        checkpoints._open().wait_until_finished()
        assert checkpoints.stored.remains() == []
    checkpoints.close()
    assert resumes_from(tmp_path / "checkpoints") is None


def test_a_full_disk_is_a_user_error_and_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    folder = written(tmp_path, 1)
    checkpoints = Checkpoints(folder, keep=1)
    full = OSError(28, "No space left on device")

    def refuse(*args):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr("jaxrl.tracking.checkpoints.write_atomically", refuse)
        with pytest.raises(UserError, match=r"could not be written .*No space left.*still there"):
            save(checkpoints, 2)
    checkpoints.close()
    assert resumes_from(folder) == 1


# Damage


@pytest.mark.parametrize(
    "manifest",
    [b"", b"[]", b"{}", b'{"a": 1}', b"\xff\xfe", None, b'{"a": [1, 2]}', b"[" * 10**5],
    ids=lambda manifest: str(manifest)[:20],
)
def test_a_damaged_manifest_invalidates_only_its_checkpoint(tmp_path, manifest, caplog):
    folder = written(tmp_path, 1, 2)
    if manifest is None:
        manifest_of(folder, 2).unlink()
    else:
        manifest_of(folder, 2).write_bytes(manifest)
    assert resumes_from(folder) == 1
    assert "checkpoint of step 2 skipped" in caplog.text


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove"])
def test_a_damaged_file_invalidates_its_checkpoint(tmp_path, damage):
    folder = written(tmp_path, 1, 2)
    for file in sorted(path for path in (folder / "2").rglob("*") if path.is_file()):
        content = file.read_bytes()
        middle = len(content) // 2
        if damage == "remove":
            file.unlink()
        elif damage == "flip":
            file.write_bytes(
                content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            )
        else:
            file.write_bytes(content[:middle] if damage == "truncate" else b"")
        assert StoredCheckpoints(folder).newest_intact() == 1, file
        file.write_bytes(content)
    assert StoredCheckpoints(folder).newest_intact() == 2


def test_stray_files_are_ignored(tmp_path):
    folder = written(tmp_path, 1)
    manifests = manifest_of(folder, 1).parent
    for stray in (
        manifests / "notes.json",
        manifests / "1.json~",
        manifests / ".7.json.tmp",
        manifests / "007.json",
        folder / "5",
        folder / "README",
    ):
        stray.write_text("{}")
    (folder / "old").mkdir()
    (folder / "012").mkdir()
    assert StoredCheckpoints(folder).steps == [1]
    assert resumes_from(folder) == 1
    assert (manifests / "notes.json").exists() and (folder / "5").exists()


def test_a_run_without_manifests_is_reported(tmp_path):
    folder = written(tmp_path, 0, 3)
    shutil.rmtree(manifest_of(folder, 3).parent)
    stored = StoredCheckpoints(folder)
    assert stored.newest_intact() is None
    assert stored.remains() == ["step 3: it has no manifest"]


# Readers


def test_reading_changes_nothing(tmp_path):
    folder = written(tmp_path, 1, 2, 3)
    manifest_of(folder, 3).unlink()
    (folder / "2" / "_CHECKPOINT_METADATA").write_bytes(b"")
    before = contents(tmp_path)
    stored = StoredCheckpoints(folder)
    assert stored.newest_intact() == 1
    assert len(stored.remains()) == 2
    assert contents(tmp_path) == before
    assert StoredCheckpoints(tmp_path / "nowhere").newest_intact() is None
    assert not (tmp_path / "nowhere").exists()


def test_a_reader_looks_again_if_the_run_continues_meanwhile(tmp_path, monkeypatch):
    folder = written(tmp_path, 1)
    stored = StoredCheckpoints(folder)
    fault = stored.fault

    def run_continues(step):
        if step == 1:
            checkpoints = Checkpoints(folder, keep=1)
            save(checkpoints, 2)
            checkpoints.close()
        return fault(step)

    monkeypatch.setattr(stored, "fault", run_continues)
    assert stored.newest_intact() == 2


def test_unfinished_groups_come_back_to_the_bit(tmp_path):
    floats = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    samples = Sample(0, 0, 2), Sample(0, 1, 2)
    samples[0].add(Stretch(np.arange(1000, dtype=np.int32), *floats, 2))
    groups = UnfinishedGroups(prompts_of([1, 2]), 2, samples)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.prepare(None)
    record = {"step": 3, "sampling": {"unfinished": groups, "no": None}}
    checkpoints.save(3, {"actor": state_of(3)}, record)
    checkpoints.commit()
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=1)
    found = again.read_record(3)
    again.close()
    assert found["step"] == 3 and found["sampling"]["no"] is None
    stored, expected = found["sampling"]["unfinished"], groups.record()
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(stored[name], value, err_msg=name)
        if isinstance(value, np.ndarray):
            assert stored[name].dtype == value.dtype
    # Damage of these files is found like any other.
    for path in (tmp_path / "checkpoints" / "3" / "record_arrays").rglob("*"):
        if path.is_file() and path.stat().st_size:
            path.write_bytes(path.read_bytes()[:-1])
            break
    assert StoredCheckpoints(tmp_path / "checkpoints").newest_intact() is None


def test_readers_do_not_stop_hosts_with_disks_of_their_own(monkeypatch, tmp_path):
    arrays = ocp.type_handlers.get_type_handler(jax.Array)
    monkeypatch.setattr(arrays._array_metadata_store, "_write_timeout_secs", 3)
    monkeypatch.setattr(hosts, "disks_apart", True)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=None)
    checkpoints.prepare(None)
    save(checkpoints, 1)
    # As of any reader on a host besides the primary one, such as `StoredCheckpoints.shapes`.
    another = ocp.options.MultiprocessingOptions(primary_host=1)
    ocp.PyTreeCheckpointHandler(multiprocessing_options=another)
    try:
        save(checkpoints, 2)
    finally:
        ocp.PyTreeCheckpointHandler()
        checkpoints.close()
        ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)


def test_a_process_that_writes_nothing_is_named(monkeypatch, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=None)
    checkpoints.prepare(None)
    save(checkpoints, 1)

    def wait_in_vain():
        late = (
            "DEADLINE_EXCEEDED: Barrier timed out. Some timed out task names:\n2\n3\n\n\nRPC: /xla"
        )
        raise TimeoutError("async_write_complete") from jax.errors.JaxRuntimeError(late)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints._open(), "wait_until_finished", wait_in_vain)
        checkpoints._committing = checkpoints._committer.submit(checkpoints._commit, 1, None)
        with pytest.raises(UserError, match=r"waited in vain for process 2, 3; look at its log"):
            checkpoints.wait()
    checkpoints.close()
