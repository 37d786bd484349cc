"""Serving a model: what `launch/serve.py` calls.

    weights, engine --+-- online driver -- OpenAI-compatible HTTP
                      +-- JetStream's driver -- JetStream's gRPC

Both answer from the same weights and take turns on the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.checks import MAX_TOKENS, at_least, between, count, token_count
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh, memory_bytes
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, check_divides, shardings
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface.config_json import read_config, read_config_json
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.request_errors import NotFinite, ServingError
from jaxrl.rollout.settings import EngineConfig, EngineSettings
from jaxrl.serving.online_driver import Delta, OnlineDriver, Request

# Context of a model whose config.json names none, and of one for which memory is short: shorter is no use.
_SHORTEST_CONTEXT = 2048
# Share of a device's memory that weights and caches may take; the rest is for temporaries of programs.
_MEMORY_SHARE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineSettings):
    """A server, and the engine behind it, whose other settings are those of `EngineSettings`.

    Attributes:
      model: Hugging Face directory.
      name: what requests call the model; "" is the directory's name.
      host: address to listen on.
      http_port, grpc_port: ports; 0 takes a free one.
      grpc: serve JetStream's gRPC too.
      slots: samples decoded side by side.
      prefill_prompts: prompts of one prefill.
      max_prompt_tokens, max_response_tokens: longest prompt and response; 0 is what the model's context and
        the memory of the devices leave (`lengths_of`).
      tokens_per_dispatch: tokens decoded between two looks of the host, which is how often text is sent.
      mesh: "p-t-d" of the devices, the first of those that are here.
      dtype: of weights and activations.
      max_waiting: samples that may wait for a slot; more are refused.
      max_body_bytes: of a request.
      max_connections: that may be open to the HTTP endpoint.
      grace_s: how long open requests may go on after SIGTERM.
    """

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    http_port: Annotated[int, between(0, 65_535)] = 8000
    grpc_port: Annotated[int, between(0, 65_535)] = 9000
    grpc: bool = True
    slots: Annotated[int, count(1)] = 64
    # Few requests at a time are the rule, and the last of them are waited for.
    smallest_bucket: Annotated[int, count(1)] = 8
    prefill_prompts: Annotated[int, count(1)] = 8
    # What a layer makes of all of a long prompt at once may not fit.
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 2048
    max_prompt_tokens: Annotated[int, token_count(0)] = 0
    max_response_tokens: Annotated[int, token_count(0)] = 0
    tokens_per_dispatch: Annotated[int, token_count(1)] = 8
    mesh: str = "1-1-1"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_waiting: Annotated[int, count(1)] = 10_000
    max_body_bytes: Annotated[int, at_least(1)] = 1 << 20
    max_connections: Annotated[int, count(1)] = 1000
    grace_s: Annotated[float, between(0, 86_400)] = 10.0

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self.name or pathlib.Path(self.model).resolve().name


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, ready to sample from."""

    engine: Engine
    params: Params
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
      driver: of the HTTP endpoint.
      http_port: it listens on.
      grpc_port: of the gRPC service, None without one.
      context_tokens: of a prompt and its response together.
    """

    driver: OnlineDriver
    http_port: int
    grpc_port: int | None
    context_tokens: int


def serve(config: ServeConfig) -> int:
    """Serves until SIGTERM or Ctrl-C, then lets open requests end.

    Returns:
      The exit status: 0, or 1 if the driver has broken down.

    Raises:
      UserError: the model cannot be served, an extra is not installed, or a port cannot be had.
    """
    _require_extras(config)
    ended = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        with running(config, load(config)) as server:
            print(f"{config.model_name}: http://{config.host}:{server.http_port}/v1", end="")
            print(f", gRPC {config.host}:{server.grpc_port}" if config.grpc else "", end="")
            print(f", up to {server.context_tokens} tokens of prompt and response", flush=True)
            while server.driver.alive and not ended.wait(timeout=1.0):
                pass
            healthy = server.driver.alive
            if healthy:
                print(f"stopping; open requests have {config.grace_s:g} s to end", flush=True)
            else:
                print("the driver has broken down, for the reason above", file=sys.stderr)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0 if healthy else 1


def load(config: ServeConfig, *, devices: Sequence[Any] | None = None) -> Loaded:
    """Reads a model onto its devices.

    Args:
      config: the server.
      devices: to choose from; all by default.

    Raises:
      UserError: something is missing, broken, or does not fit.
    """
    directory = pathlib.Path(config.model)
    if directory.exists() and not directory.is_dir():
        raise UserError(
            f"--model {directory} is a file; name the Hugging Face directory it lies in, with config.json, "
            "tokenizer.json and the weights"
        )
    if (directory / "model").is_dir() and not (directory / "config.json").exists():
        raise UserError(
            f"{directory} is the folder of a run; export it first: python launch/convert.py --from run "
            f"--path {directory} --to hf --out DIR, and serve DIR"
        )
    model, tokenizer = _model_of(directory)
    layout = ParallelLayout.from_config(LayoutConfig(train=config.mesh))
    devices = jax.devices() if devices is None else devices
    if layout.num_devices > len(devices):
        raise UserError(
            f"--mesh {config.mesh} needs {layout.num_devices} devices, here are {len(devices)} "
            f"({devices[0].device_kind}); choose a smaller one"
        )
    mesh = build_mesh(layout, devices[: layout.num_devices])
    check_divides("--slots", config.slots, "batch", GENERATE_RULES, mesh)
    check_divides("--prefill_prompts", config.prefill_prompts, "batch", GENERATE_RULES, mesh)
    graph, shapes, axes = decoder_graph(model)
    where = shardings(axes, shapes, GENERATE_RULES, mesh)

    def engine_of(lengths: Lengths) -> Engine:
        return Engine(model, graph, mesh, _engine_config(config, lengths, tokenizer.stop_ids))

    def fitting() -> int:
        return _fitting_tokens(config, engine_of(Lengths(1, 1, 2)), shapes, where)

    engine = engine_of(lengths_of(config, _context_of(directory), fitting))
    params = load_params(directory, model, where, dtype=config.dtype)
    return Loaded(engine, params, tokenizer)


class Lengths(NamedTuple):
    """Tokens of the longest prompt, of the longest response, and of both together."""

    prompt: int
    response: int
    context: int


def lengths_of(config: ServeConfig, context: int, fitting: Callable[[], int]) -> Lengths:
    """The longest sequences of a server.

    Args:
      config: its limits are taken as they are; without them a prompt and its response share the context.
      context: tokens that the model has positions for.
      fitting: returns the tokens for which there is memory where all slots are at their longest. Called where
        no limit is given.

    Raises:
      UserError: the limits leave the model's context.
    """
    prompt, response = config.max_prompt_tokens, config.max_response_tokens
    if not prompt and not response:
        context = min(context, max(fitting(), _SHORTEST_CONTEXT))
        return Lengths(max(context - 1, 1), max(context - 1, 1), context)
    prompt = prompt or context - response
    response = response or context - prompt
    if min(prompt, response) < 1 or prompt + response > context:
        raise UserError(
            f"--max_prompt_tokens {config.max_prompt_tokens} and --max_response_tokens "
            f"{config.max_response_tokens} do not fit into the {context} positions of the model "
            "(max_position_embeddings of its config.json); lower them, or leave them out"
        )
    return Lengths(prompt, response, prompt + response)


def _context_of(directory: pathlib.Path) -> int:
    """Tokens that a model has positions for."""
    value = read_config_json(directory).get("max_position_embeddings")
    if value is None:
        return _SHORTEST_CONTEXT
    if type(value) is not int or value < 2:
        raise UserError(
            f"{directory / 'config.json'}: max_position_embeddings is {value!r}; it must be a whole number "
            "of 2 or more: copy the published file again"
        )
    return min(value, MAX_TOKENS)


def _engine_config(
    config: ServeConfig, lengths: Lengths, stop_ids: tuple[int, ...]
) -> EngineConfig:
    chunk = min(config.prefill_chunk_tokens, lengths.context)
    return EngineConfig(
        **config.engine_settings(prefill_chunk_tokens=chunk),
        max_prompt_tokens=lengths.prompt,
        max_response_tokens=lengths.response,
        context_tokens=lengths.context,
        stop_ids=stop_ids,
    )


def _fitting_tokens(config: ServeConfig, engine: Engine, shapes: Any, where: Any) -> int:
    """Tokens for which every slot has room beside the weights; not positive where these do not fit.

    Args:
      config: of the server.
      engine: of the model, of any lengths.
      shapes, where: of the weights.
    """
    weights = sum(
        math.prod(place.shard_shape(leaf.shape)) * jnp.dtype(config.dtype).itemsize
        for leaf, place in zip(jax.tree.leaves(shapes), jax.tree.leaves(where), strict=True)
    )
    state = engine.abstract_decode_state()
    cache = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state.context.cache)
    )
    free = int(_MEMORY_SHARE * memory_bytes(engine.mesh.devices.flat[0])) - weights
    # HTTP's cache and, while it grows, the one before; JetStream's, which never grows.
    caches = 3 if config.grpc else 2
    return free * state.capacity // (caches * cache)


def _model_of(directory: pathlib.Path) -> tuple[ModelConfig, Tokenizer]:
    model = read_config(directory)
    tokenizer = load_tokenizer(directory)
    if model.num_scores:
        raise UserError(f"{directory} holds a model of scores; a server needs a language model")
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{model.vocab_size} rows; put two files of one model there"
        )
    return dataclasses.replace(model, num_tokens=tokenizer.vocab_size), tokenizer


@contextlib.contextmanager
def running(config: ServeConfig, loaded: Loaded) -> Iterator[Running]:
    """A server that answers as long as the context lasts.

    One sample is drawn before it listens, so that a model that does not fit is noticed at once.

    Raises:
      UserError: a port cannot be had, or memory does not suffice.
    """
    lock = threading.Lock()
    with contextlib.ExitStack() as stack:
        driver = OnlineDriver(
            loaded.engine,
            loaded.params,
            loaded.tokenizer.decode,
            max_waiting=config.max_waiting,
            lock=lock,
        )
        stack.enter_context(driver)
        _first_sample(driver)
        grpc_port = _start_grpc(config, loaded, lock, stack) if config.grpc else None
        http_port = _start_http(config, loaded, driver, stack)
        yield Running(driver, http_port, grpc_port, loaded.engine.config.max_context_tokens)


def _require_extras(config: ServeConfig) -> None:
    packages = {"pydantic": "serve", "starlette": "serve", "uvicorn": "serve"}
    if config.grpc:
        packages["jetstream"] = "jetstream"
    absent = {p: extra for p, extra in packages.items() if importlib.util.find_spec(p) is None}
    if absent:
        without = " or leave gRPC out with --http_only" if set(absent) == {"jetstream"} else ""
        raise UserError(
            f"{', '.join(absent)} not installed; pip install "
            f"'jaxrl[{','.join(sorted(set(absent.values())))}]'{without}"
        )


def _first_sample(driver: OnlineDriver) -> None:
    ended = threading.Event()
    failures: list[ServingError] = []

    def listen(event: Delta | ServingError) -> None:
        if isinstance(event, ServingError):
            failures.append(event)
        ended.set()

    driver.submit(Request(np.zeros(1, np.int32), 1, 1, seed=0), listen)
    ended.wait()
    if failures and isinstance(failures[0], NotFinite):
        raise UserError(f"a first sample could not be drawn: {failures[0]}")
    if failures:
        raise UserError(
            f"a first sample could not be drawn: {failures[0]}. Choose fewer --slots or shorter prompts and "
            "responses, or more devices with --mesh"
        )


def _start_http(
    config: ServeConfig, loaded: Loaded, driver: OnlineDriver, stack: contextlib.ExitStack
) -> int:
    from jaxrl.serving import http_server
    from jaxrl.serving.openai.calls import Limits

    sizes = loaded.engine.config
    app = http_server.build_app(
        driver,
        loaded.tokenizer,
        Limits(config.model_name, sizes.max_response_tokens, sizes.max_context_tokens),
        max_body_bytes=config.max_body_bytes,
    )
    server = http_server.HttpServer(
        app, host=config.host, port=config.http_port, max_connections=config.max_connections
    )
    stack.callback(server.stop)
    # First of all, so that whoever is still waiting then gets an answer.
    stack.callback(driver.close, config.grace_s)
    return server.port


def _start_grpc(
    config: ServeConfig, loaded: Loaded, lock: threading.Lock, stack: contextlib.ExitStack
) -> int:
    from jaxrl.serving import jetstream_grpc

    driver = jetstream_grpc.start_driver(loaded.engine, loaded.params, loaded.tokenizer, lock)
    # For the case that there will be no server to do it.
    stack.callback(driver.stop)
    server = jetstream_grpc.GrpcServer(
        driver,
        host=config.host,
        port=config.grpc_port,
        max_tokens=loaded.engine.config.max_response_tokens,
        max_message_bytes=config.max_body_bytes,
        max_requests=config.max_waiting,
    )
    stack.callback(server.stop, config.grace_s)
    return server.port
