"""Optimiser moments stored in 8 bits with a scale per block, or in bfloat16.

    stored state --decompress--> float32 --an optax update, unchanged--> float32 --compress--> stored state

Rounding is stochastic. One update changes a second moment by the share 1 - beta2, a thousandth, and rounding
to the nearest of 256 steps would lose that change every time. The random draws depend on the number of the
update and on the position in the array, never on the layout. So a resumed run rounds like the original.

Not covered: weights and gradients, which stay float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MomentKind = Literal["float32", "bfloat16", "int8"]

_BLOCKS = (128, 64, 32)
# An upper bound of the usual number of shards of a weight's last dimension; see `block_of`.
_SHARDS = 16
# Smaller moments (norms, biases) stay float32: they would save next to nothing. bitsandbytes has the same
# limit.
_FEWEST = 4096
# (levels, power, type of the codes) of first and of second moments, which span the square of the range.
_SIGNED, _UNSIGNED = (127, 2, jnp.int8), (255, 4, jnp.uint8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockQuantized:
    """A moment in 8 bits: each code c stands for sign(c) * (|c| / levels)^power * scale.

    First moments have codes from -127 to 127 and power 2. Second moments span the square of that range: codes
    from 0 to 255 and power 4. Near the largest value of a block, neighbouring codes differ by 1.6%. Values
    down to 10^-4 of the largest (10^-9 for second moments) are still represented:

        first moments     code 127  scale        126  .984 scale      1  6.2e-5 scale
        second moments    code 255  scale        254  .984 scale      1  2.4e-10 scale

    Attributes:
      codes: int8 for first moments, uint8 for second moments; the moment's shape [..., n].
      scale: float32 [..., n / block], the largest absolute value of each block of the last dimension.
    """

    codes: jax.Array
    scale: jax.Array


class CompressedState(NamedTuple):
    """State of `with_compressed_moments`. Its field names are part of the paths in a checkpoint.

    Attributes:
      num_updates: int32, the number of updates so far; seeds the rounding.
      inner: state of the wrapped optimiser, with compressed moments.
    """

    num_updates: jax.Array
    inner: Any


def with_compressed_moments(
    optimizer: optax.GradientTransformation, kind: MomentKind
) -> optax.GradientTransformation:
    """Wraps an optimiser so that it stores its moments, the fields `mu` and `nu` of its state, as `kind`.

    With "int8", moments of fewer than 4,096 values stay float32, and so do moments whose last dimension is
    not a multiple of 32.
    """
    if kind == "float32":
        return optimizer

    def init(params: Any) -> CompressedState:
        count = jnp.zeros([], jnp.int32)
        return CompressedState(count, _compress(optimizer.init(params), kind, count))

    def decompress(leaf: Any) -> Any:
        if _is_moment(leaf):
            return dequantized(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, CompressedState]:
        inner = jax.tree.map(decompress, state.inner, is_leaf=_is_moment)
        updates, inner = optimizer.update(updates, inner, params)
        count = state.num_updates + 1
        return updates, CompressedState(count, _compress(inner, kind, count))

    return optax.GradientTransformation(init, update)


def _is_moment(node: Any) -> bool:
    return isinstance(node, BlockQuantized)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, state: Any, like: Any, *, others: NamedSharding
) -> Any:
    """Shardings of the state of an optimiser.

    Block scales are split like their codes. A dimension with too few scales to split is replicated.

    Args:
      optimizer: the optimiser.
      state: shapes of its state.
      like: NamedShardings of float32 moments, in the structure of the weights.
      others: sharding of counts and constants.
    """
    return optax.tree.map_params(
        optimizer,
        _moment_sharding,
        state,
        like,
        transform_non_params=lambda _: others,
        # `optax.partition` puts a MaskedNode where an optimiser does not handle a weight: there is no moment.
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
    # A dimension that does not divide cannot be split; scales are small enough to be replicated.
    last = None if moment.scale.shape[-1] % shards else last
    places: Any = sharding, NamedSharding(sharding.mesh, P(*entries, last))
    return BlockQuantized(*places)


def _compress(state: Any, kind: MomentKind, count: jax.Array) -> Any:
    # Not a seed of the run: a resumed run must round like the original one.
    key = jax.random.fold_in(jax.random.key(0), count)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)

    def one(number: int, path: Any, leaf: jax.Array) -> Any:
        names = {entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)}
        # optax gives moments these names; counts and constants stay as they are.
        if not names & {"mu", "nu"}:
            return leaf
        leaf_key = jax.random.fold_in(key, number)
        if kind == "bfloat16":
            # Adding 16 random bits to the half that is cut off rounds up as often as it should.
            bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
            bits = bits + jax.random.bits(leaf_key, leaf.shape, jnp.uint16).astype(jnp.uint32)
            kept = (bits >> 16).astype(jnp.uint16)
            return jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
        block = block_of(leaf.shape)
        return quantized(leaf, leaf_key, block=block, signed="mu" in names) if block else leaf

    return tree.unflatten([one(n, path, leaf) for n, (path, leaf) in enumerate(leaves)])


def block_of(shape: tuple[int, ...]) -> int:
    """The number of values along the last dimension that share a scale; 0 if the moment stays float32.

    It depends on the shape alone, so that a checkpoint fits every layout. Block sizes that divide one of 16
    shards are preferred, since a block on one device needs no communication.
    """
    if math.prod(shape) < _FEWEST:
        return 0
    sizes = (n // s for s in (_SHARDS, 1) if (n := shape[-1]) % s == 0)
    return next((block for size in sizes for block in _BLOCKS if size % block == 0), 0)


def quantized(x: jax.Array, key: jax.Array, *, block: int, signed: bool) -> BlockQuantized:
    """Rounds a float32 array [..., n] to 8 bits, up or down at random so that the expected value is x.

    Args:
      x: the moment, at least 0 unless `signed`.
      key: key of the random draws.
      block: values of the last dimension that share a scale; divides n.
      signed: True for a first moment, False for a second moment.
    """
    levels, power, dtype = _SIGNED if signed else _UNSIGNED
    blocks = jnp.abs(x).reshape(*x.shape[:-1], -1, block)
    scale = blocks.max(-1)
    # A block of zeros has scale 0.
    share = (blocks / jnp.where(scale > 0, scale, 1.0)[..., None]).reshape(x.shape)
    below = jnp.floor(levels * share ** (1 / power))
    low, high = (below / levels) ** power, ((below + 1) / levels) ** power
    # The probability follows the distances to the values of the two codes, not to the codes themselves: the
    # codes are not evenly spaced, and the rounding would be biased.
    up = jax.random.uniform(key, x.shape) * (high - low) < share - low
    # At a share of 1 `below` is the last code already.
    codes = jnp.minimum(below + up.astype(below.dtype), levels)
    if not signed:
        # A positive second moment never becomes 0. With a nonzero first moment Adam would divide by epsilon
        # alone and take a huge step.
        codes = jnp.maximum(codes, (share > 0).astype(codes.dtype))
    return BlockQuantized((jnp.sign(x) * codes).astype(dtype), scale)


def dequantized(moment: BlockQuantized) -> jax.Array:
    """The float32 array [..., n] that the codes and scales stand for."""
    codes, scale = moment.codes, moment.scale
    levels, power, _ = _SIGNED if codes.dtype == jnp.int8 else _UNSIGNED
    share = codes.astype(jnp.float32) / levels
    share = jnp.sign(share) * jnp.abs(share) ** power
    blocks = share.reshape(*scale.shape, -1) * scale[..., None]
    return blocks.reshape(codes.shape)
