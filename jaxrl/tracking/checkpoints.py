"""Checkpoints: atomic, asynchronous, verified.

Orbax writes them. Each holds the training state of every role (weights, optimiser, step) and a small JSON
record (position in the data, state of the run). A complete checkpoint gets a manifest with checksums, because
Orbax would restore compressed weights with a flipped bit without an error.

    checkpoints/20/...               the files that Orbax writes
    metrics.jsonl                    the metric rows of step 20 and before, then later ones
    checkpoints.manifests/20.json    the manifest, written last: size and CRC-32 of each file and those rows

A checkpoint without a manifest was never finished, or was copied or removed in part. An unreadable manifest
invalidates its own checkpoint only.

    save      Orbax writes checkpoints/30 in the background         killed here: 20 is the newest intact one
    commit    the files of 30 reach the disk, then its manifest     killed here: 20
              the manifest of 10 is removed, then its files         killed here: 30

Processes whose disks are apart (`hosts.disks_apart`) write a part each, with a manifest of that part. The
union of their files is the checkpoint, so they are plain zarr files: Orbax would merge those of OCDBT.

No checkpoint is removed before a newer one has its manifest. `StoredCheckpoints` only reads, and is safe to
use while a run writes. `Checkpoints` belongs to the run that holds the folder's lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.errors import UserError
from jaxrl.files import read_bytes
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.roles.learner import TrainState
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.tracking.durable import ensure_writable, sync, write_atomically
from jaxrl.tracking.metrics import RowChecksum
from jaxrl.tracking.run_folder import CheckpointFolder

logger = logging.getLogger(__name__)

NO_MANIFEST = "it has no manifest"
# Key of the checksum of the metric rows. It is their path from the checkpoint, so no file of a checkpoint
# has the same key.
_ROWS = "../../metrics.jsonl"
# Key of the number of a process that has written a part alone: such a checkpoint is never intact by itself.
_PART = "../../hosts"
_BLOCK_BYTES = 2**20
# Item of a checkpoint with the arrays of its record, and the key of an array's place holder.
_ARRAYS, _ARRAY = "record_arrays", "__array__"
# Key of the stack in the weights of a role, and of its number of layers in the metadata of a checkpoint.
_LAYERS = "layers"
# Name of the value head among the weights of an actor-critic.
VALUE_HEAD = "['score_head']"
# TensorStore, which writes the arrays for Orbax, reports disk errors in this form.
_DISK_FAULT = re.compile(r"\bos_error_code='(?P<number>\d+)'")
# Processes that JAX has waited for in vain, in its own message.
_LATE = re.compile(r"timed out task names:\s+(?P<processes>[\d\s]*\d)")
# Warnings of Orbax about plain zarr files that each process writes.
_MEANT = re.compile("size logging disabled|Skipping merge of OCDBT|Type handler registry")
_ORBAX_LOGGER = logging.getLogger("absl")


class StoredCheckpoints:
    """Read access to the checkpoints of one training stage, which are numbered by finished steps.

    Attributes:
      paths: paths of the checkpoints; the folder may be missing.
    """

    def __init__(self, folder: pathlib.Path):
        self.paths = CheckpointFolder(folder.absolute())

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints in ascending order, also of unfinished ones."""
        if not self.paths.path.is_dir():
            return []
        return _numbered(path.name for path in self.paths.path.iterdir() if path.is_dir())

    @property
    def manifest_steps(self) -> list[int]:
        """The steps of all manifests in ascending order, also of unreadable ones and without a checkpoint."""
        return _numbered(path.stem for path in self.paths.manifests.glob("*.json"))

    def newest_intact(self) -> int | None:
        """The newest step with an intact checkpoint; None if there is none. Reads all of its files."""
        while True:
            steps = self.steps
            for step in reversed(steps):
                fault = self.fault(step)
                if fault is None:
                    return step
                logger.info("%s is not intact: %s", self.paths.step(step), fault)
            # A running job may have removed the only intact checkpoint after writing a newer one: look again.
            if steps == self.steps:
                return None

    def newest_complete(self, *, up_to: float = math.inf) -> int | None:
        """The newest step <= `up_to` whose checkpoint has a manifest; None if there is none."""
        # Either may be there alone, after a kill or if a folder was copied in part.
        complete = set(self.manifest_steps) & set(self.steps)
        return max((step for step in complete if step <= up_to), default=None)

    def remains(self) -> list[str]:
        """Describes the checkpoints that cannot be resumed from, one line each; empty in a new folder.

        An unfinished checkpoint of step 0 is left out, since no training is lost with it.
        """
        faults = {step: self.fault(step) for step in self.steps}
        if faults.get(0) == NO_MANIFEST:
            del faults[0]
        aside = list(self.paths.damaged.iterdir()) if self.paths.damaged.is_dir() else []
        found = [f"step {step}: {fault}" for step, fault in faults.items() if fault is not None]
        return found + ([f"{len(aside)} in {self.paths.damaged}"] if aside else [])

    def fault(self, step: int) -> str | None:
        """Returns why a checkpoint is damaged or unfinished; None if it is intact. Reads all of its files."""
        try:
            if not self.paths.manifest(step).exists():
                return NO_MANIFEST
            written = _read_manifest(read_bytes(self.paths.manifest(step), absent=""))
        except (OSError, ValueError, RecursionError) as error:
            return f"its manifest cannot be read ({error})"
        try:
            found = _checksums(self.paths.step(step))
        except OSError as error:
            return f"it cannot be read ({error})"
        if _PART in written:
            return "its other parts are on other hosts"
        for name, checksum in written.items():
            if name == _ROWS:
                continue
            if name not in found:
                return f"{name} is missing"
            if found[name] != checksum:
                return f"{name} has changed since it was written"
        return None

    def rows(self, step: int) -> RowChecksum | None:
        """The checksum of the metric rows up to a checkpoint; None if the manifest has none or is damaged."""
        try:
            written = _read_manifest(read_bytes(self.paths.manifest(step), absent=""))
            return RowChecksum(*written[_ROWS])
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            # `fault` reports a damaged manifest.
            return None

    def restore_params(self, step: int, role: str, like: Params) -> Params:
        """Restores only the weights of one role.

        Args:
          step: the checkpoint's step.
          role: name of the role.
          like: tree of the weights' shapes, dtypes and shardings; the weights are restored directly to them.

        Raises:
          UserError: if the shapes of the checkpoint differ from those of `like`.
        """
        path = self.paths.step(step) / role
        # Orbax would pad or truncate arrays of another shape.
        saved = self.shapes(step, role)
        # Of an actor-critic the policy alone may be asked for.
        saved = {name: saved[name] for name in saved if name != VALUE_HEAD or name in _shapes(like)}
        difference = _difference(saved, _shapes(like))
        if difference is not None:
            raise UserError(
                f"{path} does not hold the model that the run's files describe ({difference}); restore the "
                "run's folder from a backup"
            )
        item = {"params": like}
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item, strict=False),
            partial_restore=True,
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path, args=args)["params"]

    def shapes(self, step: int, role: str) -> dict[str, tuple[int, ...]]:
        """The shapes of a role's weights by their path in the tree, with the layers of its model."""
        # Orbax annotates its own path type and accepts pathlib's.
        directory: Any = self.paths.step(step) / role
        metadata = ocp.PyTreeCheckpointHandler().metadata(directory)
        return _shapes(metadata.tree["params"], (metadata.custom_metadata or {}).get(_LAYERS))


