"""Checkpoints: atomic, asynchronous, verified.

Orbax writes them; each holds the training state of every role (weights, optimiser, step) and a small JSON
record (position in the data, what the run knows about itself). Once one is complete its files are sealed with
checksums (`tracking.seals`): a flipped bit in compressed weights would otherwise be restored without a word.

    save      Orbax writes checkpoints/30 beside training          death here: 20 is the newest intact
    commit    the files reach the disk, then the seal of 30 does   death here: 20
              10 is moved to checkpoints.deleted/ and removed      death here: 30

Nothing is removed before a newer checkpoint is sealed. `StoredCheckpoints` reads and changes nothing, whoever
else is at work; `Checkpoints` belongs to the run that holds the folder's lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Collection, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.roles.learner import TrainState
from jaxrl.tracking.durable import ensure_writable, sync
from jaxrl.tracking.row_checksum import RowChecksum
from jaxrl.tracking.run_folder import CheckpointFolder
from jaxrl.tracking.seals import UNSEALED, Seals, numbered

logger = logging.getLogger(__name__)

# How TensorStore, which writes arrays, says that the disk did not take them.
_DISK_FAULT = re.compile(r"\bos_error_code='(?P<number>\d+)'")


_ORBAX_LOGGER = logging.getLogger("absl")


class StoredCheckpoints:
    """The checkpoints of one stage of a run, numbered by finished steps, as a reader finds them.

    Attributes:
      paths: where they lie; need not exist.
      seals: of them.
    """

    def __init__(self, folder: pathlib.Path):
        """Args: where they lie."""
        self.paths = CheckpointFolder(folder.absolute())
        self.seals = Seals(self.paths)

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, finished or not, oldest first."""
        if not self.paths.path.is_dir():
            return []
        return numbered(path.name for path in self.paths.path.iterdir() if path.is_dir())

    def newest_intact(self) -> int | None:
        """The newest step whose files are as they were written; None if there is none. It reads all of it."""
        while True:
            steps = self.steps
            for step in reversed(steps):
                fault = self.seals.fault(step)
                if fault is None:
                    return step
                logger.info("%s is not intact: %s", self.path(step), fault)
            # A run at work removes an old checkpoint as soon as a newer one is sealed: look again.
            if steps == self.steps:
                return None

    def newest_sealed(self, *, up_to: int) -> int | None:
        """The newest step with a seal that is not newer than `up_to`; None if there is none."""
        sealed = set(self.seals.steps()) & set(self.steps)
        return max((step for step in sealed if step <= up_to), default=None)

    def remains(self) -> list[str]:
        """What is there of checkpoints that cannot be gone on from, a line each; empty in a fresh folder.

        A first one (step 0) that was not finished is nothing to be missed.
        """
        faults = {step: self.seals.fault(step) for step in self.steps}
        if faults.get(0) == UNSEALED:
            del faults[0]
        aside = list(self.paths.damaged.iterdir()) if self.paths.damaged.is_dir() else []
        found = [f"step {step}: {fault}" for step, fault in faults.items() if fault is not None]
        return found + ([f"{len(aside)} in {self.paths.damaged}"] if aside else [])

    def restore_params(self, step: int, role: str, like: Params) -> Params:
        """The weights of a role alone, born with the shapes and shardings of `like`.

        Raises:
          UserError: the checkpoint holds a model of another shape.
        """
        path = self.path(step) / role
        # Orbax would fill or cut what has another shape.
        difference = _difference(self.shapes(step, role), _shapes(like))
        if difference is not None:
            raise UserError(
                f"{path} does not hold the model that the run's files describe ({difference}); restore the "
                "run's folder from a backup"
            )
        item = {"params": like}
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path, args=args)["params"]

    def shapes(self, step: int, role: str) -> dict[str, tuple[int, ...]]:
        """Of a role's weights, by their path in the tree."""
        directory: Any = self.path(step) / role  # Orbax says it wants its own kind of paths
        metadata = ocp.PyTreeCheckpointHandler().metadata(directory)
        return _shapes(metadata.tree["params"])

    def path(self, step: int) -> pathlib.Path:
        """The folder of a step's checkpoint."""
        return self.paths.step(step)


