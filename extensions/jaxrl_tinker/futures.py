"""Results that clients fetch later: who asked for what, and what came of it.

    submission -> request id, at once       retrieve: finished -> the result, as often as asked
                                                      pending  -> try again, after some seconds
                                                      unknown  -> gone (410)

A client repeats a submission whose answer it has lost, so its request id comes from what it is, such as the
model and the seq_id: it runs once, and another body under the same id is refused. It repeats a lost result as
well, so results stay until their session ends, or until all results together take too much memory: then those
that were fetched go, the oldest first. If that is not enough, sessions that fetch nothing are refused.

Submissions and results are written to a log (`log`). After a restart the submissions of the log are
submitted again, and those that were finished have their results already.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from jaxrl.errors import UserError

_LOG = logging.getLogger(__name__)

_SAMPLER_NUMBER = re.compile(rb'"sampling_session_seq_id": ?\d+')
# Bytes of all results together.
_MAX_BYTES = 1 << 30


class Gone(Exception):
    """The request or the session is not known, or no longer (status 410)."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a request has come to.

    Attributes:
      body: JSON, or a message in protobuf.
      is_protobuf: which of the two it is.
      failed: whether it is an error.
    """

    body: bytes
    is_protobuf: bool = False
    failed: bool = False

    @staticmethod
    def of(value: Any) -> Result:
        """A result of JSON types, or of bytes in protobuf."""
        if isinstance(value, bytes):
            return Result(value, is_protobuf=True)
        return Result(json.dumps(value).encode())

    @staticmethod
    def error(error: Exception) -> Result:
        """The answer to a request that has failed: the client's fault or ours."""
        if isinstance(error, UserError):
            category, message = "user", str(error)
        else:
            _LOG.error("a request has failed: %s: %s", type(error).__name__, error)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            category, message = "server", f"the server has failed: {reason}"
        body = json.dumps({"error": message, "category": category}).encode()
        return Result(body, failed=True)


@dataclasses.dataclass(eq=False)
class Future:
    """A request and, once it is finished, its result.

    Attributes:
      request_id: its id.
      route: route that it came by.
      session_id: session that it ends with.
      channel: what `Futures.finished_of` finds it by, such as a sampling session; "" for none.
      digest: hash of its body.
      result: the result; None before.
      fetched: whether a client has had it.
      waits_for: why it cannot have its turn yet; "" if it only waits for its turn.
    """

    request_id: str
    route: str
    session_id: str
    channel: str
    digest: bytes
    result: Result | None = None
    fetched: bool = False
    waits_for: str = ""


