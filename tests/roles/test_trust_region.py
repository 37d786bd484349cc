"""An actor with a trust region, against a NumPy twin with the explicit Fisher matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from jax.flatten_util import ravel_pytree
from meshes import mesh_of
from packed import ONE_EACH, PACKED, packed, sequences

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.roles.losses import policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import micro_of
from jaxrl.roles.train_config import TrainConfig
from jaxrl.roles.trust_region import ITERATIONS, TrustRegionActor

# About 1,000 weights: an explicit Fisher matrix is small.
MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=8, d_ff=8, num_heads=2, num_kv_heads=2, head_dim=4
)
SURROGATE = policy("trpo", {"kl_coef": 0.0})
MAX_KL, DAMPING, TEMPERATURE = 0.01, 0.1, 0.9
ONE_DEVICE = ("1-1-1", 1)
EIGHT_DEVICES = ("2-2-2", 2)


@functools.cache
def actor_of(layout=ONE_DEVICE, damping=DAMPING, **model) -> TrustRegionActor:
    train, fsdp = layout
    return TrustRegionActor(
        dataclasses.replace(MODEL, **model),
        mesh_of(train, fsdp=fsdp),
        train=TrainConfig(logprob_chunk_tokens=8),
        optim=OptimConfig(),
        temperature=TEMPERATURE,
        seed=0,
        max_kl=MAX_KL,
        damping=damping,
    )


@functools.cache
def first_state() -> TrainState:
    actor = actor_of()
    actor.init()
    return jax.device_get(actor.state)


def fresh(layout=ONE_DEVICE) -> TrustRegionActor:
    actor = actor_of(layout)
    actor.state = jax.device_put(first_state(), actor.state_shardings())
    return actor


def batch_for(actor: TrustRegionActor, shape=ONE_EACH, num: int = 8):
    """A batch of which the actor's own policy is the old one."""
    rng = np.random.default_rng(1)
    rows = sequences(num)
    for row in rows:
        row["advantage"] = row["loss_mask"] * np.float32(rng.normal())
    batch = actor.place(packed(rows, shape)[1])
    return batch.replace(old_logprob=actor.logprobs(batch))


def distributions(actor: TrustRegionActor, batch):
    """The function from flat weights to log-probabilities over the vocabulary at trained tokens, [N, V]."""
    micro = micro_of(batch, 0, 0)
    trained_RT = np.asarray(micro.loss_mask) > 0
    _, unravel = ravel_pytree(first_state().params)

    def of(flat):
        model = nnx.merge(actor.graph, unravel(flat))
        hidden_RTD = actor._run(model, micro).hidden_BTD
        logits = model.logits(hidden_RTD, compute=actor._compute) / TEMPERATURE
        before = jnp.roll(jax.nn.log_softmax(logits), 1, axis=1)
        return before[np.nonzero(trained_RT)]

    return of, np.asarray(micro.tokens)[trained_RT], np.asarray(micro.advantage)[trained_RT]


@functools.cache
def twin():
    """(gradient, Fisher matrix, flat weights, measure) in float64 where NumPy does the work."""
    actor = fresh()
    batch = jax.device_get(batch_for(actor))
    of, tokens, advantage = distributions(actor, batch)
    flat = np.asarray(ravel_pytree(first_state().params)[0])
    run = jax.jit(of)
    old_NV = np.asarray(run(flat), np.float64)
    N, V = old_NV.shape
    # Row by row: `jacrev` maps the backward pass over vectors, which this model's does not bear.
    rows = jnp.eye(N * V, dtype=jnp.float32).reshape(-1, N, V)
    pull = jax.jit(lambda x: jax.lax.map(lambda row: jax.vjp(of, x)[1](row)[0], rows))
    jacobian_NVP = np.asarray(pull(flat), np.float64).reshape(N, V, -1)
    score_NP = jacobian_NVP[np.arange(N), tokens]
    gradient = -(advantage[:, None] * score_NP).mean(axis=0)
    # F = E_s E_{a ~ pi} [grad log pi grad log pi^T], with every action weighted by its probability.
    weighted_NVP = np.exp(old_NV)[..., None] * jacobian_NVP
    fisher = np.einsum("nvp,nvq->pq", weighted_NVP, jacobian_NVP) / N

    def measure(new_flat):
        new_NV = np.asarray(run(np.float32(new_flat)), np.float64)
        ratio = np.exp(new_NV - old_NV)[np.arange(N), tokens]
        kl = (np.exp(old_NV) * (old_NV - new_NV)).sum(axis=1).mean()
        return -(ratio * advantage).mean(), kl

    return gradient, fisher, flat.astype(np.float64), measure