class Checkpoints:
    """Write access to the checkpoints of one training stage, for the run itself.

    Attributes:
      stored: read access to the same checkpoints.
    """

    def __init__(
        self, folder: pathlib.Path, *, keep: int | None, processes: Collection[int] | None = None
    ):
        """Creates no file or folder.

        Args:
          folder: folder of the checkpoints.
          keep: number of newest checkpoints to keep; None keeps all.
          processes: processes with devices of the training states, the first one among them; None for all.
        """
        self.stored = StoredCheckpoints(folder)
        self._keep = keep
        me = jax.process_index()
        self._has_states = processes is None or me in processes
        # A process without states reads records alone.
        self._active = set(processes or range(hosts.num_processes())) if self._has_states else {me}
        self._manager: ocp.CheckpointManager | None = None
        self._committer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._committing: concurrent.futures.Future[None] | None = None
        self._saving: int | None = None

    # Writing

    def prepare(self, newest: int | None) -> None:
        """Prepares the folder for further checkpoints. Collective: every process calls it.

        Checkpoints after `newest` are damaged. They are moved to checkpoints.damaged/, so that their steps
        can be written again. Files that a killed run has left half written or half removed are deleted.

        Args:
          newest: step of the newest intact checkpoint, from which the run continues; None for a new stage.
        """
        (hosts.gather if hosts.disks_apart else hosts.on_first)(lambda: self._prepare(newest))
        if self._manager is not None:
            self._manager.reload()

    def save(
        self,
        step: int,
        states: dict[str, TrainState],
        record: dict[str, Any],
        *,
        layers: Mapping[str, int] | None = None,
    ) -> None:
        """Starts writing a checkpoint; returns as soon as the states may change again.

        The checkpoint is valid only after `commit`.

        Args:
          step: number of finished steps.
          states: training state of each role.
          record: state of the run: JSON types, NumPy arrays, which are stored as such, and unfinished groups,
            which are stored as their records.
          layers: number of layers in the stack of each role's model. States may have more, which are 0, for
            stages of a pipeline; they are cut off or added when another layout restores them.
        """
        self.wait()
        self._saving = step
        # Sampling processes without states tell theirs what they have sampled.
        record = jax.tree.map(
            lambda x: x.whole(self._has_states) if isinstance(x, UnfinishedGroups) else x, record
        )
        if not self._has_states:
            return
        if len(self._active) == 1 < hosts.num_processes():
            # Orbax refuses arrays of one process.
            states = jax.tree.map(np.array, states)
        # JSON has no arrays: they go beside the record, where Orbax stores them as they are.
        arrays: dict[str, np.ndarray] = {}
        record = _without_arrays(record, arrays)
        items: dict[str, Any] = {_ARRAYS: ocp.args.StandardSave(arrays)} if arrays else {}
        with self._disk_errors():
            saved = self._open().save(
                step,
                args=ocp.args.Composite(
                    **{
                        role: ocp.args.StandardSave(
                            state, custom_metadata={_LAYERS: (layers or {}).get(role)}
                        )
                        for role, state in states.items()
                    },
                    record=ocp.args.JsonSave(record),
                    **items,
                ),
            )
        assert saved, f"Orbax did not save step {step}"

    def commit(self, rows: RowChecksum | None = None) -> None:
        """Starts a thread that waits for `save`, writes the manifest and removes old checkpoints.

        Args:
          rows: checksum of the metric rows up to the checkpoint's step, on the first process; None if the
            stage keeps no metrics.
        """
        assert self._saving is not None, "save comes before commit"
        # From here on the step may be overwritten by the next save, which waits for this thread.
        step, self._saving = self._saving, None
        self._committing = self._committer.submit(self._commit, step, rows)

    def wait(self) -> None:
        """Waits until the last committed checkpoint is on disk with its manifest.

        Raises:
          UserError: if writing failed, for example because the disk is full.
        """
        if self._committing is None:
            return
        # Waited for once: an error is raised once, by the step that meets it.
        committing, self._committing = self._committing, None
        with self._disk_errors():
            committing.result()

    def newest_complete(self, timeout_s: float) -> int | None:
        """The newest step with a manifest; None if there is none. Any thread may call it.

        Args:
          timeout_s: seconds to wait for a checkpoint that is being written.
        """
        committing = self._committing
        if committing is not None:
            concurrent.futures.wait([committing], timeout=timeout_s)
        return self.stored.newest_complete()

    def close(self) -> None:
        """Waits for the last checkpoint and shuts down Orbax.

        Raises:
          UserError: if writing failed.
        """
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            try:
                if self._manager is not None:
                    with self._disk_errors():
                        self._manager.close()
            finally:
                _ORBAX_LOGGER.removeFilter(_is_no_disk_fault)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        # Turns disk errors, and waits in vain for other processes, inside the block into UserErrors.
        try:
            yield
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            if late := _LATE.search(str(error.__cause__ or error)):
                raise UserError(
                    f"a checkpoint in {self.stored.paths.path} waited in vain for process "
                    f"{', '.join(late['processes'].split())}; look at its log and its disk, and start the "
                    "command again on all hosts"
                ) from error
            reason = _disk_fault(error)
            if reason is None:
                raise
            raise UserError(
                f"a checkpoint could not be written to {self.stored.paths.path} ({reason}); the ones before "
                "it are still there: free space or repair the disk, and start the command again"
            ) from error

    # Reading

    def read_record(self, step: int) -> dict[str, Any]:
        """The record of a checkpoint, as it was given to `save`; of groups their records."""
        items: dict[str, Any] = {"record": ocp.args.JsonRestore()}
        if (self.stored.paths.path / str(step) / _ARRAYS).exists():
            items[_ARRAYS] = ocp.args.StandardRestore()
        found = self._open().restore(step, args=ocp.args.Composite(**items))
        return _with_arrays(found["record"], found[_ARRAYS] if _ARRAYS in items else {})

    def restore(
        self, step: int, like: dict[str, TrainState], *, layers: Mapping[str, int] | None = None
    ) -> dict[str, TrainState]:
        """Restores the training states of a checkpoint.

        Args:
          step: the checkpoint's step.
          like: role -> tree of shapes, dtypes and shardings; the states are restored directly to them.
          layers: as for `save`.

        Raises:
          UserError: if the checkpoint lacks a role or its shapes differ from those of `like`.
        """
        path = self.stored.paths.step(step)
        saved = {path.name for path in path.iterdir()}
        # A role that the config has and the checkpoint has not: the recipe has changed.
        absent = sorted(set(like) - saved)
        if absent:
            raise UserError(
                f"the checkpoint {path} has no {', '.join(absent)}; go back to the recipe it was "
                "made with, or use another `name`"
            )
        for role, state in like.items():
            # Orbax would fail only after reading much of the checkpoint.
            shapes = _shapes(state.params, (layers or {}).get(role))
            difference = _difference(self.stored.shapes(step, role), shapes)
            if difference is not None:
                raise _does_not_fit(path, f"{role}: {difference}")
        if not self._has_states:
            # Arrays of which this process has no part.
            elsewhere = jax.make_array_from_single_device_arrays
            return jax.tree.map(lambda x: elsewhere(x.shape, x.sharding, [], dtype=x.dtype), like)
        # Not strict: Orbax adds or cuts off layers.
        args = {role: ocp.args.StandardRestore(state, strict=False) for role, state in like.items()}
        try:
            restored = self._open().restore(step, args=ocp.args.Composite(**args))
            return {role: restored[role] for role in like}
        except ValueError as error:
            raise _does_not_fit(path, str(error).splitlines()[0]) from error

    # Work of the first process

    def _prepare(self, newest: int | None) -> None:
        ensure_writable(self.stored.paths.path)
        for step in self.stored.steps:
            if newest is None:
                self._remove(step)
            elif step > newest:
                fault = self.stored.fault(step)
                aside = self.stored.paths.damaged / f"{step}.{time.time_ns()}"
                aside.parent.mkdir(exist_ok=True)
                self.stored.paths.step(step).rename(aside)
                self.stored.paths.manifest(step).unlink(missing_ok=True)
                logger.warning("checkpoint of step %d skipped: %s; kept in %s", step, fault, aside)
        for path in self.stored.paths.path.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path)
        for step in set(self.stored.manifest_steps) - set(self.stored.steps):
            self.stored.paths.manifest(step).unlink()

    def _commit(self, step: int, rows: RowChecksum | None) -> None:
        # Waits for Orbax, writes the manifest and removes old checkpoints. Runs in a thread.
        self._open().wait_until_finished()
        if not hosts.is_first() and not hosts.disks_apart:
            return
        paths = self.stored.paths
        checkpoint = paths.step(step)
        if hosts.disks_apart:
            # A process without states has an empty part.
            checkpoint.mkdir(exist_ok=True)
        checksums = _checksums(checkpoint)
        if rows is not None:
            checksums[_ROWS] = list(rows)
        if hosts.disks_apart:
            checksums[_PART] = [jax.process_index()]
        # Files first, then the manifest: a power cut may reorder what is not flushed.
        for path in (*checkpoint.rglob("*"), checkpoint, paths.path):
            sync(path)
        paths.manifests.mkdir(exist_ok=True)
        write_atomically(paths.manifest(step), json.dumps(checksums).encode())
        sync(paths.manifests.parent)
        if self._keep is not None:
            for old in [each for each in self.stored.steps if each <= step][: -self._keep]:
                self._remove(old)

    def _remove(self, step: int) -> None:
        # Removes a checkpoint. Its manifest goes first, so that what a kill leaves is no checkpoint.
        self.stored.paths.manifest(step).unlink(missing_ok=True)
        shutil.rmtree(self.stored.paths.step(step))

    def _open(self) -> ocp.CheckpointManager:
        # Returns Orbax's manager. It is created on first use, because it reads the folder at once.
        if self._manager is None:
            together = ocp.options.MultiprocessingOptions()
            if hosts.num_processes() > 1:
                # Orbax synchronises listed processes through its own service. Without a list it would run a
                # collective on the devices in the middle of training.
                first = min(self._active)
                together = ocp.options.MultiprocessingOptions(
                    primary_host=None if hosts.disks_apart else first,
                    active_processes=self._active,
                    barrier_sync_key_prefix=f"from{first}",
                )
            # The manager keeps all checkpoints: this class decides what is removed.
            options = ocp.CheckpointManagerOptions(
                create=False,
                # Do not open every checkpoint: some may be damaged.
                lightweight_initialize=True,
                multiprocessing_options=together,
            )
            _ORBAX_LOGGER.addFilter(_is_no_disk_fault)
            registry = None
            if hosts.disks_apart:
                # Orbax's own handler of arrays has one store of metadata for the whole process. Every handler
                # that is made, to read too, sets the store's primary host, and processes besides it wait for
                # a folder that it makes: on its own disk.
                ocp.type_handlers.register_type_handler(
                    jax.Array, ocp.type_handlers.ArrayHandler(primary_host=None), override=True
                )
                standard = ocp.StandardCheckpointHandler(
                    use_ocdbt=False, multiprocessing_options=together
                )
                record = ocp.JsonCheckpointHandler(multiprocessing_options=together)
                registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
                for args in (ocp.args.StandardSave, ocp.args.StandardRestore):
                    registry.add(None, args, standard)
                for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
                    registry.add(None, args, record)
            self._manager = ocp.CheckpointManager(
                self.stored.paths.path, options=options, handler_registry=registry
            )
        return self._manager