class Futures:
    """All futures of a server. Any thread may call it."""

    def __init__(
        self, write: Callable[..., None] = lambda *_, **__: None, *, max_bytes: int = _MAX_BYTES
    ):
        """Args: `Log.write`, or what takes its place; and the memory of all results."""
        self._write = write
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._futures: dict[str, Future] = {}
        self._expected: dict[str, Result | None] = {}
        # Finished requests of each channel, in order; a cursor counts them.
        self._finished: dict[str, list[tuple[str, bool, int]]] = collections.defaultdict(list)
        # Who waits for a request or a channel; a finished one wakes only those.
        self._waiters: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def expect(self, request_id: str, result: Result | None) -> None:
        """Announces a submission of the log that will come again, with its result if it is finished."""
        self._expected[request_id] = result

    def submit(
        self,
        route: str,
        request_id: str,
        body: bytes,
        start: Callable[[Future], None],
        *,
        session_id: str,
        channel: str = "",
    ) -> Future:
        """The future of a submission; a repeated one gets that of the first.

        Args:
          route, request_id: where it came from, and its id.
          body: body of the request.
          start: function that begins the work of a new one, which `finish` ends. It must return at once. One
            that is finished according to the log has its result when it starts.
          session_id, channel: as in `Future`.

        Raises:
          UserError: the id was used with another body, or the session leaves too many results unfetched.
        """
        # The SDK counts this number up when it repeats a save whose answer was lost.
        said = _SAMPLER_NUMBER.sub(b"", body) if route == "save_weights_for_sampler" else body
        digest = hashlib.sha256(said).digest()
        with self._lock:
            found = self._futures.get(request_id)
            if found is not None:
                if found.digest != digest:
                    raise UserError(
                        f"{route}: {request_id} was sent before with another body; count seq_id up by one "
                        "for each request"
                    )
                return found
            # What the log announced is in the log already, and was accepted when there was room for it.
            if request_id not in self._expected:
                if self._bytes > self._max_bytes:
                    self._check_fetches(session_id)
                fields = {"route": route, "id": request_id, "channel": channel, "body": body}
                self._write("call", session_id, **fields)
            future = Future(request_id, route, session_id, channel, digest)
            self._futures[request_id] = future
            if result := self._expected.pop(request_id, None):
                # It may have been fetched before the restart, and must not keep its room forever.
                future.fetched = True
                self._keep(future, result)
        try:
            start(future)
        except Exception as error:
            self.finish(future, Result.error(error))
            if not isinstance(error, UserError):
                raise
        return future

    def _check_fetches(self, session_id: str) -> None:
        sizes = collections.Counter()
        for future in self._futures.values():
            if future.result is not None and not future.fetched:
                sizes[future.session_id] += len(future.result.body)
        size = sizes[session_id]
        # Some session always has more than its share, so all together stay near the limit.
        if size * len(sizes) > self._max_bytes:
            raise UserError(
                f"{size} bytes of results of session {session_id} wait to be fetched, and there is no memory "
                "for more; fetch them by retrieve_future, or finish the session"
            )

    def finish(self, future: Future, result: Result, *, ran: bool = False) -> None:
        """Gives a future its result; a later one is ignored.

        Args:
          future, result: the future and its result.
          ran: whether it has had its turn and may have changed the model.
        """
        if future.result is not None:
            return
        # The log has no place for results of sessions that have ended.
        is_kept = self._futures.get(future.request_id) is future
        # If the log fails, a restart repeats this request and all after it.
        with contextlib.suppress(OSError):
            if is_kept:
                fields = {**dataclasses.asdict(result), "id": future.request_id, "ran": ran}
                self._write("result", future.session_id, **fields)
        with self._lock:
            # Its session may have ended since.
            if self._futures.get(future.request_id) is future:
                self._keep(future, result)
            future.result = result
            waiters = [
                *self._waiters.get(future.request_id, ()),
                *self._waiters.get(future.channel, ()),
            ]
        for loop, event in waiters:
            # In a loop that has ended nothing waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    def _keep(self, future: Future, result: Result) -> None:
        future.result = result
        self._bytes += len(result.body)
        if future.channel:
            event = (future.request_id, result.failed, len(result.body))
            self._finished[future.channel].append(event)
        # Room for it, from results that were fetched.
        for other in list(self._futures.values()) if self._bytes > self._max_bytes else ():
            if other.fetched and self._bytes > self._max_bytes:
                self._forget(other)

    def run(self, future: Future, work: Callable[[], Any]) -> None:
        """Does the work of a future on this thread, and finishes it with its value or error."""
        try:
            result = Result.of(work())
        except Exception as error:  # one request's failure is not the server's
            result = Result.error(error)
        self.finish(future, result, ran=True)

    def find(self, request_id: str) -> Future:
        """The future of an id; raises Gone if there is none."""
        with self._lock:
            future = self._futures.get(request_id)
        if future is None:
            raise Gone(f"request {request_id!r} is not known here, or no longer")
        return future

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | None:
        """The result of a request; None if it is still pending after some seconds.

        Raises:
          Gone: there is no such request.
        """
        future = self.find(request_id)
        if await self._wait(request_id, lambda: future.result is not None, timeout_s):
            future.fetched = True
        return future.result

    async def finished_of(
        self, channel: str, cursor: int, timeout_s: float
    ) -> tuple[list[tuple[str, bool, int]], int]:
        """Requests of a channel that finished after a cursor: (id, failed, bytes), and the next cursor."""
        events = self._finished[channel]
        await self._wait(channel, lambda: len(events) > cursor, timeout_s)
        return events[cursor:], max(len(events), cursor)

    def end_session(self, session_id: str) -> None:
        with self._lock:
            for future in [f for f in self._futures.values() if f.session_id == session_id]:
                self._forget(future)
                self._finished.pop(future.channel, None)

    async def _wait(self, name: str, condition: Callable[[], bool], timeout_s: float) -> bool:
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        with self._lock:
            self._waiters.setdefault(name, []).append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                # Events of a channel wake all its waiters, also those that look for a later cursor.
                while not condition():
                    await event.wait()
                    event.clear()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiters[name].remove(waiter)
                if not self._waiters[name]:
                    del self._waiters[name]
        return condition()

    def _forget(self, future: Future) -> None:
        del self._futures[future.request_id]
        if future.result is not None:
            self._bytes -= len(future.result.body)
