"""Pipeline parallelism: each stage holds consecutive layers, and microbatches go from stage to stage.

    p stages   m microbatches   n shards of the batch   B rows   T tokens   D width   L layers

    tick            0    1    2    3    4          m = 4, p = 2: the stages are idle for
    stage 0         a    b    c    d    -          (p - 1) / (m + p - 1) of the ticks
    stage 1         -    a    b    c    d

The pipeline is a `shard_map` over the stage axes only. Data, tensor, context and expert axes stay with the
compiler, or with the `shard_map` of attention and experts. Outside the stack rows are split over the stages
too, so that the stages share the work of embedding, unembedding and loss instead of repeating it:

    rows [B/np] --all-to-all, to the first--> [B/n] --ticks, a permute each--> [B/n] --from the last--> [B/np]

Covered: training, where gradients go back through the same permutes, and prefill and decoding with a cache.
The forward pass of all microbatches comes before the backward pass of all (GPipe, arXiv 1811.06965). Memory
for activations therefore grows with the whole batch; rematerialisation reduces it.

Not covered: 1F1B, interleaved stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.errors import UserError
from jaxrl.mesh.rules import Rules, axes_of, context_mesh, shards_of

# (layer, x_BTD, weights, per_layer, per_row, unroll=) -> (x_BTD, (out, sums)), as `scan_layers` has it.
Stack = Callable[..., tuple[jax.Array, tuple[Any, Any]]]


def bubble(stages: int, microbatches: int) -> float:
    """The share of time that a stage is idle: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def microbatches_of(rows: int, rules: Rules, mesh: Mesh | AbstractMesh, requested: int = 0) -> int:
    """The number of microbatches that a pipeline splits `rows` into.

    It is the requested number, by default the number of stages. If the rows of a shard do not divide by it,
    it is their greatest common divisor.
    """
    per_shard = rows // shards_of("batch", rules, mesh)
    # Prefill may have few rows, and one microbatch is slow but correct.
    return math.gcd(per_shard, requested or shards_of("layers", rules, mesh))


def check_microbatches(
    rows: int, rules: Rules, mesh: Mesh | AbstractMesh, requested: int = 0
) -> None:
    """Checks the number of pipeline microbatches of the learning step.

    Args:
      rows: R, rows of one microbatch of the learning step, over the whole mesh.
      rules, mesh: sharding rules of stages and rows, and the mesh.
      requested: `train.pipeline_microbatches`; 0 for the number of stages.

    Raises:
      UserError: the number is not a multiple of the stages, or does not divide the rows of a shard.
    """
    stages, shards = (shards_of(axis, rules, mesh) for axis in ("layers", "batch"))
    if stages == 1:
        return
    num = requested or stages
    if num % stages:
        raise UserError(
            f"train.pipeline_microbatches={num} is no multiple of the {stages} pipeline stages (p of "
            "mesh.train), over which finished microbatches are shared out; "
            f"use {math.ceil(num / stages) * stages}"
        )
    if rows % (shards * num):
        raise UserError(
            f"train.rows={rows} does not divide into {num} pipeline microbatches over {shards} shards of the "
            f"batch; use a multiple of {shards * num}, or change train.pipeline_microbatches or the layout"
        )


