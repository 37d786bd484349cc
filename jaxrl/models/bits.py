"""bfloat16 arrays as integers, for code that only moves them.

On CPU, XLA computes nothing but matmuls in bfloat16. It slices and writes such arrays by way of float32,
which takes several times as long as the matmul with the slice. It copies integers as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16}
_OF_BITS = {jnp.dtype(bits): dtype for dtype, bits in _BITS.items()}


def moved_as_bits(move: Callable[..., Any], *trees: Any) -> Any:
    """The result of `move`, which only moves values; in a program for CPU it gets and returns bits.

    Elsewhere it gets the arrays as they are: with bits XLA would copy a TPU's whole cache.
    """

    as_bits = lambda *trees: from_bits(move(*to_bits(trees)))  # noqa: E731
    return jax.lax.platform_dependent(*trees, cpu=as_bits, default=move)


def to_bits(tree: Any) -> Any:
    """Replaces bfloat16 arrays by unsigned integers of the same bits; no gradient."""
    return _bitcast(tree, _BITS)


def from_bits(tree: Any) -> Any:
    """The inverse of `to_bits`. The tree must not have had uint16 arrays before."""
    return _bitcast(tree, _OF_BITS)


def _bitcast(tree: Any, types: dict[Any, Any]) -> Any:
    def one(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, types[x.dtype]) if x.dtype in types else x

    return jax.tree.map(one, tree)
