"""Compiles the programs of a recipe's actor for accelerators that are not here, and says what memory they
take.

    python benchmarks/compile_ahead.py --config configs/grpo_qwen7b_lora.py --topology v5p:2x2x1

Needs the extra `aot` (libtpu). A topology with more devices than the recipe wants gives it the first
ones. What lies in memory beside a program's own arguments (moments while sampling, the cache while
learning) is counted by --dry_run; this counts what XLA needs inside.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config import command_line
from jaxrl.config.config_tree import from_config_dict
from jaxrl.config.schema import Config
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.topologies import topology_devices
from jaxrl.mesh.groupings import state_tables
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.planner.trace import abstract_batch
from jaxrl.roles.policy import Actor
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.trainer.context import engine_config, pools_of, row_limits
from jaxrl.trainer.cross_checks import policy_objective


def programs(config: Config, devices: list[Any]) -> dict[str, Any]:
    """The lowered update, log-probabilities and generation, by name."""
    (pool,) = (pool for pool in pools_of(config) if "actor" in pool.roles)
    mesh = build_mesh(pool.layout, devices[: pool.layout.num_devices])
    model = config.model
    engine = Engine(model, decoder_graph(model)[0], mesh, engine_config(config, stop_ids=(0,)))
    actor = Actor(
        model,
        mesh,
        train=config.train,
        optim=config.optim,
        temperature=config.rollout.temperature,
        seed=0,
        backend=OfflineBackend(engine, str),
        tables=state_tables(pool.config.sharding),
    )
    state = actor.abstract_state()
    rollout = config.rollout
    sequences = rollout.num_prompts * rollout.num_samples
    shape = row_limits(config).shape(sequences, minibatches=config.algorithm.updates_per_step)
    batch = abstract_batch(actor, shape)
    objective = policy_objective(config)
    reference = state.params if objective.needs_reference and not model.lora.rank else None

    def update(state: Any, batch: Any) -> Any:
        return actor._update(state, (batch,), (objective,), reference)

    dtype = jnp.dtype(rollout.dtype)
    params = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where),
        actor.shapes,
        shardings(actor.axes, actor.shapes, GENERATE_RULES, mesh),
    )
    slots = engine.abstract_decode_state()
    learn = jax.jit(update, donate_argnums=0, out_shardings=(actor.state_shardings(), None, None))
    return {
        "update": learn.lower(state, batch),
        "logprobs": jax.jit(actor._packed_logprobs).lower(state.params, batch),
        "generate": jax.jit(engine.generate, donate_argnums=1).lower(params, slots),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--topology", default="v5p:2x2x1")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    config = from_config_dict(Config, command_line.load_recipe(args.config))
    devices = list(topology_devices(args.topology))
    print(f"{config.name} on {args.topology} ({devices[0].device_kind}), GB a device")
    print(f"{'program':10} {'arguments':>10} {'temporary':>10} {'peak':>8} {'compiled in':>12}")
    for name, lowered in programs(config, devices).items():
        start = time.perf_counter()
        memory = lowered.compile().memory_analysis()
        seconds = time.perf_counter() - start
        arguments, inside = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        peak = getattr(memory, "peak_memory_in_bytes", 0) or arguments + inside
        print(
            f"{name:10} {arguments / 1e9:10.2f} {inside / 1e9:10.2f} {peak / 1e9:8.2f} {seconds:10.1f} s"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
