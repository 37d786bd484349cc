"""The learning half of the actor: log-probabilities, updates and what they may not depend on."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from meshes import mesh_of
from packed import ONE_EACH, PACKED, TWO_UPDATES
from packed import packed as packed_rows
from small import ENGINE, MODEL, actor_on, assert_as_planned
from tokens import prompts_of

from jaxrl.errors import UserError
from jaxrl.models.compute import Compute
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.learner import TrainState
from jaxrl.roles.losses import SUPERVISED, CorrectionConfig, Objective, corrected, policy
from jaxrl.roles.optimizer import (
    OptimConfig,
    Schedule,
    StageOptimConfig,
    build_optimizer,
    learning_rate,
)
from jaxrl.roles.packing import PackedShape, plan_packing
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import truncation_of
from jaxrl.tracking.sample_rows import logprobs_by_response
from jaxrl.types import TrainBatch

# With an epsilon as large as this Adam's first step, g / (|g| + 1), has the gradient's scale, which ordinary
# Adam would hide; `shown_gradient` computes it from the step.
GRADIENT_SHOWS = OptimConfig(
    lr=1.0, epsilon=1.0, lr_warmup_steps=0, weight_decay=0.0, grad_clip=np.inf
)
ADAM = OptimConfig(lr=1e-2, lr_warmup_steps=2, weight_decay=0.01)
TRAIN = TrainConfig(logprob_chunk_tokens=8)
OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
CLIPPED = policy("clipped", OPTIONS)
ONE_DEVICE = ("1-1-1", "", 1)
EIGHT_DEVICES = ("1-4-2", "1-2-2-2", 2)
STAGES = ("2-2-2", "1-2-2-2", 2)
# Tests of the mesh itself are beside these; programs on eight devices take twice as long to compile.
ON_ONE_OR_EIGHT = pytest.mark.parametrize(
    "layout",
    [ONE_DEVICE, pytest.param(EIGHT_DEVICES, marks=pytest.mark.long)],
    ids=["1 device", "8 devices"],
)
# Further ways to lay out the same eight sequences of at most 12 tokens.
TWO_ROWS = PackedShape(minibatches=1, microbatches=6, rows=2, tokens=12)
FOUR_ROWS = PackedShape(minibatches=1, microbatches=3, rows=4, tokens=12)
PROMPTS = prompts_of([3, 4], [5])


@functools.cache
def actor_of(layout=ONE_DEVICE, optim=GRADIENT_SHOWS, train=TRAIN, limits=()) -> Actor:
    """One actor for each setting; tests start from `fresh` weights and share its compiled programs."""
    train_layout, generate, fsdp = layout
    return actor_on(
        mesh_of(train_layout, generate, fsdp=fsdp),
        engine=ENGINE,
        train=train,
        optim=optim,
        temperature=0.9,
        truncation=truncation_of(**dict(limits)) if limits else None,
    )


@functools.cache
def first_state() -> TrainState:
    actor = actor_of()
    actor.init()
    return jax.device_get(actor.state)


def fresh(layout=ONE_DEVICE, optim=GRADIENT_SHOWS, **kwargs) -> Actor:
    """An actor with the weights that every test begins with."""
    actor = actor_of(layout, optim, **kwargs)
    actor.state = jax.device_put(first_state(), actor.state_shardings())
    return actor


def sequences(num: int = 8, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Ragged prompt-response pairs with everything a policy update needs."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(num):
        prompt, response = rng.integers(1, 5), rng.integers(2, 8)
        n = prompt + response
        on_response = np.arange(n) >= prompt
        out.append(
            {
                "tokens": rng.integers(0, MODEL.vocab_size, n).astype(np.int32),
                "loss_mask": on_response.astype(np.float32),
                "rollout_logprob": on_response * rng.uniform(-4, -1, n).astype(np.float32),
                "old_logprob": on_response * rng.uniform(-4, -1, n).astype(np.float32),
                "advantage": on_response * np.float32(rng.normal()),
            }
        )
    return out


def packed(rows: list[dict[str, np.ndarray]], shape=ONE_EACH, **changes) -> TrainBatch:
    return packed_rows(rows, shape)[1].replace(**changes)


def step(actor: Actor, batch: TrainBatch, loss=CLIPPED):
    """One update; returns the parameters after it and the metrics, on the host."""
    metrics = actor.update(actor.place(batch), loss)
    return jax.device_get(actor.state.params), {k: float(v) for k, v in metrics.items()}


def shown_gradient(before, after):
    """The gradient of the first step of `GRADIENT_SHOWS`, by its weights before and after."""
    moved = jax.tree.map(lambda a, b: a - b, before, after)
    return jax.tree.map(lambda step: step / (1 - np.abs(step)), moved)


def largest_difference(a, b) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


@pytest.fixture(scope="module")
def reference():
    """Parameters and metrics after one update of the plainest kind."""
    return step(fresh(), packed(sequences()))


def test_an_update_moves_every_weight(reference):
    params, metrics = reference
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, first_state().params)
    # An untrained key bias is the one exception: it is zero and stays near it.
    assert min(jax.tree.leaves(moved)) > 1e-7
    assert 1e-3 < largest_difference(params, first_state().params) < 10
    assert metrics["grad_norm"] > 0
    assert metrics["skipped_updates"] == 0


def test_neither_packing_nor_microbatches_change_an_update(reference):
    batch = packed(sequences(), PACKED)
    assert batch.num_micro_U[0] > 1 and batch.segment_ids.max() == 3
    params, metrics = step(fresh(), batch)
    assert_close(params, reference[0], scale=1)
    assert metrics == pytest.approx(reference[1], rel=1e-4, abs=1e-5)


def test_the_mesh_does_not_change_an_update(reference):
    actor = fresh(STAGES)
    params, metrics = step(actor, packed(sequences(), FOUR_ROWS))
    assert_close(params, reference[0], scale=1)
    assert metrics == pytest.approx(reference[1], rel=1e-4, abs=1e-5)
    # The new state lies as the old one did.
    jax.tree.map(
        lambda leaf, s: (
            leaf.sharding.is_equivalent_to(s, leaf.ndim) or pytest.fail(f"{leaf.sharding}")
        ),
        actor.state,
        actor.state_shardings(),
    )


def test_rows_that_a_pipeline_cannot_split_are_refused():
    with pytest.raises(UserError, match=r"train\.rows=6 does not divide into 2 pipeline"):
        actor_of(STAGES, train=TrainConfig(rows=6))


@pytest.mark.long
def test_steps_of_adam_agree_on_both_meshes():
    """Three steps of two updates, with moments, clipping, decay and schedule."""
    curves = []
    for layout in (ONE_DEVICE, EIGHT_DEVICES):
        actor = fresh(layout, ADAM)
        curves.append([step(actor, packed(sequences(seed=seed), TWO_UPDATES)) for seed in range(3)])
    for (params, metrics), (others, other_metrics) in zip(*curves, strict=True):
        assert metrics == pytest.approx(other_metrics, rel=1e-3, abs=1e-4)
        # Adam divides tiny gradients by their own size, so rounding shows more than above.
        assert largest_difference(params, others) < 1e-3


def test_weights_are_born_the_same_on_every_mesh():
    alone, spread = actor_of(), actor_of(EIGHT_DEVICES)
    spread.init()
    assert_close(jax.device_get(spread.state), first_state(), rtol=1e-6)
    assert alone.abstract_state().params["embedding"].shape == (16, 16)
    assert_as_planned(spread)


def test_how_it_is_computed_changes_nothing(reference):
    """Rematerialised, with other chunks of log-probabilities."""
    train = TrainConfig(remat="projections", logprob_chunk_tokens=5)
    params, metrics = step(fresh(train=train), packed(sequences()))
    assert_close(params, reference[0], scale=1)
    assert metrics == pytest.approx(reference[1], rel=1e-4, abs=1e-5)


def test_the_gradient_is_that_of_a_token_mean_loss(reference):
    """By finite differences of the loss along the gradient that the parameters show."""
    del reference
    before = first_state().params
    after, metrics = step(fresh(), packed(sequences()), SUPERVISED)
    gradient = shown_gradient(before, after)
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)

    actor = fresh()
    batch = packed(sequences())

    def loss(scale):
        moved = jax.tree.map(lambda p, g: p + scale * g / norm, before, gradient)
        actor.state = actor.state.replace(params=jax.device_put(moved, actor.train_shardings))
        logprob = np.asarray(actor.logprobs(actor.place(batch)), np.float64)
        return -(logprob * batch.loss_mask).sum() / batch.loss_mask.sum()

    assert metrics["loss"] == pytest.approx(loss(0.0), rel=1e-5)
    assert (loss(0.02) - loss(-0.02)) / 0.04 == pytest.approx(norm, rel=1e-2)


def test_the_mean_is_over_tokens_not_over_sequences():
    """DAPO's token-level loss: a response of 7 tokens weighs 7 times one of one token."""
    long, short = sequences(2)
    short = {name: value[: int(short["loss_mask"].argmax()) + 1] for name, value in short.items()}
    losses = {}
    for name, rows in {"long": [long], "short": [short], "both": [long, short]}.items():
        losses[name] = step(fresh(), packed(rows), SUPERVISED)[1]["loss"]
    n = long["loss_mask"].sum()
    assert short["loss_mask"].sum() == 1
    assert losses["both"] == pytest.approx(
        (n * losses["long"] + losses["short"]) / (n + 1), rel=1e-5
    )


