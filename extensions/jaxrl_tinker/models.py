"""The models that clients train, and the thread that does their training calls in order.

    create_model, load_weights      new weights, as soon as there is a place
    forward_backward, optim_step,   in the order of their seq_id, which counts from 1 without gaps; they
    save_weights, load_weights, ..  arrive in any order, and those after a gap wait for it

There is a place for each of several adapters, or one for a model of which all weights are trained. Without
a free place a model takes that of a session that has ended or was not heard of for a while, else that of an
older model of its own session, else it waits. Calls of different models run one after the other.

Weights of a name lie in the server's folder, and outlive it:

    RUN/weights/NAME            checkpoint with the optimiser's state (`tracking.checkpoints`)
    RUN/sampler_weights/NAME    Hugging Face directory in float32
    checkpoints/REQUEST         checkpoint after a request, from which a restart goes on

With adapters these are PEFT directories, and checkpoints have one beside them, without padding of the rank.

After a restart the finished calls come again, in the order in which they ran, and `plan_redo` says which of
them have to be done again, with checkpoints in the place of earlier ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxrl.errors import UserError
from jaxrl.models.model_config import LoraConfig
from jaxrl.tracking.durable import sync
from jaxrl_tinker.accumulating import AdamNumbers
from jaxrl_tinker.bodies import LoadWeights, SaveWeights
from jaxrl_tinker.devices import Devices, Together
from jaxrl_tinker.futures import Future, Futures, Gone, Result
from jaxrl_tinker.sampler_weights import Newest, SamplerWeights
from jaxrl_tinker.wire import forward_backward_output, read_data

_LOG = logging.getLogger(__name__)

# A name is that of a folder: no slash in it, no dot at its beginning.
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,127}")
# File in a folder of weights with the id of the request that has saved them.
_SAVED_BY = "saved_by"
# A run that begins with a dot, such as `..`, would lead out of the server's folder.
_URI = re.compile(r"tinker://(\w[\w:.-]*)/(weights|sampler_weights)/([^/]+)")


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call that waits for its turn, and when it arrived. That of a new model takes the place of another."""

    model: TrainedModel
    future: Future
    work: Callable[[], Any]
    may_replace: Callable[[TrainedModel], bool] = lambda _: False
    arrived: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass
class TrainedModel:
    """The model of a client.

    Attributes:
      model_id, session_id: ids.
      newest: what its samplers of `kind: inflight` sample from.
      unsaved_steps: number of steps since the last checkpoint; infinite where one must follow.
      next_seq: seq_id of the next call.
      waiting: calls by seq_id.
    """

    model_id: str
    session_id: str
    newest: Newest = dataclasses.field(default_factory=Newest)
    unsaved_steps: float = 0.0
    next_seq: int = 1
    waiting: dict[int, _Call] = dataclasses.field(default_factory=dict)


class CannotRedo(Exception):
    """A call that succeeded before a restart fails after it."""


class Done(NamedTuple):
    """A call that had its turn."""

    request_id: str
    route: str
    failed: bool
    model_id: str = ""


def plan_redo(
    done: Sequence[Done],
    checkpoints: Collection[str],
    held: Collection[str],
    replaced: Collection[str] = (),
) -> dict[str, Literal["run", "restore"]]:
    """Which calls have to be done again for the models as they are now, and for the snapshots that are held.

    Example, with an optim_step that has a checkpoint and a snapshot after it:

        create_model  forward_backward  optim_step  snapshot  forward_backward  optim_step  save_weights
        -             -                 restore     run       run               run         -

    Args:
      done: the calls in order.
      checkpoints: ids of those after which there is a checkpoint.
      held: ids of those that took the snapshots.
      replaced: ids of models that are not here any more.

    Returns:
      What to do by request id: run it, or restore the checkpoint after it. The others need nothing.
    """
    plan: dict[str, Literal["run", "restore"]] = {}
    # Whether the state after the call matters, by model.
    wanted: dict[str, bool] = dict.fromkeys(replaced, False)
    for call in reversed(done):
        is_wanted = wanted.get(call.model_id, True) or call.request_id in held
        wanted[call.model_id] = is_wanted
        # A failed step may have dropped the gradients; of other failures nothing stays.
        starts = call.route in ("create_model", "load_weights") and not call.failed
        changes = call.route == "forward_backward" and not call.failed
        changes |= starts or call.route == "optim_step" or call.request_id in held
        if not is_wanted or not changes:
            continue
        restored = call.request_id in checkpoints
        plan[call.request_id] = "restore" if restored else "run"
        wanted[call.model_id] = not (restored or starts)
    return plan


