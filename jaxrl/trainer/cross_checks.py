"""What a config's dataflow needs: roles, estimator, loss. Checked before anything is built."""

from __future__ import annotations

from jaxrl.algos.covariance import SELECTIONS
from jaxrl.algos.policy_losses import POLICY_LOSSES, SEQUENCE_LOSSES
from jaxrl.algos.registry import array_names, lookup, options_of
from jaxrl.config.schema import Config
from jaxrl.dataflows.lookup import DATAFLOWS, find_dataflow
from jaxrl.errors import UserError
from jaxrl.mesh.pools import places, read_placement
from jaxrl.roles import losses
from jaxrl.roles.advantage_estimator import (
    BASELINE,
    IMPORTANCE_WEIGHT,
    SUM_PI_SQUARED,
    VALUES,
    Estimator,
)
from jaxrl.roles.objective import Objective
from jaxrl.rollout import drivers

# Roles of a dataflow that are there only where the config has a use for them.
_WHERE_USED = ("reference", "reward")


def title_of(config: Config) -> str:
    """What people call the config's dataflow."""
    return find_dataflow(config.algorithm.dataflow).title


def roles_of(config: Config) -> tuple[str, ...]:
    """The roles of a run; the actor first.

    Raises:
      UserError: settings contradict each other.
    """
    algorithm = config.algorithm
    declared = find_dataflow(algorithm.dataflow).roles
    roles = [role for role in declared if role not in _WHERE_USED]
    if algorithm.kl.needs_reference and "reference" not in declared:
        raise UserError(
            f"algorithm.kl has a coefficient above 0, but dataflow {algorithm.dataflow!r} has no reference "
            "policy to measure it against; set reward_coef and loss_coef to 0, or use dataflow grpo or ppo"
        )
    # With adapters the actor is its own reference: the same weights without them.
    if algorithm.kl.needs_reference and not config.model.lora.rank:
        roles.append("reference")
    if config.reward.model:
        roles.append("reward")
    if config.reward.judge.model:
        roles.append("judge")
    if algorithm.one_step_off or places(config.placement, "rollout"):
        roles.append("rollout")
    if "cost" in roles and not config.cost.model:
        raise UserError(
            f"dataflow {algorithm.dataflow!r} needs a cost model; set cost.model to its directory"
        )
    return tuple(roles)


def check_algorithm(config: Config) -> None:
    """Raises UserError where settings of the algorithm are unknown or contradict each other."""
    pools = read_placement(config.placement, config.mesh, roles_of(config))
    if config.algorithm.kl.is_full and "reference" in roles_of(config):
        (pool,) = (pool for pool in pools if "actor" in pool.roles)
        if "reference" not in pool.roles:
            raise UserError(
                "algorithm.kl.loss_estimate 'full' has the reference's weights in the actor's updates, and "
                f"pool {pool.name} has the actor without the reference; put both into one pool, or use k3, "
                "k3+ or k2, which take one number a token"
            )
        if pool.layout_of("reference") != pool.layout_of("actor"):
            raise UserError(
                "algorithm.kl.loss_estimate 'full' has the reference's weights in the actor's updates, and "
                f"placement.{pool.name}.layouts splits them otherwise; give both one layout, or use k3, k3+ "
                "or k2, which take one number a token"
            )
    if config.algorithm.one_step_off:
        (pool,) = (pool for pool in pools if "rollout" in pool.roles)
        if "actor" in pool.roles:
            raise UserError(
                "algorithm.one_step_off samples while the actor learns, but both live in pool "
                f"{pool.name}; give the role rollout a pool of its own in `placement`"
            )
        if config.hosts.num_processes > 1:
            raise UserError(
                "algorithm.one_step_off runs two threads of programs, which several processes could not "
                "keep in one order; use hosts.num_processes=1"
            )
    _check_rollout(config)
    _check_curriculum(config)
    _check_correction(config)
    estimator_of(config)
    _check_old_logprobs(config)
    policy_objective(config)


