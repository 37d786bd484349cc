"""What the names in a config stand for, and the rules between groups of settings.

    Config --> resolve --> Resolved --> RunContext, RoleBuilder, the planner, hosts

A config names its dataflow, roles and pools; `resolve` finds and checks them once, and everything else is
given the result.

A rule about two settings of one group is in that group's `__post_init__`. A rule that needs another group, or
the dataflow behind a name, is a method of the group it belongs to and takes plain arguments; `resolve` calls
it. Its message has value, rule and remedy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxrl.algos.covariance import SELECTIONS
from jaxrl.algos.policy_losses import POLICY_LOSSES, SEQUENCE_LOSSES
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import array_names, check_options, lookup, options_of
from jaxrl.config.schema import Config
from jaxrl.dataflows.algorithm_config import AlgorithmConfig
from jaxrl.dataflows.dataflow import Dataflow
from jaxrl.dataflows.lookup import DATAFLOWS
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Pool, places, read_placement
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles import losses
from jaxrl.roles.advantage_estimator import (
    BASELINE,
    IMPORTANCE_WEIGHT,
    SUM_PI_SQUARED,
    VALUES,
    Estimator,
)
from jaxrl.roles.losses import Objective
from jaxrl.rollout import drivers
from jaxrl.trainer.role_table import ROLES


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A config with what its names stand for.

    Attributes:
      config: config of the run.
      roles: roles of the run, the actor first; includes "rollout" if the actor samples on other devices.
      pools: pools of the placement, without devices.
      estimator: advantage estimator.
      objective: loss of the actor.
      shares_forward: whether the first minibatch takes its old log-probabilities from the forward pass of its
        own update.
      model_in: gives the model of a folder of weights, which it reads once.
    """

    config: Config
    roles: tuple[str, ...]
    pools: tuple[Pool, ...]
    estimator: Estimator
    objective: Objective
    shares_forward: bool
    model_in: Callable[[str], ModelConfig] = dataclasses.field(
        default_factory=lambda: functools.cache(read_config)
    )

    @property
    def dataflow(self) -> Dataflow:
        """The function that runs a step."""
        return self.config.algorithm.flow

    @property
    def compared(self) -> str:
        """The role that the actor's loss may have the KL to; "" without one."""
        return _compared(self.roles)

    @property
    def runs_free(self) -> bool:
        """Whether sampling goes on while a step learns: partial rollout on devices of its own."""
        return _runs_free(self.config, self.pools)


def resolve(config: Config) -> Resolved:
    """Finds what a config names, and checks the settings that depend on it against each other.

    Raises:
      UserError: settings are unknown or contradict each other.
    """
    settings, rollout, coef = config.algorithm, config.rollout, config.train.load_balancing_coef
    flow = settings.flow
    roles = _roles_of(config, flow)
    pools = read_placement(
        config.placement, config.mesh, roles, whole_hosts=config.hosts.pools_apart
    )
    if role := _compared(roles):
        # The loss looks at both models in one program.
        pool = _pool_of(pools, "actor")
        has_reference = role in pool.roles
        settings.kl.check_pool(
            pool.name,
            has_reference=has_reference,
            same_layout=has_reference and pool.layout_of(role) == pool.layout_of("actor"),
        )
    _check_sampling(config, flow, pools)
    pairs = config.preference
    if pairs.loss:
        pair_loss = lookup(PREFERENCE_LOSSES, pairs.loss, "preference.loss")
        check_options(pair_loss, pairs.options, f"preference.loss {pairs.loss!r}")
    if settings.loss in SEQUENCE_LOSSES:
        settings.correction.check_sequence_loss(settings.loss)
    settings.correction.check_load_balancing(coef)
    estimator = _estimator_of(settings)
    computed = {VALUES} if "critic" in flow.roles else set()
    computed |= {BASELINE} if flow.greedy_baseline else set()
    computed |= set(flow.gives)
    estimator.check(
        settings.dataflow,
        frozenset(computed),
        num_samples=rollout.num_samples,
        bypass=settings.correction.bypass,
    )
    if "score_BK" in estimator.inputs:
        config.reward.check_several_terms(settings.advantage)
        settings.kl.check_separate_rewards(settings.advantage)
    if flow.trust_region:
        settings.check_trust_region(
            pretrain_coef=config.cost.pretrain_coef, truncates=config.truncates_logprobs
        )
    if config.critic.trunk_coef:
        config.critic.check_trunk(settings, squares=SUM_PI_SQUARED in estimator.inputs)
    if "ref_logprob" in array_names(lookup(POLICY_LOSSES, settings.loss, "policy loss")):
        settings.kl.check_ref_logprobs(settings.loss)
    # The pass that gives an actor-critic's values gives the log-probabilities too.
    shares = not config.critic.trunk_coef and _shares_forward(settings, coef, flow, estimator)
    objective = _policy_objective(config, flow, shares_forward=shares)
    return Resolved(config, roles, pools, estimator, objective, shares)


