"""Sends weights to a sampler that has its own devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrl.mesh.hosts import put
from jaxrl.quantized import StoredType, stored_in_place, stored_types


class Transfer:
    """Sends weights from one mesh to another with different devices; see `Resharding` for the same devices.

    Each leaf is cast on its own devices and then sent; nothing waits for the copies. The training copy stays.

    Attributes:
      donate: always False: the training copy stays. Has the meaning of `Resharding.donate`.
    """

    donate = False

    def __init__(self, generate: Any, dtype: Any):
        """Args: shardings on the other mesh, and the types there, as in `Resharding`."""
        self._generate = generate
        self._types = stored_types(dtype, generate)

    def to_generate(self, params: Any) -> Any:
        """The weights on the other mesh."""

        def send(stored: StoredType, leaf: jax.Array, where: NamedSharding) -> Any:
            to = stored.shardings(leaf.shape, where)
            return jax.tree.map(put, stored_in_place(stored, leaf), to)

        return jax.tree.map(send, self._types, params, self._generate)
