"""Moves weights between the training and the generation layout (HybridFlow section 5.3).

From the two shardings the compiler derives the communication: an all-gather inside each micro data-parallel
group on the way to generation, and a local slice on the way back. Leaves with the same sharding in both
layouts are shared, not copied.

    training copy (donated)      bucket of leaves      generation copy
    [mlp][mlp][qkv][norm]  -->  all-gather, donate --> [ mlp ][ mlp ][ qkv ][norm]
                           <--   slice, donate    <--

If generation has more tensor shards than training, an axis goes from one dimension to another (`fsdp_gen`).
Then an all-to-all comes before the gather, on the smaller shards.

A weight in 8 bits (`quantized.py`) is rounded in the training layout, so its bytes and scales travel. The
largest entry of a row or column that several devices share is found over all of them, so the values do not
depend on the layout.

Where generation has a list of layers (`rules.lists_layers`), the program that gathers a stack returns its
layers, so no device ever has a stack and its layers. Coming back each layer is cut before they are stacked.

A program holds its inputs until it ends, and gathers into a temporary. One program for all leaves would hold
two copies of the model. So leaves move in buckets, one program each. A leaf larger than a bucket moves in
slices along a dimension that neither layout splits. Large leaves go first, while the generation copy is still
small and leaves room for their temporaries.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.errors import UserError
from jaxrl.mesh.rules import replicated
from jaxrl.quantized import StoredType, entries, stored_types

# Default size of a bucket, as a share of the generation copy.
_BUCKET_SHARE = 1 / 32
# With smaller buckets, the cost of more programs outweighs the memory that they save.
MIN_BUCKET_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Weight:
    """A leaf with its type and sharding in both layouts.

    Attributes:
      shape: global shape in training.
      dtype, train: type and sharding in training.
      stored, generate: type and sharding in generation.
      generate_shape: global shape in generation. There may be fewer layers, the first dimension: absent ones,
        which make stages of a pipeline equal, are cut off.
      listed: whether generation has a list of the entries of the first dimension; shape and sharding are
        those that they had in one array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    train: NamedSharding
    stored: StoredType
    generate: NamedSharding
    generate_shape: tuple[int, ...]
    listed: bool = False

    @property
    def moves(self) -> bool:
        """Whether the layouts differ in type or sharding, so that they cannot share the leaf."""
        same = self.train.is_equivalent_to(self.generate, len(self.shape))
        return self.dtype != self.stored.dtype or not same or self.cuts or self.listed

    @property
    def cuts(self) -> bool:
        """Whether generation has fewer layers."""
        return self.shape != self.generate_shape

    @functools.cached_property
    def exchanged(self) -> NamedSharding:
        """Splits dimensions as generation does, and further by axes that training alone uses.

        Without `fsdp_gen` that is how training splits them. With it XLA would not find this way, and would
        gather whole leaves.
        """
        mesh = self.train.mesh
        if mesh.shape.get("fsdp_gen", 1) == 1:
            return self.train
        before, after = (_axes_by_dim(s, len(self.shape)) for s in (self.train, self.generate))
        used = set(itertools.chain(*after))
        spec = []
        for size, axes, kept in zip(self.shape, before, after, strict=True):
            # The axes of generation are the major ones: undoing the minor ones is then a gather inside each
            # shard.
            both = (*kept, *(axis for axis in axes if axis not in used))
            divides = size % math.prod(mesh.shape[axis] for axis in both) == 0
            spec.append(both if divides else kept)
        return NamedSharding(mesh, P(*spec))

    @property
    def train_bytes(self) -> int:
        """Bytes per device in training."""
        return math.prod(self.train.shard_shape(self.shape)) * self.dtype.itemsize

    @property
    def generate_bytes(self) -> int:
        """Bytes per device in generation."""
        return self.stored.nbytes(self.generate.shard_shape(self.generate_shape))

    @property
    def program_bytes(self) -> int:
        """Bytes per device that moving the leaf takes besides the result: the input and XLA's temporary."""
        return self.train_bytes + self.generate_bytes

    @property
    def whole_dim(self) -> int | None:
        """The first dimension that neither layout splits and whose entries have their own scales."""
        shards = zip(
            self.shape,
            self.train.shard_shape(self.shape),
            self.generate.shard_shape(self.generate_shape),
            strict=True,
        )
        whole = (i for i, sizes in enumerate(shards) if len(set(sizes)) == 1)
        return next((i for i in whole if i not in self.stored.dims), None)

    def abstract(self, *, generate: bool = False) -> Any:
        """Shape, type and sharding in training, or in generation."""
        if generate:
            where: Any = self.generate
            if self.listed:
                one = NamedSharding(self.generate.mesh, P(*self.generate.spec[1:]))
                where = [one] * self.generate_shape[0]
            return self.stored.abstract(self.generate_shape, where)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.train)

    @property
    def generate_shardings(self) -> Any:
        """Shardings of the array or arrays that it is in generation."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract(generate=True))

    def entries(self, stack: Any) -> Any:
        """What it is in generation, from one array, in 8 bits perhaps."""
        return entries(stack) if self.listed else stack


def _axes_by_dim(sharding: NamedSharding, dims: int) -> list[tuple[str, ...]]:
    entries = (*sharding.spec, *(None,) * (dims - len(sharding.spec)))
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in entries]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that one program moves together, or one leaf that it moves slice by slice.

    Attributes:
      indices: positions of the leaves in the tree.
      weights: the leaves.
      num_slices: number of calls that move the only leaf; 1 if leaves move whole.
    """

    indices: tuple[int, ...]
    weights: tuple[Weight, ...]
    num_slices: int = 1

    @property
    def temporary_bytes(self) -> int:
        """Bytes per device that a call takes besides the leaves: gathered data, and the slice it gathers."""
        if self.num_slices == 1:
            return sum(w.generate_bytes for w in self.weights)
        return self.weights[0].program_bytes // self.num_slices

    def gather(self, leaves: list[jax.Array]) -> list[Any]:
        """Moves the leaves to the generation layout; those of layers come as lists."""
        if self.num_slices == 1:
            return self.gather_program(leaves)
        state, layers = self._empty_program(), []
        for _ in range(self.num_slices):
            state = self.gather_program(state, leaves[0])
            if self.of_layers:
                layers += state[0]
                state = [], state[1]
        return [layers] if self.of_layers else [state[0]]

    @property
    def of_layers(self) -> bool:
        """Whether the slices of a leaf are whole entries of its list, so that nothing is filled."""
        return self.num_slices > 1 and self.weights[0].listed and self.weights[0].whole_dim == 0

    @functools.cached_property
    def gather_program(self) -> Any:
        """The compiled `gather`; for a leaf in slices, the program that moves one slice."""
        if self.num_slices > 1:
            # Of a slice of layers only they are returned.
            (weight,) = self.weights
            where, count = self._state_shardings
            if self.of_layers:
                where = weight.generate_shardings[:: self.num_slices]
            return jax.jit(self._gather_slice, donate_argnums=0, out_shardings=(where, count))
        return jax.jit(
            lambda leaves: [
                w.entries(_cast(w, leaf)) for w, leaf in zip(self.weights, leaves, strict=True)
            ],
            out_shardings=[w.generate_shardings for w in self.weights],
        )

    @functools.cached_property
    def slice_program(self) -> Any:
        """The compiled program that moves the leaves back to the training layout."""

        def one(weight: Weight, leaf: Any) -> jax.Array:
            if weight.listed:
                # Cut first: a stack of whole layers would be a second copy of them.
                to = NamedSharding(weight.train.mesh, P(*weight.exchanged.spec[1:]))
                leaf = jnp.stack([jax.lax.with_sharding_constraint(layer, to) for layer in leaf])
            if weight.cuts:
                absent = weight.shape[0] - leaf.shape[0]
                leaf = jnp.pad(leaf, [(0, absent), *[(0, 0)] * (leaf.ndim - 1)])
            return jax.lax.with_sharding_constraint(leaf, weight.exchanged)

        def cut(leaves: list[jax.Array]) -> list[jax.Array]:
            return list(map(one, self.weights, leaves))

        return jax.jit(cut, out_shardings=[w.train for w in self.weights])

    @functools.cached_property
    def _empty_program(self) -> Any:
        (weight,) = self.weights
        shapes = [] if self.of_layers else weight.abstract(generate=True)
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)  # noqa: E731
        return jax.jit(lambda: (zeros(), jnp.int32(0)), out_shardings=self._state_shardings)

    @property
    def _state_shardings(self) -> tuple[Any, NamedSharding]:
        (weight,) = self.weights
        where = [] if self.of_layers else weight.generate_shardings
        return where, replicated(weight.generate.mesh)

    def _gather_slice(self, state: tuple[Any, jax.Array], leaf: jax.Array) -> tuple[Any, jax.Array]:
        """Fills the next slice of (generation leaf, number of slices done); returns it if it is of layers."""
        (weight,) = self.weights
        filled, count = state
        dim = weight.whole_dim
        assert dim is not None, "only a leaf with a whole dimension moves in slices"
        size = weight.shape[dim] // self.num_slices
        start = count * size
        piece = _cast(weight, jax.lax.dynamic_slice_in_dim(leaf, start, size, dim))
        where = weight.stored.shardings(weight.generate_shape, weight.generate)
        piece = weight.entries(jax.lax.with_sharding_constraint(piece, where))
        if self.of_layers:
            return piece, count + 1
        update = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=dim - weight.listed
        )
        # The count lives on the device, so that all slices run the same program without a transfer.
        return jax.tree.map(update, filled, piece), count + 1

    def gather_arguments(self) -> tuple[Any, ...]:
        """Shapes of the arguments of `gather_program`."""
        if self.num_slices == 1:
            return ([w.abstract() for w in self.weights],)
        (weight,) = self.weights
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._state_shardings[1])
        filled = [] if self.of_layers else weight.abstract(generate=True)
        return (filled, count), weight.abstract()

    def slice_arguments(self) -> tuple[Any, ...]:
        """Shapes of the arguments of `slice_program`."""
        return ([w.abstract(generate=True) for w in self.weights],)