def _check_correction(config: Config) -> None:
    """Raises UserError where the correction contradicts the loss."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    by_token = ["correction.weights 'token'"] if correction.weights == "token" else []
    by_token += [
        f"correction.reject.{name}" for name in correction.reject.given if name.startswith("token_")
    ]
    if algorithm.loss in SEQUENCE_LOSSES and by_token:
        raise UserError(
            f"loss {algorithm.loss!r} takes the ratio of a whole sequence, and algorithm."
            f"{' and '.join(by_token)} corrects single tokens of it; use 'sequence' for weights and "
            "a seq_mean bound to reject"
        )
    late = correction.bypass and (correction.rejections or correction.normalize)
    if late and config.train.load_balancing_coef:
        raise UserError(
            "algorithm.correction.bypass rejects and normalizes inside the loss, whose divisor is known only "
            "at the end, and train.load_balancing_coef is divided before; set one of the two to 0 or False"
        )


def shares_forward(config: Config) -> bool:
    """The first minibatch's old log-probabilities come from the forward pass of its own update."""
    algorithm = config.algorithm
    if algorithm.old_logprobs == "auto":
        return algorithm.dataflow in DATAFLOWS and not _looks_before_the_update(config)
    return algorithm.old_logprobs == "update"


def _check_old_logprobs(config: Config) -> None:
    """Raises UserError where something would look at log-probabilities that are not there yet."""
    looks = _looks_before_the_update(config)
    if config.algorithm.old_logprobs == "update" and looks:
        raise UserError(
            f'algorithm.old_logprobs "update" has them only when the first update has begun, and {looks} '
            "before; set it to auto or forward"
        )


