"""Answers that share their prompt in a row: the same probabilities, scores, gradients and metrics."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from test_policy import CLIPPED, EIGHT_DEVICES, MODEL, ONE_DEVICE, OPTIONS, TRAIN, fresh
from tokens import answers_of, prompts_of

from jaxrl.dataflows.step_metrics import work_metrics
from jaxrl.errors import UserError
from jaxrl.models.attention import pick_implementation
from jaxrl.models.decoder import init_params, score_config
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.losses import policy
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.scores import RewardModel
from jaxrl.roles.train_config import TrainConfig
from jaxrl.types import Completions

SHAPE = PackedShape(minibatches=1, microbatches=4, rows=2, tokens=40)
SHARES = dataclasses.replace(TRAIN, share_prompts=True)
SHARED_FORWARD = policy("clipped", OPTIONS, shares_forward=True)


def completions(seed: int = 0) -> Completions:
    """Four ragged answers to each of three prompts, one of them a single token."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, MODEL.vocab_size, n).astype(np.int32) for n in (6, 1, 9)]
    lengths = rng.integers(1, 9, 12)
    drawn = [rng.integers(0, MODEL.vocab_size, n).astype(np.int32) for n in lengths]
    return answers_of(prompts_of(*prompts), drawn, [rng.uniform(-4, -1, n) for n in lengths])


def batches(shape: PackedShape = SHAPE):
    """The same answers, each with its prompt and sharing it; advantages by answer."""
    for share_prompts in (False, True):
        batch, _ = pack_completions(completions(), shape, share_prompts=share_prompts)
        of_answer = np.random.default_rng(1).normal(size=13).astype(np.float32)
        yield batch.replace(advantage=of_answer[batch.sequence] * batch.loss_mask)


def by_token(batch, x) -> list[np.ndarray]:
    """Values of each answer's trained tokens."""
    x, mask = np.asarray(x), np.asarray(batch.loss_mask) > 0
    return [x[mask & (np.asarray(batch.sequence) == i)] for i in range(12)]


@pytest.mark.parametrize(
    "layout",
    [
        ONE_DEVICE,
        pytest.param(EIGHT_DEVICES, marks=pytest.mark.long),
        pytest.param(("2-1-2", "", 1), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_probabilities_and_updates_are_those_of_whole_sequences(layout):
    plain, shared = batches()
    assert (np.asarray(shared.segment_ids) > 0).sum() < (np.asarray(plain.segment_ids) > 0).sum()
    actor = fresh(layout)
    expected = by_token(plain, actor.logprobs(actor.place(plain)))
    metrics = actor.update(actor.place(plain), CLIPPED)
    weights = jax.device_get(actor.state.params)
    sharing = fresh(layout, train=SHARES)
    found = by_token(shared, sharing.logprobs(sharing.place(shared)))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)
    told = sharing.update(sharing.place(shared), CLIPPED)
    assert_close(jax.device_get(sharing.state.params), weights)
    assert_close(jax.device_get(told), jax.device_get(metrics))


def logprobs_of(config, batch, mesh, train):
    """Log-probabilities of the first two microbatches."""
    model = PackedModel(config, mesh, train=train)
    params = jax.device_put(init_params(config, jax.random.key(0)), model.train_shardings)
    one = jax.jit(lambda *of: model.policy(model.graph, *of, temperature=0.9)[0])
    placed = model.place(batch)
    return [
        np.asarray(one(params, jax.tree.map(lambda x, i=i: x[0, i] if x.ndim == 4 else x, placed)))
        for i in range(2)
    ]


# With a window shorter than the prompts, in one layer of two.
WINDOWS = dataclasses.replace(MODEL, sliding_window=4, layer_pattern=("sliding", "full"))


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (MODEL, {"context": 2}),
        (WINDOWS, {}),
        pytest.param(WINDOWS, {"context": 2}, marks=pytest.mark.long),
    ],
)
def test_parts_of_sequences_and_windows_change_nothing(config, layout):
    """Of answers in the first microbatches of both kinds."""
    plain, shared = batches()
    alone = logprobs_of(config, plain, mesh_of(), TRAIN)
    mesh = mesh_of("1-1-2", **layout) if layout else mesh_of()
    together = logprobs_of(config, shared, mesh, SHARES)
    compared = 0
    for i, j, answer in itertools.product(range(2), range(2), range(12)):
        ours, theirs = (
            found[k][(np.asarray(b.sequence)[0, k] == answer) & (np.asarray(b.loss_mask)[0, k] > 0)]
            for found, b, k in ((together, shared, i), (alone, plain, j))
        )
        if ours.size and theirs.size:
            compared += 1
            assert_close(ours, theirs)
    assert compared > 2


@pytest.mark.long
def test_minibatches_keep_to_themselves():
    shape = PackedShape(minibatches=3, microbatches=4, rows=1, tokens=24)
    plain, shared = batches(shape)
    results = []
    for batch, train in ((plain, TRAIN), (shared, SHARES)):
        actor = fresh(train=train)
        metrics = actor.update(actor.place(batch), SHARED_FORWARD)
        results.append((jax.device_get(actor.state.params), jax.device_get(metrics)))
    assert_close(results[1], results[0])


def test_a_reward_model_scores_each_answer_once():
    config = score_config(MODEL)
    weights, scores = init_params(config, jax.random.key(0)), []
    for batch, train in zip(batches(), (TRAIN, SHARES), strict=True):
        role = RewardModel(config, fresh().mesh, train=train)
        role.load(weights)
        score = np.asarray(role.scores_of(role.place(batch)))
        sequence = np.asarray(batch.sequence)
        scores.append([score[sequence == i].sum() for i in range(12)])
    assert_close(scores[1], scores[0])


def test_padding_and_work_count_what_is_computed():
    actor = fresh(train=SHARES)
    of_plain, of_shared = (
        work_metrics(actor, pack_completions(completions(), SHAPE, share_prompts=shares)[1])
        for shares in (False, True)
    )
    assert 0 < of_shared["perf/padding"] < 1
    assert of_shared["perf/update_tflop"] < of_plain["perf/update_tflop"]


def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match=r"keeps those of a prompt together"):
        TrainConfig(share_prompts=True, fill_minibatches=True)
    assert pick_implementation("tpu", "bfloat16", tree=True) == "xla"
    with pytest.raises(UserError, match=r"'splash' on tpu in bfloat16 with shared prompts"):
        pick_implementation("tpu", "bfloat16", "splash", tree=True)