def test_logprobs_are_the_same_packed_unpacked_and_on_the_mesh():
    rows = sequences()
    lengths = [len(row["tokens"]) for row in rows]
    results = []
    for layout, shape in [(ONE_DEVICE, ONE_EACH), (ONE_DEVICE, PACKED), (EIGHT_DEVICES, PACKED)]:
        actor = fresh(layout)
        logprob = actor.logprobs(actor.place(packed(rows, shape)))
        results.append(plan_packing(lengths, shape).unpack(logprob))
    for row, one, two, three in zip(rows, *results, strict=True):
        assert_close(one, two, scale=1)
        assert_close(one, three, scale=1)
        np.testing.assert_array_equal(one < 0, row["loss_mask"] > 0)


def test_what_lies_outside_the_mask_has_no_effect_not_even_nan(reference):
    batch = packed(sequences())
    outside = batch.loss_mask == 0
    poisoned = batch.replace(
        **{
            name: np.where(outside, np.float32(value), getattr(batch, name))
            for name, value in [
                ("rollout_logprob", np.nan),
                ("old_logprob", np.nan),
                ("advantage", np.inf),
            ]
        }
    )
    params, metrics = step(fresh(), poisoned)
    jax.tree.map(np.testing.assert_array_equal, params, reference[0])
    assert metrics == reference[1]


