"""Serves the Tinker API: training loops of tinker 0.38 and its cookbook run against it (docs/tinker.md).

    jaxrl serve --tinker --model DIR [--mesh 1-1-1]

    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python my_loop.py

DIR is a Hugging Face directory. Several clients train an adapter each, or with --full one at a time trains
all of the model's weights, and any number may sample. In --folder are the weights that clients save by name
and what it takes to go on after a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.mesh.devices import build_generation_mesh, dtype_on
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, parts_of, shards_of, with_shardings
from jaxrl.mesh.sharding_strategies import ZERO, StateRules
from jaxrl.models import lora
from jaxrl.models.decoder import Params, weight_types
from jaxrl.models.huggingface.config_json import read_adapter_config
from jaxrl.models.huggingface.weight_export import table_of_adapter
from jaxrl.models.huggingface.weight_loading import load_adapter, load_params
from jaxrl.models.model_config import LORA_TARGETS, LoraConfig
from jaxrl.roles.accumulating import AccumulatingActor
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.train_config import TrainConfig
from jaxrl.serving.http_server import HttpServer
from jaxrl.serving.model_loading import (
    ModelDirectory,
    build_engine,
    device_bytes,
    generation_shardings,
    model_directory,
    read_model,
)
from jaxrl.serving.serve_config import end_of_service, read_flags
from jaxrl.tinker.app import ServedWeights, Service, build_app
from jaxrl.tinker.clients import Clients
from jaxrl.tinker.futures import Futures
from jaxrl.tinker.log import Log
from jaxrl.tinker.models import Models, NewAdapter, TrainedModel, check_rank
from jaxrl.tinker.sampler_weights import AdapterPlaces, SamplerWeights
from jaxrl.tinker.sampling import Sampler
from jaxrl.tinker.settings import TinkerConfig
from jaxrl.tinker.turns import Turns
from jaxrl.tracking.durable import run_lock

# Longest sequence to train on if --train_tokens does not say.
_TRAIN_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class RunningTinker:
    """A server that is running.

    Attributes:
      http_port: port that it listens on.
      actor: the policy that it trains.
      shape: shape of its batches.
    """

    http_port: int
    actor: AccumulatingActor
    shape: PackedShape


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    config = read_flags(argv, __doc__, TinkerConfig)
    keep_compiled_programs()
    with end_of_service() as ended, running(config) as server:
        url = f"http://{config.host}:{server.http_port}"
        print(f"{config.model_name}: TINKER_BASE_URL={url}", end="")
        print(f", sequences of up to {server.shape.tokens} tokens", flush=True)
        ended.wait()
    return 0


@contextlib.contextmanager
def running(config: TinkerConfig) -> Iterator[RunningTinker]:
    """Runs the server inside a `with` block.

    Raises:
      UserError: the model cannot be served, or the port is not available.
    """
    directory = model_directory(config.model)
    found = read_model(directory)
    if not config.full:
        found = _with_adapters(config, found, directory)
    model, tokenizer = found.model, found.tokenizer
    # The state is split over all replicas: it takes four times the memory of the weights.
    mesh = build_generation_mesh(config.mesh, shard_state=True)
    config = dataclasses.replace(config, dtype=dtype_on(mesh, config.dtype))
    shards = shards_of("batch", TRAIN_RULES, mesh)
    shape = PackedShape(
        minibatches=1,
        microbatches=config.train_microbatches,
        rows=config.train_rows * shards_of("rows", TRAIN_RULES, mesh),
        tokens=config.train_tokens or min(found.context_tokens, _TRAIN_TOKENS),
    )
    # Tells a length that does not divide before the first request does.
    parts_of(("rows", "length"), (shape.rows, shape.tokens), TRAIN_RULES, mesh)
    dtype: Any = config.dtype
    train = TrainConfig(rows=shape.rows, share_prompts=False, dtype=dtype)
    rules = ZERO["FSDP"] if config.full else StateRules(*[GENERATE_RULES] * 3)
    actor = AccumulatingActor(model, mesh, train=train, seed=0, state_rules=rules)
    weights_of = _whole_weights if config.full else _adapters
    weights = weights_of(config, found, directory, actor)
    sizes = dataclasses.replace(weights.engine.config, stop_ids=tuple(tokenizer.stop_ids))
    turns, folder = Turns(exclusive=mesh.size > 1), pathlib.Path(config.folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_lock(folder, "--folder"))
        log = Log(folder / "log.jsonl")
        stack.callback(log.close)
        futures = Futures(log.write)
        clients = Clients(futures, log.write, config.lease_s)
        models = Models(
            actor,
            shape,
            weights.fresh,
            futures,
            folder,
            shards=shards,
            source=directory,
            turns=turns,
            write=log.write,
            held=clients.snapshots,
            places=1 if config.full else config.adapters,
            checkpoint_steps=config.checkpoint_steps,
        )
        stack.callback(models.close)
        sampler = Sampler(
            weights.engine,
            actor,
            shape,
            tokenizer.decode,
            futures,
            shards=shards,
            turns=turns,
            max_waiting=config.max_waiting,
            places=weights.places,
        )
        stack.callback(sampler.close)
        service = Service(
            config.model_name,
            sizes,
            config.tokenizer,
            log,
            clients,
            futures,
            models,
            sampler,
            weights,
            model.lora,
        )
        server = HttpServer(
            build_app(service, max_body_bytes=config.max_body_bytes),
            host=config.host,
            port=config.http_port,
            api_key=config.key,
            max_connections=config.max_connections,
        )
        stack.callback(server.stop)
        yield RunningTinker(server.port, actor, shape)


def _whole_weights(
    config: TinkerConfig, found: ModelDirectory, directory: pathlib.Path, actor: AccumulatingActor
) -> ServedWeights:
    model, mesh = found.model, actor.mesh
    state_bytes = device_bytes((actor.abstract_state(), actor.abstract_gradients()))
    engine = build_engine(config, found, mesh, stop_ids=(), other_bytes=state_bytes)
    generate = generation_shardings(model, mesh)
    types = weight_types(model, config.dtype, config.weights_dtype)
    resharding = Resharding(actor.shapes, actor.train_shardings, generate, types)

    # One object for a path: it is what tells the sampler that the devices have these weights.
    @functools.cache
    def exported(folder: pathlib.Path, path: str | None) -> SamplerWeights:
        def load() -> Params:
            params = load_params(folder, model, generate, dtype=config.dtype)
            return engine.stored(params) if config.weights_dtype else params

        return SamplerWeights(load, path)

    def snapshot(trained: TrainedModel, request_id: str) -> SamplerWeights:
        assert trained.trainee.state is not None, "a model has weights"
        # A copy: leaves with one sharding in both layouts are shared, and the next step consumes them.
        params = resharding.to_generate(trained.trainee.state.params)
        where = jax.tree.map(lambda x: x.sharding, params)
        host = jax.tree.map(lambda x: np.array(jax.device_get(x)), params)
        return SamplerWeights(lambda: jax.device_put(host, where), taken_by=request_id)

    def fresh(_: NewAdapter | None) -> Params:
        return load_params(directory, model, actor.train_shardings, dtype=jnp.float32)

    return ServedWeights(engine, fresh, exported(directory, None), snapshot, exported)


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


def _adapters(
    config: TinkerConfig, found: ModelDirectory, directory: pathlib.Path, actor: AccumulatingActor
) -> ServedWeights:
    model, mesh = found.model, actor.mesh
    like = actor.trained(actor.shapes)
    where, frozen_where = lora.split(actor.train_shardings)
    # The base model, and a sampler of each client; two at least, for a loop that samples ahead.
    count = 1 + max(config.adapters, 2)
    make_stack = functools.partial(lora.empty_stack, like, count, jnp.dtype(config.dtype))
    stack_where = lora.stack_shardings(where)
    stack_bytes = device_bytes(with_shardings(jax.eval_shape(make_stack), stack_where))
    state_bytes = device_bytes((actor.abstract_state(), actor.abstract_gradients()))
    engine = build_engine(
        config,
        found,
        mesh,
        stop_ids=(),
        # A stack, and the one after it.
        other_bytes=config.adapters * state_bytes + 2 * stack_bytes,
        adapter_places=count,
    )
    # One copy in one layout, for training and for samples.
    base_model = lora.base_config(model)
    actor.frozen = load_params(directory, base_model, frozen_where, dtype=config.dtype)
    base = SamplerWeights(lambda: {})
    stack = jax.jit(make_stack, out_shardings=stack_where)()
    make_adapter = jax.jit(functools.partial(lora.uniform_adapters, like), out_shardings=where)

    def fresh(new: NewAdapter | None) -> Params:
        assert new is not None, "adapters are trained"
        ranks = {name: np.int32(new.rank * (name in new.targets)) for name in model.lora.targets}
        return make_adapter(ranks, jax.random.key(new.seed))

    def snapshot(trained: TrainedModel, request_id: str) -> SamplerWeights:
        assert trained.trainee.state is not None, "a model has weights"
        host = jax.device_get(lora.scaled(trained.trainee.state.params, trained.trainee.scale))
        return SamplerWeights(lambda: host, taken_by=request_id)

    # One object for a path: it is what tells the sampler that the devices have this adapter.
    @functools.cache
    def exported(folder: pathlib.Path, path: str) -> SamplerWeights:
        def load() -> Params:
            adapter = read_adapter_config(folder)
            check_rank(adapter.rank, config.max_rank)
            params = load_adapter(folder, lora.with_adapters(model, adapter), actor.train_shardings)
            return lora.scaled(lora.with_rank(params, config.max_rank), adapter.scale)

        return SamplerWeights(load, path)

    places = AdapterPlaces(actor.frozen, stack, base)
    return ServedWeights(engine, fresh, base, snapshot, exported, places)