def wait_for_all_processes(occasion: str, timeout_s: int) -> bool:
    """Waits for all processes to call this function.

    Args:
      occasion: unique name of the meeting point, the same on all processes.
      timeout_s: seconds to wait.

    Returns:
      Whether all processes called it in time.
    """
    if hosts.num_processes() == 1:
        return True
    try:
        ocp.multihost.sync_global_processes(
            f"jaxrl: {occasion}", timeout=timeout_s, processes=set(range(hosts.num_processes()))
        )
    except jax.errors.JaxRuntimeError as error:
        logger.warning("the other processes were not met: %s", str(error).splitlines()[0])
        return False
    return True


def _disk_fault(error: BaseException | None) -> str | None:
    # The reason of a disk error, such as "No space left on device"; None if `error` is no disk error.
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = _DISK_FAULT.search(str(error)) if isinstance(error, ValueError) else None
    return None if found is None else os.strerror(int(found["number"]))


def _is_no_disk_fault(record: logging.LogRecord) -> bool:
    # Log filter that drops disk errors, and warnings of what is meant for disks apart.
    #
    # Each Orbax thread logs the error with a traceback and also raises it. The raised error becomes one line.
    if hosts.disks_apart and _MEANT.search(str(record.msg)):
        return False
    return not record.exc_info or _disk_fault(record.exc_info[1]) is None