def textbook_step() -> tuple[np.ndarray, float, float, int]:
    """(weights, loss, KL, tries) after algorithm 1 with the explicit matrix."""
    gradient, fisher, flat, measure = twin()
    matrix = fisher + DAMPING * np.eye(len(fisher))
    x, r = np.zeros_like(gradient), gradient.copy()
    p = r.copy()
    for _ in range(ITERATIONS):
        Ap = matrix @ p
        alpha = r @ r / (p @ Ap)
        x, new = x + alpha * p, r - alpha * Ap
        p, r = new + (new @ new) / (r @ r) * p, new
    step = np.sqrt(2 * MAX_KL / (x @ matrix @ x)) * x
    before, _ = measure(flat)
    for k in range(10):
        loss, kl = measure(flat - 0.5**k * step)
        if loss < before and kl <= MAX_KL:
            return flat - 0.5**k * step, loss, kl, k + 1
    raise AssertionError("no step")


@pytest.mark.long
def test_the_fisher_product_is_that_of_the_explicit_matrix():
    gradient, fisher, _, _ = twin()
    actor = fresh()
    batch = batch_for(actor, PACKED)
    params = actor.state.params
    _, unravel = ravel_pytree(params)
    product = jax.jit(lambda v: actor._fisher_product(params, {}, batch, v))
    for vector in (gradient, np.random.default_rng(0).normal(size=len(gradient))):
        found = ravel_pytree(product(unravel(jnp.float32(vector))))[0]
        assert_close(found, fisher @ vector, rtol=1e-4)
    # A Fisher matrix is symmetric and has no negative direction.
    assert np.linalg.eigvalsh(fisher).min() > -1e-6


def step(actor: TrustRegionActor, shape=ONE_EACH):
    metrics = actor.update(batch_for(actor, shape), SURROGATE)
    after = np.asarray(ravel_pytree(jax.device_get(actor.state.params))[0], np.float64)
    return after, {name: float(value) for name, value in metrics.items()}


def test_a_step_is_the_textbooks():
    _, _, flat, measure = twin()
    expected, loss, kl, tries = textbook_step()
    after, metrics = step(fresh())
    moved = expected - flat
    assert np.abs((after - flat) - moved).max() < 0.01 * np.abs(moved).max()
    assert metrics["trust_region_kl"] == pytest.approx(kl, rel=0.02)
    assert metrics["trust_region_gain"] == pytest.approx(measure(flat)[0] - loss, rel=0.02)
    assert metrics["line_search_tries"] == tries
    assert metrics["skipped_updates"] == 0
    assert 0.1 * MAX_KL < metrics["trust_region_kl"] <= MAX_KL


@pytest.mark.long
@pytest.mark.parametrize("layout", [EIGHT_DEVICES, ("1-2-2", 2)], ids=["stages", "tensor and data"])
def test_neither_packing_nor_the_mesh_change_a_step(layout):
    before = np.asarray(ravel_pytree(first_state().params)[0])
    expected, metrics = step(fresh())
    actor = fresh(layout)
    found, others = step(actor, PACKED)
    # Ten products amplify rounding: the directions agree to a thousandth of the step.
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected - before).max()
    assert others == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    where = actor.state_shardings()
    assert jax.tree.all(
        jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), actor.state, where)
    )


def test_steps_compile_once_and_without_a_gradient_change_nothing():
    actor = fresh()
    batch = batch_for(actor)
    compiled = []
    for seed in range(3):
        noise = jax.random.normal(jax.random.key(seed), batch.advantage.shape)
        actor.update(actor.place(batch.replace(advantage=noise * batch.loss_mask)), SURROGATE)
        compiled.append(actor.update_program((SURROGATE,))._cache_size())
    assert compiled[0] == compiled[-1]
    before = jax.device_get(actor.state.params)
    batch = actor.place(batch.replace(advantage=jnp.zeros_like(batch.advantage)))
    metrics = actor.update(batch, SURROGATE)
    assert metrics["skipped_updates"] == 1 and metrics["trust_region_kl"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actor.state.params), before)
    assert int(actor.state.step) == 4


@pytest.mark.long
def test_adapters_take_the_step_alone():
    actor = actor_of(lora=dataclasses.replace(MODEL.lora, rank=2))
    actor.init()
    batch = batch_for(actor)
    before = jax.device_get(actor._split(actor.state.params))
    metrics = actor.update(batch, SURROGATE)
    trained, frozen = jax.device_get(actor._split(actor.state.params))
    # A wrong curvature would not give a KL near the one asked for; damping keeps it below.
    assert 0.1 * MAX_KL < float(metrics["trust_region_kl"]) <= MAX_KL
    assert not np.array_equal(ravel_pytree(trained)[0], ravel_pytree(before[0])[0])
    jax.tree.map(np.testing.assert_array_equal, frozen, before[1])


def test_programs_without_a_second_derivative_are_refused():
    with pytest.raises(UserError, match="a mixture of 4 experts"):
        actor_of(num_experts=4, experts_per_token=2)
