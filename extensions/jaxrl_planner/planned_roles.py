"""Builds the roles of a config for a plan, and lists their programs: on the meshes of the placement, without
weights.

They are the roles of a run (`trainer.roles.build_roles`) on a mesh of devices that need not be present, or on
an abstract mesh. If the checkpoint of a role is missing, the plan assumes the actor's size and says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.config.shapes import step_shape
from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.handover import Handover, union_of
from jaxrl.mesh.pools import Pool, take_devices, takes_all
from jaxrl.models.decoder import decoder_graph
from jaxrl.roles.losses import clipped_values
from jaxrl.roles.policy import Reference
from jaxrl.roles.scores import RewardModel
from jaxrl.rollout.driver import EngineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.trainer.context import meshes_of
from jaxrl.trainer.resolved import Resolved, resolve
from jaxrl.trainer.roles import RoleModels, Roles, build_roles, check_role_batches, role_models
from jaxrl_planner.compiled.programs import (
    Program,
    engine_programs,
    frozen_programs,
    handover_program,
    learner_programs,
    sampler_shapes,
    sampling_programs,
)
from jaxrl_planner.hardware.accelerators import Accelerator
from jaxrl_planner.hardware.cluster import shapes_of_at_least
from jaxrl_planner.memory import (
    ResidentBuffers,
    engine_memory,
    frozen_memory,
    learner_memory,
    sampling_memory,
)
from jaxrl_planner.step_load import StepLoad


@dataclasses.dataclass(frozen=True)
class PlannedRoles:
    """The roles of a run, without weights.

    Attributes:
      resolved: config of the run, with what its names stand for.
      models: models of the roles.
      meshes: mesh of each role.
      roles: the roles.
    """

    resolved: Resolved
    models: RoleModels
    meshes: Mapping[str, Any]
    roles: Roles

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.resolved.pools

    @property
    def engine(self) -> Engine:
        """The engine that the actor samples with."""
        return _engine_of(self.roles.actor.backend)

    @property
    def judge(self) -> Engine | None:
        """The engine of the generative judge; None without a judge."""
        return None if self.roles.judge is None else _engine_of(self.roles.judge.backend)

    @property
    def sampler(self) -> str:
        """The role whose devices and layout are used for sampling."""
        return "rollout" if "rollout" in self.meshes else "actor"

    def pool_of(self, role: str) -> Pool:
        """The pool of a role; "rollout" means the actor's pool unless it has its own."""
        # A role without a pool of its own samples where the actor learns.
        homes = {role: pool for pool in self.pools for role in pool.roles}
        return homes.get(role, homes["actor"])

    def resident_buffers(self, pool: Pool) -> list[ResidentBuffers]:
        """The buffers that stay on the devices of a pool between programs."""
        found: list[ResidentBuffers] = []
        offload = {role: pool.config_of(role).offload_training_state for role in pool.roles}
        actor = self.roles.actor
        state = actor.abstract_state()
        if "actor" in pool.roles:
            layout = pool.layout_of("actor")
            found += learner_memory("actor", actor, layout, offload=offload["actor"])
        if pool == self.pool_of("rollout"):
            sampler = sampler_shapes(self.engine, actor.model_shapes, actor.axes)
            layout = pool.layout_of(self.sampler)
            if "actor" in pool.roles:
                found += sampling_memory(layout, state, sampler)
            else:
                found += engine_memory("rollout", layout, sampler)
            # Frozen roles of agents have slots of their own.
            for name in sorted({*self.config.rollout.frozen_roles.values()}):
                found += engine_memory(f"roles of {name}", layout, sampler)
        for name, role in self.roles.critics.items():
            if name in pool.roles:
                found += learner_memory(name, role, pool.layout_of(name))
        for name, role in self.roles.frozen.items():
            if name in pool.roles:
                found += frozen_memory(name, role, pool.layout_of(name), offload=offload[name])
        if self.judge is not None and "judge" in pool.roles:
            _, shapes, axes = decoder_graph(self.judge.model)
            sampler = sampler_shapes(self.judge, shapes, axes)
            found += engine_memory("judge", pool.layout_of("judge"), sampler)
        return found

    def programs(self, load: StepLoad) -> Iterator[tuple[str, Program, Any]]:
        """(role, program, its mesh) of every program of a step, in the order in which they run."""
        config, shape, roles = self.config, step_shape(self.config), self.roles
        actor, engine = roles.actor, self.engine
        # Which device sends to which is known on devices only.
        if isinstance(actor.resharding, Handover) and isinstance(engine.mesh, Mesh):
            where = union_of(actor.mesh, engine.mesh)
            yield "rollout", handover_program(actor.resharding), where
        for program in sampling_programs(actor, engine, load):
            yield "rollout", program, self.meshes[self.sampler]
        if self.judge is not None:
            _, shapes, axes = decoder_graph(self.judge.model)
            verdicts = load.of_verdicts(config.reward.judge.max_verdict_tokens)
            for program in engine_programs(
                self.judge, verdicts, role="judge", shapes=shapes, axes=axes
            ):
                yield "judge", program, self.meshes["judge"]
        for name, role in roles.frozen.items():
            assert isinstance(role, Reference | RewardModel)
            if name != "reference" or config.algorithm.kl.needs_ref_logprobs:
                for program in frozen_programs(name, role, shape, load):
                    yield name, program, role.mesh
        objective, reference = self.resolved.objective, None
        # A model with adapters is its own reference.
        if objective.needs_reference and roles.compared is not None:
            reference = roles.compared.abstract_params()
        for program in learner_programs(
            *("actor", roles.actor, objective, shape, load),
            reference=reference,
            compared=self.resolved.compared,
            first_minibatch=int(self.resolved.shares_forward),
            epochs=config.algorithm.epochs,
        ):
            yield "actor", program, self.meshes["actor"]
        values, epochs = clipped_values(clip=config.critic.clip), config.critic.epochs
        for name, critic in roles.critics.items():
            for program in learner_programs(name, critic, values, shape, load, epochs=epochs):
                yield name, program, critic.mesh


