"""Weights for a sampler on devices of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.mesh.hosts import put


class Transfer:
    """Sends weights from one mesh to another; the counterpart of `Resharding` between disjoint devices.

    Each leaf is cast where it lies and sent on its way; nothing waits for it. The training copy stays.

    Attributes:
      donate: False, as `Resharding` has it where the training copy is not given up.
    """

    donate = False

    def __init__(self, generate: Any, generate_dtype: Any):
        """Args: shardings on the other mesh, and the type of the weights there."""
        self._generate = generate
        self._dtype = jnp.dtype(generate_dtype)

    def to_generate(self, params: Any) -> Any:
        """The weights on the other mesh."""
        cast = jax.tree.map(lambda leaf: leaf.astype(self._dtype), params)
        return jax.tree.map(put, cast, self._generate)