def _bucket_of(indices: tuple[int, ...], weights: tuple[Weight, ...], fewest: int) -> Bucket:
    # One slice if no dimension can be sliced.
    if fewest == 1 or (dim := weights[0].whole_dim) is None:
        return Bucket(indices, weights)
    return Bucket(indices, weights, equal_slices(weights[0].shape[dim], fewest))


def _cast(weight: Weight, leaf: jax.Array) -> Any:
    # The constraint to the training sharding makes the cast come before the gather, so the narrower type
    # travels.
    out = weight.stored.cast(leaf)
    for where in (weight.train, weight.exchanged):
        out = jax.lax.with_sharding_constraint(out, weight.stored.shardings(leaf.shape, where))
    if weight.cuts:
        out = jax.tree.map(lambda x: x[: weight.generate_shape[0]], out)
    return out


class Resharding:
    """Moves one set of weights between its two layouts.

    With `donate` the copy of one phase becomes the copy of the other, and no device holds two. Without it the
    training copy stays. It must stay if master weights have a wider type than the generation copy.
    """

    def __init__(
        self,
        shapes: Any,
        train_shardings: Any,
        generate_shardings: Any,
        dtype: Any,
        *,
        generate_shapes: Any = None,
        donate: bool = False,
        bucket_bytes: int | None = None,
    ):
        """Plans the buckets. Programs compile at their first use.

        Args:
          shapes: tree of ShapeDtypeStructs of the weights in training.
          generate_shapes: the same in generation; None for `shapes`.
          train_shardings, generate_shardings: trees of shardings of the same structure; in generation with
            lists of those of each layer (`rules.generation_shardings`), for such weights.
          dtype: type of the weights in generation, or a tree of `StoredType`s.
          donate: consume the weights that each move gets.
          bucket_bytes: limit of a program's memory per device besides its results: inputs and gathered
            temporaries. None is 1/32 of the generation copy, or 64 MiB if that is more.

        Raises:
          UserError: `donate` is set and the two types differ; the narrower could not restore the wider.
        """
        self.donate = donate
        self.weights = weights_of(
            shapes, train_shardings, generate_shardings, dtype, generate_shapes
        )
        self._structure = jax.tree.structure(shapes)
        changed = [w for w in self.weights if w.dtype != w.stored.dtype]
        if donate and changed:
            raise UserError(
                f"training weights of type {changed[0].dtype} cannot be given up for a generation copy of "
                f"type {changed[0].stored.dtype}, which could not restore them; "
                "keep the training copy, or use one type"
            )
        if bucket_bytes is None:
            copy_bytes = sum(w.generate_bytes for w in self.weights)
            bucket_bytes = max(int(copy_bytes * _BUCKET_SHARE), MIN_BUCKET_BYTES)
        self.bucket_bytes = bucket_bytes
        sizes = {i: w.program_bytes for i, w in enumerate(self.weights) if w.moves}
        self.buckets = tuple(
            _bucket_of(indices, tuple(self.weights[i] for i in indices), fewest)
            for indices, fewest in packed_in_buckets(sizes, bucket_bytes)
        )

    def peak_bytes(self, own_bytes: Sequence[int] | None = None) -> int:
        """Peak bytes of weights per device during `to_generate`.

        At most the generation copy and one bucket. For a leaf larger than a bucket: the generation copy, the
        leaf's training shard and one slice, less the part that later buckets have not gathered yet.

        Args:
          own_bytes: memory of each bucket's program besides inputs and results, from the compiler; None for
            an estimate (`Bucket.temporary_bytes`).
        """
        if own_bytes is None:
            own_bytes = [bucket.temporary_bytes for bucket in self.buckets]
        # At the start: shared leaves, and all other leaves in the training layout.
        held = sum(w.train_bytes if w.moves else w.generate_bytes for w in self.weights)
        peak = held
        for bucket, own in zip(self.buckets, own_bytes, strict=True):
            held += sum(w.generate_bytes for w in bucket.weights)
            peak = max(peak, held + own)
            if self.donate:
                held -= sum(w.train_bytes for w in bucket.weights)
        return peak

    def to_generate(self, params: Any) -> Any:
        """Moves the weights to the generation layout; with `donate`, `params` are consumed."""
        leaves = jax.tree.leaves(params)
        for bucket in self.buckets:
            self._replace(leaves, bucket, bucket.gather)
        return jax.tree.unflatten(self._structure, leaves)

    def to_train(self, params: Any) -> Any:
        """Moves the weights back to the training layout, bit for bit; consumes the generation copy.

        Only with `donate`: otherwise the training copy still exists.
        """
        assert self.donate, "the training copy still exists; drop the generation copy instead"
        leaves = self._structure.flatten_up_to(params)
        # In reverse, each bucket meets the memory that it left on the way to generation: the peak is the
        # same.
        for bucket in reversed(self.buckets):
            self._replace(leaves, bucket, bucket.slice_program)
        return jax.tree.unflatten(self._structure, leaves)

    def _replace(self, leaves: list[jax.Array], bucket: Bucket, move: Any) -> None:
        old = [leaves[i] for i in bucket.indices]
        new = move(old)
        for i, leaf in zip(bucket.indices, new, strict=True):
            leaves[i] = leaf
        if self.donate:
            # Delete the inputs here: XLA's donation reuses a buffer only for an output of the same size, and
            # shard sizes differ. Wait first: dispatching ahead would keep several buckets in memory at once.
            jax.block_until_ready(new)
            for leaf in jax.tree.leaves(old):
                leaf.delete()


