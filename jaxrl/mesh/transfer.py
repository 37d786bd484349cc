"""Sends weights to a sampler that has its own devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.mesh.hosts import put


class Transfer:
    """Sends weights from one mesh to another with different devices; see `Resharding` for the same devices.

    Each leaf is cast on its own devices and then sent; nothing waits for the copies. The training copy stays.

    Attributes:
      donate: always False: the training copy stays. Has the meaning of `Resharding.donate`.
    """

    donate = False

    def __init__(self, generate: Any, generate_dtype: Any):
        """Args are the shardings on the other mesh, and the type of the weights there."""
        self._generate = generate
        self._dtype = jnp.dtype(generate_dtype)

    def to_generate(self, params: Any) -> Any:
        """The weights on the other mesh."""
        cast = jax.tree.map(lambda leaf: leaf.astype(self._dtype), params)
        return jax.tree.map(put, cast, self._generate)
