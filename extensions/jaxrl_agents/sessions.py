"""The open samples of agents: who runs each, what it has said, and how it ended. Any thread may call it.

    open -> waiting -> taken by a worker -> done: a score, or an error
               ^            |
               +-- lost ----+   its worker died or hung; it starts again, and gets the same answers

If a worker dies, any of its sessions may be to blame. All of them start again, from then on with few others,
and then alone, in a worker; one that has been in three dead workers has failed.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from jaxrl.rollout.sampling import SamplingOptions
from jaxrl_agents.conversation import Conversation
from jaxrl_serving.online_driver import Delta

# By how often its worker has died: the most sessions that a worker runs beside one.
_TOGETHER = (1 << 30, 4, 1)


Score: TypeAlias = float | dict[str, float] | None


@dataclasses.dataclass(eq=False)
class Session:
    """A sample of an agent.

    Attributes:
      prompt: number of its prompt in the batch.
      sample: number among the samples of the prompt.
      prompt_id: `Prompts.ids_N` of the prompt.
      problem: fields of `worker.Problem`.
      conversations: what was said, by role; of an agent without roles by "".
      options: how its answers are drawn.
      key: secret of its requests; with "." and a role at its end that of the role's.
      worker: key of the worker that runs it; "" while it waits.
      deaths: number of workers that have died under it.
      until: time by which it has to end, once it was taken.
      seconds: time from when it was last taken to its end.
      score: score that the agent gave, or one for each role; None for none.
      error: why it failed; "" if it did not.
      traceback: traceback of the exception that ended its agent; "" without one.
      ended: whether it is done.
      turns: keys of the turns that were asked for.
      lock: held while the conversation is read or changed, not while the model answers.
      deltas: of each turn that was answered, for requests that are repeated. A session of an earlier run has
        them from the start: its agent begins again, and gets the same answers up to where it was.
      asked: version of the weights at the time of each request that is not answered yet, by turn.
    """

    prompt: int
    sample: int
    prompt_id: int
    problem: dict[str, Any]
    conversations: dict[str, Conversation]
    options: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    key: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(18))
    worker: str = ""
    deaths: int = 0
    until: float = float("inf")
    seconds: float = 0.0
    score: Score = None
    error: str = ""
    traceback: str = ""
    ended: bool = False
    turns: set[str] = dataclasses.field(default_factory=set)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    deltas: dict[str, tuple[Delta, ...]] = dataclasses.field(default_factory=dict)
    asked: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def learning(self) -> dict[str, Conversation]:
        """The conversations of the roles that learn."""
        return {role: x for role, x in self.conversations.items() if not x.weights}

    def role_of(self, key: str) -> str | None:
        """The role that a key of this session names, the first one if it names none; None for another."""
        role = key.partition(".")[2] or next(iter(self.conversations))
        return role if role in self.conversations else None


class Sessions:
    """The sessions of a run.

    Attributes:
      on_news: function that is called when a worker may have something to take, or to end.
      closed: whether workers get no more.
    """

    def __init__(self, seconds: float):
        """Args: seconds that a session has from when a worker takes it."""
        self._seconds = seconds
        # Reentrant: `lost` and `stop` call `end`.
        self._lock = threading.RLock()
        self._by_key: dict[str, Session] = {}
        self._waiting: dict[str, Session] = {}
        # By worker.
        self._running: dict[str, dict[str, Session]] = collections.defaultdict(dict)
        self._dead: set[str] = set()
        self._done: list[Session] = []
        # Keys of sessions that their worker has to end, by worker.
        self._ended: dict[str, list[str]] = collections.defaultdict(list)
        self._held_since: float | None = None
        self.on_news: Callable[[], object] = lambda: None
        self.closed = False

    def open(self, sessions: Iterable[Session]) -> None:
        """Queues sessions for the workers."""
        by_key = {session.key: session for session in sessions}
        with self._lock:
            self._by_key |= by_key
            self._waiting |= by_key
        if by_key:
            self.on_news()

    def find(self, key: str) -> Session | None:
        """The open session of a key, with or without a role; None if there is none."""
        return self._by_key.get(key.partition(".")[0])

    def take(self, worker: str, most: int) -> list[Session]:
        """Sessions that a worker runs from now on, as many as it may run at the same time."""
        with self._lock:
            if not self._waiting or worker in self._dead:
                return []
            running = self._running[worker]
            room = min((most, *(_TOGETHER[s.deaths] for s in running.values())))
            taken: list[Session] = []
            for key, session in list(self._waiting.items()):
                # A suspect is run beside few others, and others are not run beside it.
                if len(running) >= min(room, _TOGETHER[session.deaths]):
                    if len(running) >= room:
                        break
                    continue
                room = min(room, _TOGETHER[session.deaths])
                del self._waiting[key]
                session.worker, session.until = worker, time.monotonic() + self._seconds
                running[key] = session
                taken.append(session)
            return taken

    def end(self, key: str, score: Score, error: str = "", traceback: str = "") -> None:
        """Ends a session. Ignores one that has ended: an agent may answer twice, or too late."""
        with self._lock:
            session = self._by_key.pop(key, None)
            if session is None:
                return
            self._waiting.pop(key, None)
            self._running[session.worker].pop(key, None)
            session.score, session.error, session.traceback = score, error, traceback
            session.ended = True
            # From `until`, which `hold` and `go_on` move: time in which no answers are given does not count.
            session.seconds = max(0.0, time.monotonic() + self._seconds - session.until)
            self._done.append(session)
            if self._waiting:
                self.on_news()

    def lost(self, worker: str) -> None:
        """Queues the sessions of a dead worker again; those that have seen too many die have failed.

        The worker gets no more.
        """
        with self._lock:
            self._dead.add(worker)
            for session in self._running.pop(worker, {}).values():
                session.worker, session.until = "", float("inf")
                session.deaths += 1
                if session.deaths == len(_TOGETHER):
                    self.end(session.key, None, "ended its process, or did not let it answer")
                else:
                    self._waiting[session.key] = session
        self.on_news()

    def stop(self, session: Session, error: str) -> None:
        """Ends a session, and has its worker end the agent."""
        with self._lock:
            if session.key in self._by_key and session.worker:
                self._ended[session.worker].append(session.key)
            self.end(session.key, None, error)
        self.on_news()

    def take_stopped(self, worker: str) -> list[str]:
        """Keys of the sessions that a worker has to end, since the last call."""
        with self._lock:
            return self._ended.pop(worker, [])

    def end_late(self) -> None:
        now = time.monotonic()
        # A copy, since `stop` takes sessions out of the dict, and other threads do meanwhile.
        for session in [s for s in [*self._by_key.values()] if s.until < now]:
            self.stop(session, f"took longer than {self._seconds:g} s")

    def hold(self) -> None:
        """Stops the clock of all sessions, because they get no answers now."""
        self._held_since = time.monotonic()

    def go_on(self) -> None:
        """Ends a `hold`."""
        with self._lock:
            if self._held_since is not None:
                held_s = time.monotonic() - self._held_since
                for session in self._by_key.values():
                    # A session that a worker has taken since then gets a little more.
                    session.until += held_s
            self._held_since = None

    def take_done(self) -> list[Session]:
        """The sessions that have ended since the last call, in that order."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Fails all open sessions; workers get no more."""
        with self._lock:
            self.closed = True
            for key in list(self._by_key):
                self.end(key, None, "the run has ended")
        self.on_news()

    @property
    def num_open(self) -> int:
        return len(self._by_key)
