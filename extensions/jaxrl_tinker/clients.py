"""Sessions of clients, and the samplers that they have."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from jaxrl.errors import UserError
from jaxrl_tinker.futures import Futures, Gone
from jaxrl_tinker.sampler_weights import SamplerWeights

# Time for clients to come back after a restart, before others may train. They send heartbeats every 10 s.
_RETURN_S = 60.0
# Snapshots of a session that are kept: each holds a copy of the weights on the host.
MAX_SNAPSHOTS = 4


@dataclasses.dataclass
class SamplingSession:
    """A client's sampler.

    Attributes:
      weights: weights to sample from; None once newer snapshots have taken their room.
    """

    session_id: str
    weights: SamplerWeights | None


class Clients:
    """Sessions and samplers of all clients. Any thread may call it."""

    def __init__(self, futures: Futures, write: Callable[..., None], lease_s: float):
        """Args: futures; `Log.write`; seconds without a word after which a session is silent."""
        self._futures = futures
        self._write = write
        self._lease_s = lease_s
        self._lock = threading.Lock()
        # When each session was last heard of.
        self._heard: dict[str, float] = {}
        self._samplers: dict[str, SamplingSession] = {}

    def open(self) -> str:
        """Opens a session, and ends those that are silent."""
        # Many clients stop without a word: nothing else would free what their sessions hold.
        # A copy, since `end` changes the table.
        for silent in filter(self.is_silent, list(self._heard)):
            self.end(silent)
        # Random: folders of weights are named after it, and outlive the server that counts.
        session_id = f"s{secrets.token_hex(8)}"
        self._write("session", session_id)
        self._heard[session_id] = monotonic()
        return session_id

    def restore(self, session_id: str) -> None:
        """Reopens a session of the log; its client has a minute to come back."""
        self._heard[session_id] = monotonic() - max(0.0, self._lease_s - _RETURN_S)

    def heard(self, session_id: Any) -> str:
        """Notes that a session was heard of, and returns its id; raises Gone if there is none."""
        if not isinstance(session_id, str) or session_id not in self._heard:
            raise Gone(f"session {session_id!r} is not known here, or has ended; create one")
        self._heard[session_id] = monotonic()
        return session_id

    def is_silent(self, session_id: str) -> bool:
        """Whether a session has ended, or was not heard of for the time of its lease."""
        heard = self._heard.get(session_id)
        return heard is None or monotonic() - heard > self._lease_s

    def end(self, session_id: str) -> None:
        if session_id not in self._heard:
            return
        self._write("end", session_id)
        with self._lock:
            self._heard.pop(session_id, None)
            for sampler_id in [k for k, s in self._samplers.items() if s.session_id == session_id]:
                del self._samplers[sampler_id]
        self._futures.end_session(session_id)

    def add_sampler(self, sampler_id: str, session_id: str, weights: SamplerWeights) -> None:
        with self._lock:
            self._samplers[sampler_id] = SamplingSession(session_id, weights)
            samplers = (s for s in self._samplers.values() if s.session_id == session_id)
            # Weights in files take no memory here.
            taken = [s for s in samplers if s.weights and s.weights.taken_by]
            for sampler in taken[:-MAX_SNAPSHOTS]:
                sampler.weights = None

    def snapshots(self) -> set[str]:
        """Ids of the requests that took the snapshots that are kept."""
        with self._lock:
            return {s.weights.needs for s in self._samplers.values() if s.weights} - {""}

    def sampler(self, sampler_id: str) -> tuple[str, SamplerWeights]:
        """The session and the weights of a sampler; raises Gone without it, UserError without its weights."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise Gone(f"sampling session {sampler_id!r} is not known here; create one")
        if sampler.weights is None:
            raise UserError(
                f"the weights of {sampler_id} are gone: the newest {MAX_SNAPSHOTS} snapshots are kept; save "
                "weights by name (save_weights_for_sampler(name=..)) to sample from them later"
            )
        return self.heard(sampler.session_id), sampler.weights