def _looks_before_the_update(config: Config) -> str:
    """The setting that asks for old log-probabilities before the first update, and why; "" if none does."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    estimator = estimator_of(config)
    arrays = estimator.inputs | set(options_of(estimator.function))
    seen = {"logprob_BT", SUM_PI_SQUARED} | ({IMPORTANCE_WEIGHT} if correction.weighs else set())
    corrects = correction.weighs or bool(correction.rejections)
    adds_terms = bool(algorithm.entropy_coef or algorithm.kl.loss_coef)
    looks = {
        "algorithm.correction.bypass takes the sampler's": correction.bypass,
        "algorithm.kl.reward_coef penalizes rewards by them": algorithm.kl.reward_coef > 0,
        f"algorithm.loss {algorithm.loss!r} selects tokens by them": algorithm.loss in SELECTIONS,
        f"algorithm.advantage {algorithm.advantage!r} is made of them": bool(arrays & seen),
        f"algorithm.epochs {algorithm.epochs} needs them whole": algorithm.epochs > 1,
        "algorithm.correction compares them over all minibatches": corrects
        and algorithm.updates_per_step > 1,
        # Inside the loss the mean is known only at the end of the minibatch.
        "algorithm.correction.normalize takes a mean of them": correction.weighs
        and correction.normalize
        and adds_terms,
        "train.load_balancing_coef counts the tokens they leave": corrects
        and config.train.load_balancing_coef > 0,
    }
    return next((clause for clause, asks in looks.items() if asks), "")


def _check_rollout(config: Config) -> None:
    """Raises UserError where settings of sampling contradict each other or the dataflow."""
    options = config.rollout
    if options.partial and not find_dataflow(config.algorithm.dataflow).dynamic_sampling:
        raise UserError(
            f"rollout.partial ends a step when it has enough groups, and dataflow "
            f"{config.algorithm.dataflow!r} takes what it gets; use dataflow dapo, or rollout.partial=False"
        )
    if options.partial and config.algorithm.one_step_off:
        raise UserError(
            "rollout.partial and algorithm.one_step_off are two ways to keep the devices busy while long "
            "samples end, and do not go together; choose one"
        )
    asked = {
        drivers.PARTIAL: options.partial,
        drivers.ENVIRONMENT: options.environment,
        drivers.SEVERAL_PROCESSES: config.hosts.num_processes > 1,
    }
    drivers.check_driver(
        options.driver, frozenset(name for name, wanted in asked.items() if wanted)
    )


def _check_curriculum(config: Config) -> None:
    """Raises UserError where there is no right and wrong to go by."""
    if config.data.curriculum.by == "pass_rate" and not config.reward.grader_weight:
        raise UserError(
            "data.curriculum.by 'pass_rate' goes by which answers are right, and reward.grader_weight 0 says "
            "that this run rewards something else; set it above 0, or data.curriculum.by to off"
        )


def estimator_of(config: Config) -> Estimator:
    """The advantage estimator of a config.

    Raises:
      UserError: it is not known, needs what the dataflow does not compute, or groups of more than one answer.
    """
    algorithm = config.algorithm
    estimator = Estimator.of(
        algorithm.advantage,
        algorithm.advantage_options,
        whiten=algorithm.whiten,
        kl_estimate=algorithm.kl.reward_estimate,
    )
    dataflow = find_dataflow(algorithm.dataflow)
    extra = {VALUES} if "critic" in dataflow.roles else set()
    extra |= {BASELINE} if dataflow.greedy_baseline else set()
    estimator.check_inputs(algorithm.dataflow, frozenset(extra | {SUM_PI_SQUARED}))
    if extra and not extra <= estimator.inputs:
        raise UserError(
            f"dataflow {algorithm.dataflow!r} computes {', '.join(sorted(extra))}, which advantage "
            f"{algorithm.advantage!r} does not use; set algorithm.advantage to "
            f"{'gae' if VALUES in extra else 'remax'}, or use dataflow grpo"
        )
    if not estimator.inputs.isdisjoint({"group_B", "group_BT"}) and config.rollout.num_samples < 2:
        raise UserError(
            f"rollout.num_samples {config.rollout.num_samples}: advantage {algorithm.advantage!r} compares "
            "the answers to a prompt with each other; use at least 2 answers to each prompt"
        )
    if "score_BK" in estimator.inputs:
        _check_terms(config)
    if SUM_PI_SQUARED in estimator.inputs and algorithm.correction.bypass:
        raise UserError(
            f"advantage {algorithm.advantage!r} looks at the trainer's probabilities of the whole "
            "vocabulary, and algorithm.correction.bypass saves the forward pass that has them; set it to "
            "False"
        )
    return estimator


def _check_terms(config: Config) -> None:
    """Raises UserError where the reward has a single part, or one that is not seen as such."""
    algorithm, reward = config.algorithm, config.reward
    weights = {"grader": reward.grader_weight}
    weights |= {name: function["weight"] for name, function in reward.functions.items()}
    weights |= {"model": reward.model_weight} if reward.model else {}
    weights |= {"judge": reward.judge.weight} if reward.judge.model else {}
    counting = [name for name, weight in weights.items() if weight]
    if len(counting) < 2:
        raise UserError(
            f"advantage {algorithm.advantage!r} normalises each reward on its own, and this run has "
            f"{', '.join(counting) or 'none'} alone; add reward.functions, reward.model or reward.judge with "
            "a weight, or use advantage grpo"
        )
    if algorithm.kl.reward_coef:
        raise UserError(
            f"advantage {algorithm.advantage!r} takes the reward in its parts, and the KL penalty "
            "(algorithm.kl.reward_coef) is none of them; set it to 0 and use algorithm.kl.loss_coef"
        )


def policy_objective(config: Config) -> Objective:
    """The actor's loss, from the config.

    Raises:
      UserError: a name or an option is not known, or the loss and the aggregation contradict each other.
    """
    algorithm, correction = config.algorithm, config.algorithm.correction
    loss = lookup(POLICY_LOSSES, algorithm.loss, "policy loss")
    if "ref_logprob" in array_names(loss) and not algorithm.kl.needs_ref_logprobs:
        raise UserError(
            f"policy loss {algorithm.loss!r} takes ref_logprob, and this run has no reference policy; set "
            "algorithm.kl.loss_coef or algorithm.kl.reward_coef above 0"
        )
    return losses.policy(
        algorithm.loss,
        algorithm.loss_options,
        aggregation=algorithm.aggregation,
        aggregation_options=algorithm.aggregation_options,
        entropy_coef=algorithm.entropy_coef,
        kl_coef=algorithm.kl.loss_coef,
        kl_estimate=algorithm.kl.loss_estimate,
        correction=correction if _corrects_inside(config) else None,
        shares_forward=shares_forward(config),
    )


def _corrects_inside(config: Config) -> bool:
    """The correction is done by the policy being trained; there is no other, or it is the same."""
    correction = config.algorithm.correction
    does_something = correction.weighs or bool(correction.rejections)
    return correction.bypass or (does_something and shares_forward(config))
