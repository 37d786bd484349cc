"""JetStream's gRPC service around our engine: its servicer and its messages, on a port of ours.

What it takes to run the package today is listed in `rollout.jetstream.package`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.jetstream import engine_adapter
from jaxrl.rollout.jetstream.orchestrator_driver import (
    DriverFailed,
    DriverStopped,
    JetStreamDriver,
)
from jaxrl.rollout.jetstream.package import (
    ReturnSample,
    grpc,
    jetstream_pb2_grpc,
    orchestrator,
)
from jaxrl.rollout.slots import DrawSettings
from jaxrl.rollout.text_stream import TextStream
from jaxrl.serving.request_checks import check_request


class TextDriver(JetStreamDriver):
    """JetStream's driver for requests of clients: checked, with text in the answer where text came in."""

    def __init__(self, engine: engine_adapter.JetStreamEngine):
        """Starts the threads; `stop` must be called, or the process does not end."""
        self._adapter = engine
        self._numbers = itertools.count()
        super().__init__(engine)

    def place_request_on_prefill_queue(self, request: orchestrator.ActiveRequest) -> None:
        """Queues a request.

        Args:
          request: its content is a text or a list of token ids.

        Raises:
          UserError: the request can never be served.
          DriverStopped: the driver takes no requests.
        """
        content: Any = request.prefill_content
        add_text = None
        if isinstance(content, str):
            tokenizer = self._adapter.tokenizer
            add_text = _Texts(tokenizer.decode_text).add
            content = tokenizer.encode(content)[0]
        work: Any = self._work_of(np.asarray(content, np.int64), request.max_tokens)
        request.prefill_content = work
        self._queue(request, add_text)

    def _work_of(self, tokens: np.ndarray, max_tokens: int) -> engine_adapter.Work:
        engine = self._adapter.engine
        if max_tokens == engine.config.max_response_tokens:
            # The number of requests that name none: as many tokens as there is room for.
            max_tokens = min(max_tokens, engine.config.max_context_tokens - len(tokens))
        check_request(engine, tokens, max_tokens)
        return engine_adapter.Work(
            tokens.astype(np.int32), max_tokens, prompt_id=next(self._numbers) % 2**31
        )


class _Texts:
    """The texts of a request's samples while they grow."""

    def __init__(self, decode_text: Callable[[np.ndarray], str]):
        self._streams = collections.defaultdict(lambda: TextStream(decode_text))

    def add(self, samples: Sequence[ReturnSample], complete: np.ndarray) -> None:
        """Gives samples the text of their tokens; `complete` says which of them have ended."""
        for index, (sample, ended) in enumerate(zip(samples, complete, strict=True)):
            text = self._streams[index].add(sample.token_ids)[1]
            if ended:
                text += self._streams[index].end()
            # By characters, so that nothing reads "<0x41>" in an answer as JetStream's way to write a byte.
            sample.text = list(text)


def start_driver(
    engine: Engine,
    params: Params,
    tokenizer: Tokenizer,
    lock: contextlib.AbstractContextManager,
) -> TextDriver:
    """JetStream's driver for a server; it samples greedily, since its requests have no settings.

    Args:
      engine, params, tokenizer: of the model.
      lock: held while something is dispatched, for another driver of the same devices.
    """
    of_text = engine_adapter.Tokenizer(tokenizer.encode, tokenizer.decode, tokenizer.stop_ids)
    adapter = engine_adapter.JetStreamEngine(engine, params, of_text, DrawSettings(), lock=lock)
    return TextDriver(adapter)


class _Orchestrator(orchestrator.LLMOrchestrator):
    """JetStream's servicer, with gRPC's own status for what goes wrong."""

    def __init__(self, driver: JetStreamDriver, max_tokens: int):
        super().__init__(driver)
        self._max_tokens = max_tokens

    async def Decode(
        self, request: Any, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[Any]:
        """Streams the response to one prompt; `max_tokens` of 0 is the server's limit."""
        assert context is not None, "this servicer is for servers"
        if request.WhichOneof("content") is None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the request has no text_content or token_content"
            )
        request.max_tokens = request.max_tokens or self._max_tokens
        try:
            async for response in super().Decode(request, context):
                # The last dispatch of a sample may have given none.
                if any(s.token_ids or s.text for s in response.stream_content.samples):
                    yield response
        except UserError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DriverStopped as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except DriverFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))


class GrpcServer:
    """JetStream's gRPC service on a thread of its own.

    Unlike `jetstream.core.server_lib.JetStreamServer` it listens on a given address, and reports its port.

    Attributes:
      port: it listens on.
    """

    def __init__(
        self,
        driver: JetStreamDriver,
        *,
        host: str,
        port: int,
        max_tokens: int,
        max_message_bytes: int,
        max_requests: int,
    ):
        """Starts serving.

        Args:
          driver: answers the requests; it is the server's from now on.
          host, port: where to listen; port 0 takes a free one.
          max_tokens: of a request that names none.
          max_message_bytes: larger requests are refused.
          max_requests: that may be open at once; more are refused.

        Raises:
          UserError: the port cannot be had.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="grpc-server", daemon=True
        )
        self._thread.start()
        self._driver = driver
        self._server: Any = None
        try:
            self.port = self._call(
                self._start(host, port, max_tokens, max_message_bytes, max_requests)
            )
        except RuntimeError as error:
            self._end_loop()
            raise UserError(
                f"gRPC cannot listen on {host}:{port} ({error}); choose another --grpc_port"
            ) from error

    async def _start(
        self, host: str, port: int, max_tokens: int, max_message_bytes: int, max_requests: int
    ) -> int:
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=max_requests,
            # By default a second server would share the port in silence.
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_message_bytes),
            ],
        )
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(
            _Orchestrator(self._driver, max_tokens), self._server
        )
        port = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return port

    def stop(self, grace_s: float) -> None:
        """Takes no requests any more, and ends after those that are open or after `grace_s`.

        Stops the driver too.
        """
        self._call(self._server.stop(grace_s))
        # Before the loop that its threads send their results to.
        self._driver.stop()
        self._end_loop()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
