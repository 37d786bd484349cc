"""Arrays in pinned host memory: optimiser state, or a role, that waits for its turn."""

from __future__ import annotations

from typing import Any

import jax

from jaxrl.errors import UserError

_HOST = "pinned_host"


def offload(tree: Any) -> Any:
    """Moves every array to pinned memory of its device's host, split as it is; consumes `tree`.

    Raises:
      UserError: the devices have no such memory.
    """
    leaves = jax.tree.leaves(tree)
    for device in {d for leaf in leaves for d in leaf.sharding.addressable_devices}:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if _HOST not in kinds:
            raise UserError(
                f"{device.device_kind} cannot offload arrays: it reaches {', '.join(kinds)} memory, but not "
                f"{_HOST}; keep them on the device"
            )
    shardings = [leaf.sharding.with_memory_kind(_HOST) for leaf in leaves]
    return _move(tree, shardings)


def onload(tree: Any, shardings: Any) -> Any:
    """Moves offloaded arrays to `shardings`, a tree of the same structure; consumes `tree`."""
    return _move(tree, jax.tree.leaves(shardings))


def onloaded_copy(tree: Any, shardings: Any) -> Any:
    """Copies of offloaded arrays at `shardings`; the offloaded ones stay."""
    return jax.device_put(tree, shardings)


def _move(tree: Any, shardings: list[Any]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    moved = jax.block_until_ready(jax.device_put(leaves, shardings))
    for old, new in zip(leaves, moved, strict=True):
        if new is not old:
            old.delete()
    return jax.tree.unflatten(structure, moved)
