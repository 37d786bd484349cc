"""Every program of a step of a run, by role: what a plan traces or compiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxrl.config.batch_shapes import step_shape
from jaxrl.models.decoder import decoder_graph
from jaxrl.planner.compiled.programs import (
    Program,
    critic_programs,
    engine_programs,
    frozen_programs,
    policy_programs,
    sampling_programs,
)
from jaxrl.planner.planned_roles import PlannedRoles
from jaxrl.planner.step_load import StepLoad
from jaxrl.roles.losses import clipped_values
from jaxrl.roles.policy import Reference
from jaxrl.roles.scores import RewardModel
from jaxrl.trainer.algorithm import compared_role


def programs_of(planned: PlannedRoles, load: StepLoad) -> Iterator[tuple[str, Program, Any]]:
    """(role, program, its mesh) of every program of a step, in the order in which they run."""
    config, shape, roles = planned.config, step_shape(planned.config), planned.roles
    for program in sampling_programs(roles.actor, planned.engine, load):
        yield "rollout", program, planned.meshes[planned.sampler]
    for program in _judge_programs(planned, load):
        yield "judge", program, planned.meshes["judge"]
    for name, role in roles.frozen.items():
        assert isinstance(role, Reference | RewardModel)
        if name != "reference" or config.algorithm.kl.needs_ref_logprobs:
            for program in frozen_programs(name, role, shape, load):
                yield name, program, role.mesh
    for program in _actor_programs(planned, load):
        yield "actor", program, planned.meshes["actor"]
    values, epochs = clipped_values(clip=config.critic.clip), config.critic.epochs
    for name, critic in roles.critics.items():
        for program in critic_programs(name, critic, values, shape, load, epochs=epochs):
            yield name, program, critic.mesh


def _judge_programs(planned: PlannedRoles, load: StepLoad) -> Iterator[Program]:
    judge = planned.judge
    if judge is None:
        return iter(())
    _, shapes, axes = decoder_graph(judge.model)
    verdicts = load.of_verdicts(planned.config.reward.judge.max_verdict_tokens)
    return engine_programs(judge, verdicts, role="judge", shapes=shapes, axes=axes)


def _actor_programs(planned: PlannedRoles, load: StepLoad) -> Iterator[Program]:
    config, algorithm, roles = planned.config, planned.algorithm, planned.roles
    reference = None
    # A model with adapters is its own reference.
    if algorithm.objective.needs_reference and roles.compared is not None:
        reference = roles.compared.abstract_params()
    return policy_programs(
        *(roles.actor, algorithm.objective, step_shape(config), load),
        reference=reference,
        compared=compared_role(algorithm.roles),
        first_minibatch=int(algorithm.shares_forward),
        epochs=config.algorithm.epochs,
    )
