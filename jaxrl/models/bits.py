"""bfloat16 arrays as integers, for code that only moves them.

On CPU, XLA computes nothing but matmuls in bfloat16. It slices and writes such an array by way of float32,
which takes several times as long as the matmul with the slice. It copies integers as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def to_bits(tree: Any) -> Any:
    """Replaces bfloat16 arrays by uint16 arrays of the same bits. They have no gradient."""
    return _bitcast(tree, jnp.bfloat16, jnp.uint16)


def from_bits(tree: Any) -> Any:
    """The inverse of `to_bits`. The tree must not have had uint16 arrays before."""
    return _bitcast(tree, jnp.uint16, jnp.bfloat16)


def _bitcast(tree: Any, old: Any, new: Any) -> Any:
    def one(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, new) if x.dtype == old else x

    return jax.tree.map(one, tree)
