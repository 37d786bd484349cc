"""Chooses what the backward pass keeps: `train.remat = "auto"` recomputes as little as memory allows.

    weights and moments + other roles + gradients + kept of the layers + values at work <= .9 of a device

What the layers keep is counted in the traced update, the rest from shapes (`update_bytes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jax_core

from jaxrl.config.schema import Config
from jaxrl.config.shapes import step_shape
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import memory_bytes, platform_of
from jaxrl.mesh.pools import Pool
from jaxrl.mesh.rules import TRAIN_RULES, shards_of
from jaxrl.roles.learner import Learner
from jaxrl.trainer.resolved import Resolved
from jaxrl.types import TrainBatch, ValueBatch
from jaxrl_planner.compiled.programs import abstract_batch
from jaxrl_planner.memory import ResidentBuffers, phase_bytes, update_memory
from jaxrl_planner.planned_roles import PlannedRoles, meshes_on, planned_roles
from jaxrl_planner.step_load import load_of

# The least recomputation first. "full" is taken unseen.
_ORDER = ("none", "projections", "full")
# The rest of a device is for what is not counted, and for gaps between buffers.
_MEMORY_SHARE = 0.9
# Float32 arrays as large as the logits of a chunk, and values as large as the largest of a layer, that are
# there at once. With these, 12 updates compiled for an H200 take as much as counted, or up to 3.1 GB less.
_LOGITS_ARRAYS, _LAYER_VALUES = 4, 6


def with_remat(resolved: Resolved, meshes: Mapping[str, Any], memory: int) -> Resolved:
    """Returns the config with the least recomputation that fits; unchanged if it names one.

    Args:
      resolved: config of the run, with what its names stand for, without open slots.
      meshes: mesh of each role, abstract or of devices that need not be present.
      memory: bytes of a device.
    """
    config = resolved.config
    if config.train.remat != "auto":
        return resolved
    for remat in _ORDER:
        train = dataclasses.replace(config.train, remat=remat)
        found = dataclasses.replace(resolved, config=dataclasses.replace(config, train=train))
        if remat == _ORDER[-1] or update_bytes(found, meshes) <= _MEMORY_SHARE * memory:
            return found
    raise AssertionError("the last needs no look")


def with_chosen_remat(resolved: Resolved, devices: Sequence[Any]) -> Config:
    """`with_remat` for the devices of a run. Collective."""
    if resolved.config.train.remat != "auto" or devices[0].platform == "cpu":
        return resolved.config
    # Each process sees only the memory of its own devices; all must choose the same.
    memory = hosts.on_first(lambda: memory_bytes(jax.local_devices()[0]))
    try:
        config = with_remat(resolved, meshes_on(resolved.pools, devices), memory).config
    except UserError:
        # A run of supervised learning alone need not be able to sample. It recomputes everything.
        return resolved.config
    if hosts.is_first():
        print(f"train.remat: {chosen_remat(config, memory)}")
    return config


def chosen_remat(config: Config, memory: int) -> str:
    """What was chosen, in words."""
    return (
        f"{config.train.remat}, the least recomputation that fits {memory / 1e9:.1f} GB by shapes"
    )


def update_bytes(resolved: Resolved, meshes: Mapping[str, Any]) -> int:
    """Bytes per device in the update that needs most, of the fullest pool."""
    roles = planned_roles(resolved, meshes)
    updates = {
        program.role: piece.function.trace(*piece.arguments, **piece.keywords).jaxpr.jaxpr
        for _, program, _ in roles.programs(load_of(roles.config))
        if program.name == "update"
        for piece in program.pieces
    }
    shape, peaks = step_shape(roles.config), []
    for pool in roles.pools:
        buffers = [*roles.resident_buffers(pool), *buffers_in_updates(roles, pool, updates)]
        # What an update holds for a time: the other values of a layer, logits, a copy of the head.
        for held in [held for held in buffers if held.name.endswith("largest value in a layer")]:
            logits = _bytes_of_logits(roles.roles.learners[held.turn], shape.rows * shape.tokens)
            nbytes = (_LAYER_VALUES - 1) * held.bytes_per_device + logits
            buffers.append(dataclasses.replace(held, bytes_per_device=nbytes))
        peaks.append(phase_bytes(buffers, "learning"))
    return max(peaks)


def buffers_in_updates(
    roles: PlannedRoles, pool: Pool, updates: Mapping[str, jax_core.Jaxpr]
) -> Iterator[ResidentBuffers]:
    """The temporaries that the traced updates of a pool's roles add, one role at a time."""
    shape = step_shape(roles.config)
    for name, role in roles.roles.learners.items():
        if name in pool.roles:
            batch = abstract_batch(role, shape, TrainBatch if name == "actor" else ValueBatch)
            layout = pool.layout_of(name)
            yield from update_memory(name, role, layout, shape, batch, updates[name])


def _bytes_of_logits(role: Learner, tokens: int) -> int:
    model, mesh = role.model, role.mesh
    if model.num_scores:
        return 0
    vocabulary = model.vocab_size // shards_of("vocab", TRAIN_RULES, mesh)
    tokens //= shards_of("batch", TRAIN_RULES, mesh) * shards_of("length", TRAIN_RULES, mesh)
    positions = role.train.positions_of_logits(vocabulary, platform_of(mesh), of_device=tokens)
    copies = vocabulary * model.d_model * (2 + 4)
    return _LOGITS_ARRAYS * 4 * min(positions, tokens) * vocabulary + copies
