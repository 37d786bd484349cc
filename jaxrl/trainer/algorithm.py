"""The algorithm of a run: its parts, built once from the config, and the rules between groups of settings.

A rule about two settings of one group is in that group's `__post_init__`. A rule that needs another group, or
the dataflow behind a name, is a method of the group it belongs to and takes plain arguments; `algorithm_of`
calls it. Its message has value, rule and remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl.algos.policy_losses import POLICY_LOSSES, SEQUENCE_LOSSES
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import array_names, check_options, lookup
from jaxrl.config.schema import Config
from jaxrl.dataflows.algorithm_parts import estimator_of, policy_objective, shares_forward
from jaxrl.dataflows.dataflow import Dataflow
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Pool, places, read_placement
from jaxrl.roles.advantage_estimator import BASELINE, SUM_PI_SQUARED, VALUES, Estimator
from jaxrl.roles.losses import Objective
from jaxrl.rollout import drivers
from jaxrl.trainer.role_table import ROLES


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A dataflow with its estimator and loss.

    Attributes:
      dataflow: function that runs a step.
      roles: roles of the run, the actor first; includes "rollout" if the actor samples on other devices.
      estimator: advantage estimator.
      objective: loss of the actor.
      shares_forward: whether the first minibatch takes its old log-probabilities from the forward pass of its
        own update.
    """

    dataflow: Dataflow
    roles: tuple[str, ...]
    estimator: Estimator
    objective: Objective
    shares_forward: bool


def algorithm_of(config: Config) -> Algorithm:
    """Builds the algorithm of a config, and checks the settings that it depends on against each other.

    Raises:
      UserError: settings are unknown or contradict each other.
    """
    settings, rollout, coef = config.algorithm, config.rollout, config.train.load_balancing_coef
    flow, roles = find_dataflow(settings.dataflow), roles_of(config)
    pools_of(config, roles)
    if role := compared_role(roles):
        # The loss looks at both models in one program.
        pool = _pool_of(config, "actor")
        has_reference = role in pool.roles
        settings.kl.check_pool(
            pool.name,
            has_reference=has_reference,
            same_layout=has_reference and pool.layout_of(role) == pool.layout_of("actor"),
        )
    _check_sampling(config, flow)
    pairs = config.preference
    if pairs.loss:
        pair_loss = lookup(PREFERENCE_LOSSES, pairs.loss, "preference.loss")
        check_options(pair_loss, pairs.options, f"preference.loss {pairs.loss!r}")
    if settings.loss in SEQUENCE_LOSSES:
        settings.correction.check_sequence_loss(settings.loss)
    settings.correction.check_load_balancing(coef)
    estimator = estimator_of(settings)
    computed = {VALUES} if "critic" in flow.roles else set()
    computed |= {BASELINE} if flow.greedy_baseline else set()
    computed |= set(flow.gives)
    estimator.check_inputs(settings.dataflow, frozenset(computed | {SUM_PI_SQUARED}))
    estimator.check_uses(settings.dataflow, frozenset(computed))
    estimator.check_group_size(rollout.num_samples)
    estimator.check_bypass(bypass=settings.correction.bypass)
    if "score_BK" in estimator.inputs:
        config.reward.check_several_terms(settings.advantage)
        settings.kl.check_separate_rewards(settings.advantage)
    if flow.trust_region:
        settings.check_trust_region(
            pretrain_coef=config.cost.pretrain_coef, truncates=config.truncates_logprobs
        )
    if "ref_logprob" in array_names(lookup(POLICY_LOSSES, settings.loss, "policy loss")):
        settings.kl.check_ref_logprobs(settings.loss)
    objective = policy_objective(settings, coef, truncated=config.truncates_logprobs)
    return Algorithm(flow, roles, estimator, objective, shares_forward(settings, coef))


def roles_of(config: Config) -> tuple[str, ...]:
    """The roles of a run; the actor first.

    Raises:
      UserError: the dataflow lacks the role that a setting needs, or a role lacks its model.
    """
    algorithm = config.algorithm
    declared = find_dataflow(algorithm.dataflow).roles
    unknown = [role for role in declared if role != "actor" and role not in ROLES]
    if unknown:
        raise UserError(
            f"dataflow {algorithm.dataflow!r} declares {', '.join(unknown)}, which no run has; besides the "
            f"actor it may have {', '.join(ROLES)}"
        )
    algorithm.kl.check_compared(algorithm.dataflow, compared_role(declared))
    roles = [role for role in declared if role == "actor" or not ROLES[role].optional]
    for name, kind in ROLES.items():
        if kind.optional and kind.is_used(config, declared=name in declared):
            roles.append(name)
        if name in declared and kind.needs_weights and not kind.weights(config):
            raise UserError(
                f"dataflow {algorithm.dataflow!r} needs a {name} model; set {kind.setting} to its directory"
            )
    return (*roles, "rollout") if places(config.placement, "rollout") else tuple(roles)


def compared_role(roles: Sequence[str]) -> str:
    """The role that the actor's loss may have the KL to; "" if there is none among `roles`."""
    return next((role for role in roles if role in ROLES and ROLES[role].compared), "")


def pools_of(config: Config, roles: Sequence[str] = ()) -> tuple[Pool, ...]:
    """The pools of a config's placement, checked; no devices yet.

    Args:
      config: config of the run.
      roles: roles of the run; () works them out.
    """
    return read_placement(config.placement, config.mesh, roles or roles_of(config))


def runs_free(config: Config) -> bool:
    """Whether sampling goes on while a step learns: partial rollout on devices of its own."""
    apart = places(config.placement, "rollout")
    return config.rollout.partial and apart and "actor" not in _pool_of(config, "rollout").roles


def _check_sampling(config: Config, flow: Dataflow) -> None:
    rollout, num_processes = config.rollout, config.hosts.num_processes
    free = runs_free(config)
    if free:
        config.algorithm.check_runs_free()
        rollout.check_runs_free(num_processes)
    rollout.check_partial(
        config.algorithm.dataflow, dynamic_sampling=flow.dynamic_sampling, runs_free=free
    )
    wanted = {
        drivers.PARTIAL: rollout.partial,
        drivers.ENVIRONMENT: rollout.environment,
        drivers.PAGED: rollout.cache == "paged",
        drivers.SPECULATE: rollout.speculate,
        drivers.SEVERAL_PROCESSES: num_processes > 1,
    }
    drivers.check_driver(
        rollout.driver, frozenset(name for name, is_set in wanted.items() if is_set)
    )


def _pool_of(config: Config, role: str) -> Pool:
    (pool,) = (pool for pool in pools_of(config) if role in pool.roles)
    return pool