def pipeline(
    stack: Stack, mesh: Mesh | AbstractMesh, rules: Rules, *, num_microbatches: int = 0
) -> Stack:
    """Runs `stack` on every stage for its own layers, one microbatch after the other.

    Args:
      stack: a function that runs the layers of one stage.
      mesh, rules: mesh, and sharding rules of layers (the stages), rows and tokens.
      num_microbatches: requested number, see `microbatches_of`.
    """
    sizes = dict(mesh.shape)
    stage_axes = axes_of("layers", rules, sizes)
    if not stage_axes:
        return stack
    batch_axes = axes_of("batch", rules, sizes)
    p, n = (shards_of(axis, rules, mesh) for axis in ("layers", "batch"))

    def on_mesh(layer, x_BTD, weights, per_layer, per_row, *, unroll=1):
        m = microbatches_of(x_BTD.shape[0], rules, mesh, num_microbatches)
        rows = _Rows(n, m, mesh, batch_axes)

        def stage_program(x, weights, per_layer, per_row):
            stage = jax.lax.axis_index(stage_axes)
            x = x[0]

            def tick(received, t):
                # In the bubble a stage computes a clipped microbatch again; the result is never read.
                i = jnp.clip(t - stage, 0, m - 1)
                x_out, (out, sums) = stack(
                    lambda x, w, layer_in, row_in: layer(x, w, rows.pick(layer_in, i), row_in),
                    jnp.where(stage == 0, rows.pick(x, i), received),
                    weights,
                    per_layer,
                    rows.pick(per_row, i),
                    unroll=unroll,
                )
                onward = jax.lax.ppermute(x_out, stage_axes, [(s, s + 1) for s in range(p - 1)])
                return onward, (x_out, out, sums)

            def own(a):
                """Selects the ticks in which this stage had a microbatch: t = stage .. stage + m - 1."""
                return jax.lax.dynamic_slice_in_dim(a, stage, m, axis=0)

            nothing = jnp.zeros_like(rows.pick(x, 0))
            _, (x_out, out, sums) = jax.lax.scan(tick, nothing, jnp.arange(m + p - 1))
            # The ticks of the last stage. On other stages these are garbage, and `from_last` drops them.
            x_out = rows.joined(x_out[p - 1 :], 0)[None]
            out = jax.tree.map(lambda a: rows.joined(own(a), 1), out)
            return x_out, (out, jax.tree.map(lambda a: own(a).sum(0), sums))

        stages = P(stage_axes)
        to_first, from_last = _exchanges(mesh, rules, shared=m % p == 0)
        x_out, (out, sums) = jax.shard_map(
            stage_program,
            mesh=mesh,
            axis_names=frozenset(stage_axes),
            in_specs=(stages, stages, stages, P()),
            out_specs=(stages, (stages, stages)),
            check_vma=False,
        )(
            to_first(rows.apart(x_BTD, 0)),
            weights,
            jax.tree.map(lambda a: rows.apart(a, 1), per_layer),
            jax.tree.map(lambda a: rows.apart(a, 0), per_row),
        )
        out = jax.tree.map(lambda a: rows.together(a, 1), out)
        return rows.together(from_last(x_out), 0), (out, sums)

    return on_mesh


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Views B rows as m microbatches, [n, m, b]: each shard of the batch has a part of every microbatch.

    Example: B = 8 rows, n = 2 shards, m = 2 microbatches. Shard 0 holds rows 0-3, shard 1 rows 4-7.
    Microbatch 0 is rows 0, 1, 4, 5 and microbatch 1 rows 2, 3, 6, 7, so no row moves to another shard.

    Attributes:
      n, m: number of batch shards, number of microbatches.
      mesh, axes: mesh, and the mesh axes of the batch.
    """

    n: int
    m: int
    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    def apart(self, a: jax.Array, dim: int) -> jax.Array:
        """[.., B, ..] -> [.., n, m, b, ..] at `dim`."""
        shape = (*a.shape[:dim], self.n, self.m, -1, *a.shape[dim + 1 :])
        return self._pin(a.reshape(shape), dim)

    def together(self, a: jax.Array, dim: int) -> jax.Array:
        """[.., n, m, b, ..] -> [.., B, ..] at `dim`."""
        return a.reshape(*a.shape[:dim], -1, *a.shape[dim + 3 :])

    def pick(self, tree: Any, i: jax.Array | int) -> Any:
        """Microbatch `i` of a tree of [n, m, b, ...]: [n*b, ...]."""

        def one(a):
            a = jax.lax.dynamic_index_in_dim(a, i, axis=1, keepdims=False)
            return self._pin(a.reshape(-1, *a.shape[2:]), 0)

        return jax.tree.map(one, tree)

    def joined(self, a: jax.Array, dim: int) -> jax.Array:
        """All microbatches [m, .., n*b, ..] -> [.., n, m, b, ..] at `dim`."""
        a = a.reshape(*a.shape[: dim + 1], self.n, -1, *a.shape[dim + 2 :])
        return self._pin(jnp.moveaxis(a, 0, dim + 1), dim)

    def _pin(self, a: jax.Array, dim: int) -> jax.Array:
        """Keeps `dim` split over the batch axes."""
        if not self.axes:
            return a
        # Otherwise the compiler would gather it for the reshape.
        left = (P.UNCONSTRAINED,)
        spec = P(*left * dim, self.axes, *left * (a.ndim - dim - 1))
        return jax.lax.with_sharding_constraint(a, NamedSharding(context_mesh(self.mesh), spec))


def _exchanges(
    mesh: Mesh | AbstractMesh, rules: Rules, *, shared: bool
) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Functions that move rows from all stages to the first one, and from the last one back to all.

    Args:
      mesh, rules: mesh, and sharding rules of stages, rows and tokens.
      shared: True if rows are split over the stages, False if each stage has all of them.

    Returns:
      (to_first, from_last), [n, m, b, T, D] -> [p, n, m, b, T, D] and back. The leading p counts stages. Only
      the entry of the first stage (to_first), or of the last (from_last), has meaning.
    """
    sizes = dict(mesh.shape)
    stage, batch, length = (
        axes_of(axis, rules, sizes) or None for axis in ("layers", "batch", "length")
    )
    p = shards_of("layers", rules, mesh)
    outside = P(batch, stage if shared else None, None, length)
    on_stages = P(stage, batch, None, None, length)

    def to_first(x):
        if not shared:
            return x[None]
        # All rows go to stage 0; the other stages receive zeros.
        pieces = jnp.pad(x[None], [(0, p - 1)] + [(0, 0)] * x.ndim)
        pieces = jax.lax.all_to_all(pieces, stage, split_axis=0, concat_axis=0, tiled=True)
        return jnp.moveaxis(pieces, 0, 1).reshape(1, x.shape[0], -1, *x.shape[2:])

    def from_last(x):
        if not shared:
            # Too few microbatches to share out: a sum in which all other stages are 0 copies the last one's
            # rows.
            last = jax.lax.axis_index(stage) == p - 1
            return jax.lax.psum(jnp.where(last, x[0], jnp.zeros_like(x[0])), stage)
        pieces = jnp.moveaxis(x.reshape(x.shape[1], p, -1, *x.shape[3:]), 1, 0)
        return jax.lax.all_to_all(pieces, stage, split_axis=0, concat_axis=0, tiled=True)[p - 1]

    # Over all axes: in a `shard_map` over the stage axes alone the compiler would gather the arrays instead
    # of exchanging parts of them. No `check_vma=False` here, unlike elsewhere. With the check JAX knows that
    # gradients are replicated over the tensor axes, and does not add them up.
    return (
        jax.shard_map(to_first, mesh=mesh, in_specs=outside, out_specs=on_stages),
        jax.shard_map(from_last, mesh=mesh, in_specs=on_stages, out_specs=outside),
    )
