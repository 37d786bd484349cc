"""The arrays of a key-value cache, of one layer or of all layers.

    B sequences   C capacity in tokens   L layers   K kv heads   H head size

Types: float32, bfloat16, or int8 with a scale per token and head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.bits import moved_as_bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Rotated keys and values, of one layer or, with a leading L, of all layers.

    On CPU the last dimension of keys is the length: q·k is then a plain matmul, 5 to 7 times faster than with
    the head size last. Kernels need the head size last, as for values.

    Attributes:
      k: [.., B, K, H, C] or, with `keys_last` "head_dim", [.., B, K, C, H].
      v: [.., B, K, C, H].
      k_scale, v_scale: float32 [.., B, K, C], factors of int8 entries; None for other types.
      keys_last: last dimension of k, "length" or "head_dim".
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    keys_last: str = dataclasses.field(default="length", metadata={"static": True})

    @property
    def capacity(self) -> int:
        """The number of tokens that fit into a slot."""
        return self.v.shape[-2]


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes and types of all caches of an engine.

    Attributes:
      num_layers, num_kv_heads, head_dim: sizes of the model.
      dtype: float32, bfloat16 or int8.
      keys_last: see `KVCache`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    keys_last: str = "length"

    def empty(self, num_slots: int, capacity: int) -> KVCache:
        """Zeros for all layers."""
        return self._zeros((self.num_layers, num_slots), capacity)

    def empty_layer(self, num_slots: int, capacity: int) -> KVCache:
        """Zeros for one layer, without L."""
        return self._zeros((num_slots,), capacity)

    def holding(self, k_TKH: jax.Array, v_TKH: jax.Array) -> KVCache:
        """A cache that holds exactly the given keys and values, [.., T, K, H]."""
        return cache_of(k_TKH, v_TKH, self.dtype, self.keys_last)

    def _zeros(self, leading: tuple[int, ...], capacity: int) -> KVCache:
        K, H, C = self.num_kv_heads, self.head_dim, capacity
        scales: Any = [None, None]
        if jnp.dtype(self.dtype) == jnp.int8:
            scales = [jnp.zeros((*leading, K, C)) for _ in range(2)]
        k_shape = (*leading, K, C, H) if self.keys_last == "head_dim" else (*leading, K, H, C)
        return KVCache(
            jnp.zeros(k_shape, self.dtype),
            jnp.zeros((*leading, K, C, H), self.dtype),
            *scales,
            keys_last=self.keys_last,
        )


def cache_axes(cache: KVCache) -> KVCache:
    """The logical axes of the arrays of a cache, in its structure."""
    heads = ("layers", "batch", "kv_heads")[5 - cache.v.ndim :]
    scale: Any = None if cache.k_scale is None else (*heads, "length")
    v: Any = (*heads, "length", "head_dim")
    k: Any = v if cache.keys_last == "head_dim" else (*heads, "head_dim", "length")
    return KVCache(k, v, scale, scale, cache.keys_last)


def cache_of(k_TKH: jax.Array, v_TKH: jax.Array, dtype: Any, keys_last: str = "length") -> KVCache:
    """A cache that holds exactly the given keys and values, [.., T, K, H]."""
    k_KTH, v_KTH = (x.swapaxes(-3, -2) for x in (k_TKH, v_TKH))
    scales: Any = [None, None]
    if jnp.dtype(dtype) == jnp.int8:
        (k_KTH, scales[0]), (v_KTH, scales[1]) = _quantized(k_KTH), _quantized(v_KTH)
    k = k_KTH if keys_last == "head_dim" else k_KTH.swapaxes(-1, -2)
    return KVCache(k.astype(dtype), v_KTH.astype(dtype), *scales, keys_last=keys_last)


def put_token(cache: KVCache, new: KVCache, place: jax.Array) -> KVCache:
    """Writes the one token of `new` to the same position of all slots. This needs no scatter."""

    def put(old, new, axes):
        return jax.lax.dynamic_update_slice_in_dim(old, new, place, axes.index("length"))

    axes = cache_axes(cache)
    return moved_as_bits(lambda cache, new: jax.tree.map(put, cache, new, axes), cache, new)


def _quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds [.., H] to int8 with a scale [..]; the largest absolute value becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / 127
    steps = x / jnp.where(scale > 0, scale, 1)[..., None]
    return jnp.round(steps).astype(jnp.int8), scale
