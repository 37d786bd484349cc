"""JetStream's own driver, an orchestrator of threads, around our engine; see `package` for what it takes."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from jaxrl.rollout.jetstream.engine_adapter import JetStreamEngine, Work
from jaxrl.rollout.jetstream.package import LOG, ReturnSample, orchestrator, tokenizer_api
from jaxrl.rollout.request_checks import check_request
from jaxrl.rollout.request_errors import ServingError, Stopped
from jaxrl.rollout.text_stream import TextStream


class JetStreamDriver(orchestrator.Driver):
    """JetStream's driver of one engine, which prefills and decodes in turn.

    If one of its threads fails, every request that is open gets a `ServingError`, later ones are refused,
    and `stop` ends the other threads.
    """

    def __init__(self, engine: JetStreamEngine):
        """Starts the threads; `stop` must be called, or the process does not end."""
        self._engine = engine
        self._numbers = itertools.count()
        self._guard = threading.Lock()
        self._channels: dict[int, Any] = {}
        self._failure: ServingError | None = None
        params = engine.load_params()
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
        )

    def stop(self) -> None:
        """Ends all threads; open requests get `Stopped`."""
        super().stop()
        self._close_channels(Stopped("the server has stopped before the answer was complete"))

    def submit(self, work: Work, channel: Any) -> None:
        """Queues a request that the channel gets the results of, as ids; see below for what is raised."""
        content: Any = work
        self.place_request_on_prefill_queue(
            orchestrator.ActiveRequest(
                max_tokens=work.max_tokens, return_channel=channel, prefill_content=content
            )
        )

    def place_request_on_prefill_queue(self, request: orchestrator.ActiveRequest) -> None:
        """Queues a request.

        Args:
          request: its content is a text, a list of token ids, or a `Work`.

        Raises:
          UserError: it can never be served.
          Stopped: the driver has, or has failed; its cause is then what the engine raised.
        """
        content: Any = request.prefill_content
        streams: list[TextStream] = []
        if not isinstance(content, Work):
            if isinstance(content, str):
                tokenizer = self._engine.tokenizer
                streams = [
                    TextStream(tokenizer.decode_text) for _ in range(self._engine.samples_per_slot)
                ]
                content = tokenizer.encode(content)[0]
            content = self._work_of(np.asarray(content, np.int64), request.max_tokens)
        request.prefill_content = content  # pyright: ignore[reportAttributeAccessIssue]
        # Else the detokenize thread would decode token by token; what text there is comes from the streams.
        request.is_client_side_tokenization = True
        channel = request.return_channel
        pass_on = functools.partial(self._pass_on, request, channel, streams)
        request.enqueue_samples = pass_on  # pyright: ignore[reportAttributeAccessIssue]
        with self._guard:
            if not self.live:
                self._refuse()
            self._channels[id(request)] = channel
        super().place_request_on_prefill_queue(request)

    def _refuse(self) -> NoReturn:
        """With what failed as the cause, whether a request came before the failure or after it."""
        failure = self._failure
        raise Stopped(f"the server takes no requests: {failure or 'it is stopping'}") from (
            failure and failure.__cause__
        )

    def _work_of(self, tokens: np.ndarray, max_tokens: int) -> Work:
        engine = self._engine.engine
        if max_tokens == engine.config.max_response_tokens:
            # What requests have that name no number: as much as there is room for.
            max_tokens = min(max_tokens, engine.config.max_context_tokens - len(tokens))
        check_request(engine, tokens, max_tokens)
        return Work(tokens.astype(np.int32), max_tokens, prompt_id=next(self._numbers) % 2**31)

    def _process_prefill_content(
        self,
        request: orchestrator.ActiveRequest,
        tokenizer: tokenizer_api.Tokenizer,
        is_bos: bool,
        max_prefill_length: int,
    ) -> tuple[Any, int]:
        """The prompt as it is: the engine has sizes of its own, and a prompt brings its BOS if it has one."""
        work: Any = request.prefill_content
        return work, len(work.tokens)

    def _pass_on(
        self,
        request: orchestrator.ActiveRequest,
        channel: Any,
        streams: Sequence[TextStream],
        samples: list[ReturnSample],
    ) -> None:
        """Takes the place of `ActiveRequest.enqueue_samples`; runs in the detokenize thread."""
        complete = request.complete
        assert complete is not None, "it is set when the request gets its slot"
        for stream, sample, ended in zip(streams, samples, complete, strict=False):
            text = "".join(stream.add(token)[1] for token in sample.token_ids)
            # By characters, so that nothing reads "<0x41>" in an answer as JetStream's way to write a byte.
            sample.text = list(text + stream.flush() if ended else text)
        channel.add_result(samples)
        if channel.cancelled():
            # JetStream looks next at whether all are complete, and then the slot is free.
            complete[:] = True
        if complete.all():
            with self._guard:
                self._channels.pop(id(request), None)

    def _prefill_thread(self, idx: int) -> None:
        self._guarded(super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._guarded(super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        self._guarded(super()._generate_thread, idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._guarded(super()._detokenize_thread, idx)

    def _guarded(self, body: Callable[[int], None], idx: int) -> None:
        try:
            body(idx)
        # Of every kind: JetStream's threads answer what is raised with SIGKILL. Nothing is hidden by this,
        # since the error goes to everybody who waits for a result.
        except Exception as error:
            failure = ServingError(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._guard:
                self.live = False
                self._failure = failure
            LOG.error("JetStream's driver has failed", exc_info=error)
            self._close_channels(failure)

    def _close_channels(self, error: ServingError) -> None:
        with self._guard:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.set_exception(error)