def weights_of(
    shapes: Any,
    train_shardings: Any,
    generate_shardings: Any,
    dtype: Any,
    generate_shapes: Any = None,
) -> list[Weight]:
    """The leaves of trees of shapes and shardings; arguments as for `Resharding`."""
    after = shapes if generate_shapes is None else generate_shapes
    trees = (shapes, train_shardings, stored_types(dtype, shapes), generate_shardings, after)
    leaves = map(jax.tree.structure(shapes).flatten_up_to, trees)

    weights = []
    for leaf, train, stored, generate, there in zip(*leaves, strict=True):
        if listed := isinstance(generate, list):
            generate = NamedSharding(generate[0].mesh, P(None, *generate[0].spec))
        types = tuple(leaf.shape), jnp.dtype(leaf.dtype), train, stored
        weights.append(Weight(*types, generate, tuple(there.shape), listed))
    return weights


def packed_in_buckets(
    sizes: Mapping[int, int], bucket_bytes: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Packs leaves into buckets, the largest first.

    Args:
      sizes: bytes of each leaf, by its position in the tree.
      bucket_bytes: bytes of a bucket.

    Yields:
      (positions of leaves, number of slices): 1 if they fit together, or more for a leaf that is too large.
    """
    gathered: list[int] = []
    room = bucket_bytes
    for i in sorted(sizes, key=lambda i: -sizes[i]):
        if sizes[i] > bucket_bytes:
            yield (i,), math.ceil(sizes[i] / bucket_bytes)
            continue
        if sizes[i] > room and gathered:
            yield tuple(gathered), 1
            gathered, room = [], bucket_bytes
        gathered.append(i)
        room -= sizes[i]
    if gathered:
        yield tuple(gathered), 1


def equal_slices(length: int, fewest: int) -> int:
    """The smallest number of equal slices of `length` entries, `fewest` or more as far as it goes."""
    return next((n for n in range(fewest, length) if length % n == 0), length)
