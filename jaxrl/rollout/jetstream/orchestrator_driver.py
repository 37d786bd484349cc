"""JetStream's driver (an orchestrator of threads) around our engine; see `package` for the workarounds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from jaxrl.rollout.jetstream.engine_adapter import JetStreamEngine, Work
from jaxrl.rollout.jetstream.package import LOG, ReturnSample, orchestrator, tokenizer_api

# Called with the samples of a request after a dispatch, and with the indices of the complete ones.
AddText: TypeAlias = Callable[[Sequence[ReturnSample], np.ndarray], None]


class DriverFailed(RuntimeError):
    """The engine has failed, so a request was not answered."""


class DriverStopped(DriverFailed):
    """The driver no longer accepts requests; `__cause__` is the engine's error if the engine has failed."""


class JetStreamDriver(orchestrator.Driver):
    """JetStream's driver of one engine; it alternates between prefill and decode.

    If one of its threads fails, every open request gets `DriverFailed`, later requests are refused, and
    `stop` ends the other threads.
    """

    def __init__(self, engine: JetStreamEngine):
        """Starts the threads. Without a call of `stop` the process does not end."""
        self._engine = engine
        self._guard = threading.Lock()
        self._channels: dict[int, Any] = {}
        self._failure: DriverFailed | None = None
        params = engine.load_params()
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
        )

    def stop(self) -> None:
        """Stops all threads; open requests get `DriverStopped`."""
        super().stop()
        self._close_channels(DriverStopped("the server has stopped before the answer was complete"))

    def submit(self, work: Work, channel: Any) -> None:
        """Queues a request; its channel receives the results as token ids.

        Raises:
          DriverStopped: the driver no longer accepts requests.
        """
        content: Any = work
        self._queue(
            orchestrator.ActiveRequest(
                max_tokens=work.max_tokens, return_channel=channel, prefill_content=content
            )
        )

    def _queue(self, request: orchestrator.ActiveRequest, add_text: AddText | None = None) -> None:
        """Queues a request whose content is a `Work`; see `submit`."""
        # Without this the detokenize thread would decode token by token.
        request.is_client_side_tokenization = True
        channel = request.return_channel
        pass_on = functools.partial(self._pass_on, request, channel, add_text)
        request.enqueue_samples = pass_on  # pyright: ignore[reportAttributeAccessIssue]
        with self._guard:
            if not self.live:
                self._refuse()
            self._channels[id(request)] = channel
        super().place_request_on_prefill_queue(request)

    def _refuse(self) -> NoReturn:
        """Raises `DriverStopped` with the engine's failure as its cause, if there is one."""
        failure = self._failure
        raise DriverStopped(f"the server takes no requests: {failure or 'it is stopping'}") from (
            failure and failure.__cause__
        )

    def _process_prefill_content(
        self,
        request: orchestrator.ActiveRequest,
        tokenizer: tokenizer_api.Tokenizer,
        is_bos: bool,
        max_prefill_length: int,
    ) -> tuple[Any, int]:
        """Returns the prompt unchanged: the engine pads to its own sizes, and no BOS is added."""
        work: Any = request.prefill_content
        return work, len(work.tokens)

    def _pass_on(
        self,
        request: orchestrator.ActiveRequest,
        channel: Any,
        add_text: AddText | None,
        samples: list[ReturnSample],
    ) -> None:
        """Replaces `ActiveRequest.enqueue_samples`; runs in the detokenize thread."""
        complete = request.complete
        assert complete is not None, "it is set when the request gets its slot"
        if add_text is not None:
            add_text(samples, complete)
        channel.add_result(samples)
        if channel.cancelled():
            # JetStream frees the slot once all samples are marked complete, which it checks next.
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
        # Catches every exception: JetStream kills the process (SIGKILL) if one leaves a thread. Nothing is
        # hidden, because everybody who waits for a result gets the error.
        except Exception as error:
            failure = DriverFailed(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._guard:
                self.live = False
                self._failure = failure
            LOG.error("JetStream's driver has failed", exc_info=error)
            self._close_channels(failure)

    def _close_channels(self, error: DriverFailed) -> None:
        with self._guard:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.set_exception(error)