def planned_roles(resolved: Resolved, meshes: Mapping[str, Any]) -> PlannedRoles:
    """Builds the roles of a config for a plan.

    Args:
      resolved: config of the run, with what its names stand for.
      meshes: mesh of each role, abstract or of devices that need not be present.

    Raises:
      UserError: settings contradict each other or a checkpoint, something does not divide, or no memory
        could hold it.
    """
    config = resolved.config
    check_role_batches(config, meshes)
    # The programs of another backend are unknown; our engine stands for them.
    rollout = dataclasses.replace(config.rollout, driver="offline")
    config = dataclasses.replace(config, rollout=rollout)
    resolved = dataclasses.replace(resolved, config=config)
    # A checkpoint that is not here has the size of the actor, and the plan says so.
    models = role_models(resolved)
    roles = build_roles(resolved, meshes, models)
    return PlannedRoles(resolved, models, meshes, roles)


def roles_without_devices(config: Config) -> PlannedRoles:
    """`planned_roles` on the abstract meshes of a config."""
    resolved = resolve(config)
    return planned_roles(resolved, abstract_meshes(resolved.pools))


def check_num_devices(
    pools: Sequence[Pool], name: str, kind: Accelerator, num_devices: int
) -> None:
    """Raises UserError if pools that take all devices need another number than topology `name` has."""
    wanted = sum(pool.num_devices for pool in pools)
    if wanted != num_devices and takes_all(pools):
        raise UserError(
            f"{name} has {num_devices} devices, layout {pools[0].layout.name} needs {wanted} (p*t*d); change "
            f"mesh.train, or choose {shapes_of_at_least(kind, wanted)}"
        )


def abstract_meshes(pools: Sequence[Pool]) -> dict[str, Any]:
    """Abstract mesh of each role: axes and sizes without devices, which is enough for tracing."""
    return {role: abstract_mesh(pool.layout_of(role)) for pool in pools for role in pool.roles}


def meshes_on(pools: Sequence[Pool], devices: Sequence[Any]) -> dict[str, Any]:
    """The mesh of each role on the given devices, in the order that a run uses."""
    return dict(meshes_of(take_devices(pools, devices)))


def _engine_of(backend: Any) -> Engine:
    assert isinstance(backend, EngineBackend), "roles of a plan sample with our engine"
    return backend.engine
