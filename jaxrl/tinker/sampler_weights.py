"""Weights that a client samples from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params


@dataclasses.dataclass(eq=False)
class Newest:
    """The adapter of the newest save of `kind: inflight` of a model, for all its samplers of this kind.

    Attributes:
      saved: what was saved; None before the first save.
    """

    saved: SamplerWeights | None = None

    def load(self) -> Params:
        """The adapter; raises UserError before the first save."""
        if self.saved is None:
            raise UserError("this sampler's weights are not saved yet; wait for the save before")
        return self.saved.load()


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerWeights:
    """Weights to sample from. They never change, but for those of `newest`.

    Attributes:
      load: function that returns them: on the devices in the generation layout, or an adapter with its scale.
      path: their path, if a client has given them a name; else None.
      taken_by: request that copied them to the host's memory, where they are gone when they are dropped; ""
        if they are in files.
      newest: what it follows, if it is of `kind: inflight`.
    """

    load: Callable[[], Params]
    path: str | None = None
    taken_by: str = ""
    newest: Newest | None = None

    @property
    def needs(self) -> str:
        """The request whose weights it has now, if they are in memory only; else ""."""
        saved = self.newest.saved if self.newest else self
        return saved.taken_by if saved else ""
