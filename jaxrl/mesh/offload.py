"""Moves arrays to pinned host memory and back, between programs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxrl.errors import UserError

_HOST = "pinned_host"


def offload(tree: Any) -> Any:
    """Moves every array to pinned memory of its host with the same sharding; consumes `tree`.

    Raises:
      UserError: the devices have no pinned host memory.
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


def check_host_memory(mesh: Mesh | AbstractMesh, setting: str, instead: str) -> None:
    """Raises UserError if a setting needs pinned host memory and the devices have none.

    Args:
      mesh: mesh of the programs; an abstract one passes.
      setting: setting with its value, for the message.
      instead: values to recommend, for the message.

    Raises:
      UserError: a device of this process has no pinned host memory.
    """
    for device in mesh.local_devices if isinstance(mesh, Mesh) else ():
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        # A device that programs are compiled for, but that is not here, lists no memory at all.
        if kinds and _HOST not in kinds:
            raise UserError(
                f"{setting} keeps arrays in {_HOST} memory, and {device.device_kind} reaches "
                f"{', '.join(kinds)} memory only; use {instead}"
            )


def onload(tree: Any, shardings: Any) -> Any:
    """Moves offloaded arrays to `shardings`, a tree of the same structure; consumes `tree`."""
    return _move(tree, jax.tree.leaves(shardings))


def _move(tree: Any, shardings: list[Any]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    # Wait for the copies, so that the memory of the sources is free when this function returns.
    moved = jax.block_until_ready(jax.device_put(leaves, shardings))
    for old, new in zip(leaves, moved, strict=True):
        if new is not old:
            old.delete()
    return jax.tree.unflatten(structure, moved)
