"""Every name that a config can give: it reaches its function, which computes something to learn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from packed import SHAPES, packed, sequences
from small import actor_on

from jaxrl.algos.advantages import ADVANTAGES
from jaxrl.algos.aggregation import AGGREGATIONS, count
from jaxrl.algos.policy_losses import POLICY_LOSSES
from jaxrl.config.config_tree import from_config_dict, to_config_dict
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.advantage_estimator import VocabularyBatch
from jaxrl.roles.losses import Objective
from jaxrl.roles.policy import Actor, PolicyOutputs
from jaxrl.trainer.resolved import resolve

ROWS = sequences()
GROUP = np.arange(8, dtype=np.int32) // 4
SCORE = np.array([1, -1, 1, 1, -1, -1, 0.5, -1], np.float32)
TERMS = {"brevity": {"path": "rules.py:brevity", "weight": 0.5}}
RECIPE_OF = {"gae": "ppo", "remax": "remax", "reverse_kl": "distill"}
NEEDS = {"gdpo": {"reward__functions": TERMS}, "reverse_kl": {"teacher__weights": "a/teacher"}}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
LIMITS = {"limit_low": 0.1, "limit_high": 0.1, "max_ratio": 5.0}
OPTIONS = {
    "cispo": CLIP,
    "clip_cov": {**CLIP, "fraction": 0.1, "lowest": -1.0, "highest": 5.0},
    "clipped": {**CLIP, "dual_clip": 3.0},
    "dppo_kl": LIMITS,
    "dppo_tv": LIMITS,
    "dro": {"beta": 0.1},
    "kl_cov": {"kl_coef": 1.0, "fraction": 0.1},
    "sequence_masked": {**CLIP, "dual_clip": 3.0, "threshold": 0.5},
    "trpo": {"kl_coef": 0.1},
}


def estimator_in(config: Config):
    return resolve(config).estimator


def objective_in(config: Config):
    return resolve(config).objective


def make_config(**changes) -> Config:
    config = to_config_dict(Config())
    settings = {
        "rollout.num_prompts": 2,
        "rollout.num_samples": 4,
        "algorithm.dataflow": "grpo",
        "algorithm.updates_per_step": 1,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    config.update_from_flattened_dict(settings)
    return from_config_dict(Config, config)


def batch_of(shape: str = "packed"):
    packing, batch = packed(ROWS, SHAPES[shape])
    rng = np.random.default_rng(0)
    inside = batch.loss_mask
    return packing, batch.replace(
        advantage=inside * rng.normal(size=inside.shape).astype(np.float32)
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_by_its_name(name):
    changes, recipe = NEEDS.get(name, {}), RECIPE_OF.get(name, "grpo")
    estimator = estimator_in(
        make_config(algorithm__advantage=name, algorithm__dataflow=recipe, **changes)
    )
    packing, batch = batch_of()
    squares = np.random.default_rng(0).uniform(0.3, 0.9, batch.tokens.shape).astype(np.float32)
    batch = batch.extended_as(VocabularyBatch, sum_pi_squared=squares)
    given = {
        "value": packing.pack([row["value"] for row in ROWS], np.float32),
        "baseline_B": np.zeros(8, np.float32),
        "score_BK": np.stack([SCORE, np.arange(8, dtype=np.float32)], axis=1),
        "weight_K": np.ones(2, np.float32),
        "average_reward": 0.25,
        "arrays": {"teacher_logprob_BT": batch.old_logprob - squares},
    }
    advantage, target, _ = estimator(batch, SCORE, GROUP, num_groups=2, **given)
    inside = batch.loss_mask > 0
    for values in (advantage, target):
        assert np.isfinite(values).all() and (np.asarray(values)[~inside] == 0).all()
    assert np.std(np.asarray(advantage)[inside]) > 0.1


MODEL = ModelConfig(
    vocab_size=16, num_layers=1, d_model=8, d_ff=8, num_heads=2, num_kv_heads=1, head_dim=4
)


def tiny_actor() -> Actor:
    return actor_on(mesh_of(), model=MODEL, train=Config().train, optim=Config().optim)


@pytest.mark.parametrize("name", ["clip_cov", "gspo", "full"])
def test_the_whole_update_is_made_of_an_objective(name):
    """One that prepares its batch, one of whole sequences, one with a reference."""
    if name == "full":
        changes = {"algorithm__kl__loss_coef": 0.1, "algorithm__kl__loss_estimate": name}
    else:
        changes = {"algorithm__loss": name, "algorithm__loss_options": OPTIONS.get(name, {})}
    objective = objective_in(make_config(**changes))
    actor = tiny_actor()
    _, batch = batch_of("two updates")

    def update(state, batch):
        actor.state = state
        return actor.update(batch, objective, reference=state.params)

    shapes = jax.eval_shape(lambda: batch)
    metrics = jax.eval_shape(update, actor.abstract_state(), shapes)
    assert metrics["loss"].shape == metrics["first_ratio_max_deviation"].shape == ()


def check_gradient(objective: Objective) -> None:
    """A policy a little off the old one has a gradient, and that inside the mask."""
    _, batch = batch_of("two updates")
    noise = np.random.default_rng(1).uniform(-0.1, 0.1, batch.tokens.shape[2:])
    logprob = batch.old_logprob[0, 0] + noise.astype(np.float32)

    def loss(logprob):
        prepared = objective.prepare(batch, jax.random.key(0))
        micro = jax.tree.map(lambda x: x[0, 0] if x.ndim == 4 else x, prepared)
        kl = jnp.zeros_like(logprob)
        values, stats = objective.loss(PolicyOutputs(logprob, kl, kl), micro)
        counts = count(micro.loss_mask, micro.segment_ids)
        total = objective.aggregation.total(values, micro.loss_mask, micro.segment_ids)
        return total / objective.aggregation.divisor(counts), stats

    (value, stats), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logprob)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in stats.values())
    assert "ppo_kl" in stats
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4
    assert (np.asarray(gradient)[batch.loss_mask[0, 0] == 0] == 0).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_by_its_name(name):
    config = make_config(algorithm__loss=name, algorithm__loss_options=OPTIONS.get(name, {}))
    check_gradient(objective_in(config))


OWN_LOSS = """
def reinforce(logprob, advantage, rollout_logprob, *, most: float = 2.0):
    ratio = jax.lax.stop_gradient(jnp.exp(logprob - rollout_logprob))
    weight = jnp.minimum(ratio, most)
    return -weight * advantage * logprob, {"ppo_kl": rollout_logprob - logprob, "own_weight": weight}


