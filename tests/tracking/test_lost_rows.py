"""Metric rows that were lost or changed after a checkpoint."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from jaxrl.roles.learner import TrainState
from jaxrl.tracking.checkpoints import Checkpoints
from jaxrl.tracking.metrics import MetricsWriter
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.tracking.stage_checkpoints import lost_rows

STATE = TrainState({"w": jnp.zeros(3)}, {"m": jnp.zeros(3)}, jnp.int32(0))


@pytest.fixture
def stage(tmp_path) -> StageFolder:
    """A stage with rows of steps 0 to 5 and checkpoints of steps 0, 2 and 4."""
    folder = StageFolder(tmp_path / "rl")
    checkpoints = Checkpoints(folder.checkpoints.path, keep=None)
    checkpoints.prepare(None)
    with MetricsWriter(folder.path) as writer:
        for step in range(6):
            if step:
                writer.write(step, {"loss": 1 / step})
            if step % 2 == 0:
                checkpoints.save(step, {"actor": STATE}, {})
                checkpoints.commit(rows=writer.checksum)
            if not step:
                # As the loop does: what was measured before training comes after the first checkpoint.
                writer.write(0, {"loss": 2.0})
    checkpoints.close()
    return folder


def lines(path: pathlib.Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def flipped(content: bytes) -> bytes:
    """Changes a digit of the loss of step 3; the row stays valid."""
    at = content.index(b"0.333") + 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = {
    "empty": lambda c, ls: b"",
    "cut": lambda c, ls: b"".join(ls[:4]),
    "cut inside a row": lambda c, ls: b"".join(ls[:4]) + ls[4][:-9],
    "a row twice": lambda c, ls: b"".join([*ls[:3], *ls[2:]]),
    "a digit changed": lambda c, ls: flipped(c),
}


def test_unchanged_rows_have_no_fault(stage):
    assert lost_rows(stage) is None
    # Of step 5, which no checkpoint holds, nothing is known; a kill may cut its row.
    content = stage.metrics.read_bytes()
    for cut in (content[:-9], b"".join(lines(stage.metrics)[:5])):
        stage.metrics.write_bytes(cut)
        assert lost_rows(stage) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_and_nothing_changes(damage, stage):
    content = stage.metrics.read_bytes()
    damaged = DAMAGES[damage](content, lines(stage.metrics))
    assert damaged != content
    stage.metrics.write_bytes(damaged)
    fault = lost_rows(stage)
    said = "none of" if damage == "empty" else "other content than"
    assert fault is not None and str(stage.metrics) in fault
    assert f"has {said} the 5 rows to step 4, with which the checkpoint of step 4" in fault
    assert stage.metrics.read_bytes() == damaged


def test_rows_of_a_damaged_checkpoint_may_be_missing(stage):
    """The steps after 2 are repeated, and with them their rows."""
    stage.metrics.write_bytes(b"".join(lines(stage.metrics)[:4]))
    (stage.checkpoints.step(4) / "record" / "metadata").write_bytes(b"")
    assert lost_rows(stage) is None
    stage.metrics.write_bytes(b"".join(lines(stage.metrics)[:2]))
    fault = lost_rows(stage)
    assert fault is not None and "the checkpoint of step 2" in fault


def test_a_manifest_without_rows_and_a_folder_without_manifests(stage):
    manifest = stage.checkpoints.manifest(4)
    sums = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: sums[name] for name in sums if "metrics" not in name}))
    stage.metrics.unlink()
    assert lost_rows(stage) is None
    shutil.rmtree(stage.checkpoints.manifests)
    assert lost_rows(stage) is None
