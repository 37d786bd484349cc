"""Serving a model: what `launch/serve.py` calls.

    weights, engine --+-- online driver -- OpenAI-compatible HTTP
                      +-- JetStream's driver -- JetStream's gRPC

Both answer from the same weights and take turns on the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.checks import at_least, between, check_fields, count, token_count
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, check_divides, shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface_config import read_config
from jaxrl.models.huggingface_weights import load_params
from jaxrl.rollout.engine import Engine, EngineConfig
from jaxrl.rollout.online import Ask, Delta, OnlineDriver, ServingError
from jaxrl.rollout.openai_api import Limits


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """A server.

    Attributes:
      model: Hugging Face directory.
      name: what requests call the model; "" is the directory's name.
      host: address to listen on.
      http_port, grpc_port: ports; 0 takes a free one.
      grpc: serve JetStream's gRPC too.
      slots: samples decoded side by side.
      prefill_prompts: prompts of one prefill.
      max_prompt_tokens, max_response_tokens: longest prompt and response.
      tokens_per_dispatch: tokens decoded between two looks of the host, which is how often text is sent.
      mesh: "p-t-d" of the devices, the first of those that are here.
      dtype: of weights and activations.
      max_waiting: samples that may wait for a slot; more are refused.
      max_body_bytes: of a request.
      grace_s: how long open requests may go on after SIGTERM.
    """

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    http_port: Annotated[int, between(0, 65_535)] = 8000
    grpc_port: Annotated[int, between(0, 65_535)] = 9000
    grpc: bool = True
    slots: Annotated[int, count(1)] = 64
    prefill_prompts: Annotated[int, count(1)] = 8
    max_prompt_tokens: Annotated[int, token_count(1)] = 1024
    max_response_tokens: Annotated[int, token_count(1)] = 1024
    tokens_per_dispatch: Annotated[int, token_count(1)] = 8
    mesh: str = "1-1-1"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_waiting: Annotated[int, count(1)] = 10_000
    max_body_bytes: Annotated[int, at_least(1)] = 1 << 20
    grace_s: Annotated[float, between(0, 86_400)] = 10.0

    def __post_init__(self):
        check_fields(self)

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
    """

    driver: OnlineDriver
    http_port: int
    grpc_port: int | None


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
            print(f", gRPC {config.host}:{server.grpc_port}" if config.grpc else "", flush=True)
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
    engine = Engine(
        model,
        graph,
        mesh,
        EngineConfig(
            slots=config.slots,
            prefill_prompts=config.prefill_prompts,
            max_prompt_tokens=config.max_prompt_tokens,
            max_response_tokens=config.max_response_tokens,
            tokens_per_dispatch=config.tokens_per_dispatch,
            stop_ids=tokenizer.stop_ids,
            dtype=jnp.dtype(config.dtype),
        ),
    )
    where = shardings(axes, shapes, GENERATE_RULES, mesh)
    params = load_params(directory, model, where, dtype=config.dtype)
    return Loaded(engine, params, tokenizer)


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
        yield Running(driver, http_port, grpc_port)


def _require_extras(config: ServeConfig) -> None:
    packages = {"starlette": "serve", "uvicorn": "serve"}
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

    driver.submit(Ask(np.zeros(1, np.int32), 1, 1, seed=0), listen)
    ended.wait()
    if failures:
        raise UserError(
            f"a first sample could not be drawn: {failures[0]}. Choose fewer --slots or shorter prompts and "
            "responses, or more devices with --mesh"
        )


def _start_http(
    config: ServeConfig, loaded: Loaded, driver: OnlineDriver, stack: contextlib.ExitStack
) -> int:
    from jaxrl.rollout import http_server

    app = http_server.build_app(
        driver,
        loaded.tokenizer,
        Limits(config.model_name, config.max_response_tokens),
        max_body_bytes=config.max_body_bytes,
    )
    server = http_server.HttpServer(app, host=config.host, port=config.http_port)
    stack.callback(server.stop)
    # First of all, so that whoever is still waiting then is told.
    stack.callback(driver.close, config.grace_s)
    return server.port


def _start_grpc(
    config: ServeConfig, loaded: Loaded, lock: threading.Lock, stack: contextlib.ExitStack
) -> int:
    from jaxrl.rollout import jetstream

    tokenizer = loaded.tokenizer
    engine = jetstream.JetStreamEngine(
        loaded.engine,
        loaded.params,
        jetstream.Tokenizer(tokenizer.encode, tokenizer.decode, tokenizer.stop_ids),
        jetstream.Settings(),
        lock=lock,
    )
    driver = jetstream.Driver(engine)
    # For the case that there will be no server to do it.
    stack.callback(driver.stop)
    server = jetstream.GrpcServer(
        driver,
        host=config.host,
        port=config.grpc_port,
        max_tokens=config.max_response_tokens,
        max_message_bytes=config.max_body_bytes,
        max_requests=config.max_waiting,
    )
    stack.callback(server.stop, config.grace_s)
    return server.port
