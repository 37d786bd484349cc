"""Moving weights between the training and the generation layout (HybridFlow section 5.3).

Given the shardings of both, the compiler writes the move: an all-gather inside each micro data-parallel
group on the way to generation, a local slice on the way back. Leaves that lie the same way in both
layouts are shared, not copied.

    training copy (given up)     bucket of leaves      generation copy
    [mlp][mlp][qkv][norm]  -->  all-gather, donate --> [ mlp ][ mlp ][ qkv ][norm]
                           <--   slice, donate    <--

A program holds its inputs until it ends and gathers into a temporary, so one program for all leaves would
hold two copies. Leaves therefore move in buckets, and a leaf larger than a bucket in slices along a
dimension that neither layout splits. Large leaves go first: what later ones have yet to gather is the
room that their own training shards take.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.errors import UserError
from jaxrl.mesh.rules import replicated

# Share of the generation copy that one program may take for itself, if nobody says otherwise.
_BUCKET_SHARE = 1 / 32
# Below this, more programs cost more than the memory they save.
_MIN_BUCKET_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Weight:
    """One leaf and where it lies.

    Attributes:
      shape: over all devices.
      dtype, train: type and sharding in training.
      generate_dtype, generate: the same in generation.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    train: NamedSharding
    generate_dtype: np.dtype
    generate: NamedSharding

    @property
    def moves(self) -> bool:
        """The two layouts cannot share it."""
        same = self.train.is_equivalent_to(self.generate, len(self.shape))
        return self.dtype != self.generate_dtype or not same

    @property
    def train_bytes(self) -> int:
        """Bytes on a device in training."""
        return math.prod(self.train.shard_shape(self.shape)) * self.dtype.itemsize

    @property
    def generate_bytes(self) -> int:
        """Bytes on a device in generation."""
        return math.prod(self.generate.shard_shape(self.shape)) * self.generate_dtype.itemsize

    @property
    def program_bytes(self) -> int:
        """Bytes on a device that a program moving it takes besides its result: XLA gathers into a
        temporary."""
        return self.train_bytes + self.generate_bytes

    @property
    def whole_dim(self) -> int | None:
        """The first dimension that neither layout splits."""
        shards = zip(
            self.shape,
            self.train.shard_shape(self.shape),
            self.generate.shard_shape(self.shape),
            strict=True,
        )
        return next((i for i, sizes in enumerate(shards) if len(set(sizes)) == 1), None)

    def abstract(self, *, generate: bool = False) -> jax.ShapeDtypeStruct:
        """Its shape, type and sharding in training, or in generation."""
        if generate:
            return jax.ShapeDtypeStruct(self.shape, self.generate_dtype, sharding=self.generate)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.train)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that one program moves, or one leaf that it moves slice by slice.

    Attributes:
      indices: of the leaves in the tree.
      weights: the leaves.
      num_slices: 1, or in how many calls the only leaf moves.
    """

    indices: tuple[int, ...]
    weights: tuple[Weight, ...]
    num_slices: int = 1

    @property
    def temporary_bytes(self) -> int:
        """Bytes that a call takes besides the leaves: what it gathers, and a slice to gather from."""
        if self.num_slices == 1:
            return sum(w.generate_bytes for w in self.weights)
        return self.weights[0].program_bytes // self.num_slices

    def gather(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The leaves in the generation layout."""
        if self.num_slices == 1:
            return self.gather_program(leaves)
        state = self._empty_program()
        for _ in range(self.num_slices):
            state = self.gather_program(state, leaves[0])
        return [state[0]]

    def slice(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The leaves in the training layout again."""
        return self.slice_program(leaves)

    @functools.cached_property
    def gather_program(self) -> Any:
        """The compiled `gather`; of a leaf in slices, of one slice."""
        if self.num_slices > 1:
            return jax.jit(
                self._gather_slice, donate_argnums=0, out_shardings=self._state_shardings
            )
        return jax.jit(
            lambda leaves: [_cast(w, leaf) for w, leaf in zip(self.weights, leaves, strict=True)],
            out_shardings=[w.generate for w in self.weights],
        )

    @functools.cached_property
    def slice_program(self) -> Any:
        """The compiled `slice`."""
        return jax.jit(lambda leaves: leaves, out_shardings=[w.train for w in self.weights])

    @functools.cached_property
    def _empty_program(self) -> Any:
        (weight,) = self.weights
        return jax.jit(
            lambda: (jnp.zeros(weight.shape, weight.generate_dtype), jnp.int32(0)),
            out_shardings=self._state_shardings,
        )

    @property
    def _state_shardings(self) -> tuple[NamedSharding, NamedSharding]:
        (weight,) = self.weights
        return weight.generate, replicated(weight.generate.mesh)

    def _gather_slice(
        self, state: tuple[jax.Array, jax.Array], leaf: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Fills the next slice of (generation leaf, slices done); counted on the device."""
        (weight,) = self.weights
        filled, count = state
        dim = weight.whole_dim
        assert dim is not None, "only a leaf with a whole dimension moves in slices"
        size = weight.shape[dim] // self.num_slices
        start = count * size
        piece = _cast(weight, jax.lax.dynamic_slice_in_dim(leaf, start, size, dim))
        piece = jax.lax.with_sharding_constraint(piece, weight.generate)
        return jax.lax.dynamic_update_slice_in_dim(filled, piece, start, dim), count + 1

    def gather_arguments(self) -> tuple[Any, ...]:
        """What `gather_program` takes, as shapes."""
        if self.num_slices == 1:
            return ([w.abstract() for w in self.weights],)
        (weight,) = self.weights
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._state_shardings[1])
        return (weight.abstract(generate=True), count), weight.abstract()

    def slice_arguments(self) -> tuple[Any, ...]:
        """What `slice_program` takes, as shapes."""
        return ([w.abstract(generate=True) for w in self.weights],)


