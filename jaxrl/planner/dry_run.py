"""What a run would take, from the real programs' shapes and shardings, with no device and no memory.

    roles, layouts, shapes --> the real roles and engine on meshes without devices
                                |
                                +-- trace.py: every program; a shape or a split that does not fit is an error
                                +-- memory.py: bytes per device of what these hold
                                +-- batch_flow.py: how many a step samples, keeps and learns from
                                |
                                v
                              DryRun, which tables.py prints

A total has every term that shapes can tell, of every role and pool. What compiled programs need besides, only
compiling them can tell: `jaxrl plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.packing import PackedShape
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.sharding_strategies import ZERO, StateRules
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.batch_flow import BatchFlow, describe_flow
from jaxrl.planner.compiled.trace import abstract_batch, trace_learning, trace_rollout, trace_update
from jaxrl.planner.memory import (
    Holding,
    activation_memory,
    role_memory,
    sampling_memory,
    training_memory,
    update_memory,
)
from jaxrl.planner.tables import DryRun, PoolHoldings
from jaxrl.roles.frozen import Frozen
from jaxrl.roles.learner import Learner
from jaxrl.roles.objective import Objective
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.roles.policy import Actor
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import ValueBatch


def dry_run(
    title: str,
    model: ModelConfig,
    layout: ParallelLayout,
    *,
    train: TrainConfig,
    optim: OptimConfig,
    engine: EngineConfig,
    temperature: float,
    objective: Objective,
    flow: BatchFlow,
    tables: StateRules = ZERO["FSDP"],
    offload: bool = False,
    samples_here: bool = True,
    companions: Sequence[Holding] = (),
    elsewhere: Sequence[PoolHoldings] = (),
    notes: Sequence[tuple[str, str]] = (),
    left_out: Sequence[tuple[str, str]] = (),
) -> DryRun:
    """Traces every program of an actor on a mesh without devices, and counts what lies beside it.

    Args:
      title: of the run.
      model, layout: what is trained, and how it would be spread.
      train, optim, temperature, objective, tables: as the actor takes them.
      engine: what it samples with.
      flow: batches of a step.
      offload: training states wait in pinned host memory while their role is idle, and frozen weights do.
      samples_here: the engine's weights and cache are on these devices, and not on those of another pool.
      companions: what other roles hold on the same devices, as of `companion_memory`.
      elsewhere: other pools.
      notes: (what, which) to be shown with the flow.
      left_out: (what, why) of what the caller knows to be missing.

    Raises:
      UserError: something does not divide over the layout.
    """
    # Stands in for a Mesh: it has axes and sizes, which is all that tracing asks for, and no devices.
    mesh: Any = abstract_mesh(layout)
    backend = OfflineBackend(Engine(model, decoder_graph(model)[0], mesh, engine), _no_text)
    actor = Actor(
        model,
        mesh,
        train=train,
        optim=optim,
        temperature=temperature,
        seed=0,
        backend=backend,
        state_rules=tables,
    )
    state = actor.abstract_state()
    batch = abstract_batch(actor, flow.shape)
    sampler = trace_rollout(actor, backend.engine)
    update = trace_learning(actor, state, batch, objective)
    sampling = sampling_memory(layout, state, sampler, engine.dtype) if samples_here else []
    holdings = (
        *training_memory(actor, layout, state, offload=offload),
        *sampling,
        *(held for held in companions if not held.turn),
        *update_memory("actor", actor, flow.shape, batch),
        *activation_memory("actor", actor, layout, flow.shape.rows, update),
        *(held for held in companions if held.turn),
    )
    described = (*notes, *describe_flow(flow, mesh, engine, train))
    return DryRun(title, layout, holdings, described, tuple(left_out), tuple(elsewhere))


def companion_memory(
    name: str,
    role: Learner | Frozen,
    layout: ParallelLayout,
    shape: PackedShape,
    *,
    objective: Objective,
    offload: bool,
) -> list[Holding]:
    """What a critic, or a model that does not learn, holds, and what a critic's traced update adds to that.

    Args:
      name, role: it.
      layout: of its mesh.
      shape: of its batches.
      objective: what a critic minimises.
      offload: as for `dry_run`.
    """
    found = role_memory(name, role, layout, offload=offload)
    if isinstance(role, Learner):
        batch = abstract_batch(role, shape, ValueBatch)
        update = trace_update(role, role.abstract_state(), batch, objective)
        found += update_memory(name, role, shape, batch)
        found += activation_memory(name, role, layout, shape.rows, update)
    return found


def _no_text(tokens: np.ndarray) -> str:
    raise AssertionError(f"shapes are not spelled, and {len(tokens)} tokens are")
