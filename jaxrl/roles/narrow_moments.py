"""Moments of an optimiser in fewer bits between its updates: bfloat16, or 8 bits with a scale per block.

    stored state --widened--> float32 --an optax update, as it is--> float32 --narrowed--> stored state

Rounding is stochastic: a second moment moves by 1 - beta2 of itself an update, a thousandth, which rounding
to the nearest of 256 steps would lose each time. The draws depend on the number of the update and on the
place in the array, never on the layout, so a run and its resumption round alike.

Not covered: weights and gradients, which stay float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MomentKind = Literal["float32", "bfloat16", "int8"]

_BLOCKS = (128, 64, 32)
# Above the shards that the last dimension of a weight is usually split into.
_SHARDS = 16
# Smaller moments are not worth it: norms, biases. bitsandbytes draws the line here too.
_FEWEST = 4096


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockQuantized:
    """A moment in 8 bits: sign(c) * (|c| / levels)^power * scale, for each code c.

    First moments have codes from -127 to 127 and power 2; second moments, which span the square of their
    range, 0 to 255 and power 4. So steps are 1.6% of the value at the top of a block, and what is 10^-4 of
    the top, or 10^-9 for a second moment, is not lost.

    Attributes:
      codes: int8, or uint8 of what is never negative; of the moment's shape [..., n].
      scale: float32 [..., n / block], the largest absolute value of each block of the last dimension.
    """

    codes: jax.Array
    scale: jax.Array


class NarrowState(NamedTuple):
    """State of `narrowed`.

    Attributes:
      num_updates: int32, so far: what rounding draws from.
      inner: the state of the optimiser, its moments narrowed.
    """

    num_updates: jax.Array
    inner: Any


def narrowed(
    optimizer: optax.GradientTransformation, kind: MomentKind
) -> optax.GradientTransformation:
    """An optimiser that keeps its moments, the fields `mu` and `nu` of its state, as `kind`.

    Moments of fewer than 4,096 values stay float32 in "int8", as do those whose last dimension is no
    multiple of 32.
    """
    if kind == "float32":
        return optimizer

    def init(params: Any) -> NarrowState:
        count = jnp.zeros([], jnp.int32)
        return NarrowState(count, _narrow(optimizer.init(params), kind, count))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, NarrowState]:
        updates, inner = optimizer.update(updates, _widen(state.inner), params)
        count = state.num_updates + 1
        return updates, NarrowState(count, _narrow(inner, kind, count))

    return optax.GradientTransformation(init, update)


def _is_moment(node: Any) -> bool:
    return isinstance(node, BlockQuantized)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, state: Any, like: Any, *, others: NamedSharding
) -> Any:
    """Shardings of an optimiser's state.

    Scales of blocks are split as the codes are; a dimension that holds too few of them for that is whole on
    every device.

    Args:
      optimizer: whose state it is.
      state: its shapes.
      like: NamedShardings of moments in float32, in the structure of the weights.
      others: that of counts and constants.
    """
    return optax.tree.map_params(
        optimizer,
        _moment_sharding,
        state,
        like,
        transform_non_params=lambda _: others,
        # Where an optimiser does not see a weight, its state has such a node and no moment.
        is_leaf=lambda node: _is_moment(node) or isinstance(node, optax.MaskedNode),
    )


def _moment_sharding(moment: Any, sharding: NamedSharding) -> Any:
    if isinstance(moment, optax.MaskedNode):
        return moment
    if not _is_moment(moment):
        return sharding
    *entries, last = (*sharding.spec, *[None] * (moment.codes.ndim - len(sharding.spec)))
    axes = (last,) if isinstance(last, str) else last or ()
    shards = math.prod(dict(sharding.mesh.shape)[axis] for axis in axes)
    last = None if moment.scale.shape[-1] % shards else last
    places: Any = sharding, NamedSharding(sharding.mesh, P(*entries, last))
    return BlockQuantized(*places)


def _narrow(state: Any, kind: MomentKind, count: jax.Array) -> Any:
    key = jax.random.fold_in(jax.random.key(0), count)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)

    def one(number: int, path: Any, leaf: jax.Array) -> Any:
        names = {entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)}
        if not names & {"mu", "nu"}:
            return leaf
        leaf_key = jax.random.fold_in(key, number)
        if kind == "bfloat16":
            return _to_bfloat16(leaf, leaf_key)
        block = block_of(leaf.shape)
        return quantized(leaf, leaf_key, block=block, signed="mu" in names) if block else leaf

    return tree.unflatten([one(n, path, leaf) for n, (path, leaf) in enumerate(leaves)])


def _widen(state: Any) -> Any:
    def one(leaf: Any) -> Any:
        if _is_moment(leaf):
            return dequantized(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(one, state, is_leaf=_is_moment)


def block_of(shape: tuple[int, ...]) -> int:
    """Values that share a scale, along the last dimension; 0 where a moment stays float32.

    It depends on the shape alone, so that a checkpoint fits every layout. Blocks that lie within a shard
    of up to 16 come first: none then waits for another device.
    """
    if math.prod(shape) < _FEWEST:
        return 0
    sizes = (n // s for s in (_SHARDS, 1) if (n := shape[-1]) % s == 0)
    return next((block for size in sizes for block in _BLOCKS if size % block == 0), 0)


def quantized(x: jax.Array, key: jax.Array, *, block: int, signed: bool) -> BlockQuantized:
    """Rounds a float32 array [..., n] to 8 bits, each value up or down so that its mean stays.

    Args:
      x: not below 0 unless `signed`.
      key: of the draws.
      block: values of the last dimension that share a scale; divides n.
      signed: a first moment.
    """
    levels, power, dtype = _format(signed)
    blocks = jnp.abs(x).reshape(*x.shape[:-1], -1, block)
    scale = blocks.max(-1)
    share = (blocks / jnp.where(scale > 0, scale, 1.0)[..., None]).reshape(x.shape)
    below = jnp.floor(levels * share ** (1 / power))
    low, high = (below / levels) ** power, ((below + 1) / levels) ** power
    # By the distance to the values of the two codes, not to the codes: else the mean would not stay.
    up = jax.random.uniform(key, x.shape) * (high - low) < share - low
    codes = jnp.minimum(below + up.astype(below.dtype), levels)
    if not signed:
        # A second moment of 0 beside a first one that is not would be a division by epsilon.
        codes = jnp.maximum(codes, (share > 0).astype(codes.dtype))
    return BlockQuantized((jnp.sign(x) * codes).astype(dtype), scale)


def dequantized(moment: BlockQuantized) -> jax.Array:
    """The float32 array [..., n] that was rounded."""
    codes, scale = moment.codes, moment.scale
    levels, power, _ = _format(codes.dtype == jnp.int8)
    share = codes.astype(jnp.float32) / levels
    share = jnp.sign(share) * jnp.abs(share) ** power
    blocks = share.reshape(*scale.shape, -1) * scale[..., None]
    return blocks.reshape(codes.shape)


def _format(signed: bool) -> tuple[int, int, Any]:
    return (127, 2, jnp.int8) if signed else (255, 4, jnp.uint8)


def _to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds up or down by chance: a draw below the 16 bits that go, then they are cut."""
    as_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
    bits = as_bits(x) + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = (bits >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