@dataclasses.dataclass(eq=False)
class Models:
    """Training calls, done one after the other on a thread of their own, which starts at once.

    Attributes:
      together: devices that train them.
      futures: futures, which the thread finishes.
      folder: folder of named weights.
      write: `Log.write`.
      held: function that returns the ids of the requests that took the kept snapshots.
      places: number of models that are trained at the same time.
      checkpoint_steps: number of optimiser steps between checkpoints.
      gap_timeout_s: how long calls wait for a missing one.
    """

    together: Together
    futures: Futures
    folder: pathlib.Path
    _: dataclasses.KW_ONLY
    write: Callable[..., None]
    held: Callable[[], Collection[str]]
    places: int = 1
    checkpoint_steps: int = 10
    gap_timeout_s: float = 300.0

    def __post_init__(self):
        self._done: list[Done] = []
        self._plan: Mapping[str, str] = {}
        self._checkpoints: set[str] = set()
        # Models that had to give their places away.
        self._replaced: set[str] = set()
        self._changed = threading.Condition()
        self._new: list[_Call] = []
        # In the order of their creation.
        self._models: dict[str, TrainedModel] = {}
        # Those that somebody may still sample from.
        self._snapshots: weakref.WeakSet[SamplerWeights] = weakref.WeakSet()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="tinker-models", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the call that it is at."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def model_of(self, model_id: str) -> TrainedModel:
        """The model of an id; raises Gone."""
        model = self._models.get(model_id)
        if model is None:
            raise Gone(
                f"model {model_id!r} is not here: its session is over, or another model has its place; "
                "create a model, or load weights that were saved"
            )
        return model

    def create(
        self,
        model: TrainedModel,
        future: Future,
        work: Callable[[], Any],
        may_replace: Callable[[TrainedModel], bool],
    ) -> None:
        """Queues `model`, to be trained once there is a place.

        Args:
          model, future: the model, and the future of its creation.
          work: function that gives it weights.
          may_replace: whether it may take the place of a model.
        """
        if future.result is not None:
            # After a restart models come again in their order, each in a place that was given up for it.
            if len(self._models) >= self.places:
                self._models.pop(next(each for each in self._models if each in self._replaced))
            self._models[model.model_id] = model
            self._redo(model, future, work)
            if future.result.failed:
                self._models.pop(model.model_id)
            return
        with self._changed:
            new = _Call(model, future, work, may_replace)
            self._new.append(new)
            if self._place_for(new) is None:
                future.waits_for = (
                    f"{self.places} of {self.places} places for models are taken; a session that ends, or "
                    "is not heard of, frees its own"
                )
            self._changed.notify_all()

    def _place_for(self, new: _Call) -> list[TrainedModel] | None:
        """The models that have to go for a new one, at most one; None if it has to wait."""
        if len(self._models) < self.places:
            return []
        others = [model for model in self._models.values() if new.may_replace(model)]
        # Silent sessions first.
        others.sort(key=lambda model: model.session_id == new.model.session_id)
        return others[:1] or None

    def _begin(self, new: _Call, before: Sequence[TrainedModel]) -> Any:
        model = new.model
        for each in before:
            # Logged before another model has the place, so that a restart does not give it back.
            self._replaced.add(each.model_id)
            self.write("replaced", each.session_id, id=each.model_id)
            error = Result.error(UserError(f"{each.model_id} was replaced by {model.model_id}"))
            for call in each.waiting.values():
                self.futures.finish(call.future, error)
        if before:
            self.together.run(Devices.drop, [each.model_id for each in before])
        try:
            return new.work()
        except Exception:
            with self._changed:
                self._models.pop(model.model_id, None)
            raise

    def submit(
        self, model: TrainedModel, seq_id: int, future: Future, work: Callable[[], Any]
    ) -> None:
        """Queues a training call.

        Raises:
          UserError: its turn is over.
          Gone: the model was replaced.
        """
        if future.result is not None:
            model.next_seq = seq_id + 1
            self._redo(model, future, work)
            return
        with self._changed:
            is_queued = any(new.model is model for new in self._new)
            if self._models.get(model.model_id) is not model and not is_queued:
                raise Gone(f"model {model.model_id} was replaced")
            if seq_id < model.next_seq:
                raise UserError(
                    f"seq_id {seq_id} was used: the next one of {model.model_id} is {model.next_seq}"
                )
            model.waiting[seq_id] = _Call(model, future, work)
            self._changed.notify_all()

    # Checkpoints

    def expect(
        self,
        done: Sequence[Done],
        checkpoints: Collection[str],
        held: Collection[str],
        replaced: Collection[str],
    ) -> None:
        """Announces calls that come again after a restart; arguments as for `plan_redo`."""
        self._checkpoints = {each for each in checkpoints if self._checkpoint_of(each).exists()}
        self._replaced |= set(replaced)
        self._plan = plan_redo(done, self._checkpoints, held, replaced)

    def drop_replaced(self) -> None:
        """Removes models that came again for their snapshots alone."""
        for model_id in self._models.keys() & self._replaced:
            self._models.pop(model_id)

    def _redo(self, model: TrainedModel, future: Future, work: Callable[[], Any]) -> None:
        """Does on the caller's thread what the plan says about a call that has its result already."""
        result = future.result
        assert result is not None, "only finished calls are done again"
        self._done.append(Done(future.request_id, future.route, result.failed, model.model_id))
        action = self._plan.get(future.request_id)
        try:
            if action == "restore":
                folder = self._checkpoint_of(future.request_id)
                self.together.run(Devices.load, model.model_id, folder, optimizer=True)
                model.unsaved_steps = 0
            elif action == "run":
                # No checkpoint here: it would remove those that only later calls of the log need.
                work()
        except Exception as error:
            if not result.failed:
                raise CannotRedo(f"{future.request_id}: {error}") from error

    def _checkpoint_of(self, request_id: str) -> pathlib.Path:
        return self.folder / "checkpoints" / re.sub("[:/]", "-", request_id)

    def _save_checkpoint(self, model: TrainedModel, future: Future) -> None:
        """Saves the state after a call if it is time, and removes checkpoints that no restart needs."""
        # These leave no gradients behind, which a checkpoint does not hold.
        changes = future.route in ("optim_step", "load_weights")
        if not changes or model.unsaved_steps < self.checkpoint_steps:
            return
        model.unsaved_steps = 0
        folder = self._checkpoint_of(future.request_id)
        # A server that was killed here may have left a part.
        shutil.rmtree(folder, ignore_errors=True)
        self.together.run(Devices.save, model.model_id, folder)
        self.write("checkpoint", future.session_id, id=future.request_id)
        self._checkpoints.add(future.request_id)
        plan = plan_redo(self._done, self._checkpoints, self.held(), self._replaced)
        self._checkpoints &= {
            request_id for request_id, action in plan.items() if action == "restore"
        }
        # Calls of a model before the first that is needed are never needed again.
        needed: set[str] = set()
        done, self._done = self._done, []
        for call in done:
            needed |= {call.model_id} if call.request_id in plan else set()
            if call.model_id in needed:
                self._done.append(call)
        kept = set(map(self._checkpoint_of, self._checkpoints))
        for path in folder.parent.iterdir():
            if path not in kept:
                shutil.rmtree(path)

    # The thread

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            model, future = call.model, call.future
            self.futures.run(future, call.work)
            result = future.result
            assert result is not None, "it has just been run"
            done = Done(future.request_id, future.route, result.failed, model.model_id)
            self._done.append(done)
            try:
                self._save_checkpoint(model, future)
            except Exception as error:  # a restart takes longer without it
                _LOG.error("no checkpoint after %s: %s", future.request_id, error)

    def _next(self) -> _Call | None:
        with self._changed:
            while not self._closing:
                for new in self._new:
                    if (before := self._place_for(new)) is not None:
                        self._new.remove(new)
                        for model in before:
                            del self._models[model.model_id]
                        self._models[new.model.model_id] = new.model
                        new.future.waits_for = ""
                        work = functools.partial(self._begin, new, before)
                        return dataclasses.replace(new, work=work)
                ready = [m for m in self._models.values() if m.next_seq in m.waiting]
                if ready:
                    # The call that has waited longest.
                    model = min(ready, key=lambda model: model.waiting[model.next_seq].arrived)
                    model.next_seq += 1
                    return model.waiting.pop(model.next_seq - 1)
                for model in self._models.values():
                    if model.waiting:
                        self._give_up_gap(model)
                # Wakes by itself too: gaps end with time, and sessions fall silent.
                self._changed.wait(1.0)
        return None

    def _give_up_gap(self, model: TrainedModel) -> None:
        """Fails the calls after a gap that has lasted too long, and goes on after them."""
        oldest = min(call.arrived for call in model.waiting.values())
        if time.monotonic() - oldest < self.gap_timeout_s:
            return
        missing, last = model.next_seq, max(model.waiting)
        waiting, model.waiting = model.waiting, {}
        model.next_seq = last + 1
        for seq_id, call in waiting.items():
            error = UserError(
                f"seq_id {seq_id} waited {self.gap_timeout_s:g} s for {missing}, which never came; send "
                "every seq_id"
            )
            self.futures.finish(call.future, Result.error(error))

    # Work, on the thread

    def start(self, model: TrainedModel, adapter: LoraConfig | None, seed: int) -> Any:
        """Begins with a new adapter, or with the base model's weights."""
        self.together.run(Devices.start, model.model_id, adapter, seed)
        return {"type": "create_model", "model_id": model.model_id}

    def forward_backward(self, model: TrainedModel, request: Any) -> bytes:
        """Adds the gradient of a request's loss, or only computes the loss."""
        devices, forward_only = self.together.devices, request.forward_only
        data = read_data(request, devices.shape.tokens, devices.actor.model.live_tokens)
        found, total = self.together.run(
            Devices.train, model.model_id, data, request.loss_fn, forward_only=forward_only
        )
        flat = [len(d.loss_fn_inputs["target_tokens"].shape) < 2 for d in request.data]
        answers = [x[:, 0] if is_flat else x for x, is_flat in zip(found, flat, strict=True)]
        return forward_backward_output(answers, {"loss:sum": total})

    def optim_step(self, model: TrainedModel, numbers: AdamNumbers) -> Any:
        if self.together.devices.trained[model.model_id].trainee.gradients is None:
            raise UserError(
                "optim_step has no gradient to apply; call forward_backward after the optim_step before it"
            )
        try:
            norm = self.together.run(Devices.step, model.model_id, numbers)
        except jax.errors.JaxRuntimeError:
            # The step has consumed the weights: the model is gone, and its next calls say so.
            with self._changed:
                self._models.pop(model.model_id, None)
            raise
        model.unsaved_steps += 1
        if not math.isfinite(norm):
            raise UserError(
                f"the gradient's norm is {norm}, so nothing was changed; look for extreme weights, "
                "advantages or log-probabilities"
            )
        return {"type": "optim_step", "metrics": {"grad_norm:mean": norm}}

    def save_weights(self, model: TrainedModel, request_id: str, given: SaveWeights) -> Any:
        name = given.path or f"{int(request_id.rpartition('/')[2]):06d}"
        out = self._path(model.model_id, "weights", name)
        with self._saved(out, request_id, overwrite=given.overwrite) as folder:
            self.together.run(Devices.save, model.model_id, folder)
        return {"type": "save_weights", "path": f"tinker://{model.model_id}/weights/{name}"}

    def load_weights(self, model: TrainedModel, given: LoadWeights) -> Any:
        """Goes on with saved weights, with or without the optimiser's state."""
        folder = self.folder_of(given.path, "weights")
        self.together.run(Devices.load, model.model_id, folder, optimizer=given.optimizer)
        # The named weights may be overwritten, so a checkpoint has to follow.
        model.unsaved_steps = math.inf
        return {"type": "load_weights", "model_id": model.model_id, "path": given.path}

    def export(self, model: TrainedModel, request_id: str, name: str) -> Any:
        """Writes a Hugging Face directory, or of an adapter a PEFT directory, to sample from."""
        out = self._path(model.model_id, "sampler_weights", name)
        with self._saved(out, request_id, overwrite=False) as folder:
            self.together.run(Devices.export, model.model_id, folder)
        return {
            "type": "save_weights_for_sampler",
            "path": f"tinker://{model.model_id}/sampler_weights/{name}",
        }

    def snapshot(self, model: TrainedModel, request_id: str) -> SamplerWeights:
        """Copies a model's weights to the host, to sample from."""
        kept = [each.taken_by for each in self._snapshots]
        self.together.run(Devices.snapshot, model.model_id, request_id, kept)
        weights = SamplerWeights(taken_by=request_id)
        self._snapshots.add(weights)
        return weights

    @contextlib.contextmanager
    def _saved(
        self, out: pathlib.Path, request_id: str, *, overwrite: bool
    ) -> Iterator[pathlib.Path]:
        """A folder to fill, which then takes the place of `out`: all of it or nothing.

        Raises:
          UserError: another request has saved `out`.
        """
        # After a restart a request may find what it has saved before.
        if out.exists() and not overwrite and (out / _SAVED_BY).read_text() != request_id:
            raise UserError(
                f"weights {out.name!r} exist; choose another name, or set overwrite where there is one"
            )
        part = out.with_name(f".{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        yield part
        (part / _SAVED_BY).write_text(request_id)
        # `rename` does not replace a folder that is not empty.
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
        sync(out.parent)

    # Names

    def _path(self, model_id: str, kind: str, name: str) -> pathlib.Path:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{name[:140]!r} is no name for weights; use letters, digits and . _ - +, 128 at most"
            )
        return self.folder / model_id.replace(":", "-") / kind / name

    def folder_of(self, path: str, kind: str) -> pathlib.Path:
        """The folder of weights, from `tinker://RUN/KIND/NAME`.

        Raises:
          UserError: the path is none, or nothing is there.
        """
        found = _URI.fullmatch(path)
        if found is None or found[2] != kind:
            raise UserError(f"{path[:200]!r} is no path of weights; use tinker://RUN/{kind}/NAME")
        folder = self._path(found[1], kind, found[3])
        if not folder.is_dir():
            raise UserError(f"{path} is not here; this server has what it saved in {self.folder}")
        return folder