def _roles_of(config: Config, flow: Dataflow) -> tuple[str, ...]:
    """The roles of a run; UserError if the dataflow lacks one that a setting needs, or a role its model."""
    algorithm, declared = config.algorithm, flow.roles
    unknown = [role for role in declared if role != "actor" and role not in ROLES]
    if unknown:
        raise UserError(
            f"dataflow {algorithm.dataflow!r} declares {', '.join(unknown)}, which no run has; besides the "
            f"actor it may have {', '.join(ROLES)}"
        )
    algorithm.kl.check_compared(algorithm.dataflow, _compared(declared))
    always = [name for name, kind in ROLES.items() if not kind.optional]
    always = {"actor", *(name for name in always if ROLES[name].is_used(config, declared=True))}
    roles = [role for role in declared if role in always]
    for name, kind in ROLES.items():
        if kind.optional and kind.is_used(config, declared=name in declared):
            roles.append(name)
        if name in declared and kind.needs_weights and not kind.weights(config):
            raise UserError(
                f"dataflow {algorithm.dataflow!r} needs a {name} model; set {kind.setting} to its directory"
            )
    return (*roles, "rollout") if places(config.placement, "rollout") else tuple(roles)


def _compared(roles: Sequence[str]) -> str:
    return next((role for role in roles if role in ROLES and ROLES[role].compared), "")


def _runs_free(config: Config, pools: Sequence[Pool]) -> bool:
    apart = places(config.placement, "rollout")
    return config.rollout.partial and apart and "actor" not in _pool_of(pools, "rollout").roles


def _check_sampling(config: Config, flow: Dataflow, pools: Sequence[Pool]) -> None:
    rollout, num_processes = config.rollout, config.hosts.num_processes
    free = _runs_free(config, pools)
    if config.hosts.pools_apart:
        learn = {"actor", *(name for name, kind in ROLES.items() if kind.trains)}
        if any(pool.span or learn & {*pool.roles} for pool in pools[1:]) or pools[0].span:
            raise UserError(
                "hosts.pools_apart is for pools without `devices`, of which the first, which writes "
                "checkpoints, has all roles that learn; change the placement, or set hosts.pools_apart=False"
            )
    if free:
        config.algorithm.check_runs_free()
        rollout.check_runs_free()
    rollout.check_roles(config.prompts_per_batch, config.data.sampler)
    rollout.check_partial(
        config.algorithm.dataflow, dynamic_sampling=flow.dynamic_sampling, runs_free=free
    )
    wanted = {
        drivers.PARTIAL: rollout.partial,
        drivers.PAGED: rollout.cache == "paged",
        drivers.SPECULATE: rollout.speculate,
        drivers.REPLAY: config.train.replay_routes,
        drivers.SEVERAL_PROCESSES: num_processes > 1,
    }
    drivers.check_driver(
        rollout.driver, frozenset(name for name, is_set in wanted.items() if is_set)
    )


def _pool_of(pools: Sequence[Pool], role: str) -> Pool:
    (pool,) = (pool for pool in pools if role in pool.roles)
    return pool


def _estimator_of(algorithm: AlgorithmConfig) -> Estimator:
    """The advantage estimator.

    Raises:
      UserError: its name or an option is unknown.
    """
    return Estimator.of(
        algorithm.advantage,
        algorithm.advantage_options,
        whiten=algorithm.whiten,
        kl_estimate=algorithm.kl.reward_estimate,
    )


def _shares_forward(
    algorithm: AlgorithmConfig, load_balancing_coef: float, flow: Dataflow, estimator: Estimator
) -> bool:
    """Whether the first minibatch takes its old log-probabilities from the forward pass of its own update.

    The numbers are those of a forward pass before the updates, because the weights are. A user's dataflow may
    look at them earlier, and so do these settings:
    """
    correction = algorithm.correction
    arrays = estimator.inputs | set(options_of(estimator.function))
    seen = {"logprob_BT", SUM_PI_SQUARED} | ({IMPORTANCE_WEIGHT} if correction.weighs else set())
    corrects = correction.weighs or bool(correction.rejections)
    adds_terms = bool(algorithm.entropy_coef or algorithm.entropy_target or algorithm.kl.loss_coef)
    early = (
        correction.bypass,  # takes the sampler's
        algorithm.kl.reward_coef > 0,  # penalises rewards by them
        algorithm.loss in SELECTIONS,  # selects tokens by them
        arrays & seen,  # the advantage is made of them
        flow.trust_region,  # searches along its step with them
        algorithm.epochs > 1,  # needs those of all minibatches
        corrects and algorithm.updates_per_step > 1,  # compares them over all minibatches
        # Inside the loss their mean is known only at the end of the minibatch.
        correction.weighs and correction.normalize and adds_terms,
        corrects and load_balancing_coef > 0,  # counts the tokens that they leave
    )
    return algorithm.dataflow in DATAFLOWS and not any(early)


def _policy_objective(config: Config, flow: Dataflow, *, shares_forward: bool) -> Objective:
    """The actor's loss; UserError if a name is unknown, or loss and aggregation contradict each other."""
    algorithm = config.algorithm
    correction = algorithm.correction
    corrects = correction.weighs or bool(correction.rejections)
    # The current policy itself gives the correction ratio if there is no separate old policy, or if both are
    # equal.
    inside = correction.bypass or (corrects and shares_forward)
    return losses.policy(
        algorithm.loss,
        algorithm.loss_options,
        aggregation=algorithm.aggregation,
        aggregation_options=algorithm.aggregation_options,
        entropy_coef=algorithm.entropy_coef,
        adapts_entropy=algorithm.entropy_target > 0,
        kl_coef=algorithm.kl.loss_coef,
        kl_estimate=algorithm.kl.loss_estimate,
        correction=correction if inside else None,
        shares_forward=shares_forward,
        # Dynamic sampling has already dropped the groups without advantages.
        skips_groups=not flow.dynamic_sampling,
        truncated=config.truncates_logprobs,
        value_coef=config.critic.trunk_coef,
        value_clip=config.critic.clip,
    )