def _shapes(tree: Any, layers: int | None = None) -> dict[str, tuple[int, ...]]:
    # Shapes of weights by path; those of the stack have `layers` layers, if that is given.
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        shapes[name] = tuple(leaf.shape)
        if layers is not None and name.startswith(f"[{_LAYERS!r}]"):
            shapes[name] = layers, *leaf.shape[1:]
    return shapes


def _difference(saved: dict[str, tuple[int, ...]], like: dict[str, tuple[int, ...]]) -> str | None:
    # Describes the first weight whose shape differs or that one model lacks; None if all are equal.
    for name in sorted(saved.keys() | like.keys()):
        if saved.get(name) != like.get(name):
            there, here = (
                f"{list(shapes[name])}" if name in shapes else "absent" for shapes in (saved, like)
            )
            return f"{name} is {there} there and {here} here"
    return None


def _does_not_fit(path: pathlib.Path, difference: str) -> UserError:
    return UserError(
        f"the checkpoint {path} does not fit the model of this config ({difference}); go back to the config "
        "it was made with, or use another `name`"
    )


def _without_arrays(record: Any, arrays: dict[str, np.ndarray]) -> Any:
    # A copy of a record in which the number of each array takes its place; fills `arrays` by number.
    #
    # Example: {"lengths": array, "step": 3} becomes {"lengths": {"__array__": "0"}, "step": 3}. A name of a
    # user's that begins with "__array__" gets a "_" more.
    if isinstance(record, UnfinishedGroups):
        # Only now, and not after every step: 1.2 s for 32 million tokens.
        record = record.record()
    if isinstance(record, np.ndarray):
        if not record.size:  # Orbax stores no empty arrays
            return {_ARRAY: "", "dtype": str(record.dtype)}
        arrays[name := str(len(arrays))] = record
        return {_ARRAY: name}
    if isinstance(record, dict):
        return {
            f"{key}_" if key.startswith(_ARRAY) else key: _without_arrays(x, arrays)
            for key, x in record.items()
        }
    return record


def _with_arrays(record: Any, arrays: Mapping[str, Any]) -> Any:
    # The inverse of `_without_arrays`.
    if not isinstance(record, dict):
        return record
    if _ARRAY in record:
        name = record[_ARRAY]
        return np.asarray(arrays[name]) if name else np.zeros(0, record["dtype"])
    return {
        key.removesuffix("_") if key.startswith(_ARRAY) else key: _with_arrays(value, arrays)
        for key, value in record.items()
    }


def _numbered(names: Iterable[str]) -> list[int]:
    # The step numbers among `names`, in ascending order: "0" and "20" count, "020" and "x" do not.
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _read_manifest(content: bytes) -> dict[str, list[int]]:
    manifest = json.loads(content)
    whole = isinstance(manifest, dict) and manifest
    if not whole or not all(isinstance(checksum, list) for checksum in manifest.values()):
        raise ValueError("it is no table of checksums")
    return manifest


def _checksums(folder: pathlib.Path) -> dict[str, list[int]]:
    # Size and CRC-32 of every file below `folder`.
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            crc, size = 0, 0
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    crc, size = zlib.crc32(block, crc), size + len(block)
            sums[path.relative_to(folder).as_posix()] = [size, crc]
    return sums
