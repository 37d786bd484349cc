"""Groups without advantages have no backward pass, and the update is the same as with it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from test_every_algorithm import OPTIONS as LOSS_OPTIONS
from test_policy import ADAM, EIGHT_DEVICES, MODEL, ONE_DEVICE, OPTIONS, first_state, fresh, step
from tokens import answers_of, prompts_of

from jaxrl.algos.policy_losses import HAVE_OTHER_TERMS
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.gradient import num_with_advantage
from jaxrl.roles.losses import policy
from jaxrl.roles.packing import PackedShape
from jaxrl.types import Completions, TrainBatch

# Four groups of two answers; the second and the last have no advantage.
QUIET = np.array([False, True, False, True]).repeat(2)
SHAPE = PackedShape(minibatches=1, microbatches=4, rows=2, tokens=12)
TWO_UPDATES = PackedShape(minibatches=2, microbatches=2, rows=2, tokens=12)


def completions() -> Completions:
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(0, MODEL.vocab_size, n).astype(np.int32) for n in (3, 5, 2, 4))
    tokens = tuple(rng.integers(0, MODEL.vocab_size, n).astype(np.int32) for n in (6, 7, 5, 6) * 2)
    return answers_of(prompts_of(*prompts), tokens, [rng.uniform(-4, -1, len(t)) for t in tokens])


def batch_of(quiet_B=QUIET, shape=SHAPE, **packing) -> TrainBatch:
    """A batch in which quiet sequences have advantage 0 and others one of their own."""
    batch, _ = pack_completions(completions(), shape, last_B=quiet_B, **packing)
    advantage_B = np.where(quiet_B, 0.0, np.linspace(-1, 1.5, len(quiet_B))).astype(np.float32)
    advantage = advantage_B[batch.sequence] * batch.loss_mask
    return batch.replace(advantage=advantage, old_logprob=batch.rollout_logprob)


@pytest.mark.parametrize(
    ("name", "aggregation", "layout"),
    [
        ("clipped", "token-mean", ONE_DEVICE),
        pytest.param("gspo", "seq-mean-token-mean", ONE_DEVICE, marks=pytest.mark.long),
        pytest.param("clipped", "seq-mean-token-sum-norm", EIGHT_DEVICES, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_update_is_the_one_with_all_groups(name, aggregation, layout):
    """Of every loss that skips groups the gradient is 0 there: `algos/test_on_policy_gradients.py`."""
    options = {"scale": 7.0} if aggregation == "seq-mean-token-sum-norm" else {}
    settings: Any = {"aggregation": aggregation, "aggregation_options": options}
    batch = batch_of(share_prompts=layout == ONE_DEVICE)
    (params, metrics), (all_params, all_metrics) = (
        step(
            fresh(layout),
            batch,
            policy(name, LOSS_OPTIONS.get(name, {}), skips_groups=skips, **settings),
        )
        for skips in (True, False)
    )
    assert_close(params, all_params, scale=1)
    assert metrics.keys() == all_metrics.keys()
    for key, value in metrics.items():
        assert value == pytest.approx(all_metrics[key], rel=1e-5, abs=1e-7), key


def test_a_term_beside_the_advantage_keeps_every_group():
    assert not policy("clipped", OPTIONS, skips_groups=True, entropy_coef=0.1).needs_advantage
    assert not policy("clipped", OPTIONS, skips_groups=True, adapts_entropy=True).needs_advantage
    assert not policy("clipped", OPTIONS, skips_groups=True, kl_coef=0.1).needs_advantage
    for name in HAVE_OTHER_TERMS:
        assert not policy(name, LOSS_OPTIONS[name], skips_groups=True).needs_advantage
    assert policy("clipped", OPTIONS, skips_groups=True).needs_advantage


def test_a_users_loss_keeps_every_group(tmp_path):
    (tmp_path / "own.py").write_text(
        "def loss(logprob, advantage):\n    return -advantage * logprob - logprob, {}\n"
    )
    assert not policy(f"{tmp_path}/own.py:loss", {}, skips_groups=True).needs_advantage


def test_a_minibatch_without_advantages_is_skipped():
    """Neither momentum nor weight decay moves the weights for it."""
    quiet_B = np.arange(8) >= 4
    objective = policy("clipped", OPTIONS, skips_groups=True)
    both, metrics = step(fresh(optim=ADAM), batch_of(quiet_B, TWO_UPDATES), objective)
    assert metrics["skipped_updates"] == 0.5
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), both, first_state().params)
    assert min(jax.tree.leaves(moved)) > 0
    same, metrics = step(fresh(optim=ADAM), batch_of(np.ones(8, bool), TWO_UPDATES), objective)
    assert metrics["skipped_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, same, first_state().params)


@pytest.mark.parametrize(
    ("quiet", "expected"), [((), 4), ((2, 3, 6, 7), 2), ((0, 1, 2, 3, 4, 5, 6, 7), 0), ((0, 1), 3)]
)
def test_how_many_microbatches_have_a_backward_pass(quiet, expected):
    quiet_B = np.isin(np.arange(8), quiet)
    batch = jax.tree.map(jnp.asarray, batch_of(quiet_B))
    assert batch.num_micro_U[0] == 4
    assert int(num_with_advantage(batch.advantage[0], batch.loss_mask[0])) == expected
