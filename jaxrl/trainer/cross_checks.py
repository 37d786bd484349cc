"""The rules between several groups of settings: `RULES`, checked before anything is built.

A rule about two settings of one group is in that group's `__post_init__`. A rule that needs another group, or
the dataflow behind a name, is a method of the group it belongs to and takes plain arguments. The functions
here only pass the arguments:

    def _curriculum(config):
        config.data.curriculum.check_rewards(config.reward.grader_weight)

To add a rule, write the method, with value, rule and remedy in its message, and add a line to `RULES`. Rules
are independent of each other; their order only decides which error is reported first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.algos.policy_losses import POLICY_LOSSES, SEQUENCE_LOSSES
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import array_names, check_options, lookup
from jaxrl.config.schema import Config
from jaxrl.dataflows import old_logprobs
from jaxrl.dataflows.algorithm_parts import estimator_of, policy_objective
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Pool, places, read_placement
from jaxrl.roles.advantage_estimator import BASELINE, SUM_PI_SQUARED, VALUES
from jaxrl.rollout import drivers
from jaxrl.trainer.role_table import ROLES


def check_algorithm(config: Config) -> None:
    """Raises UserError for the first rule of `RULES` that a config breaks."""
    for rule in RULES:
        rule(config)


# Values derived from a config.


def title_of(config: Config) -> str:
    """The display name of the config's dataflow."""
    return find_dataflow(config.algorithm.dataflow).title


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
    roles = [role for role in declared if role == "actor" or not ROLES[role].where_used]
    compared = compared_role(declared)
    algorithm.kl.check_compared(algorithm.dataflow, compared)
    # With adapters the actor is its own reference: the same weights without them.
    own_reference = compared == "reference" and not config.model.lora.rank
    if algorithm.kl.needs_reference and own_reference:
        roles.append("reference")
    roles += [name for name, row in ROLES.items() if row.by_setting and row.weights(config)]
    if places(config.placement, "rollout"):
        roles.append("rollout")
    for role in declared:
        row = ROLES.get(role)
        if row is not None and row.needs_weights and not row.weights(config):
            raise UserError(
                f"dataflow {algorithm.dataflow!r} needs a {role} model; set {row.setting} to its directory"
            )
    return tuple(roles)


def compared_role(roles: Sequence[str]) -> str:
    """The role that the actor's loss may have the KL to; "" if there is none among `roles`."""
    return next((role for role in roles if role in ROLES and ROLES[role].compared), "")


def pools_of(config: Config, roles: Sequence[str] = ()) -> tuple[Pool, ...]:
    """The pools of a config's placement, checked; no devices yet.

    Args:
      config: of the run.
      roles: of the run, if they are known already.
    """
    return read_placement(config.placement, config.mesh, roles or roles_of(config))


def runs_free(config: Config) -> bool:
    """Whether sampling goes on while a step learns: partial rollout on devices of its own."""
    apart = places(config.placement, "rollout")
    return config.rollout.partial and apart and "actor" not in _pool_of(config, "rollout").roles


# Each rule passes settings to the check that it calls.


def _full_kl(config: Config) -> None:
    role = compared_role(roles_of(config))
    if role:
        pool = _pool_of(config, "actor")
        has_reference = role in pool.roles
        config.algorithm.kl.check_pool(
            pool.name,
            has_reference=has_reference,
            same_layout=has_reference and pool.layout_of(role) == pool.layout_of("actor"),
        )


def _runs_free(config: Config) -> None:
    if runs_free(config):
        config.algorithm.check_runs_free()
        config.rollout.check_runs_free(config.hosts.num_processes)


def _rollout(config: Config) -> None:
    config.rollout.check_partial(
        config.algorithm.dataflow,
        dynamic_sampling=find_dataflow(config.algorithm.dataflow).dynamic_sampling,
        runs_free=runs_free(config),
    )


def _driver(config: Config) -> None:
    wanted = {
        drivers.PARTIAL: config.rollout.partial,
        drivers.ENVIRONMENT: config.rollout.environment,
        drivers.PAGED: config.rollout.cache == "paged",
        drivers.SPECULATE: config.rollout.speculate,
        drivers.SEVERAL_PROCESSES: config.hosts.num_processes > 1,
    }
    drivers.check_driver(
        config.rollout.driver, frozenset(name for name, is_set in wanted.items() if is_set)
    )


def _curriculum(config: Config) -> None:
    config.data.curriculum.check_rewards(config.reward.grader_weight)


def _preference(config: Config) -> None:
    options = config.preference
    loss = lookup(PREFERENCE_LOSSES, options.loss, "preference.loss")
    check_options(loss, options.options, f"preference.loss {options.loss!r}")


def _correction(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.loss in SEQUENCE_LOSSES:
        algorithm.correction.check_sequence_loss(algorithm.loss)
    algorithm.correction.check_load_balancing(config.train.load_balancing_coef)


def _advantage(config: Config) -> None:
    dataflow = find_dataflow(config.algorithm.dataflow)
    computed = {VALUES} if "critic" in dataflow.roles else set()
    computed |= {BASELINE} if dataflow.greedy_baseline else set()
    computed |= set(dataflow.gives)
    estimator = estimator_of(config.algorithm)
    estimator.check_inputs(config.algorithm.dataflow, frozenset(computed | {SUM_PI_SQUARED}))
    estimator.check_uses(config.algorithm.dataflow, frozenset(computed))
    estimator.check_group_size(config.rollout.num_samples)
    estimator.check_bypass(bypass=config.algorithm.correction.bypass)


def _separate_rewards(config: Config) -> None:
    if "score_BK" in estimator_of(config.algorithm).inputs:
        config.reward.check_several_terms(config.algorithm.advantage)
        config.algorithm.kl.check_separate_rewards(config.algorithm.advantage)


def _old_logprobs(config: Config) -> None:
    old_logprobs.check_old_logprobs(
        config.algorithm, estimator_of(config.algorithm), config.train.load_balancing_coef
    )


def _loss(config: Config) -> None:
    loss = lookup(POLICY_LOSSES, config.algorithm.loss, "policy loss")
    if "ref_logprob" in array_names(loss):
        config.algorithm.kl.check_ref_logprobs(config.algorithm.loss)
    policy_objective(config.algorithm, config.train.load_balancing_coef)


def _trust_region(config: Config) -> None:
    if find_dataflow(config.algorithm.dataflow).trust_region:
        config.algorithm.check_trust_region(
            pretrain_coef=config.cost.pretrain_coef, truncates=config.truncates_logprobs
        )


RULES: tuple[Callable[[Config], Any], ...] = (
    pools_of,
    _full_kl,
    _runs_free,
    _rollout,
    _driver,
    _curriculum,
    _preference,
    _correction,
    _advantage,
    _separate_rewards,
    _trust_region,
    _old_logprobs,
    _loss,
)


def _pool_of(config: Config, role: str) -> Pool:
    (pool,) = (pool for pool in pools_of(config) if role in pool.roles)
    return pool