def test_a_loss_that_is_nan_outside_the_mask_has_no_effect(reference):
    del reference

    def zero_over_zero(outputs, micro):
        return -outputs.logprob * micro.advantage / micro.advantage, {}

    params, metrics = step(fresh(), packed(sequences()), Objective(zero_over_zero))
    expected, _ = step(fresh(), packed(sequences()), SUPERVISED)
    assert metrics["skipped_updates"] == 0
    assert_close(params, expected, scale=1)


def test_microbatches_beyond_the_count_are_not_computed():
    batch = packed(sequences(), TWO_ROWS)
    assert batch.num_micro_U.tolist() == [4]
    nothing = batch.replace(num_micro_U=np.array([0], np.int32))
    params, metrics = step(fresh(), nothing)
    assert metrics["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, params, first_state().params)

    actor = fresh()
    half = actor.place(batch.replace(num_micro_U=np.array([2], np.int32)))
    computed = np.asarray(actor.logprobs(half)).any(axis=(0, 2, 3))
    assert computed.tolist() == [True, True, False, False, False, False]


@ON_ONE_OR_EIGHT
def test_the_ratio_is_one_at_the_first_update(layout):
    """On policy: sampled by the engine, old log-probabilities recomputed as the update computes them."""
    actor = fresh(layout, ADAM)
    options = SamplingOptions(num_samples=4, seed=0, step=0, temperature=0.9)
    completions = actor.generate(PROMPTS, options)
    batch = actor.place(pack_completions(completions, TWO_UPDATES)[0])
    advantage = np.linspace(-1, 1, batch.tokens.size, dtype=np.float32)
    batch = batch.replace(
        old_logprob=actor.logprobs(batch), advantage=advantage.reshape(batch.tokens.shape)
    )
    metrics = jax.device_get(actor.update(batch, CLIPPED))
    assert metrics["first_ratio_max_deviation"] <= 1e-6
    assert abs(metrics["first_ppo_kl"]) < 1e-6
    # The second minibatch already sees changed weights.
    assert metrics["ratio_max_deviation"] > 1e-3
    assert abs(metrics["ppo_kl"]) > 1e-5


REJECTION = CorrectionConfig(
    bypass=True, reject=dict(token_ratio=(0.5, 2.0), seq_max_k2=4.0, veto=0.05)
)
REJECTING = policy("clipped", OPTIONS, correction=REJECTION, entropy_coef=0.1)


def check_inside_the_loss(correction: CorrectionConfig, outside: Objective, inside: Objective):
    """An update in bypass is that of a batch which the same policy has corrected before.

    Microbatches cannot change it, and it has the metrics of the whole minibatch.
    """
    batch = packed(sequences(), TWO_ROWS)
    batch = batch.replace(old_logprob=batch.rollout_logprob)
    actor = fresh()
    now = batch.replace(old_logprob=np.asarray(actor.logprobs(actor.place(batch))))
    known, told = jax.device_get(corrected(correction, now))
    known = known.replace(old_logprob=batch.old_logprob)
    expected, theirs = step(fresh(), known, outside)
    params, ours = step(fresh(), batch, inside)
    assert_close(params, expected)
    for metric in [m for m in ours if m.startswith("rollout_corr/")]:
        np.testing.assert_allclose(
            ours.pop(metric), told[metric], rtol=1e-4, atol=1e-5, err_msg=metric
        )
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    return known, told


def test_what_the_loss_rejects_counts_nowhere():
    """Neither in the sum nor in what it is divided by: as if it had not been in the mask."""
    plain = policy("clipped", OPTIONS, entropy_coef=0.1)
    left, told = check_inside_the_loss(REJECTION, plain, REJECTING)
    before = packed(sequences(), TWO_ROWS).loss_mask.sum()
    assert 0 < left.loss_mask.sum() < before
    share = pytest.approx(1 - left.loss_mask.sum() / before, rel=1e-5)
    assert float(told["rollout_corr/rollout_rs_masked_fraction"]) == share
    shares = [
        told[f"rollout_corr/rollout_rs_{name}_masked_fraction"]
        for name in ("token_k1", "seq_max_k2", "veto")
    ]
    assert all(0 < x <= 1 - left.loss_mask.sum() / before + 1e-6 for x in shares)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "token", "normalize": True, "reject": dict(seq_mean_ratio=(0.5, 2.0))},
        {"weights": "sequence", "bounds": (0.01, 5.0), "normalize": True},
    ],
    ids=["some rejected", "band"],
)
def test_the_loss_weighs_its_tokens(settings):
    """verl's bypass_pg_is: -sg(w) A logprob, w of the policy being trained to the sampler's."""
    correction = CorrectionConfig(bypass=True, **settings)
    objectives = (policy("policy_gradient", {}, **c) for c in ({}, {"correction": correction}))
    known, told = check_inside_the_loss(correction, *objectives)
    inside = known.weight[known.loss_mask > 0]
    assert inside.std() > 0.1
    assert "rollout_corr/rollout_is_batch_norm_factor" in told