def far(logprob, ref_logprob):
    return ref_logprob - logprob, {}


def centred(score_B, group_B, *, scale: float):
    return scale * (score_B - score_B.mean())
"""


def test_a_loss_and_an_advantage_of_ones_own_by_their_path(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(f"import jax\nimport jax.numpy as jnp\n{OWN_LOSS}")
    own_loss = {"algorithm__loss": f"{file}:reinforce", "algorithm__loss_options": {"most": 1.5}}
    check_gradient(objective_in(make_config(**own_loss)))
    with pytest.raises(UserError, match="has no option least; it has most"):
        resolve(make_config(**own_loss | {"algorithm__loss_options": {"least": 1.0}}))
    with pytest.raises(UserError, match="takes ref_logprob, and this run has no reference"):
        resolve(make_config(algorithm__loss=f"{file}:far", algorithm__loss_options={}))
    estimator = estimator_in(
        make_config(
            algorithm__advantage=f"{file}:centred", algorithm__advantage_options={"scale": 2.0}
        )
    )
    assert estimator.inputs == {"score_B", "group_B"}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_by_its_name(name):
    options = {"scale": 8.0} if name.endswith("norm") else {}
    check_gradient(
        objective_in(
            make_config(algorithm__aggregation=name, algorithm__aggregation_options=options)
        )
    )


@pytest.mark.parametrize("name", ["k3+", "full"])
def test_a_kl_estimate_by_its_name(name):
    config = make_config(algorithm__kl__loss_coef=0.1, algorithm__kl__loss_estimate=name)
    check_gradient(objective_in(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__advantage": "gdpo"}, "this run has grader alone; add reward.functions"),
        (
            {
                "algorithm__advantage": "gdpo",
                "reward__functions": TERMS,
                "algorithm__kl__reward_coef": 0.1,
            },
            "takes the reward in its parts, and the KL penalty",
        ),
        (
            {
                "algorithm__advantage": "gdpo",
                "reward__functions": TERMS,
                "reward__grader_weight": 0.0,
            },
            "this run has brevity alone",
        ),
        (
            {
                "algorithm__advantage": "optimal_token_baseline",
                "algorithm__correction__bypass": True,
            },
            "correction.bypass saves the forward pass that has them",
        ),
        (
            {"algorithm__advantage": "optimal_token_baseline", "rollout__num_samples": 1},
            "at least 2 answers to each prompt",
        ),
        (
            {
                "algorithm__loss": "gspo",
                "algorithm__loss_options": {},
                "algorithm__correction__weights": "token",
            },
            "correction.weights 'token' corrects single tokens of it",
        ),
        (
            {
                "algorithm__loss": "geo_mean",
                "algorithm__loss_options": {},
                "algorithm__correction__reject": {"token_k3": 0.1},
            },
            "correction.reject.token_k3 corrects single tokens of it",
        ),
        (
            {"algorithm__loss": "clip_cov", "algorithm__loss_options": CLIP},
            "policy loss 'clip_cov' needs fraction, lowest, highest",
        ),
        (
            {"algorithm__kl__loss_coef": 0.1, "algorithm__kl__loss_estimate": "all"},
            "kl.loss_estimate = 'all': is not one of abs, abs+, k1",
        ),
        (
            {"algorithm__kl__reward_coef": 0.1, "algorithm__kl__reward_estimate": "full"},
            "kl.reward_estimate = 'full': is not one of abs, abs+, k1",
        ),
        (
            {
                "algorithm__kl__loss_coef": 0.1,
                "algorithm__kl__loss_estimate": "full",
                "placement": {
                    "a": {"roles": ("actor",), "train": "1-1-1"},
                    "b": {"roles": ("reference",), "train": "1-1-1"},
                },
            },
            "pool a has the actor without the reference; put both into one pool",
        ),
        (
            {
                "algorithm__correction__bypass": True,
                "algorithm__correction__reject": {"veto": 1e-4},
                "train__load_balancing_coef": 0.01,
            },
            "train.load_balancing_coef is divided before",
        ),
        (
            {"algorithm__correction__bypass": True, "algorithm__correction__weights": "token"},
            "corrects loss 'clipped' twice: its ratio is to the sampler's policy",
        ),
        (
            {
                "algorithm__loss": "policy_gradient",
                "algorithm__loss_options": {},
                "algorithm__correction__bypass": True,
                "algorithm__correction__weights": "token",
                "algorithm__correction__normalize": True,
                "algorithm__entropy_coef": 0.01,
            },
            "would divide the entropy bonus and the KL penalty too",
        ),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(UserError) as error:
        resolve(make_config(**changes))
    assert message in str(error.value)
