"""Serves requests that arrive at any time, each with its own settings; streams text after each dispatch.

    submit --> [live loop] --> Decoded --> TextStream --> Delta, Delta, ... --> listener

One thread turns the live loop (`rollout.live_loop`) and calls the listeners. Any thread may submit and
cancel. If a dispatch fails, the requests in the loop fail; waiting ones are still served.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxrl.data.tokenizer import TextStream
from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_loop import Decoded, End
from jaxrl.rollout.decode_state import TokenScores, TopTokens
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.live_loop import LiveCounts, LiveError, LiveLoop, Request
from jaxrl.rollout.stop_strings import StopSearch
from jaxrl.types import Stretch

STOP, LENGTH = "stop", "length"
_FINISH = {None: "", End.STOP_ID: STOP, End.STOP_STRING: STOP, End.FULL: LENGTH}
# Longest wait of the thread without requests. A request or the end wakes it at once.
_IDLE_S = 60.0

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Delta(Stretch):
    """Tokens and text that a dispatch has added to a sample.

    Example, with the stop string "\\n": tokens "9", "\\n", text "9", finish "stop".

    Attributes:
      index: index of the sample in its request.
      pieces: text of each of the R tokens; "" for an incomplete character and for special tokens.
      text: text to show now, without stop strings; it lags behind the pieces while one may have started.
      finish: "stop" or "length" if the sample has ended, else "".
      top: the most probable tokens at each place, [R, K], if the request asks for them.
      prompt: with the first tokens, the scores of the prompt's tokens but the first, if it asks for them.
    """

    index: int
    pieces: tuple[str, ...]
    text: str
    finish: str
    top: TopTokens | None = None
    prompt: TokenScores | None = None


# Called on the driver's thread, with the deltas of each sample in order, or with one error as the last event.
# It must return at once and must not raise.
Listener: TypeAlias = Callable[[Delta | LiveError], None]


def _with_text(
    request: Request,
    listener: Listener,
    decode_text: Callable[[np.ndarray], str] | None,
    shows_stop: bool,
) -> Callable[[Decoded | LiveError], None]:
    """A listener of the live loop that adds the text to the tokens of a request."""
    options = request.options
    hidden = () if shows_stop else options.stop_strings
    hidden_ids = () if shows_stop else options.stop_ids
    streams: dict[int, TextStream] | None = None
    if decode_text is not None:
        streams = collections.defaultdict(functools.partial(TextStream, decode_text, hidden))

    def answer(event: Decoded | LiveError) -> None:
        if isinstance(event, LiveError):
            listener(event)
            return
        index, pieces, text = event.sample.index, ("",) * len(event), ""
        if streams is not None:
            stream, tokens = streams[index], event.tokens.tolist()
            # A stop id may have a text.
            silent = event.end is End.STOP_ID and tokens and tokens[-1] in hidden_ids
            pieces, text = stream.add(tokens[:-1] if silent else tokens)
            pieces += ("",) * bool(silent)
            if event.end is not None:
                at_stop_string = event.end is End.STOP_STRING and not shows_stop
                text += stream.end(at_stop_string=at_stop_string)
        finish = _FINISH[event.end]
        listener(Delta(*event.arrays, index, pieces, text, finish, event.top, event.prompt))

    return answer


class LiveText:
    """A live loop whose listeners get text, too. Its owner turns the loop."""

    def __init__(self, live: LiveLoop, decode_text: Callable[[np.ndarray], str]):
        """Args: the loop; a function that turns token ids into text."""
        self._live = live
        self._decode_text = decode_text

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self._live.accepting

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of waiting samples and of samples in the decode loop."""
        return self._live.load

    @property
    def max_waiting(self) -> int:
        """The number of samples that may wait; a call for more can never be served."""
        return self._live.max_waiting

    @property
    def counts(self) -> LiveCounts:
        """The load, and the numbers of tokens so far."""
        return self._live.counts

    def submit(self, request: Request, listener: Listener) -> int:
        """Queues a request; see `LiveLoop.submit`.

        Args:
          request: the request. What ends its samples is not shown.
          listener: function called with the answer, dispatch by dispatch.
        """
        return self.submit_all([(request, listener)])[0]

    def submit_all(
        self,
        requests: Sequence[tuple[Request, Listener]],
        *,
        texts: bool = True,
        shows_stop: bool = False,
    ) -> list[int]:
        """Queues either all of the requests or none of them; see `submit`.

        Args:
          requests: the requests with their listeners.
          texts: whether the deltas have texts. They take 20 us a token, between two dispatches.
          shows_stop: whether these have the stop strings and the request's own stop ids, too.
        """
        decode_text = self._decode_text if texts else None
        answers = [
            (each, _with_text(each, heard, decode_text, shows_stop)) for each, heard in requests
        ]
        return self._live.submit_all(answers)

    def cancel(self, ticket: int) -> None:
        """Ends a request and frees its slots with the next dispatch. Ignores a request that has ended."""
        self._live.cancel(ticket)


class OnlineDriver(LiveText, contextlib.AbstractContextManager):
    """Serves requests from its own thread until it is closed."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        decode_text: Callable[[np.ndarray], str],
        *,
        max_waiting: int = 10_000,
    ):
        """Starts the thread.

        Args:
          engine, params: engine of the model, and its weights in the generation layout.
          decode_text: function that turns token ids into text.
          max_waiting: maximum number of samples that wait for a slot; more are refused.
        """
        live = LiveLoop(engine, params, StopSearch(decode_text), max_waiting=max_waiting)
        super().__init__(live, decode_text)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="online-driver", daemon=True)
        self._thread.start()

    def __exit__(self, *_):
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and super().alive

    def close(self, grace_s: float = 0.0) -> None:
        """Refuses new requests. Requests not answered within `grace_s` seconds get `Stopped`."""
        # First: the thread goes on answering open requests until this returns.
        self._live.refuse(grace_s)
        self._stopping = True
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._live.turn(wait_s=_IDLE_S)
                # Device errors, such as out of memory. The failed program may have consumed the slots.
                except jax.errors.JaxRuntimeError as error:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    failure = LiveError(f"the engine has failed: {reason}")
                    _LOG.error("%s", failure)
                    self._live.clear(failure)
        finally:
            # Whatever ended the thread, every open request gets an error.
            self._live.close()