def _cast(weight: Weight, leaf: jax.Array) -> jax.Array:
    # Pinned to where it came from, so that the narrower of the two types travels.
    leaf = leaf.astype(weight.generate_dtype)
    return jax.lax.with_sharding_constraint(leaf, weight.train)


class Resharding:
    """The compiled moves of one set of weights between its two layouts.

    With `donate` each phase gives its copy to the other: no device ever holds two. Without it the training
    copy stays, as it must where it holds master weights of a wider type than generation samples with.
    """

    def __init__(
        self,
        shapes: Any,
        train_shardings: Any,
        generate_shardings: Any,
        dtype: Any,
        *,
        donate: bool = False,
        bucket_bytes: int | None = None,
    ):
        """Plans the moves; programs compile when they are first used.

        Args:
          shapes: tree of ShapeDtypeStructs, the weights in training.
          train_shardings, generate_shardings: trees of shardings of the same structure.
          dtype: type of the weights in generation.
          donate: each move consumes the weights it is given.
          bucket_bytes: what a program may take on a device, besides its results: its inputs and as much
            again as it gathers. By default a thirty-second of the generation copy, or 64 MiB if that is
            more.

        Raises:
          UserError: `donate` with two types, of which the narrower cannot restore the wider.
        """
        self.donate = donate
        self.weights = weights_of(shapes, train_shardings, generate_shardings, dtype)
        self._structure = jax.tree.structure(shapes)
        changed = [w for w in self.weights if w.dtype != w.generate_dtype]
        if donate and changed:
            raise UserError(
                f"training weights of type {changed[0].dtype} cannot be given up for a generation copy of "
                f"type {changed[0].generate_dtype}, which could not restore them; "
                "keep the training copy, or use one type"
            )
        if bucket_bytes is None:
            copy_bytes = sum(w.generate_bytes for w in self.weights)
            bucket_bytes = max(int(copy_bytes * _BUCKET_SHARE), _MIN_BUCKET_BYTES)
        self.bucket_bytes = bucket_bytes
        self.buckets = tuple(_buckets(self.weights, bucket_bytes))

    def peak_bytes(self, own_bytes: Sequence[int] | None = None) -> int:
        """Bytes of weights on a device at the worst moment of `to_generate`.

        That is the generation copy and at most one bucket; for a leaf larger than a bucket, its training
        shard and a slice, less what later buckets have yet to gather.

        Args:
          own_bytes: what each bucket's program takes besides inputs and results, as the compiler says; by
            default what XLA needs to gather into a temporary.
        """
        if own_bytes is None:
            own_bytes = [bucket.temporary_bytes for bucket in self.buckets]
        # Everything shared, and everything still in the training layout.
        held = sum(w.train_bytes if w.moves else w.generate_bytes for w in self.weights)
        peak = held
        for bucket, own in zip(self.buckets, own_bytes, strict=True):
            held += sum(w.generate_bytes for w in bucket.weights)
            peak = max(peak, held + own)
            if self.donate:
                held -= sum(w.train_bytes for w in bucket.weights)
        return peak

    def to_generate(self, params: Any) -> Any:
        """The weights as generation wants them; with `donate`, `params` are consumed."""
        leaves = jax.tree.leaves(params)
        for bucket in self.buckets:
            self._replace(leaves, bucket, bucket.gather)
        return jax.tree.unflatten(self._structure, leaves)

    def to_train(self, params: Any) -> Any:
        """The weights as training wants them, bit for bit; consumes the generation copy.

        Only with `donate`: otherwise the training copy was never given up.
        """
        assert self.donate, "the training copy still exists; drop the generation copy instead"
        leaves = jax.tree.leaves(params)
        for bucket in reversed(self.buckets):
            self._replace(leaves, bucket, bucket.slice)
        return jax.tree.unflatten(self._structure, leaves)

    def _replace(self, leaves: list[jax.Array], bucket: Bucket, move: Any) -> None:
        old = [leaves[i] for i in bucket.indices]
        new = move(old)
        for i, leaf in zip(bucket.indices, new, strict=True):
            leaves[i] = leaf
        if self.donate:
            # The outputs have other shard sizes than the inputs, so XLA's own donation finds nothing to
            # reuse. Running ahead of the device would keep several buckets in memory at once.
            jax.block_until_ready(new)
            for leaf in old:
                leaf.delete()


