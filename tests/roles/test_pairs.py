"""Preference pairs: both answers in one row, and losses that do not know how rows were filled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from small import MODEL, actor_on

from jaxrl.data.preferences import PreferencePair
from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params, score_config
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.pairs import pack_pairs, pair_sums, policy_pair_objective, reward_model_objective
from jaxrl.roles.policy import Actor
from jaxrl.roles.scores import RewardModelLearner
from jaxrl.roles.train_config import TrainConfig

ONE_EACH = PackedShape(minibatches=1, microbatches=1, rows=6, tokens=24)
PACKED = PackedShape(minibatches=1, microbatches=4, rows=2, tokens=48)
BRADLEY_TERRY = reward_model_objective("bradley_terry", {})
OPTIM = OptimConfig(lr=1e-2, lr_warmup_steps=0, weight_decay=0.0)


def pair_of(prompt, chosen, rejected, margin=0.0, harms=(0, 0)) -> PreferencePair:
    prompt, chosen, rejected = (np.array(x, np.int32) for x in (prompt, chosen, rejected))
    return PreferencePair((prompt, chosen), (prompt, rejected), margin, *harms)


def make_pairs(num=6, seed=0):
    """Chosen answers end in 2, rejected ones in 3."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(num):
        prompt = rng.integers(4, 16, rng.integers(1, 5))
        chosen, rejected = (rng.integers(4, 16, rng.integers(1, 6)) for _ in range(2))
        pairs.append(pair_of(prompt, [*chosen, 2], [*rejected, 3], margin=0.5, harms=(-1, 1)))
    return pairs


def test_a_packed_pair_by_hand():
    pair = pair_of([5, 6], [7, 2], [3], margin=0.5, harms=(-1, 1))
    batch, _ = pack_pairs([pair], PackedShape(1, 1, 1, 9))
    fields = {name: getattr(batch, name)[0, 0, 0].tolist() for name in ("tokens", "positions")}
    assert fields["tokens"] == [5, 6, 7, 2, 5, 6, 3, 0, 0]
    assert fields["positions"] == [0, 1, 2, 3, 0, 1, 2, 0, 0]
    assert batch.segment_ids[0, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
    assert batch.loss_mask[0, 0, 0].tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0]
    assert batch.margin[0, 0, 0].tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0]
    assert batch.harm[0, 0, 0].tolist() == [0, 0, 0, -1, 0, 0, 1, 0, 0]
    chosen, rejected = pair_sums(
        jnp.asarray(batch.loss_mask[0, 0]), jnp.asarray(batch.segment_ids[0, 0])
    )
    assert chosen.tolist() == [[2, 0, 0, 0]] and rejected.tolist() == [[1, 0, 0, 0]]


@pytest.fixture(scope="module")
def learner() -> RewardModelLearner:
    return RewardModelLearner(MODEL, mesh_of(), train=TrainConfig(), optim=OPTIM, seed=0)


def random_weights():
    return init_params(score_config(MODEL), jax.random.key(3))


def test_scores_are_compared_pair_by_pair(learner):
    pairs = make_pairs()
    results = []
    for shape in (ONE_EACH, PACKED):
        learner.start_from(random_weights())
        batch, _ = pack_pairs(pairs, shape)
        scores = np.asarray(learner.scores_of(batch)).reshape(-1)
        order, ends = np.asarray(batch.sequence).reshape(-1), scores != 0
        # The chosen answer of a pair comes first.
        by_pair = [scores[ends & (order == i)] for i in range(len(pairs))]
        metrics = jax.device_get(learner.update(batch, BRADLEY_TERRY))
        results.append((np.array(by_pair), metrics, jax.device_get(learner.state.params)))
    chosen, rejected = results[0][0].T
    expected = np.log1p(np.exp(0.5 - (chosen - rejected))).mean()
    assert results[0][1]["accuracy"] == pytest.approx((chosen > rejected).mean())
    assert results[0][1]["loss"] == pytest.approx(expected, rel=1e-5)
    assert_close(results[1], results[0], rtol=1e-4, scale=1)


def test_a_reward_model_learns_what_is_preferred(learner):
    learner.start_from(init_params(MODEL, jax.random.key(1)))
    pairs = [pair._replace(margin=0.0) for pair in make_pairs(seed=1)]
    batch, _ = pack_pairs(pairs, ONE_EACH)
    metrics = [learner.update(batch, BRADLEY_TERRY) for _ in range(60)]
    # The head starts at 0, so all pairs tie.
    assert float(metrics[0]["accuracy"]) == 0.5
    assert float(metrics[0]["loss"]) == pytest.approx(np.log(2), rel=1e-5)
    assert float(metrics[-1]["accuracy"]) == 1 and float(metrics[-1]["loss"]) < 0.3


@pytest.fixture(scope="module")
def actor() -> Actor:
    train = TrainConfig(rows=6, row_tokens=24)
    return actor_on(mesh_of("1-2-2", fsdp=2), model=MODEL, train=train, optim=OPTIM)


@pytest.mark.parametrize("name", ["dpo", pytest.param("ipo", marks=pytest.mark.long)])
def test_preference_optimisation_moves_the_policy_towards_the_chosen(name, actor):
    actor.init()
    batch, _ = pack_pairs(make_pairs(), ONE_EACH)
    batch = batch.replace(ref_logprob=actor.logprobs(batch))
    objective = policy_pair_objective(name, {"beta": 0.1})
    metrics = [actor.update(batch, objective) for _ in range(20)]
    assert float(metrics[0]["reward_margin"]) == pytest.approx(0, abs=1e-4)
    expected = np.log(2) if name == "dpo" else 25.0
    assert float(metrics[0]["loss"]) == pytest.approx(expected, rel=1e-4)
    assert float(metrics[-1]["accuracy"]) == 1
    assert float(metrics[-1]["loss"]) < 0.8 * expected


def test_refused():
    with pytest.raises(UserError, match="preference loss 'bt' is not known; use one of bradley_te"):
        reward_model_objective("bt", {})
    with pytest.raises(
        UserError, match=r"'bradley_terry' takes chosen_score, .*; it may take chosen_logp"
    ):
        policy_pair_objective("bradley_terry", {})
    with pytest.raises(UserError, match="preference loss 'dpo' needs beta"):
        policy_pair_objective("dpo", {})