class Checkpoints:
    """The checkpoints of one stage of a run, for the run itself.

    Attributes:
      stored: the same for readers.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int | None):
        """Args: where they lie (made once one is saved), and how many of the newest stay, None for all."""
        self.stored = StoredCheckpoints(folder)
        self._keep = keep
        self._deleted = self.stored.paths.deleted
        self._manager: ocp.CheckpointManager | None = None
        self._sealer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._sealing: concurrent.futures.Future[None] | None = None
        self._saving: int | None = None

    # Writing

    def prepare(self, newest: int | None) -> None:
        """Makes the folder ready to go on from `newest`, the newest intact one, or to begin. Collective.

        Newer ones are not intact; they are moved aside, so that their steps can be written again. What a
        death has left half written or half removed is removed.
        """
        hosts.on_first(lambda: self._prepare(newest))
        if self._manager is not None:
            self._manager.reload()

    def save(self, step: int, states: dict[str, TrainState], record: dict[str, Any]) -> None:
        """Starts writing a checkpoint of every role's state; returns once they may change again.

        It counts as a checkpoint once it is committed.
        """
        self.wait()
        with self._disk_errors():
            saved = self._open().save(
                step,
                args=ocp.args.Composite(
                    **{role: ocp.args.StandardSave(state) for role, state in states.items()},
                    record=ocp.args.JsonSave(record),
                ),
            )
        assert saved, f"Orbax did not save step {step}"
        self._saving = step

    def commit(self, sound_steps: Collection[int] = (), *, rows: RowChecksum | None = None) -> None:
        """Seals what `save` has begun, beside training, and then removes the oldest ones.

        Args:
          sound_steps: besides the newest `keep`, the newest checkpoint up to each of these stays.
          rows: of the metrics up to the checkpoint's step; the first process needs them, if any are kept.
        """
        assert self._saving is not None, "save comes before commit"
        step, self._saving = self._saving, None
        self._sealing = self._sealer.submit(self._commit, step, tuple(sound_steps), rows)

    def wait(self) -> None:
        """Returns once everything that was committed is sealed.

        Raises:
          UserError: the disk did not take it.
        """
        if self._sealing is None:
            return
        sealing, self._sealing = self._sealing, None
        with self._disk_errors():
            sealing.result()

    def newest_sealed(self, timeout_s: float) -> int | None:
        """The newest sealed checkpoint, once the last one is sealed or the time is over. For any thread."""
        sealing = self._sealing
        if sealing is not None:
            concurrent.futures.wait([sealing], timeout=timeout_s)
        return max(self.stored.seals.steps(), default=None)

    def close(self) -> None:
        """Waits until everything is on disk and sealed."""
        try:
            self.wait()
        finally:
            self._sealer.shutdown()
            try:
                if self._manager is not None:
                    with self._disk_errors():
                        self._manager.close()
            finally:
                _ORBAX_LOGGER.removeFilter(_is_no_disk_fault)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Around writing: what the disk did not take is a UserError."""
        try:
            yield
        except (OSError, ValueError) as error:
            reason = _disk_fault(error)
            if reason is None:
                raise
            raise UserError(
                f"a checkpoint could not be written to {self.stored.paths.path} ({reason}); the ones before "
                "it are still there: free space or repair the disk, and start the command again"
            ) from error

    # Reading

    def read_record(self, step: int) -> dict[str, Any]:
        """The JSON record of a checkpoint."""
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return self._open().restore(step, args=args)["record"]

    def restore(self, step: int, like: dict[str, TrainState]) -> dict[str, TrainState]:
        """The states of a checkpoint by role, born with the shapes and shardings of `like`.

        Raises:
          UserError: the checkpoint holds other roles, or a model of another shape.
        """
        path = self.stored.path(step)
        saved = {path.name for path in path.iterdir()}
        absent = sorted(set(like) - saved)
        if absent:
            raise UserError(
                f"the checkpoint {path} has no {', '.join(absent)}; go back to the recipe it was "
                "made with, or use another `name`"
            )
        for role, state in like.items():
            # Orbax would find out while it reads.
            difference = _difference(self.stored.shapes(step, role), _shapes(state.params))
            if difference is not None:
                raise _does_not_fit(path, f"{role}: {difference}")
        args = {role: ocp.args.StandardRestore(state) for role, state in like.items()}
        try:
            restored = self._open().restore(step, args=ocp.args.Composite(**args))
            return {role: restored[role] for role in like}
        except ValueError as error:
            raise _does_not_fit(path, str(error).splitlines()[0]) from error

    # What only the first process does

    def _prepare(self, newest: int | None) -> None:
        ensure_writable(self.stored.paths.path)
        for step in self.stored.steps:
            if newest is None:
                self._remove(step)
            elif step > newest:
                self._set_aside(step)
        shutil.rmtree(self._deleted, ignore_errors=True)
        for path in self.stored.paths.path.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path)
        for step in set(self.stored.seals.steps()) - set(self.stored.steps):
            self.stored.seals.remove(step)

    def _commit(self, step: int, sound_steps: Collection[int], rows: RowChecksum | None) -> None:
        """Runs beside training: waits for Orbax, seals, removes what is older."""
        self._open().wait_until_finished()
        if not hosts.is_first():
            return
        self.stored.seals.write(step, rows)
        self._remove_older(step, sound_steps)

    def _remove_older(self, newest: int, sound_steps: Collection[int]) -> None:
        if self._keep is None:
            return
        steps = [step for step in self.stored.steps if step <= newest]
        stay = {self.stored.newest_sealed(up_to=step) for step in sound_steps}
        for step in steps[: -self._keep]:
            if step not in stay:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint; a death in between leaves nothing that looks like one."""
        self._deleted.mkdir(exist_ok=True)
        aside = self._deleted / f"{step}.{time.time_ns()}"
        self.stored.path(step).rename(aside)
        sync(self.stored.paths.path)
        self.stored.seals.remove(step)
        shutil.rmtree(aside)

    def _set_aside(self, step: int) -> None:
        fault = self.stored.seals.fault(step)
        aside = self.stored.paths.damaged / f"{step}.{time.time_ns()}"
        aside.parent.mkdir(exist_ok=True)
        self.stored.path(step).rename(aside)
        self.stored.seals.remove(step)
        logger.warning("checkpoint of step %d skipped: %s; kept in %s", step, fault, aside)

    def _open(self) -> ocp.CheckpointManager:
        """Orbax's manager, which looks at the folder when it is made."""
        if self._manager is None:
            # It keeps everything: what is removed, and when, is decided here.
            options = ocp.CheckpointManagerOptions(
                create=False,
                # Without a look into all of them, of which some may be damaged.
                lightweight_initialize=True,
                multiprocessing_options=_processes(),
            )
            self._manager = ocp.CheckpointManager(self.stored.paths.path, options=options)
            _ORBAX_LOGGER.addFilter(_is_no_disk_fault)
        return self._manager