WEIGHTS = {"weights": "token", "bounds": (0.0, 1.5)}


@functools.cache
def step_of_top_entropy(layout, shape: PackedShape, *, bypass: bool, share_prompts=False):
    """Weights after a step of the half of the tokens with the highest entropy; its loss, here and by hand."""
    rng = np.random.default_rng(0)
    options = SamplingOptions(num_samples=4, seed=0, step=0, temperature=0.9)
    completions = fresh().generate(PROMPTS, options)
    ends = np.cumsum(completions.lengths_B)
    rank_N = rng.permutation(ends[-1]).astype(np.float32)
    noise_N = rng.uniform(-1, 1, ends[-1]).astype(np.float32)
    rollout_N = np.concatenate(completions.rollout_logprob) + noise_N
    advantage_B = rng.normal(size=len(completions)).astype(np.float32)
    completions = dataclasses.replace(
        completions,
        entropy=tuple(np.split(rank_N, ends[:-1])),
        rollout_logprob=tuple(np.split(rollout_N, ends[:-1])),
    )
    actor = fresh(layout)
    batch, packing = pack_completions(
        completions, shape, top_entropy=0.5, share_prompts=share_prompts
    )
    advantage = advantage_B[np.asarray(batch.sequence)] * batch.loss_mask
    batch = actor.place(batch.replace(advantage=advantage))
    now = actor.logprobs(batch)
    correction = CorrectionConfig(bypass=bypass, **WEIGHTS)
    if bypass:
        batch = batch.replace(old_logprob=batch.rollout_logprob)
        objective = policy("policy_gradient", {}, correction=correction)
    else:
        batch, _ = corrected(correction, batch.replace(old_logprob=now))
        objective = policy("policy_gradient", {})
    params, metrics = step(actor, batch, objective)

    rows = np.asarray(now)[packing.rows(packing.starts)]
    found = logprobs_by_response(packing, rows, completions.lengths_B.tolist())
    now_N = np.concatenate([found[b] for b in range(len(completions))])
    weight_N = np.minimum(np.exp(now_N - rollout_N), 1.5) * (rank_N >= (len(rank_N) - 1) / 2)
    by_hand = -(weight_N * np.repeat(advantage_B, completions.lengths_B) * now_N).mean()
    return params, metrics["loss"], by_hand


