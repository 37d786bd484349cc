"""Arrays in int8 with float32 scales, for storage: weights of a sampler, keys and values of a cache.

    values [L, D, F] int8    scale [L, 1, F]      dimension 1 shares a scale: one for each output of a matmul

An entry is a value times its scale. The largest absolute entry of those that share a scale becomes 127, and
all are rounded to the nearest integer. float8 takes as many bytes and is three to five times less exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

_LARGEST = 127
_SCALE_BYTES = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in 8 bits.

    Attributes:
      values: int8.
      scale: float32, of the same rank; dimensions that share a scale have size 1.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    def astype(self, dtype: Any) -> jax.Array:
        """The entries in a wider type; the product with the scale is rounded once."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantize(x: jax.Array, dims: tuple[int, ...]) -> Quantized:
    """Rounds an array to 8 bits.

    Args:
      x: array of a wider type.
      dims: dimensions whose entries share a scale.
    """
    x = x.astype(jnp.float32)
    # Not a division: compiled, XLA makes it a product with the reciprocal, which may round otherwise.
    scale = jnp.abs(x).max(dims, keepdims=True) * np.float32(1 / _LARGEST)
    # Entries that are all 0 have scale 0.
    steps = jnp.round(x / jnp.where(scale > 0, scale, 1))
    return Quantized(steps.astype(jnp.int8), scale)


@dataclasses.dataclass(frozen=True)
class StoredType:
    """How a weight is stored: an array of one type, or a `Quantized` one.

    Attributes:
      dtype: type of the array.
      dims: dimensions whose entries share a scale; empty for an array without scales.
    """

    dtype: np.dtype
    dims: tuple[int, ...] = ()

    def cast(self, x: jax.Array | Quantized) -> Any:
        """The array as it is stored; a `Quantized` one is returned as it is."""
        if isinstance(x, Quantized):
            return x
        return quantize(x, self.dims) if self.dims else x.astype(self.dtype)

    @property
    def of_entry(self) -> StoredType:
        """That of an entry of the first dimension, whose entries share no scale."""
        return dataclasses.replace(self, dims=tuple(dim - 1 for dim in self.dims))

    def abstract(self, shape: tuple[int, ...], sharding: Any) -> Any:
        """The abstract value (ShapeDtypeStruct) of what `cast` returns.

        With a list of shardings that of each entry of the first dimension.
        """
        if isinstance(sharding, list):
            return [self.of_entry.abstract(shape[1:], each) for each in sharding]
        values = jax.ShapeDtypeStruct(shape, self.dtype, sharding=sharding)
        if not self.dims:
            return values
        spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
        # Dimensions that share a scale have size 1 there, which cannot be split.
        whole: Any = P(*(None if dim in self.dims else axes for dim, axes in enumerate(spec)))
        scale = jax.ShapeDtypeStruct(
            self._scale_shape(shape), jnp.float32, sharding=NamedSharding(sharding.mesh, whole)
        )
        return Quantized(values, scale)  # pyright: ignore[reportArgumentType]

    def shardings(self, shape: tuple[int, ...], sharding: Any) -> Any:
        """Shardings in the structure of `cast`: scales are split like the dimensions that have their own."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract(shape, sharding))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of an array, or of a shard, with its scales."""
        scales = math.prod(self._scale_shape(shape)) if self.dims else 0
        return math.prod(shape) * self.dtype.itemsize + scales * _SCALE_BYTES

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(1 if dim in self.dims else size for dim, size in enumerate(shape))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _stored(stored: StoredType, x: jax.Array, sharding: Any) -> Any:
    out = stored.cast(x)
    if not isinstance(sharding, NamedSharding):
        return out
    return jax.lax.with_sharding_constraint(out, stored.shardings(x.shape, sharding))


def entries(x: Any) -> list[Any]:
    """The entries of the first dimension of an array, or of one in 8 bits."""
    return [jax.tree.map(lambda leaf: leaf[i], x) for i in range(x.shape[0])]  # noqa: B023


def stored_in_place(stored: StoredType, x: Any) -> Any:
    """`stored.cast`, compiled; every device keeps its part of the array, or of each in a list of entries."""
    if isinstance(x, list):
        return [stored_in_place(stored.of_entry, each) for each in x]
    if isinstance(x, Quantized) or (not stored.dims and x.dtype == stored.dtype):
        return x
    return _stored(stored, x, x.sharding)


def stored_types(dtype: Any, tree: Any) -> Any:
    """A tree of `StoredType`s: `dtype` itself if it is one, else plain arrays of that type for all leaves.

    Args:
      dtype: tree of `StoredType`s, or one data type.
      tree: tree of the same structure.
    """
    if any(isinstance(leaf, StoredType) for leaf in jax.tree.leaves(dtype)):
        return dtype
    return jax.tree.map(lambda _: StoredType(jnp.dtype(dtype)), tree)
