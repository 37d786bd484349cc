"""What is on the devices: the models that clients train, and the weights that they sample from.

The public methods of `Devices` are commands, which `Together` runs one at a time, and with several processes
in each of them. Their results are the same everywhere. Clients' mistakes are found before a command is sent,
in the first process.

    process 0   models ---+                                the others
                sampler --+--> run(command, ..) -- sends --> follow: command(..)

The devices of a program wait for each other in its collectives. If two threads start such programs, devices
may get them in different orders, and then all of them wait forever. So commands take turns, in the order in
which they come. On one device they may run at the same time.

N tokens of a sequence   K targets of a place
"""

from __future__ import annotations

import abc
import base64
import collections
import contextlib
import dataclasses
import functools
import pathlib
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.data.model_directory import ModelDirectory, generation_shardings
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import TRAIN_RULES, lists_layers, shards_of, with_shardings
from jaxrl.models import lora
from jaxrl.models.decoder import Params, weight_types
from jaxrl.models.huggingface.config_json import read_adapter_config
from jaxrl.models.huggingface.weight_export import save_adapter, save_checkpoint
from jaxrl.models.huggingface.weight_loading import load_adapter, load_params
from jaxrl.models.model_config import LoraConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.live_loop import LiveError, LiveLoop
from jaxrl.rollout.stop_strings import StopSearch
from jaxrl.tracking.checkpoints import Checkpoints
from jaxrl_serving.model_loading import (
    build_engine,
    device_bytes,
)
from jaxrl_tinker.accumulating import AccumulatingActor, AdamNumbers, Targets, Trainee, pack_targets
from jaxrl_tinker.settings import TinkerConfig

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclasses.dataclass
class Trained:
    """A model that is trained.

    Attributes:
      adapter: rank and alpha of what is trained; the rank is 0 if that is all weights.
      trainee: its weights, optimiser state and gradients.
    """

    adapter: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    trainee: Trainee = dataclasses.field(default_factory=Trainee)

    @property
    def params(self) -> Params:
        assert self.trainee.state is not None, "a model has weights"
        return self.trainee.state.params


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities at the N - 1 places of a sequence that have a next token.

    Attributes:
      logprobs: float32 [N - 1], of the next token.
      targets: float32 [N - 1, K], of further tokens.
      top: [N - 1, k] both, the most probable tokens and their log-probabilities; empty for none.
      drawn: the same of tokens that were drawn.
    """

    logprobs: np.ndarray
    targets: np.ndarray
    top: Sequence[np.ndarray]
    drawn: Sequence[np.ndarray]


def check_rank(rank: int, most: int) -> None:
    """Raises UserError for an adapter that this server cannot train."""
    if not 1 <= rank <= most:
        raise UserError(
            f"the rank of an adapter is {rank!r}; this server trains ranks from 1 to {most}: choose another, "
            "or start it with a larger --max_rank, or with --full to train all weights"
        )


class Devices(abc.ABC):
    """The devices of a server.

    Attributes:
      actor, shape: policy that trains the models, and the shape of its batches.
      sizes: sizes of the engine, with the token ids that end samples by default.
      live: loop that decodes samples; between commands it takes requests and cancellations.
      trained: the models, by id.
      num_places: number of weights that are sampled from at the same time.
    """

    num_places: int
    live: LiveLoop
    _engine: Engine

    def __init__(
        self,
        config: TinkerConfig,
        found: ModelDirectory,
        directory: pathlib.Path,
        actor: AccumulatingActor,
        shape: PackedShape,
    ):
        """Allocates nothing.

        Args: the settings, the base model and its directory, a policy without weights, its shape.
        """
        self.config, self.directory = config, directory
        self.actor, self.shape = actor, shape
        self.trained: dict[str, Trained] = {}
        self._shards = shards_of("batch", TRAIN_RULES, actor.mesh)
        # Weights of samplers, by the request that has taken them.
        self._snapshots: dict[str, Any] = {}
        self.tokenizer = found.tokenizer
        # What stays, with its bytes on each device.
        self._resident: dict[str, int] = {}
        self._plan(found)
        self.sizes = self._engine.config

    @abc.abstractmethod
    def _plan(self, found: ModelDirectory) -> None:
        """Fills `_resident`, and makes the engine of samples."""

    def load_base(self) -> None:
        params, search = self._loaded(), StopSearch(self.tokenizer.decode)
        max_waiting = self.config.max_waiting
        self.live = LiveLoop(self._engine, params, search, max_waiting=max_waiting)

    def _loaded(self) -> Params:
        """Loads the base model; returns what samples are drawn with, {} before `bring` brings it."""
        return {}

    def memory(self) -> dict[str, int]:
        """Bytes of each device by what they are for, counted from shapes and by the compiler."""
        sizes, actor = self._engine.config, self.actor
        cache = f"cache of {sizes.slots} samples of {sizes.max_context_tokens} tokens"
        # Any sequence does: all batches have one shape.
        one = np.zeros((1, 1), np.float32)
        datum = Targets(np.zeros(1, np.int32), one.astype(np.int32), {"weights": one})
        (part,) = pack_targets([datum], self.shape, shards=self._shards)
        compiled = actor.accumulate_program.lower(
            actor.abstract_gradients(),
            actor.abstract_state().params,
            self._frozen_shapes(),
            np.float32(1),
            actor.place(part.batch),
            loss="cross_entropy",
        ).compile()
        temporaries: Any = compiled.memory_analysis()
        shape = f"{self.shape.microbatches} x {self.shape.rows} x {self.shape.tokens} tokens"
        return {
            **self._resident,
            cache: device_bytes(self._engine.abstract_decode_state()),
            f"temporaries of forward_backward, {shape}": temporaries.temp_size_in_bytes,
        }

    def _frozen_shapes(self) -> Params:
        """Shapes and shardings of the weights below adapters, in the training layout."""
        return {}

    # Training

    def start(self, model_id: str, adapter: LoraConfig | None, seed: int) -> None:
        """Begins a model with a new adapter of random factors, or with the base model's weights."""
        trained = self.trained[model_id] = Trained()
        with self._training(trained) as actor:
            actor.start_from(self._fresh(adapter, seed))
            if adapter is not None:
                # Its other projections have factors of 0, and are in its files.
                trained.adapter = dataclasses.replace(adapter, targets=actor.model.lora.targets)
                actor.trainee = dataclasses.replace(actor.trainee, scale=trained.adapter.scale)

    @abc.abstractmethod
    def _fresh(self, adapter: LoraConfig | None, seed: int) -> Params:
        """What is trained at first, in the training layout."""

    def drop(self, model_ids: Sequence[str]) -> None:
        for model_id in model_ids:
            self.trained.pop(model_id, None)

    def train(
        self, model_id: str, data: Sequence[Targets], loss: str, *, forward_only: bool
    ) -> tuple[list[np.ndarray], float]:
        """Adds the gradient of a loss, or only computes the loss.

        Returns:
          (log-probabilities [N, K] of each sequence, sum of the loss).
        """
        # Each number of targets has programs of its own.
        by_k: dict[int, list[int]] = collections.defaultdict(list)
        for i, datum in enumerate(data):
            by_k[datum.targets.shape[1]].append(i)
        logprobs: dict[int, np.ndarray] = {}
        total = 0.0
        with self._training(self.trained[model_id]) as actor:
            run = actor.forward if forward_only else actor.accumulate
            for indices in by_k.values():
                chosen = [data[i] for i in indices]
                for part in pack_targets(chosen, self.shape, shards=self._shards):
                    found, loss_sum = run(part.batch, loss)
                    logprobs |= {indices[i]: x for i, x in part.unpack(hosts.fetch(found))}
                    total += float(loss_sum)
        return [logprobs[i] for i in range(len(data))], total

    def step(self, model_id: str, numbers: AdamNumbers) -> float:
        """Applies the accumulated gradients; returns their norm. If it is not finite, nothing changes."""
        with self._training(self.trained[model_id]) as actor:
            return actor.apply(numbers)["grad_norm"]

    @contextlib.contextmanager
    def _training(self, trained: Trained) -> Iterator[AccumulatingActor]:
        """The actor with the state of a model, which the model gets back."""
        # What a program consumes must not be held twice, and of a failed one nothing is left.
        self.actor.trainee, trained.trainee = trained.trainee, Trainee()
        try:
            yield self.actor
        finally:
            trained.trainee, self.actor.trainee = self.actor.trainee, Trainee()

    # Files

    def save(self, model_id: str, folder: pathlib.Path) -> None:
        """Saves weights and the optimiser's state; of an adapter a PEFT directory, too."""
        trained = self.trained[model_id]
        state = trained.trainee.state
        assert state is not None, "a model has weights"
        if trained.adapter.rank:
            self.export(model_id, folder)
            # Without padding, so that a server with another --max_rank can load it.
            state = lora.with_rank(state, trained.adapter.rank)
        checkpoints = Checkpoints(folder / "checkpoints", keep=None)
        try:
            checkpoints.prepare(None)
            checkpoints.save(0, {"actor": state}, {})
            checkpoints.commit()
        finally:
            checkpoints.close()

    def load(self, model_id: str, folder: pathlib.Path, *, optimizer: bool) -> None:
        """Goes on with saved weights, with or without the optimiser's state.

        Raises:
          UserError: they are damaged, or their rank is too high.
        """
        most, adapter = self.actor.model.lora.rank, LoraConfig()
        if most:
            adapter = read_adapter_config(folder)
            check_rank(adapter.rank, most)

        def with_rank(tree: Any, rank: int) -> Any:
            return lora.with_rank(tree, rank) if most else tree

        trained = self.trained.setdefault(model_id, Trained())
        checkpoints = Checkpoints(folder / "checkpoints", keep=None)
        with self._training(trained) as actor:
            where = actor.state_shardings()
            cut = functools.partial(with_rank, rank=adapter.rank)
            like = with_shardings(jax.eval_shape(cut, actor.abstract_state()), where)
            try:
                step = hosts.on_first(checkpoints.stored.newest_intact)
                if step is None:
                    raise UserError(f"{folder} is not here, or damaged; save weights first")
                if optimizer:
                    state = checkpoints.restore(step, {"actor": like})["actor"]
                    actor.state = jax.device_put(with_rank(state, most), where)
                else:
                    params = checkpoints.stored.restore_params(step, "actor", like.params)
                    actor.start_from(jax.device_put(with_rank(params, most), where.params))
            finally:
                checkpoints.close()
            trained.adapter = adapter
            actor.trainee = Trainee(actor.state, scale=adapter.scale if most else 1.0)

    @abc.abstractmethod
    def export(self, model_id: str, folder: pathlib.Path) -> None:
        """Writes a Hugging Face directory, or of an adapter a PEFT directory, to sample from."""

    # Samples

    def snapshot(self, model_id: str, request_id: str, kept: Collection[str]) -> None:
        """Copies a model's weights to the host, to sample from; drops earlier copies but those in `kept`."""
        self._snapshots = {name: self._snapshots[name] for name in kept}
        self._snapshots[request_id] = self._copied(self.trained[model_id])

    @abc.abstractmethod
    def _copied(self, trained: Trained) -> Any:
        """A model's weights on the host."""

    @abc.abstractmethod
    def bring(self, at: int, taken_by: str, folder: pathlib.Path | None) -> None:
        """Brings weights to a place: a snapshot, or what is in a folder."""

    def turn(self) -> None:
        """Decodes further. If the devices fail, open requests are answered with the failure."""
        try:
            self.live.turn()
        # The failed program may have consumed the slots of all samples.
        except jax.errors.JaxRuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.live.clear(LiveError(f"the engine has failed: {reason}"))

    def score(self, at: int, data: Sequence[Targets], **further: Any) -> list[Scores]:
        """Log-probabilities at temperature 1 with the weights of a place.

        Args:
          at: the place.
          data: sequences; their first target is the next token, and the last `draws` are random numbers.
          further: arguments of `AccumulatingActor.score`.
        """
        scores: dict[int, Scores] = {}
        params = self._params_at(at)
        for part in pack_targets(data, self.shape, shards=self._shards):
            found = hosts.fetch(self.actor.score(params, part.batch, **further))
            for fields in zip(*map(part.unpack, found), strict=True):
                index, logprobs = fields[0]
                values = [each for _, each in fields[1:]]
                top, drawn = (values[:2], values[2:]) if further["top_k"] else ((), values)
                scores[index] = Scores(logprobs[:, 0], logprobs[:, 1:], top, drawn)
        return [scores[i] for i in range(len(data))]

    @abc.abstractmethod
    def _params_at(self, at: int) -> Params:
        """All weights with those of a place."""