@pytest.mark.parametrize(
    ("layout", "shape", "share_prompts", "bypass"),
    [
        pytest.param(ONE_DEVICE, PACKED, True, True, id="packed, in the loss"),
        pytest.param(
            *(STAGES, FOUR_ROWS, False, False),
            id="stages, before the update",
            marks=pytest.mark.long,
        ),
    ],
)
def test_tokens_of_the_highest_entropy_train_alone(layout, shape, share_prompts, bypass):
    """With weights of the correction, which are multiplied in; neither packing nor the mesh matter."""
    expected, _, _ = step_of_top_entropy(ONE_DEVICE, ONE_EACH, bypass=False)
    params, loss, by_hand = step_of_top_entropy(
        layout, shape, bypass=bypass, share_prompts=share_prompts
    )
    assert loss == pytest.approx(by_hand, rel=1e-4)
    assert_close(params, expected, scale=1)


def test_a_minibatch_that_the_loss_rejects_is_skipped():
    batch = packed(sequences(), TWO_ROWS)
    impossible = np.full_like(batch.rollout_logprob, -30.0)
    batch = batch.replace(rollout_logprob=impossible, old_logprob=impossible)
    params, metrics = step(fresh(), batch, REJECTING)
    jax.tree.map(np.testing.assert_array_equal, params, first_state().params)
    assert metrics["skipped_updates"] == 1
    for name in ("masked", "seq_masked", "seq_lost", "token_k1_masked", "seq_max_k2_masked"):
        assert metrics[f"rollout_corr/rollout_rs_{name}_fraction"] == 1
    assert all(np.isfinite(value) for value in metrics.values())


def other_weights():
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + rng.normal(0, 0.1, x.shape).astype(x.dtype), first_state().params
    )


