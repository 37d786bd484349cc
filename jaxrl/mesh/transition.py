"""Moving weights from the training to the generation layout (HybridFlow section 5.3).

Given the shardings of both, the compiler writes the move: an all-gather inside each micro data-parallel
group. Leaves that lie the same way in both layouts are shared, not copied.
"""

from __future__ import annotations

from typing import Any

import jax

# Leaves are moved in programs of about this size, so that what a program holds besides the two layouts
# stays small against the model.
BUCKET_BYTES = 256 * 2**20


class Transition:
    """The compiled move of one set of weights to its generation layout."""

    def __init__(self, shapes: Any, train_shardings: Any, generate_shardings: Any, dtype: Any):
        """Plans the move.

        Args:
          shapes: tree of ShapeDtypeStructs, the weights in training.
          train_shardings, generate_shardings: trees of shardings of the same structure.
          dtype: type of the weights in generation.
        """
        self._dtype = jax.numpy.dtype(dtype)
        leaves, self._structure = jax.tree.flatten(shapes)
        train, generate = jax.tree.leaves(train_shardings), jax.tree.leaves(generate_shardings)
        moving = [
            i
            for i, leaf in enumerate(leaves)
            if leaf.dtype != self._dtype or not train[i].is_equivalent_to(generate[i], leaf.ndim)
        ]
        self._programs = [
            (bucket, jax.jit(self._cast, out_shardings=[generate[i] for i in bucket]))
            for bucket in _buckets(moving, [leaf.size * leaf.dtype.itemsize for leaf in leaves])
        ]

    def _cast(self, leaves: list[jax.Array]) -> list[jax.Array]:
        return [leaf.astype(self._dtype) for leaf in leaves]

    def to_generate(self, params: Any) -> Any:
        """The weights as generation wants them."""
        leaves = jax.tree.leaves(params)
        for bucket, program in self._programs:
            for i, moved in zip(bucket, program([leaves[i] for i in bucket]), strict=True):
                leaves[i] = moved
        return jax.tree.unflatten(self._structure, leaves)


def _buckets(indices: list[int], nbytes: list[int]) -> list[list[int]]:
    buckets: list[list[int]] = []
    room = 0
    for i in indices:
        if not buckets or nbytes[i] > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(i)
        room -= nbytes[i]
    return buckets
