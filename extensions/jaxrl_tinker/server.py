"""Serves the Tinker API: training loops of tinker 0.38 and its cookbook run against it (docs/tinker.md).

    jaxrl serve --tinker --model DIR [--mesh 1-1-1]

    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python my_loop.py

DIR is a Hugging Face directory. Several clients train an adapter each, or with --full one at a time trains
all of the model's weights, and any number may sample. In --folder are the weights that clients save by name
and what it takes to go on after a restart. Several processes are started with the same command and
--coordinator, --num_processes and --process_id; the first one listens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxrl.data.model_directory import ModelDirectory, read_model
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.mesh.devices import build_generation_mesh, dtype_on, memory_bytes
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, parts_of, shards_of
from jaxrl.mesh.sharding_strategies import ZERO, StateRules
from jaxrl.models import lora
from jaxrl.models.huggingface.weight_export import table_of_adapter
from jaxrl.models.model_config import LORA_TARGETS, LoraConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.train_config import TrainConfig
from jaxrl.tracking.durable import run_lock
from jaxrl_serving.http_server import HttpServer
from jaxrl_serving.model_loading import model_directory
from jaxrl_serving.serve_config import end_of_service, read_flags
from jaxrl_tinker.accumulating import AccumulatingActor
from jaxrl_tinker.app import TinkerApp
from jaxrl_tinker.clients import Clients
from jaxrl_tinker.devices import AdapterDevices, Devices, Together, WholeDevices
from jaxrl_tinker.futures import Futures
from jaxrl_tinker.log import Log
from jaxrl_tinker.models import Models
from jaxrl_tinker.sampler_weights import SamplerWeights
from jaxrl_tinker.sampling import Sampler
from jaxrl_tinker.settings import TinkerConfig

# Longest sequence to train on if --train_tokens does not say.
_TRAIN_TOKENS = 1024
# Seconds between two commands to the other processes: these do not wait forever for the next one.
_BEAT_S = 1.0


@dataclasses.dataclass(frozen=True)
class RunningTinker:
    """A server that is running.

    Attributes:
      http_port: port that it listens on.
      together: its devices.
    """

    http_port: int
    together: Together

    @property
    def actor(self) -> AccumulatingActor:
        return self.together.devices.actor


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments.

    Returns:
      The exit status; that of --dry_run is 1 if the server does not fit.
    """
    config = read_flags(argv, __doc__, TinkerConfig)
    hosts.start(config)
    keep_compiled_programs()
    if config.dry_run:
        devices = devices_of(config)
        (device, *others) = devices.actor.mesh.devices.flat
        print(f"{config.model_name} on {1 + len(others)} x {device.device_kind}, GB of each:")
        parts = devices.memory()
        for name, size in parts.items():
            print(f"{size / 1e9:10.2f}  {name}")
        needed, there = sum(parts.values()), memory_bytes(device)
        fits = "they fit" if needed <= there else "they DO NOT FIT"
        print(f"{needed / 1e9:10.2f}  together, of {there / 1e9:.2f}: {fits}")
        return int(needed > there)
    with end_of_service() as ended, hosts.watched(config):
        if not hosts.is_first():
            with _together(config) as together:
                together.follow()
            return 0
        with running(config) as server:
            url = f"http://{config.host}:{server.http_port}"
            tokens = server.together.devices.shape.tokens
            print(f"{config.model_name}: TINKER_BASE_URL={url}", end="")
            print(f", sequences of up to {tokens} tokens", flush=True)
            while not ended.wait(_BEAT_S):
                if hosts.num_processes() > 1:
                    server.together.run(Devices.turn)
    return 0