def test_the_kl_to_a_reference_over_the_whole_vocabulary():
    """Value and gradient are those of the plain formula on logits that are all in memory."""
    actor, batch = fresh(), packed(sequences())
    assert batch.tokens.shape[-1] > TRAIN.logprob_chunk_tokens
    micro = jax.tree.map(lambda x: x[0, 0] if x.ndim == 4 else x, batch)
    reference = other_weights()

    def logprobs(params):
        model = nnx.merge(actor.graph, params)
        logits_RTV = model.logits(actor._run(model, micro).hidden_BTD, compute=Compute()) / 0.9
        # Entry t says what hidden state t - 1 knows.
        return jax.nn.log_softmax(jnp.roll(logits_RTV, 1, axis=1))

    def mean_kl(params):
        ours, theirs = logprobs(params), logprobs(reference)
        kl_RT = (jnp.exp(ours) * (ours - theirs)).sum(-1)
        return (kl_RT * micro.loss_mask).sum() / micro.loss_mask.sum()

    expected, gradient = jax.jit(jax.value_and_grad(mean_kl))(first_state().params)
    silent = batch.replace(advantage=np.zeros_like(batch.advantage))
    objective = policy("policy_gradient", {}, kl_coef=1.0, kl_estimate="full")
    placed = jax.device_put(reference, actor.train_shardings)
    metrics = jax.device_get(actor.update(actor.place(silent), objective, reference=placed))
    assert metrics["kl_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["kl_loss"] == pytest.approx(metrics["loss"]) and metrics["loss"] > 0.1
    shown = shown_gradient(first_state().params, jax.device_get(actor.state.params))
    # The exact KL sums what nearly cancels, over the whole vocabulary.
    assert_close(shown, gradient, rtol=1e-4, scale=0.3)


def test_squared_probabilities_come_with_the_same_logprobs():
    actor = fresh()
    batch = actor.place(packed(sequences(), PACKED))
    logprob, sum_pi_squared = actor.squared_probabilities(batch)
    np.testing.assert_array_equal(logprob, actor.logprobs(batch))
    inside = np.asarray(batch.loss_mask) > 0
    # At least that of a uniform distribution, and at least the token's own share.
    least = np.maximum(np.exp(2 * np.asarray(logprob)), 1 / MODEL.vocab_size)
    assert (np.asarray(sum_pi_squared) >= least * (1 - 1e-5))[inside].all()
    assert (np.asarray(sum_pi_squared) <= 1)[inside].all()


def test_a_gradient_that_is_not_finite_skips_the_update_and_is_counted():
    actor = fresh(optim=ADAM)
    rows = sequences()
    for bad in (rows[3], rows[5]):
        bad["advantage"][bad["loss_mask"] > 0] = np.inf
    params, metrics = step(actor, packed(rows, TWO_UPDATES))
    jax.tree.map(np.testing.assert_array_equal, params, first_state().params)
    jax.tree.map(np.testing.assert_array_equal, actor.state.opt_state, first_state().opt_state)
    assert metrics["skipped_updates"] == 1
    assert int(actor.state.step) == 1


def test_only_the_bad_minibatch_is_skipped():
    """Two minibatches, the first not finite: the step equals one update with the second."""
    rows = sequences()
    second_alone, _ = step(fresh(), packed(rows[4:]))
    rows[0]["advantage"][rows[0]["loss_mask"] > 0] = np.nan
    params, metrics = step(fresh(), packed(rows, TWO_UPDATES))
    assert metrics["skipped_updates"] == 0.5
    assert_close(params, second_alone, scale=1)


def test_minibatches_are_successive_updates():
    rows = sequences()
    together, metrics = step(fresh(), packed(rows, TWO_UPDATES))
    actor = fresh()
    _, first = step(actor, packed(rows[:4]))
    apart, second = step(actor, packed(rows[4:]))
    # Adam's second step mixes in the first's moments the same way; metrics are means over updates.
    assert_close(together, apart, scale=1)
    assert metrics["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2, rel=1e-4)


def test_a_large_gradient_is_clipped_to_its_norm():
    optimizer = build_optimizer(OptimConfig(epsilon=1.0, weight_decay=0.0, grad_clip=0.5))
    weights = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradient = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([2.0])}
    # The norm is 3, so 0.5 / 3 of it is left; with this epsilon the first direction is g / (|g| + 1).
    with jax.numpy_dtype_promotion("standard"):
        direction, _ = optimizer.update(gradient, optimizer.init(weights), weights)
    np.testing.assert_allclose(direction["a"], [1 / 7, 1 / 4], rtol=1e-5)
    np.testing.assert_allclose(direction["b"], [1 / 4], rtol=1e-5)


def test_weight_decay_pulls_towards_zero_apart_from_the_moments():
    """AdamW: a gradient of zero leaves decay alone, at weight_decay times the weight."""
    optimizer = build_optimizer(OptimConfig(weight_decay=0.1))
    weights = {"a": jnp.array([2.0, -4.0])}
    with jax.numpy_dtype_promotion("standard"):
        direction, _ = optimizer.update({"a": jnp.zeros(2)}, optimizer.init(weights), weights)
    np.testing.assert_allclose(direction["a"], [0.2, -0.4], rtol=1e-6)


def test_the_state_counts_steps_and_reports_the_rate():
    actor = fresh(optim=ADAM)
    rates = [step(actor, packed(sequences(seed=seed), TWO_UPDATES))[1]["lr"] for seed in range(3)]
    assert rates == pytest.approx([0.005, 0.01, 0.01])
    assert int(actor.state.step) == 3


def test_starting_from_weights_forgets_the_optimiser_and_the_step():
    """Starts from the weights of an earlier training stage."""
    actor = fresh(optim=ADAM)
    params, _ = step(actor, packed(sequences(), TWO_UPDATES))
    actor.start_from(actor.state.params)
    jax.tree.map(np.testing.assert_array_equal, actor.state.params, params)
    jax.tree.map(np.testing.assert_array_equal, actor.state.opt_state, first_state().opt_state)
    assert int(actor.state.step) == 0


def rates(num_steps: int, **settings) -> np.ndarray:
    schedule = Schedule.of(OptimConfig(lr=1.0, **settings))
    return np.array([float(learning_rate(schedule, jnp.int32(n))) for n in range(num_steps)])


def test_warm_up_counts_from_one():
    np.testing.assert_allclose(rates(6, lr_warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1])


@pytest.mark.parametrize("lr_warmup_steps", [0, 1])
def test_without_warm_up_the_first_step_has_the_full_rate(lr_warmup_steps):
    np.testing.assert_allclose(rates(3, lr_warmup_steps=lr_warmup_steps), [1, 1, 1])


def test_a_cosine_ends_at_the_final_share_and_stays_there():
    decayed = rates(13, lr_warmup_steps=1, lr_decay_steps=10, lr_final=0.2)
    np.testing.assert_allclose(decayed[[0, 5, 10, 12]], [1, 0.6, 0.2, 0.2], rtol=1e-6)
    assert (np.diff(decayed[:11]) < 0).all()


# Factors by hand, by step. In brackets the part of the decay that is over.
VERLS = [
    # Step 0 trains nothing.
    ("constant", 4, 0, {}, {0: 0, 1: 0.25, 3: 0.75, 4: 1, 100: 1}),
    ("constant", 0, 0, {}, {0: 1, 1: 1}),
    # [5/35]: .1 + .45 (1 + cos 25.714 deg) = .1 + .45 * 1.90097
    ("cosine", 5, 40, {"lr_final": 0.1}, {0: 0, 4: 0.8, 5: 1, 10: 0.95544, 40: 0.1, 50: 0.1}),
    # [1/4] .2 + .4 (1 + .70711), [1/2]
    ("cosine", 4, 12, {"lr_final": 0.2}, {4: 1, 6: 0.88284, 8: 0.6, 12: 0.2}),
    ("cosine", 0, 10, {}, {0: 1, 5: 0.5, 10: 0}),
    # A whole wave falls and rises again.
    ("cosine", 0, 10, {"lr_cycles": 1.0}, {0: 1, 5: 0, 10: 1}),
    ("linear", 2, 12, {"lr_final": 0.5}, {0: 0, 1: 0.5, 2: 1, 7: 0.75, 12: 0.5, 13: 0.5}),
    # int(35 * .9) = 31 steps at the full rate, and 4 of the decay from 36 on:
    # [1/2] .1 + .45, [3/4] .1 + .45 (1 - .70711)
    ("wsd", 5, 40, {"lr_final": 0.1}, {2: 0.4, 5: 1, 36: 1, 38: 0.55, 39: 0.23180, 40: 0.1}),
    ("wsd", 4, 24, {"lr_stable_ratio": 0.5}, {13: 1, 14: 1, 19: 0.5, 24: 0}),
    # Without a stable part it is the cosine.
    ("wsd", 4, 12, {"lr_final": 0.2, "lr_stable_ratio": 0.0}, {6: 0.88284, 8: 0.6, 12: 0.2}),
]


@pytest.mark.parametrize(("schedule", "warmup", "steps", "settings", "expected"), VERLS)
def test_schedules_by_verls_definition(schedule, warmup, steps, settings, expected):
    settings = {"lr_warmup_steps": warmup, "lr_decay_steps": steps, **settings}
    found = rates(max(expected) + 1, lr_schedule=schedule, **settings)
    np.testing.assert_allclose(found[[*expected]], [*expected.values()], rtol=1e-5, atol=1e-6)


def test_the_schedule_by_default_counts_its_decay_from_the_first_step():
    # [10/40]: .1 + .45 (1 + .70711)
    found = rates(41, lr_warmup_steps=5, lr_decay_steps=40, lr_final=0.1)
    np.testing.assert_allclose(found[[0, 10, 40]], [0.2, 0.86820, 0.1], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "constant", "lr_decay_steps": 9}, "'constant' has no decay"),
        ({"lr_schedule": "cosine"}, "to lr_decay_steps 0, which has to be larger"),
        ({"lr_schedule": "linear", "lr_decay_steps": 10}, "from lr_warmup_steps 10 to"),
        ({"lr_schedule": "wsd", "lr_decay_steps": 3}, "to lr_decay_steps 3"),
        ({"lr_schedule": "WSD"}, "lr_schedule"),
        ({"lr_stable_ratio": 1.5}, "lr_stable_ratio"),
        ({"lr_cycles": 0.0}, "lr_cycles"),
    ],
)
@pytest.mark.parametrize("kind", [OptimConfig, StageOptimConfig])
def test_schedules_that_cannot_be(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


@ON_ONE_OR_EIGHT
def test_nothing_compiles_twice_over_varied_batches(layout, caplog):
    actor = fresh(layout, ADAM)
    batches = [actor.place(packed(sequences(num, seed=num), TWO_UPDATES)) for num in (8, 4, 6)]
    assert len({tuple(batch.num_micro_U.tolist()) for batch in batches}) > 1

    def one_step(batch):
        actor.update(batch.replace(old_logprob=actor.logprobs(batch)), CLIPPED)
        actor.for_sampling()
        assert actor.for_training()  # the way back, too

    one_step(batches[0])
    with jax.log_compiles():
        for batch in batches[1:]:
            one_step(batch)
    assert not [message for message in caplog.messages if message.startswith("Compiling")]


def test_rows_that_do_not_divide_over_the_mesh_are_refused():
    batch = packed(sequences(), PackedShape(minibatches=1, microbatches=8, rows=1, tokens=12))
    with pytest.raises(
        UserError, match=re.escape("per-token data: batch of size 1 does not divide over fsdp=2")
    ):
        actor_of(EIGHT_DEVICES).place(batch)


@ON_ONE_OR_EIGHT
def test_sampling_after_an_update_uses_the_new_weights(layout):
    """The old ones may have shared the buffers that the update consumed."""
    actor = fresh(layout, ADAM)
    actor.for_sampling()
    greedy = SamplingOptions(num_samples=1, seed=0, step=0, temperature=0.0)
    before = actor.generate(PROMPTS, greedy)
    step(actor, packed(sequences(), TWO_UPDATES))
    after = actor.generate(PROMPTS, greedy)
    assert any(
        (a[:1] != b[:1]).any()
        for a, b in zip(after.rollout_logprob, before.rollout_logprob, strict=True)
    )


# Epochs


@ON_ONE_OR_EIGHT
def test_epochs_of_one_program_are_updates_one_after_another(layout):
    actor = fresh(layout, ADAM)
    batch = actor.place(packed(sequences(), TWO_UPDATES))
    first = jax.device_get(actor.update(batch, CLIPPED))
    # The learning rate is a step's, of which two epochs are one.
    actor.state = actor.state.replace(step=jnp.zeros_like(actor.state.step))
    second = jax.device_get(actor.update(batch, CLIPPED))
    twice = jax.device_get(actor.state)
    actor = fresh(layout, ADAM)
    metrics = jax.device_get(actor.update(batch, CLIPPED, epochs=2))
    assert_close(jax.device_get(actor.state).params, twice.params)
    assert_close(jax.device_get(actor.state).opt_state, twice.opt_state)
    assert actor.state.step == 1
    largest = max(told["ratio_max_deviation"] for told in (first, second))
    assert metrics["ratio_max_deviation"] == pytest.approx(largest, rel=1e-4)
    assert metrics["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2, rel=1e-4)


def test_an_epoch_again_wants_the_log_probabilities_of_the_first():
    actor = fresh()
    batch = actor.place(packed(sequences(), TWO_UPDATES))
    with pytest.raises(AssertionError, match="no longer has the policy"):
        actor.update(batch, policy("clipped", OPTIONS, shares_forward=True), epochs=2)
