"""JetStream's gRPC service around our engine: JetStream's servicer and messages on a server of ours.

`rollout.jetstream.package` lists the workarounds that the package needs today.
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
    """JetStream's driver for client requests. It checks them, and answers texts with text."""

    def __init__(self, engine: engine_adapter.JetStreamEngine):
        """Starts the threads. Without a call of `stop` the process does not end."""
        self._adapter = engine
        self._numbers = itertools.count()
        super().__init__(engine)

    def place_request_on_prefill_queue(self, request: orchestrator.ActiveRequest) -> None:
        """Queues a request.

        Args:
          request: request whose content is a text or a list of token ids.

        Raises:
          UserError: the request can never be served.
          DriverStopped: the driver no longer accepts requests.
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
            # JetStream's default if a request names no limit; here it means the remaining room.
            max_tokens = min(max_tokens, engine.config.max_context_tokens - len(tokens))
        check_request(engine, tokens, max_tokens)
        return engine_adapter.Work(
            tokens.astype(np.int32), max_tokens, prompt_id=next(self._numbers) % 2**31
        )


class _Texts:
    """The texts of a request's samples as they grow."""

    def __init__(self, decode_text: Callable[[np.ndarray], str]):
        self._streams = collections.defaultdict(lambda: TextStream(decode_text))

    def add(self, samples: Sequence[ReturnSample], complete: np.ndarray) -> None:
        """Sets the text of each sample's new tokens; `complete` marks the samples that have ended."""
        for index, (sample, ended) in enumerate(zip(samples, complete, strict=True)):
            text = self._streams[index].add(sample.token_ids)[1]
            if ended:
                text += self._streams[index].end()
            # Sent as characters: JetStream would read the text "<0x41>" as its notation for a byte.
            sample.text = list(text)


def start_driver(
    engine: Engine,
    params: Params,
    tokenizer: Tokenizer,
    lock: contextlib.AbstractContextManager,
) -> TextDriver:
    """Starts JetStream's driver for a server. It samples greedily, because its requests have no settings.

    Args:
      engine, params, tokenizer: engine, weights and tokenizer of the model.
      lock: context manager that is held during each dispatch, for another driver of the same devices.
    """
    of_text = engine_adapter.JetstreamTokenizer(
        tokenizer.encode, tokenizer.decode, tokenizer.stop_ids
    )
    adapter = engine_adapter.JetStreamEngine(engine, params, of_text, DrawSettings(), lock=lock)
    return TextDriver(adapter)


class _Orchestrator(orchestrator.LLMOrchestrator):
    """JetStream's servicer, with standard gRPC status codes for errors."""

    def __init__(self, driver: JetStreamDriver, max_tokens: int):
        super().__init__(driver)
        self._max_tokens = max_tokens

    async def Decode(
        self, request: Any, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[Any]:
        """Streams the response to one prompt; `max_tokens` = 0 means the server's limit."""
        assert context is not None, "this servicer is for servers"
        if request.WhichOneof("content") is None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the request has no text_content or token_content"
            )
        request.max_tokens = request.max_tokens or self._max_tokens
        try:
            async for response in super().Decode(request, context):
                # The last dispatch of a sample may have decoded no token.
                if any(s.token_ids or s.text for s in response.stream_content.samples):
                    yield response
        except UserError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DriverStopped as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except DriverFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))


class GrpcServer:
    """JetStream's gRPC service on its own thread.

    Unlike `jetstream.core.server_lib.JetStreamServer` it listens on a given address and reports its port.

    Attributes:
      port: port that it listens on.
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
          driver: driver that answers the requests; the server owns it from now on.
          host, port: address to listen on; port 0 chooses a free port.
          max_tokens: maximum number of tokens if a request names none.
          max_message_bytes: maximum size of a request; larger ones are refused.
          max_requests: maximum number of open requests; more are refused.

        Raises:
          UserError: the port is not available.
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
            # Without this option a second server could silently share the port.
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
        """Refuses new requests, and stops once the open ones end, at the latest after `grace_s` seconds.

        Also stops the driver.
        """
        self._call(self._server.stop(grace_s))
        # The driver goes first: its threads send results to the event loop, so the loop must still run.
        self._driver.stop()
        self._end_loop()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