def _processes() -> ocp.options.MultiprocessingOptions:
    """Who takes part. Several processes are named one by one: Orbax then meets them by its own service, and
    not by a collective on the devices, which it would start in the midst of training."""
    count = hosts.num_processes()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)) if count > 1 else None
    )


def all_meet(occasion: str, timeout_s: int) -> bool:
    """Whether every process calls this for the same occasion, each of which is its own, within the time."""
    everyone = _processes().active_processes
    if everyone is None:
        return True
    try:
        ocp.multihost.sync_global_processes(
            f"jaxrl: {occasion}", timeout=timeout_s, processes=everyone
        )
    except jax.errors.JaxRuntimeError as error:
        logger.warning("the other processes were not met: %s", str(error).splitlines()[0])
        return False
    return True


def _disk_fault(error: BaseException | None) -> str | None:
    """What was wrong with the disk, such as "No space left on device"; None if `error` is another one."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = _DISK_FAULT.search(str(error)) if isinstance(error, ValueError) else None
    return None if found is None else os.strerror(int(found["number"]))


def _is_no_disk_fault(record: logging.LogRecord) -> bool:
    """Leaves out of the log, with their tracebacks, the errors of the disk that each thread of Orbax meets.

    They are also raised, and become one line.
    """
    return not record.exc_info or _disk_fault(record.exc_info[1]) is None


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}


def _difference(saved: dict[str, tuple[int, ...]], like: dict[str, tuple[int, ...]]) -> str | None:
    """The first weight that two models do not share; None if they have the same."""
    for name in sorted(saved.keys() | like.keys()):
        if saved.get(name) != like.get(name):
            return f"{name} is {_said(saved.get(name))} there and {_said(like.get(name))} here"
    return None


def _said(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"{list(shape)}"


def _does_not_fit(path: pathlib.Path, difference: str) -> UserError:
    return UserError(
        f"the checkpoint {path} does not fit the model of this config ({difference}); go back to the config "
        "it was made with, or use another `name`"
    )