class AdapterDevices(Devices):
    """Models are adapters, and all samplers' adapters are in one stack; place 0 is the base model's."""

    def _plan(self, found: ModelDirectory) -> None:
        actor, config = self.actor, self.config
        like = actor.trained(actor.shapes)
        where, self._frozen_where = lora.split(actor.train_shardings)
        # A sampler of each client; two at least, for a loop that samples ahead.
        self.num_places = 1 + max(config.adapters, 2)
        dtype = jnp.dtype(config.dtype)
        empty = functools.partial(lora.empty_stack, like, self.num_places, dtype)
        stack_where = lora.stack_shardings(where)
        stack = device_bytes(with_shardings(jax.eval_shape(empty), stack_where))
        trained = device_bytes((actor.abstract_state(), actor.abstract_gradients()))
        self._resident = {
            f"{config.adapters} adapters in training": config.adapters * trained,
            # The stack in use, and the next one while it is made.
            f"{self.num_places} places of adapters": 2 * stack,
        }
        base = device_bytes(self._frozen_shapes())
        if lists_layers(actor.mesh):
            # Training reads the stack.
            self._resident["layers of the base model, for samples"] = base
        self._engine = build_engine(
            config,
            found,
            actor.mesh,
            stop_ids=(),
            other_bytes=sum(self._resident.values()),
            adapter_places=self.num_places,
        )
        self._resident["base model"] = base
        self._empty = jax.jit(empty, out_shardings=stack_where)
        self._make = jax.jit(functools.partial(lora.uniform_adapters, like), out_shardings=where)
        # Not donated: the loop may be about to use the stack as it is.
        self._put = jax.jit(lora.put_into, out_shardings=stack_where)
        self._taken = jax.jit(lora.taken_from)

    def _frozen_shapes(self) -> Params:
        frozen = lora.split(self.actor.shapes)[1]
        types = lora.split(weight_types(self.actor.model, self.config.dtype))[1]
        return jax.tree.map(
            lambda stored, leaf, where: stored.abstract(leaf.shape, where),
            types,
            frozen,
            self._frozen_where,
        )

    def _loaded(self) -> Params:
        # One copy in one layout, for training and for samples.
        base, dtype = lora.base_config(self.actor.model), self.config.dtype
        self.actor.frozen = load_params(self.directory, base, self._frozen_where, dtype=dtype)
        self._stack = self._empty()
        params = lora.join(self._stack, self.actor.frozen)
        return self._engine.split(params) if lists_layers(self.actor.mesh) else params

    def _fresh(self, adapter: LoraConfig | None, seed: int) -> Params:
        assert adapter is not None, "adapters are trained"
        targets = self.actor.model.lora.targets
        ranks = {name: np.int32(adapter.rank * (name in adapter.targets)) for name in targets}
        return self._make(ranks, jax.random.key(seed))

    def export(self, model_id: str, folder: pathlib.Path) -> None:
        trained = self.trained[model_id]
        params = hosts.fetch(lora.with_rank(trained.params, trained.adapter.rank))
        config = lora.with_adapters(self.actor.model, trained.adapter)

        def write() -> None:
            try:
                here = jax.device_put(params, jax.local_devices()[0])
                save_adapter(here, config, folder, dtype="float32", base=str(self.directory))
            except Exception as error:  # `on_first` tells the others of a UserError only
                raise UserError(
                    f"{folder} could not be written ({error}); free space or repair the disk, and save again"
                ) from error

        # Collective: the others would go on to the checkpoint, and wait in it for this process.
        hosts.on_first(write)

    def _copied(self, trained: Trained) -> Any:
        # With the client's scale in its factors, since the adapters of a stack share a scale of 1.
        return hosts.fetch(lora.scaled(trained.params, trained.trainee.scale))

    def bring(self, at: int, taken_by: str, folder: pathlib.Path | None) -> None:
        if folder is None:
            adapter = self._snapshots[taken_by]
        else:
            most, config = self.config.max_rank, read_adapter_config(folder)
            check_rank(config.rank, most)
            saved = lora.with_adapters(self.actor.model, config)
            adapter = load_adapter(folder, saved, self.actor.train_shardings)
            adapter = lora.scaled(lora.with_rank(adapter, most), config.scale)
        self._stack = self._put(self._stack, adapter, at)
        self.live.load_adapters(self._stack)

    def _params_at(self, at: int) -> Params:
        return lora.join(self._taken(self._stack, at), self.actor.frozen)


