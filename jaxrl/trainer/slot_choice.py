"""How many slots fit: `rollout.slots = 0` takes them from `rollout.memory_fraction` of a device's memory.

    memory x fraction - what lies there in sampling - the largest temporary = slots x bytes of one

What lies there is counted from shapes; temporaries are those that compiled programs were seen to take
(benchmarks/results/2026-11-22-plan.md). `jaxrl plan` compiles at this number and says what is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import memory_bytes
from jaxrl.mesh.pools import Pool
from jaxrl.mesh.rules import GENERATE_RULES, shards_of
from jaxrl.planner.memory import phase_bytes
from jaxrl.planner.programs import CACHE
from jaxrl.rollout.buckets import round_up
from jaxrl.trainer.abstract_roles import AbstractRoles, abstract_roles
from jaxrl.trainer.context import RunContext, pools_of

# Copies of a prefill batch that inserting it takes: 1 on TPUs, 1.5 on GPUs.
_INSERTED_COPIES = 1.5
# Float32 arrays [V] of each slot that a dispatch has at once, seen on GPUs; fewer on TPUs.
_LOGITS_COPIES = 48
# A replica has no use for more.
_MOST = 4096


def with_slots(config: Config, mesh_of: Callable[[Pool], Any], memory: int) -> Config:
    """The config with the number of slots that fit, or as it is if it has one.

    Args:
      config: of the run.
      mesh_of: the mesh of a pool, of devices that need not be here, or of none.
      memory: bytes of a device.

    Raises:
      UserError: not one fits.
    """
    if config.rollout.slots:
        return config
    pools = pools_of(config)
    homes = {role: pool for pool in pools for role in pool.roles}
    pool = homes.get("rollout", homes["actor"])
    replicas = shards_of("batch", GENERATE_RULES, mesh_of(pool))
    one_each = _with(config, replicas)
    roles = abstract_roles(one_each, mesh_of)
    return _with(config, replicas * _slots_of_replica(roles, pool, memory))


def _slots_of_replica(roles: AbstractRoles, pool: Pool, memory: int) -> int:
    holdings = roles.holdings(pool)
    cache = next(h for h in holdings if h.name == CACHE or h.name.endswith("cache and slots"))
    slot = cache.bytes_per_device
    there = phase_bytes(holdings, "sampling") - slot
    rollout, engine = roles.config.rollout, roles.engine
    tokens = round_up(engine.prompt_sizes, engine.config.max_prompt_tokens)
    prefix = slot * engine.batch_sizes[-1] * tokens / engine.cache_sizes[-1]
    logits = 4 * roles.model.vocab_size * _LOGITS_COPIES
    room = memory * rollout.memory_fraction - there
    fitting = min((room - _INSERTED_COPIES * prefix) // slot, room // (slot + logits), _MOST)
    if fitting < 1:
        raise UserError(
            f"rollout.slots 0 chooses as many slots as fit, and none does: of {memory / 1e9:.1f} GB of a "
            f"device rollout.memory_fraction {rollout.memory_fraction:g} leaves {room / 1e9:.1f} beside the "
            f"weights, a slot of {engine.cache_sizes[-1]:,} tokens takes {slot / 1e9:.2f} and inserting a "
            f"prefill batch {_INSERTED_COPIES * prefix / 1e9:.2f}; raise t_g of mesh.generate, or lower "
            "rollout.prefill_prompts or rollout.max_response_tokens"
        )
    return int(fitting)


def with_chosen_slots(run: RunContext) -> RunContext:
    """A run whose config has the slots that fit its devices. Collective."""
    if run.config.rollout.slots:
        return run
    meshes = {pool.name: pool.mesh for pool in run.placement.pools}
    # A process sees the memory of its own devices, and all must come to one number.
    memory = hosts.on_first(lambda: memory_bytes(jax.local_devices()[0]))
    config = with_slots(run.config, lambda pool: meshes[pool.name], memory)
    return dataclasses.replace(run, config=config)


def _with(config: Config, slots: int) -> Config:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, slots=slots))
