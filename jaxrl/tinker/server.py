"""Serves the Tinker API: training loops of tinker 0.38 and its cookbook run against it (docs/tinker.md).

    jaxrl serve --tinker --model DIR [--mesh 1-1-1]

    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python my_loop.py

DIR is a Hugging Face directory. One client at a time trains all of the model's weights, and any number
may sample. In --folder are the weights that clients save by name and what it takes to go on after a restart.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.flags import add_flags, command_parser, settings_of
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.mesh.devices import build_generation_mesh, dtype_on
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import TRAIN_RULES, parts_of, shards_of
from jaxrl.models.decoder import Params, weight_types
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.roles.accumulating import AccumulatingActor
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.train_config import TrainConfig
from jaxrl.serving.http_server import HttpServer
from jaxrl.serving.model_loading import (
    build_engine,
    generation_shardings,
    model_directory,
    read_model,
)
from jaxrl.tinker.app import Service, build_app
from jaxrl.tinker.clients import Clients
from jaxrl.tinker.futures import Futures
from jaxrl.tinker.log import Log
from jaxrl.tinker.models import Models
from jaxrl.tinker.sampling import Sampler, SamplerWeights, SamplingLimits
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
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    add_flags(parser, TinkerConfig)
    parser.add_argument("--tinker", action="store_true", help="serve the Tinker API")
    parser.add_argument(
        "--port",
        dest="http_port",
        type=int,
        default=argparse.SUPPRESS,
        help="short for --http_port",
    )
    try:
        config = settings_of(TinkerConfig, parser.parse_args(arguments))
    except ValueError as error:
        parser.error(str(error))
    keep_compiled_programs()
    ended = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        with running(config) as server:
            url = f"http://{config.host}:{server.http_port}"
            print(f"{config.model_name}: TINKER_BASE_URL={url}", end="")
            print(f", sequences of up to {server.shape.tokens} tokens", flush=True)
            ended.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


@contextlib.contextmanager
def running(config: TinkerConfig) -> Iterator[RunningTinker]:
    """Runs the server inside a `with` block.

    Raises:
      UserError: the model cannot be served, or the port is not available.
    """
    directory = model_directory(config.model)
    found = read_model(directory)
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
    actor = AccumulatingActor(model, mesh, train=train, seed=0)
    state = jax.tree.leaves((actor.abstract_state(), actor.abstract_gradients()))
    state_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    engine = build_engine(config, found, mesh, stop_ids=(), other_bytes=state_bytes)
    generate = generation_shardings(model, mesh)
    resharding = Resharding(
        actor.shapes,
        actor.train_shardings,
        generate,
        weight_types(model, config.dtype, config.weights_dtype),
    )

    # One object for a path: it is what tells the sampler that the devices have these weights.
    @functools.cache
    def sampled_from(folder: pathlib.Path, path: str | None) -> SamplerWeights:
        def load() -> Params:
            params = load_params(folder, model, generate, dtype=config.dtype)
            return engine.stored(params) if config.weights_dtype else params

        return SamplerWeights(load, path)

    def snapshot(request_id: str) -> SamplerWeights:
        # A copy: leaves with one sharding in both layouts are shared, and the next step consumes them.
        params = resharding.to_generate(models.params())
        where = jax.tree.map(lambda x: x.sharding, params)
        host = jax.tree.map(lambda x: np.array(jax.device_get(x)), params)
        return SamplerWeights(lambda: jax.device_put(host, where), taken_by=request_id)

    sizes = engine.config
    limits = SamplingLimits(
        model.live_tokens,
        sizes.max_prompt_tokens,
        sizes.max_response_tokens,
        sizes.max_context_tokens,
        tuple(tokenizer.stop_ids),
    )
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
            lambda: load_params(directory, model, actor.train_shardings, dtype=jnp.float32),
            futures,
            folder,
            shards=shards,
            source=directory,
            turns=turns,
            write=log.write,
            held=clients.snapshots,
            checkpoint_steps=config.checkpoint_steps,
        )
        stack.callback(models.close)
        sampler = Sampler(
            engine,
            actor,
            shape,
            tokenizer.decode,
            futures,
            shards=shards,
            turns=turns,
            max_waiting=config.max_waiting,
        )
        stack.callback(sampler.close)
        service = Service(
            config.model_name,
            config.tokenizer,
            log,
            clients,
            futures,
            models,
            sampler,
            sampled_from(directory, None),
            snapshot,
            sampled_from,
            limits,
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