class WholeDevices(Devices):
    """One model, all of whose weights are trained, and one sampler's weights at a time. For one process."""

    num_places = 1

    def _plan(self, found: ModelDirectory) -> None:
        model, actor, config = found.model, self.actor, self.config
        self._where = generation_shardings(model, actor.mesh)
        types = weight_types(model, config.dtype, config.weights_dtype)
        self._resharding = Resharding(
            *(actor.shapes, actor.train_shardings, self._where, types),
            generate_shapes=actor.model_shapes,
        )
        state = device_bytes((actor.abstract_state(), actor.abstract_gradients()))
        self._resident = {"model in training": state}
        self._engine = build_engine(config, found, actor.mesh, stop_ids=(), other_bytes=state)
        weights = device_bytes(with_shardings(actor.model_shapes, self._where), config.dtype)
        self._resident["weights of samples"] = weights
        self._params: Params = {}

    def _fresh(self, adapter: LoraConfig | None, seed: int) -> Params:
        where = self.actor.train_shardings
        return load_params(self.directory, self.actor.model, where, dtype=jnp.float32)

    def export(self, model_id: str, folder: pathlib.Path) -> None:
        params, config = self.trained[model_id].params, self.actor.model
        save_checkpoint(params, config, folder, dtype="float32", source=self.directory)

    def _copied(self, trained: Trained) -> Any:
        # A copy: leaves with one sharding in both layouts are shared, and the next step consumes them.
        params = self._resharding.to_generate(trained.params)
        where = jax.tree.map(lambda x: x.sharding, params)
        return jax.tree.map(lambda x: np.array(jax.device_get(x)), params), where

    def bring(self, at: int, taken_by: str, folder: pathlib.Path | None) -> None:
        # The old weights go before the new ones come: both may not fit.
        self.live.pause()
        self.live.release_weights()
        self._params = {}
        if folder is None:
            self._params = jax.device_put(*self._snapshots[taken_by])
        else:
            dtype, model = self.config.dtype, self.actor.model
            params = load_params(folder, model, self._where, dtype=dtype)
            self._params = self._engine.stored(params) if self.config.weights_dtype else params
        self.live.renew(self._params, 0)

    def _params_at(self, at: int) -> Params:
        return self._params