@contextlib.contextmanager
def running(config: TinkerConfig) -> Iterator[RunningTinker]:
    """Runs the server inside a `with` block, in the first process.

    Raises:
      UserError: the model cannot be served, or the port is not available.
    """
    folder = pathlib.Path(config.folder)
    with contextlib.ExitStack() as stack:
        together = stack.enter_context(_together(config))
        # Callbacks run in reverse: the threads that send commands end before the other processes do.
        stack.callback(together.end)
        devices = together.devices
        log = Log(folder / "log.jsonl")
        stack.callback(log.close)
        futures = Futures(log.write)
        clients = Clients(futures, log.write, config.lease_s)
        models = Models(
            together,
            futures,
            folder,
            write=log.write,
            held=clients.snapshots,
            places=1 if config.full else config.adapters,
            checkpoint_steps=config.checkpoint_steps,
        )
        stack.callback(models.close)
        base = SamplerWeights(devices.directory)
        sampler = Sampler(together, futures, base, max_waiting=config.max_waiting)
        stack.callback(sampler.close)
        server = HttpServer(
            TinkerApp(config, log, clients, futures, models, sampler, base).build(),
            host=config.host,
            port=config.http_port,
            api_key=config.key,
            max_connections=config.max_connections,
        )
        stack.callback(server.stop)
        yield RunningTinker(server.port, together)


@contextlib.contextmanager
def _together(config: TinkerConfig) -> Iterator[Together]:
    """The devices with the base model, while the folder is locked. Collective."""
    with run_lock(pathlib.Path(config.folder), "--folder"):
        devices = devices_of(config)
        devices.load_base()
        yield Together(devices, exclusive=devices.actor.mesh.size > 1)


def devices_of(config: TinkerConfig) -> Devices:
    """The devices without weights."""
    directory = model_directory(config.model)
    found = read_model(directory)
    if not config.full:
        found = _with_adapters(config, found, directory)
    elif hosts.num_processes() > 1:
        raise UserError("--full trains in one process; leave it out, and train adapters")
    # The state is split over all replicas: it takes four times the memory of the weights.
    mesh = build_generation_mesh(config.mesh, shard_state=True)
    if hosts.num_processes() > 1 and mesh.size < jax.device_count():
        raise UserError(
            f"--mesh {config.mesh} has {mesh.size} of the {jax.device_count()} devices of all processes; "
            "choose one of all devices"
        )
    config = dataclasses.replace(config, dtype=dtype_on(mesh, config.dtype))
    shape = PackedShape(
        minibatches=1,
        microbatches=config.train_microbatches,
        rows=config.train_rows * shards_of("rows", TRAIN_RULES, mesh),
        tokens=config.train_tokens or min(found.context_tokens, _TRAIN_TOKENS),
    )
    # Raises now, and not at the first request, if a length does not divide.
    parts_of(("rows", "length"), (shape.rows, shape.tokens), TRAIN_RULES, mesh)
    dtype: Any = config.dtype
    train = TrainConfig(rows=shape.rows, share_prompts=False, dtype=dtype, remat="none")
    # Adapters are small, and their base is laid out as for generation: one copy serves both.
    rules = ZERO["FSDP"] if config.full else StateRules(*[GENERATE_RULES] * 3)
    actor = AccumulatingActor(found.model, mesh, train=train, seed=0, state_rules=rules)
    kind = WholeDevices if config.full else AdapterDevices
    return kind(config, found, directory, actor, shape)


def _with_adapters(
    config: TinkerConfig, found: ModelDirectory, directory: pathlib.Path
) -> ModelDirectory:
    """The model with adapters of the highest rank."""
    for name in ("weights_dtype", "speculate"):
        if value := getattr(config, name):
            raise UserError(
                f"--{name} {value} does not work with adapters; leave it out, or set --full"
            )
    # Experts choose their weights by token, and cannot by adapter, too.
    targets = LORA_TARGETS[:4] if found.model.num_experts else LORA_TARGETS
    if found.model.kv_latent:
        # The absorbed form of attention multiplies with one weight for all rows.
        targets = tuple(name for name in targets if name != "v")
    # A scale of 1: each client has its own.
    adapters = LoraConfig(rank=config.max_rank, alpha=float(config.max_rank), targets=targets)
    model = lora.with_adapters(found.model, adapters)
    try:
        table_of_adapter(model, str(directory))
    except UserError as error:
        reason, _, _ = str(error).partition(";")
        raise UserError(
            f"adapters of {config.model_name} cannot be saved: {reason}; set --full"
        ) from error
    return dataclasses.replace(found, model=model)