def weights_of(
    shapes: Any, train_shardings: Any, generate_shardings: Any, dtype: Any
) -> list[Weight]:
    """The leaves of trees of shapes and shardings; `dtype` is that of generation."""
    leaves = (jax.tree.leaves(tree) for tree in (shapes, train_shardings, generate_shardings))
    return [
        Weight(tuple(leaf.shape), jnp.dtype(leaf.dtype), train, jnp.dtype(dtype), generate)
        for leaf, train, generate in zip(*leaves, strict=True)
    ]


def _buckets(weights: list[Weight], bucket_bytes: int) -> Iterator[Bucket]:
    """Leaves that move, the largest first, in buckets of at most `bucket_bytes` where possible."""
    moving = [i for i, weight in enumerate(weights) if weight.moves]
    moving.sort(key=lambda i: -weights[i].program_bytes)
    gathered: list[int] = []
    room = bucket_bytes
    for i in moving:
        size = weights[i].program_bytes
        if size > bucket_bytes:
            yield Bucket((i,), (weights[i],), _num_slices(weights[i], bucket_bytes))
            continue
        if size > room and gathered:
            yield Bucket(tuple(gathered), tuple(weights[j] for j in gathered))
            gathered, room = [], bucket_bytes
        gathered.append(i)
        room -= size
    if gathered:
        yield Bucket(tuple(gathered), tuple(weights[j] for j in gathered))


def _num_slices(weight: Weight, bucket_bytes: int) -> int:
    """The fewest equal slices that fit into a bucket; 1 if no dimension can be sliced."""
    if weight.whole_dim is None:
        return 1
    size = weight.shape[weight.whole_dim]
    fewest = math.ceil(weight.program_bytes / bucket_bytes)
    return next((n for n in range(fewest, size) if size % n == 0), size)