class Together:
    """Runs the commands of the first process everywhere."""

    def __init__(self, devices: Devices, *, exclusive: bool):
        """Args: the devices; whether only one command may run at a time."""
        self.devices = devices
        self._exclusive = exclusive
        self._changed = threading.Condition()
        self._arrived = self._served = 0

    def run(
        self,
        command: Callable[Concatenate[Devices, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Runs a method of the devices in every process, and returns what it returns here.

        Its arguments are picklable and valid: clients' mistakes are found before.
        """
        with self._turn():
            self._exchange((command.__name__, args, kwargs))
            return getattr(self.devices, command.__name__)(*args, **kwargs)

    def follow(self) -> None:
        """Runs the commands of the first process in another one, until the first one ends."""
        while (sent := self._exchange()) is not None:
            command, args, kwargs = sent
            # It fails in the first process, too, which tells the client.
            with contextlib.suppress(UserError, jax.errors.JaxRuntimeError):
                getattr(self.devices, command)(*args, **kwargs)

    def end(self) -> None:
        """Ends the other processes."""
        with self._turn():
            self._exchange()

    def _exchange(self, command: Any = None) -> Any:
        if hosts.num_processes() == 1:
            return command
        sent = hosts.on_first(lambda: base64.b64encode(pickle.dumps(command)).decode())
        # The sender is process 0 of this run, by JAX's own service.
        return pickle.loads(base64.b64decode(sent))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        # A lock would let a thread that asks again at once go before those that wait.
        with self._changed:
            mine, self._arrived = self._arrived, self._arrived + 1
            self._changed.wait_for(lambda: not self._exclusive or self._served == mine)
        try:
            yield
        finally:
            with self._changed:
                self._served += 1
                self._changed.notify_all()
