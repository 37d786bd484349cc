"""What a run would take, from the real programs' shapes and shardings, with no device and no memory.

    model, layout, shapes --> the real Actor and Engine on a mesh without devices
                                |
                                +-- trace.py: every program; a shape or a split that does not fit is an error
                                +-- memory.py: bytes per device of what these hold
                                +-- batch_flow.py: how many a step samples, keeps and learns from
                                |
                                v
                              DryRun, which tables.py prints

Totals are lower bounds. What the caller names as left out, the table repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.batch_flow import BatchFlow, describe_flow
from jaxrl.planner.memory import (
    Companion,
    activation_memory,
    companion_memory,
    sampling_memory,
    training_memory,
    update_memory,
)
from jaxrl.planner.tables import DryRun
from jaxrl.planner.trace import abstract_batch, trace_learning, trace_rollout
from jaxrl.roles.objective import Objective
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.roles.policy import Actor
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig


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
    tables: StateTables = ZERO["FSDP"],
    offload: bool = False,
    companions: Sequence[Companion] = (),
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
      companions: roles on the same devices.
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
        tables=tables,
    )
    state = actor.abstract_state()
    batch = abstract_batch(actor, flow.shape)
    sampler = trace_rollout(actor, backend.engine)
    update = trace_learning(actor, state, batch, objective)
    holdings = (
        *training_memory(actor, layout, state, offload=offload),
        *sampling_memory(layout, state, sampler, engine.dtype),
        *(h for c in companions for h in companion_memory(c, actor, layout, offload=offload)),
        *update_memory(actor, flow.shape, batch),
        *activation_memory(actor, layout, flow.shape.rows, update),
    )
    described = (*notes, *describe_flow(flow, mesh, engine, train))
    return DryRun(title, layout, holdings, described, tuple(left_out))


def _no_text(tokens: np.ndarray) -> str:
    raise AssertionError(f"shapes are not spelled, and {len(tokens)} tokens are")
