"""Weights that a client samples from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxrl.models.decoder import Params


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerWeights:
    """Weights to sample from, which never change.

    Attributes:
      load: function that returns them: on the devices in the generation layout, or an adapter with its scale.
      path: their path, if a client has given them a name; else None.
      taken_by: request that copied them to the host's memory, where they are gone when they are dropped; ""
        if they are in files.
    """

    load: Callable[[], Params]
    path: str | None = None
    taken_by: str = ""
