"""Serves a model over an OpenAI-compatible HTTP endpoint (docs/serving.md).

    python launch/serve.py --model DIR [--http_port 8000]

DIR is a Hugging Face directory. `jaxrl convert` makes one from the result of a run. The server
listens only on this machine unless --host is given, which needs a key. After SIGTERM or Ctrl-C it finishes
open requests. With --tinker it serves the Tinker API instead; --tinker --help lists the arguments of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.live_loop import LiveError, NotFinite, Request
from jaxrl_serving.model_loading import Loaded, load
from jaxrl_serving.online_driver import Delta, OnlineDriver
from jaxrl_serving.serve_config import ServeConfig, check_packages, end_of_service, read_flags

# Longest prompt that a cache with many capacities is compiled for before the first request.
_WARM_TOKENS = 1024
# Seconds of a sample after which something must have been compiled.
_SLOW_S = 2.0


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that is running.

    Attributes:
      driver: driver of the HTTP endpoint.
      http_port: port that it listens on.
      context_tokens: maximum number of tokens of a prompt and its response together.
    """

    driver: OnlineDriver
    http_port: int
    context_tokens: int


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM or Ctrl-C, then finishes open requests.

    Args:
      argv: program name and arguments.

    Returns:
      The exit status: 0, or 1 if the driver has failed.

    Raises:
      UserError: the model cannot be served, an extra is not installed, or a port is not available.
    """
    config = read_flags(argv, __doc__, ServeConfig)
    keep_compiled_programs()
    check_packages()
    with end_of_service() as ended:
        loaded = load(config)
        with running(config, loaded) as server:
            print(f"{config.model_name}: http://{config.host}:{server.http_port}/v1", end="")
            print(f", up to {server.context_tokens} tokens of prompt and response", end="")
            print(f", in {loaded.engine.config.dtype}", flush=True)
            # Looks once a second: a driver that breaks down sets no event.
            while server.driver.alive and not ended.wait(timeout=1.0):
                pass
            healthy = server.driver.alive
            if healthy:
                print(f"stopping; open requests have {config.grace_s:g} s to end", flush=True)
            else:
                print("the driver has broken down, for the reason above", file=sys.stderr)
    return 0 if healthy else 1


@contextlib.contextmanager
def running(config: ServeConfig, loaded: Loaded) -> Iterator[Running]:
    """Runs the server inside a `with` block.

    It draws samples before it listens. So a model that does not fit is reported at once, and the first
    requests need not wait for compilations.

    Raises:
      UserError: a port is not available, or memory does not suffice.
    """
    from jaxrl_serving.http_server import HttpServer
    from jaxrl_serving.openai.endpoint import build_app

    tokenizer, sizes = loaded.tokenizer, loaded.engine.config
    with contextlib.ExitStack() as stack:
        driver = OnlineDriver(
            loaded.engine, loaded.params, tokenizer.decode, max_waiting=config.max_waiting
        )
        stack.enter_context(driver)
        _warm_up(driver, loaded.engine)
        name, most = config.model_name, config.max_body_bytes
        server = HttpServer(
            build_app(driver, tokenizer, name, sizes, max_body_bytes=most),
            host=config.host,
            port=config.http_port,
            api_key=config.key,
            max_connections=config.max_connections,
        )
        stack.callback(server.stop)
        # Called before `server.stop`, so that open requests get their answers while the HTTP server runs.
        stack.callback(driver.close, config.grace_s)
        yield Running(driver, server.port, sizes.max_context_tokens)


def _warm_up(driver: OnlineDriver, engine: Engine) -> None:
    """Draws samples after a prompt of each size, so that the first requests compile nothing.

    Raises:
      UserError: a sample cannot be drawn.
    """
    # A cache that grows with its sequences has a program for each of its capacities. Those of short sequences
    # and few requests are compiled here, the others when they are first needed.
    grows = len(engine.cache_sizes) > 1
    sizes = [size for size in engine.prompt_sizes if not grows or size <= _WARM_TOKENS]
    longest = [min(size, engine.config.max_prompt_tokens) for size in sizes]
    lengths = list(dict.fromkeys([1, *longest]))
    for done, length in enumerate(lengths, start=1):
        began = time.monotonic()
        # Other tokens than those of the prompts before, whose pages would be reused.
        prompt = np.full(length, done, np.int32)
        # In a paged cache the second one finds the pages of the first, so that the programs that reuse pages
        # are compiled, too.
        for _ in range(1 if engine.pages is None else 2):
            events: queue.SimpleQueue[Delta | LiveError] = queue.SimpleQueue()
            driver.submit(Request(prompt, max_tokens=1, seed=0), events.put)
            failure = events.get()
            if isinstance(failure, NotFinite):
                raise UserError(f"a first sample could not be drawn: {failure}")
            if isinstance(failure, LiveError):
                raise UserError(
                    f"a first sample could not be drawn: {failure}. Choose fewer --slots or shorter prompts "
                    "and responses, or more devices with --mesh"
                )
        if time.monotonic() - began > _SLOW_S:
            # The program of one token is that of the shortest prompts.
            most = next(size for size in longest if size >= length)
            print(
                f"compiled for prompts of up to {most} tokens, {done} of {len(lengths)}", flush=True
            )
