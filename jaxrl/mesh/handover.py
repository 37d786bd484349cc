"""Hands weights over from one pool's devices to another's, shard to shard; `resharding.py` is for one pool.

    learner  t=4               one program over the devices of both pools        sampler  t=2, 2 replicas
    0 1 2 3   round 1:  0 -> 4   1 -> 6   2 -> 5   3 -> 7                        4: 01  5: 23
              round 2:  0 -> 6   1 -> 4   2 -> 7   3 -> 5                        6: 01  7: 23

Both shardings cut an array into equal shards. A cell is the largest block of which every shard, on either
side, has whole ones. Each target device receives each cell of its shard once, from one of the devices that
hold it. All send about as many, and cells stay on their host as far as that allows. In a round a device sends
at most one cell and receives at most one, so a round is one collective-permute. Nothing is whole where it was
not.

All devices run one program, so all have inputs and outputs of the same shape: target devices get an empty
input, and source devices drop their output. Therefore large leaves travel in slices of their cells:

    cut, on the source devices   -->   move, on all devices   -->   write, on the target devices
    slice, cast, quantise              collective-permutes          into the leaf, in place

`jax.device_put` does not do this. Within a process it gathers an array on the host if the shards differ (jax
0.10.2, 0.12.0); between processes it refuses other shards, and pools that have devices of the same processes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.devices import platform_of
from jaxrl.mesh.hosts import fetch
from jaxrl.mesh.resharding import (
    MIN_BUCKET_BYTES,
    Weight,
    equal_slices,
    packed_in_buckets,
    weights_of,
)
from jaxrl.mesh.rules import replicated
from jaxrl.quantized import stored_in_place

# Default size of a bucket, as a share of the weights of a target device. The temporaries of a program are up
# to twice as large.
_BUCKET_SHARE = 1 / 128
# The only axis of a mesh over the devices of both pools.
_AXIS = "device"
_ON_EACH = P(_AXIS)


# The place of a cell in an array or in a shard, in cells.
_Place: TypeAlias = tuple[int, ...]
_Node: TypeAlias = tuple[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """The way of an array from one sharding to another one.

    Equal arguments of `route_of` give the same object.

    Attributes:
      mesh: devices of both sides.
      source_cells, target_cells: number of cells in a shard, by dimension.
      rounds: (sender, receiver) positions among the devices, by round.
      read, write: place of the cell in the shard of a sender, or of a receiver: int32 [rounds, devices,
        dimensions].
    """

    mesh: Mesh
    source_cells: tuple[int, ...]
    target_cells: tuple[int, ...]
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    read: np.ndarray
    write: np.ndarray

    def move(self, shard: jax.Array) -> jax.Array:
        """From the source shard of a device to its target shard; inside a `shard_map` over the mesh."""
        me, dtype = jax.lax.axis_index(_AXIS), shard.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            # As bits: XLA's CPU backend would send bfloat16 as float32.
            shard = jax.lax.bitcast_convert_type(shard, jnp.dtype(f"uint{8 * dtype.itemsize}"))
        cell = tuple(n // k for n, k in zip(shard.shape, self.source_cells, strict=True))
        shape = tuple(n * k for n, k in zip(cell, self.target_cells, strict=True))
        moved = jnp.zeros(shape, shard.dtype)
        targets = {receiver for pairs in self.rounds for _, receiver in pairs}
        for pairs, read, write in zip(self.rounds, self.read, self.write, strict=True):
            own = jax.lax.dynamic_slice(
                shard, jnp.asarray(read * np.array(cell, np.int32))[me], cell
            )
            new = jax.lax.ppermute(own, _AXIS, pairs)
            start = jnp.asarray(write * np.array(cell, np.int32))[me]
            if len(pairs) < len(targets):
                # Some target devices receive nothing in this round.
                receives = np.isin(np.arange(self.mesh.size), [receiver for _, receiver in pairs])
                old = jax.lax.dynamic_slice(moved, start, cell)
                new = jnp.where(jnp.asarray(receives)[me], new, old)
            moved = jax.lax.dynamic_update_slice(moved, new, start)
        return jax.lax.bitcast_convert_type(moved, dtype)


# Routes are static arguments of `move_program` and compared by identity: another object would compile anew.
@functools.cache
def route_of(
    shape: tuple[int, ...],
    source: NamedSharding,
    target: NamedSharding,
    kept: tuple[int, ...] | None = None,
) -> Route:
    """The way of an array of this shape, with at least one dimension, between two shardings.

    `kept` is the shape of the part that the target has, from the first entries on; None for all.
    """
    mesh = union_of(source.mesh, target.mesh)
    devices = {device: i for i, device in enumerate(mesh.devices.flat)}
    ends = ((source, shape), (target, kept or shape))
    shards = np.array([side.shard_shape(whole) for side, whole in ends])
    # Both sizes divide those of the arrays, so cells of one side are cells of the other.
    cell = np.maximum(np.gcd(*shards), 1)
    source_cells, target_cells = (tuple(counts) for counts in (shards // cell).tolist())

    def cells_of(
        side: NamedSharding, whole: tuple[int, ...], counts: _Place
    ) -> Iterator[tuple[int, _Place, _Place]]:
        """(device, place in its shard, place in the array) of every cell of every shard."""
        for device, index in side.devices_indices_map(whole).items():
            first = np.array([part.start or 0 for part in index]) // cell
            for inside in itertools.product(*map(range, counts)):
                yield devices[device], inside, tuple((first + inside).tolist())

    holders = collections.defaultdict(list)
    for device, inside, place in cells_of(*ends[0], source_cells):
        holders[place].append((device, inside))
    needed = [
        (device, inside, holders[place])
        for device, inside, place in cells_of(*ends[1], target_cells)
    ]
    edges = _senders(needed, [device.process_index for device in devices])
    numbers = _rounds([edge[:2] for edge in edges])
    rounds = [[] for _ in range(max(numbers) + 1)]
    read, write = np.zeros((2, len(rounds), mesh.size, len(shape)), np.int32)
    for (sender, receiver, from_, to), number in zip(edges, numbers, strict=True):
        rounds[number].append((sender, receiver))
        read[number, sender], write[number, receiver] = from_, to
    return Route(mesh, source_cells, target_cells, tuple(map(tuple, rounds)), read, write)


def _senders(
    needed: Sequence[tuple[int, _Place, list[tuple[int, _Place]]]], process: Sequence[int]
) -> list[tuple[int, int, _Place, _Place]]:
    """Chooses the sender of each cell: the receiver itself, or one of its process if all send equally much.

    Args:
      needed: (receiver, place of the cell in its shard, devices that hold it with the place in their shards).
      process: process of each device.

    Returns:
      (sender, receiver, place in the sender's shard, place in the receiver's).
    """
    num_sources = len({place for *_, holders in needed for place, _ in holders})
    most = math.ceil(len(needed) / num_sources)
    sent = collections.Counter()
    edges = []

    def is_local(receiver: int, holders: Sequence[tuple[int, _Place]]) -> bool:
        return any(process[place] == process[receiver] for place, _ in holders)

    # Those first that have a choice of staying on their host.
    for receiver, write, holders in sorted(needed, key=lambda n: not is_local(n[0], n[2])):
        sender, read = min(
            holders,
            # The receiver itself costs nothing. Then evenly, since the busiest sender sets the number of
            # rounds; then on the same host, over the faster links.
            key=lambda h: (
                h[0] != receiver,
                sent[h[0]] >= most,
                process[h[0]] != process[receiver],
                sent[h[0]],
            ),
        )
        sent[sender] += 1
        edges.append((sender, receiver, read, write))
    return edges


def _rounds(edges: Sequence[tuple[int, int]]) -> list[int]:
    """The round of each (sender, receiver): no process sends or receives twice in a round.

    These are as few rounds as the busiest device has edges (König's theorem). An edge takes the first round
    that is free at its sender; if another one has it at the receiver, edges swap two rounds along a path.
    """
    rounds: list[int] = []
    taken: dict[_Node, dict[int, int]] = collections.defaultdict(dict)  # node -> round -> edge

    def nodes(edge: int) -> tuple[_Node, _Node]:
        return ("sends", edges[edge][0]), ("receives", edges[edge][1])

    for edge in range(len(edges)):
        sender, node = nodes(edge)
        free, other = (
            next(r for r in itertools.count() if r not in taken[n]) for n in (sender, node)
        )
        path, wanted = [], free
        while (found := taken[node].get(wanted)) is not None:
            path.append(found)
            node = next(n for n in nodes(found) if n != node)
            wanted = free + other - wanted
        for found in path:
            for n in nodes(found):
                del taken[n][rounds[found]]
        rounds.append(free)
        for found in path:
            rounds[found] = free + other - rounds[found]
        for found in (*path, edge):
            for n in nodes(found):
                taken[n][rounds[found]] = found
    return rounds


@functools.lru_cache(maxsize=64)
def union_of(*meshes: Mesh) -> Mesh:
    """A mesh with one axis over the devices of all, by id, as XLA's GPU backend wants them."""
    devices = {device for mesh in meshes for device in mesh.devices.flat}
    return Mesh(np.array(sorted(devices, key=lambda device: device.id)), (_AXIS,))


@functools.partial(jax.jit, static_argnums=0)
def move_program(routes: tuple[Route, ...], shards: list[jax.Array]) -> list[jax.Array]:
    """From source shards to target shards, both stacked along the first dimension over all devices."""

    def move(shards: list[jax.Array]) -> list[jax.Array]:
        return [route.move(shard) for route, shard in zip(routes, shards, strict=True)]

    mesh = routes[0].mesh
    return jax.shard_map(move, mesh=mesh, in_specs=_ON_EACH, out_specs=_ON_EACH, check_vma=False)(
        shards
    )


def _stacked(shard: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    return num_devices * shard[0], *shard[1:]


@functools.cache
def _empty_on(mesh: Mesh, shard: tuple[int, ...], dtype: np.dtype) -> Any:
    """A program that gives every device of a mesh a shard of zeros."""
    shape, where = _stacked(shard, mesh.size), NamedSharding(mesh, _ON_EACH)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=where)


def move_arrays(
    arrays: Sequence[jax.Array],
    targets: Sequence[NamedSharding],
    kept: Sequence[tuple[int, ...]] | None = None,
) -> list[jax.Array]:
    """Moves arrays to other devices in one program, without waiting.

    Args:
      arrays: arrays on one mesh, with at least one dimension each.
      targets: their new shardings, on one mesh.
      kept: as for `route_of`, of each.
    """
    kept = kept or [x.shape for x in arrays]
    source: Any = arrays[0].sharding
    mesh = union_of(source.mesh, targets[0].mesh)
    where = NamedSharding(mesh, _ON_EACH)
    rest = np.array([d for d in mesh.devices.flat if d not in source.device_set])
    routes, stacked = [], []
    for x, *to in zip(arrays, targets, kept, strict=True):
        routes.append(route_of(x.shape, x.sharding, *to))
        shard = x.sharding.shard_shape(x.shape)
        parts = [part.data for part in x.addressable_shards]
        # Every device of the program needs an input of the same shape, also those that only receive.
        if len(rest):
            empty = _empty_on(Mesh(rest, (_AXIS,)), shard, x.dtype)()
            parts += [part.data for part in empty.addressable_shards]
        stacked.append(_of_parts(_stacked(shard, mesh.size), where, parts, x.dtype))
    moved = []
    for y, target, shape in zip(move_program(tuple(routes), stacked), targets, kept, strict=True):
        parts = [part.data for part in y.addressable_shards if part.device in target.device_set]
        moved.append(_of_parts(shape, target, parts, y.dtype))
    return moved


def _of_parts(shape: Any, sharding: NamedSharding, parts: list[jax.Array], dtype: Any) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """Moves an array to a sharding, on this mesh or another one.

    A host array goes to the devices of this process without communication, because every process holds what
    goes to its own devices. A device array is sent directly, without waiting. If several processes move an
    array between two meshes of different devices, it moves by `move_arrays`; then it is collective.

    Args:
      value: a host array, of which each process needs only the part of its devices, or a jax.Array.
      sharding: the new sharding.
    """
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        local = value.is_fully_addressable and sharding.is_fully_addressable
        if local or value.sharding.device_set == sharding.device_set:
            return jax.device_put(value, sharding)
        if value.ndim:
            return move_arrays([value], [sharding])[0]
        # A scalar has no dimension that a route could cut. It is small enough to go through the hosts.
        value = fetch(value)
    elif sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    value = np.asarray(value)
    # The type for processes that have none of the devices.
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that one program moves together, or one leaf that it moves slice by slice.

    Attributes:
      indices: positions of the leaves in the tree.
      weights: the leaves; of a leaf in slices one slice.
      num_slices: number of calls that move the only leaf; 1 if leaves move whole.
      dim: dimension whose cells are cut into slices.
    """

    indices: tuple[int, ...]
    weights: tuple[Weight, ...]
    num_slices: int = 1
    dim: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes per device of a program's input and output."""
        return sum(map(_program_bytes, self.weights))

    @property
    def routes(self) -> tuple[Route, ...]:
        return tuple(
            route_of(x.shape, x.sharding, to.sharding, to.shape)
            for x, to in zip(*self._ends, strict=True)
        )

    def move_arguments(self) -> tuple[Any, ...]:
        """Arguments of `move_program`, with shapes in place of arrays."""
        routes, where = self.routes, NamedSharding(self.routes[0].mesh, _ON_EACH)
        shapes = [
            jax.ShapeDtypeStruct(
                _stacked(x.sharding.shard_shape(x.shape), where.mesh.size), x.dtype, sharding=where
            )
            for x in self._ends[0]
        ]
        return routes, shapes

    @functools.cached_property
    def _ends(self) -> tuple[list[Any], list[Any]]:
        # The arrays that travel, and what they are there.
        before = [w.stored.abstract(w.shape, w.train) for w in self.weights]
        after = [w.stored.abstract(w.generate_shape, w.generate) for w in self.weights]
        return jax.tree.leaves(before), jax.tree.leaves(after)

    def move(self, leaves: list[jax.Array]) -> list[Any]:
        """Moves the leaves, and waits until they are there."""
        if self.num_slices == 1:
            stored = [
                stored_in_place(w.stored, x) for w, x in zip(self.weights, leaves, strict=True)
            ]
            return self.entries_program(self._sent(stored))
        (leaf,) = leaves
        count, state = jnp.zeros((), jnp.int32), self._empty_program()
        for _ in range(self.num_slices):
            piece, count = self.cut_program(leaf, count)
            state = self.write_program(state, self._sent(piece))
        return [state[0]]

    @functools.cached_property
    def entries_program(self) -> Any:
        """The compiled program from what has arrived to what generation has: lists of layers."""
        if not any(w.listed for w in self.weights):
            return lambda arrived: arrived
        return jax.jit(
            lambda arrived: [w.entries(x) for w, x in zip(self.weights, arrived, strict=True)],
            out_shardings=[w.generate_shardings for w in self.weights],
        )

    def _sent(self, arrays: Any) -> Any:
        flat, structure = jax.tree.flatten(arrays)
        # Otherwise several buckets would be in memory at once.
        after = self._ends[1]
        moved = move_arrays(flat, [x.sharding for x in after], [x.shape for x in after])
        jax.block_until_ready(moved)
        return jax.tree.unflatten(structure, moved)

    @functools.cached_property
    def cut_program(self) -> Any:
        """The compiled program (leaf, number of slices cut) -> (slice as it is stored, number + 1)."""
        (piece,) = self.weights

        def cut(leaf: jax.Array, count: jax.Array) -> tuple[Any, jax.Array]:
            cells = leaf.reshape(self._sliced(leaf.shape))
            own = jax.lax.dynamic_index_in_dim(cells, count, self.dim + 1, keepdims=False)
            return piece.stored.cast(own.reshape(piece.shape)), count + 1

        where = piece.stored.shardings(piece.shape, piece.train)
        return jax.jit(cut, out_shardings=(where, replicated(piece.train.mesh)))

    @functools.cached_property
    def write_program(self) -> Any:
        """The compiled program ((leaf, number of slices in it), slice) -> (leaf, number + 1), in place."""

        def write(state: tuple[Any, jax.Array], piece: Any) -> tuple[Any, jax.Array]:
            filled, count = state
            listed = self.weights[0].listed

            def one(old: jax.Array, new: jax.Array) -> jax.Array:
                if listed:
                    old, new = old[None], new[None]
                shape = self._sliced(old.shape)
                new = new.reshape(*shape[: self.dim + 1], 1, *shape[self.dim + 2 :])
                cells = old.reshape(shape)
                cells = jax.lax.dynamic_update_slice_in_dim(cells, new, count, self.dim + 1)
                return cells.reshape(old.shape[listed:])

            return jax.tree.map(one, filled, self.weights[0].entries(piece)), count + 1

        return jax.jit(write, donate_argnums=0, out_shardings=self._state_shardings)

    def _sliced(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a leaf, with `dim` in three parts: cells, slices, and what a slice has of a cell."""
        (piece,) = self.weights
        cells = shape[self.dim] // self.num_slices // _cell_of(piece)[self.dim]
        part = _cell_of(piece)[self.dim]
        return *shape[: self.dim], cells, self.num_slices, part, *shape[self.dim + 1 :]

    @functools.cached_property
    def _empty_program(self) -> Any:
        (piece,) = self.weights
        shape = list(piece.generate_shape)
        shape[self.dim] *= self.num_slices
        whole = dataclasses.replace(piece, generate_shape=tuple(shape))
        leaf = whole.abstract(generate=True)
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), leaf)  # noqa: E731
        return jax.jit(lambda: (zeros(), jnp.int32(0)), out_shardings=self._state_shardings)

    @property
    def _state_shardings(self) -> tuple[Any, NamedSharding]:
        (piece,) = self.weights
        return piece.generate_shardings, replicated(piece.generate.mesh)


def _cell_of(weight: Weight) -> tuple[int, ...]:
    after = weight.generate.shard_shape(weight.generate_shape)
    return tuple(map(math.gcd, weight.train.shard_shape(weight.shape), after))


def _program_bytes(weight: Weight) -> int:
    """Bytes per device of the input and the output of a program that moves the leaf."""
    return weight.stored.nbytes(weight.train.shard_shape(weight.shape)) + weight.generate_bytes


def _bucket_of(indices: tuple[int, ...], weights: Sequence[Weight], fewest: int) -> Bucket:
    if fewest == 1:
        return Bucket(indices, tuple(weights))
    (weight,), cell = weights, _cell_of(weights[0])
    # Entries that share a scale stay together. The first dimension: contiguous in memory. Slices of layers
    # would be other ones if some are cut off, and each would fill other arrays of a list.
    first = weight.cuts or weight.listed
    free = [d for d in range(first, len(cell)) if d not in weight.stored.dims]
    dim = next((d for d in free if cell[d] >= fewest), max(free, key=lambda d: cell[d]))
    num_slices = equal_slices(cell[dim], fewest)
    before, after = list(weight.shape), list(weight.generate_shape)
    before[dim], after[dim] = before[dim] // num_slices, after[dim] // num_slices
    piece = dataclasses.replace(weight, shape=tuple(before), generate_shape=tuple(after))
    return Bucket(indices, (piece,), num_slices, dim)


class Handover:
    """Sends weights from one mesh to another with different devices; see `Resharding` for the same devices.

    The training copy stays. A device holds its weights and one bucket.

    Attributes:
      donate: always False: the training copy stays. Has the meaning of `Resharding.donate`.
      weights: the leaves.
      buckets: leaves in the order in which they travel.
    """

    donate = False

    def __init__(
        self,
        shapes: Any,
        train_shardings: Any,
        generate_shardings: Any,
        dtype: Any,
        *,
        generate_shapes: Any = None,
        bucket_bytes: int | None = None,
    ):
        """Plans the buckets. Programs compile at their first use.

        Args:
          shapes, train_shardings, generate_shardings, dtype, generate_shapes: as for `Resharding`.
          bucket_bytes: limit of a program's inputs and outputs per device. None is 1/128 of the weights of a
            target device, or 64 MiB if that is more.
        """
        self.weights = weights_of(
            shapes, train_shardings, generate_shardings, dtype, generate_shapes
        )
        self._structure = jax.tree.structure(shapes)
        if bucket_bytes is None:
            bucket_bytes = max(int(self.received_bytes * _BUCKET_SHARE), MIN_BUCKET_BYTES)
        sizes = {i: _program_bytes(weight) for i, weight in enumerate(self.weights)}
        self.buckets = tuple(
            _bucket_of(indices, [self.weights[i] for i in indices], fewest)
            for indices, fewest in packed_in_buckets(sizes, bucket_bytes)
        )

    @property
    def received_bytes(self) -> int:
        """Bytes that each target device receives, if it held none: its shards of all leaves, with scales."""
        return sum(weight.generate_bytes for weight in self.weights)

    def to_generate(self, params: Any) -> Any:
        """The weights on the other mesh."""
        target = self.weights[0].generate
        if jax.process_count() > 1 or platform_of(target.mesh) != "cpu":
            return self.by_shards(params)
        # Simulated devices of one process have one memory, where a whole leaf costs nothing: 4 to 6 times
        # faster than the programs.
        moved = []
        for w, leaf in zip(self.weights, jax.tree.leaves(params), strict=True):
            here = stored_in_place(w.stored, leaf)
            if w.cuts:
                here = jax.tree.map(lambda x, w=w: np.asarray(x)[: w.generate_shape[0]], here)
            moved.append(jax.tree.map(put, w.entries(here), w.generate_shardings))
        return jax.tree.unflatten(self._structure, moved)

    def by_shards(self, params: Any) -> Any:
        """The weights on the other mesh, by the programs of the buckets."""
        leaves = jax.tree.leaves(params)
        moved: list[Any] = [None] * len(leaves)
        for bucket in self.buckets:
            new = bucket.move([leaves[i] for i in bucket.indices])
            for i, leaf in zip(bucket.indices, new, strict=True):
                moved[i] = leaf
        return jax.tree.unflatten(self._structure, moved)
