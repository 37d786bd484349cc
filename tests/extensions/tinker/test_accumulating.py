"""Gradients that add up, and the step that applies them, against plain loops in JAX and NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from flax import nnx
from meshes import mesh_of
from plain_pass import next_logprobs
from small import MODEL

from jaxrl.mesh.rules import GENERATE_RULES
from jaxrl.mesh.sharding_strategies import StateRules
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import LORA_TARGETS, LoraConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.train_config import TrainConfig
from jaxrl_tinker.accumulating import (
    DRAW_NUMBERS,
    AccumulatingActor,
    AdamNumbers,
    Targets,
    Trainee,
    pack_targets,
)
from jaxrl_tinker.summed_losses import SUMMED_LOSSES

RL = ("importance_sampling", "ppo", "cispo", "dro", "gspo")

# Adam divides a gradient by its own size, rounding included: by some processors 2e-5 of a weight after the
# steps of a test. A wrong term is wrong by much more.
AFTER_ADAM = 1e-4


@functools.cache
def weights():
    rng = np.random.default_rng(0)
    shapes = decoder_graph(MODEL)[1]
    return jax.tree.map(lambda s: (0.3 * rng.normal(size=s.shape)).astype(np.float32), shapes)


def actor_of(layout="1-1-1", rows=1, **shares) -> AccumulatingActor:
    train = TrainConfig(rows=rows, share_prompts=False)
    actor = AccumulatingActor(MODEL, mesh_of(layout, **shares), train=train, seed=0)
    actor.start_from(jax.device_put(weights(), actor.train_shardings))
    return actor


def sequence_of(rng, length: int, loss: str, K: int = 1) -> Targets:
    tokens, targets = (rng.integers(0, 16, size).astype(np.int32) for size in (length, (length, K)))

    def uniform(low, high):
        return rng.uniform(low, high, (length, K)).astype(np.float32)

    # Some of the log-probabilities are far from the policy's, so that clips are active.
    arrays = {
        "weights": uniform(-1, 1) * (rng.random((length, K)) < 0.7),
        "logprobs": uniform(-3.2, -2.3),
        "advantages": uniform(-1, 1),
        "sequence_ratio_mask": (rng.random((length, K)) < 0.7).astype(np.float32),
        "clip_low_threshold": np.full((length, K), 0.85, np.float32),
        "clip_high_threshold": np.full((length, K), 1.15, np.float32),
        "beta": np.full((length, K), 0.3, np.float32),
    }
    return Targets(tokens, targets, {name: arrays[name] for name in SUMMED_LOSSES[loss].arrays})


# The plain loop: a sequence at a time, no packing, the formulas as the API's documentation has them.


def plain_logprobs(params, tokens, targets):
    """[T, K], by the model itself on one sequence."""
    found = next_logprobs(nnx.merge(decoder_graph(MODEL)[0], params), tokens)
    return jnp.take_along_axis(found, targets, axis=-1)


def plain_loss(loss, logprob, x):
    if loss == "cross_entropy":
        return -(x["weights"] * logprob).sum()
    A, ratio = x["advantages"], jnp.exp(logprob - x["logprobs"])
    if loss == "importance_sampling":
        return -(ratio * A).sum()
    if loss == "dro":
        return -(logprob * A - 0.5 * x["beta"] * (logprob - x["logprobs"]) ** 2).sum()
    low, high = x["clip_low_threshold"], x["clip_high_threshold"]
    if loss == "cispo":
        return -(jax.lax.stop_gradient(jnp.clip(ratio, low, high)) * logprob * A).sum()
    mask = jnp.ones_like(A)
    if loss == "gspo":
        mask = x["sequence_ratio_mask"]
        mean = (mask * (logprob - x["logprobs"])).sum() / jnp.maximum(mask.sum(), 1.0)
        ratio = jnp.exp(mean) * jnp.ones_like(A)
    return -(mask * jnp.minimum(ratio * A, jnp.clip(ratio, low, high) * A)).sum()


def plain_total(params, sequences, loss):
    found = [plain_logprobs(params, jnp.array(s.tokens), jnp.array(s.targets)) for s in sequences]
    return sum(
        plain_loss(loss, lp, s.inputs) for lp, s in zip(found, sequences, strict=True)
    ), found


class PlainAdam:
    """AdamW in NumPy, float64."""

    def __init__(self, params):
        self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.mu, self.nu = (jax.tree.map(np.zeros_like, self.params) for _ in range(2))
        self.count = 0

    def step(self, grads, n: AdamNumbers):
        self.count += 1
        grads = jax.tree.map(lambda g: np.asarray(g, np.float64), grads)
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        scale = min(1.0, n.grad_clip_norm / norm) if n.grad_clip_norm else 1.0
        grads = jax.tree.map(lambda g: scale * g, grads)
        self.mu = jax.tree.map(lambda m, g: n.beta1 * m + (1 - n.beta1) * g, self.mu, grads)
        self.nu = jax.tree.map(lambda v, g: n.beta2 * v + (1 - n.beta2) * g**2, self.nu, grads)
        one, two = (1 - beta**self.count for beta in (n.beta1, n.beta2))

        def moved(p, m, v):
            step = m / one / (np.sqrt(v / two) + n.eps) + n.weight_decay * p
            return p - n.learning_rate * step

        self.params = jax.tree.map(moved, self.params, self.mu, self.nu)
        return norm


SHAPE = PackedShape(minibatches=1, microbatches=2, rows=1, tokens=12)
# Two length pairs, so that the plain loop compiles for few lengths.
LENGTHS = (12, 5, 7, 5, 12)


def accumulated(actor, sequences, loss, shape=SHAPE, shards=1, backward=True):
    """(log-probabilities of each sequence, loss) over all batches."""
    found, total = {}, 0.0
    run = actor.accumulate if backward else actor.forward
    for part in pack_targets(sequences, shape, shards=shards):
        logprobs, loss_sum = run(part.batch, loss)
        found |= dict(part.unpack(logprobs))
        total += float(loss_sum)
    return [found[i] for i in range(len(sequences))], total


def train(actor, loss, steps, *, shape=SHAPE, shards=1, plain=None):
    """The losses and weights of some steps; compares each step with the plain loop's."""
    rng = np.random.default_rng(1)
    gradient = jax.jit(jax.value_and_grad(plain_total, has_aux=True), static_argnames="loss")
    for step in range(steps):
        numbers = AdamNumbers(
            learning_rate=1e-2 / (1 + step),
            beta1=0.9,
            beta2=0.95 if step % 2 else 0.99,
            eps=1e-6,
            weight_decay=0.1 * (step % 3),
            grad_clip_norm=0.0 if step % 2 else 0.5,
        )
        # Two calls before a step: their gradients add up.
        halves = [[sequence_of(rng, n, loss) for n in LENGTHS] for _ in range(2)]
        if plain is not None:
            params = jax.tree.map(lambda x: x.astype(np.float32), plain.params)
            values, grads = zip(
                *(gradient(params, half, loss=loss) for half in halves), strict=True
            )
            norm = plain.step(jax.tree.map(np.add, *grads), numbers)
        for i, half in enumerate(halves):
            logprobs, total = accumulated(actor, half, loss, shape, shards)
            if plain is not None:
                assert_close(logprobs, list(values[i][1]), scale=1)
                assert_close(total, float(values[i][0]), scale=1)
        applied = actor.apply(numbers)
        if plain is not None:
            assert_close(applied["grad_norm"], norm)
            assert_close(actor.state.params, plain.params, AFTER_ADAM, scale=1)
    return actor.state.params


def test_gradients_add_up_and_are_applied_as_by_a_plain_loop():
    train(actor_of(), "ppo", 2, plain=PlainAdam(weights()))


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cross_entropy", *RL])
def test_twenty_steps_are_those_of_a_plain_loop(loss):
    train(actor_of(), loss, 20, plain=PlainAdam(weights()))


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cross_entropy", *RL])
def test_eight_devices_take_the_same_steps(loss):
    alone = train(actor_of(), loss, 3)
    wide = PackedShape(minibatches=1, microbatches=2, rows=4, tokens=12)
    spread = train(actor_of("1-2-4", rows=4, fsdp=2), loss, 3, shape=wide, shards=4)
    assert_close(jax.device_get(spread), jax.device_get(alone), AFTER_ADAM, scale=1)


def test_any_lengths_compile_once_and_packed_equals_alone():
    actor, rng = actor_of(), np.random.default_rng(2)
    long = PackedShape(minibatches=1, microbatches=3, rows=1, tokens=512)
    for lengths in ([512], [1], [3, 511, 200, 200, 90, 1, 1], rng.integers(1, 513, 40)):
        sequences = [sequence_of(rng, int(n), "cross_entropy") for n in lengths]
        together, _ = accumulated(actor, sequences, "cross_entropy", long)
        alone = [
            accumulated(actor, [s], "cross_entropy", long, backward=False)[0][0]
            for s in sequences[:3]
        ]
        assert_close(together[:3], alone, scale=1)
    actor.apply(AdamNumbers(1e-3))
    actor.accumulate(next(pack_targets(sequences, long)).batch, "cross_entropy")
    actor.apply(AdamNumbers(2e-3, 0.8, 0.9, 1e-8, 0.3, 1.0))
    programs = (actor.accumulate_program, actor.forward_program, actor.apply_program)
    assert [program._cache_size() for program in programs] == [1, 1, 1]


RANKED = dataclasses.replace(MODEL, lora=LoraConfig(rank=4, alpha=4.0))


def adapter_actor(layout="1-1-1", rows=1, **shares) -> AccumulatingActor:
    train = TrainConfig(rows=rows, share_prompts=False)
    rules = StateRules(GENERATE_RULES, GENERATE_RULES, GENERATE_RULES)
    mesh = mesh_of(layout, **shares)
    actor = AccumulatingActor(RANKED, mesh, train=train, seed=0, state_rules=rules)
    _, where = lora.split(actor.train_shardings)
    actor.frozen = jax.device_put(weights(), where)
    return actor


def adapter_trainee(actor, rank: int, seed: int, scale: float) -> Trainee:
    ranks = dict.fromkeys(LORA_TARGETS, rank)
    like = actor.trained(actor.shapes)
    actor.start_from(lora.uniform_adapters(like, ranks, jax.random.key(seed)))
    return dataclasses.replace(actor.trainee, gradients=None, scale=scale)


def merged(adapters, scale):
    """The weights with adapters in them: W + scale * a · b."""
    params = lora.join(adapters, jax.tree.map(jnp.asarray, weights()))
    return lora.merge(params, dataclasses.replace(MODEL, lora=LoraConfig(rank=1, alpha=scale)))


def sequences_of(seed, loss):
    rng = np.random.default_rng(seed)
    return [sequence_of(rng, n, loss) for n in LENGTHS]


def test_an_adapter_is_trained_as_by_a_plain_loop():
    """Padding to the highest rank has no effect, and stays 0."""
    actor, rank, scale = adapter_actor(), 2, 2.5
    actor.trainee = adapter_trainee(actor, rank, seed=1, scale=scale)
    adapters = lora.with_rank(actor.state.params, rank)
    optimizer = optax.adamw(3e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    opt_state = optimizer.init(adapters)
    gradient = jax.jit(
        jax.value_and_grad(lambda a, s: plain_total(merged(a, scale), s, "ppo"), has_aux=True)
    )
    for step in range(3):
        sequences = sequences_of(step, "ppo")
        (total, _), grads = gradient(adapters, sequences)
        _, found = accumulated(actor, sequences, "ppo")
        assert_close(found, float(total), scale=1)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, adapters)
        adapters = optax.apply_updates(adapters, updates)
        norm = actor.apply(AdamNumbers(3e-2, 0.9, 0.95, 1e-8, 0.1))["grad_norm"]
        assert_close(norm, float(optax.tree.norm(grads)))
    assert_close(lora.with_rank(actor.state.params, rank), adapters, scale=1)
    # A step without an epsilon leaves the padding alone, too.
    accumulated(actor, sequences, "ppo")
    actor.apply(AdamNumbers(3e-2, eps=0.0))
    padded = lora.with_rank(lora.with_rank(actor.state.params, rank), 4)
    jax.tree.map(np.testing.assert_array_equal, actor.state.params, padded)


def two_clients(actor):
    """The adapters of two clients whose steps alternate."""
    clients = [adapter_trainee(actor, 2, seed=3, scale=16.0), adapter_trainee(actor, 4, 4, 8.0)]
    for step in range(2):
        for which in (0, 1):
            actor.trainee = clients[which]
            accumulated(actor, sequences_of(10 * which + step, "dro"), "dro")
            clients[which] = actor.trainee
        # Between the gradients and the step of one client is the other's batch.
        for which in (1, 0):
            actor.trainee = clients[which]
            actor.apply(AdamNumbers(1e-2 * (1 + which)))
            clients[which] = actor.trainee
    return [client.state.params for client in clients]


def test_two_clients_at_once_are_what_each_is_alone():
    actor = adapter_actor()
    together = two_clients(actor)
    for which, rank, seed, scale in ((0, 2, 3, 16.0), (1, 4, 4, 8.0)):
        actor.trainee = adapter_trainee(actor, rank, seed, scale)
        for step in range(2):
            accumulated(actor, sequences_of(10 * which + step, "dro"), "dro")
            actor.apply(AdamNumbers(1e-2 * (1 + which)))
        jax.tree.map(np.testing.assert_array_equal, actor.state.params, together[which])
    programs = (actor.accumulate_program, actor.apply_program)
    assert [program._cache_size() for program in programs] == [1, 1]


def test_several_targets_of_a_place_have_weights_of_their_own():
    """Distillation: [T, K] targets are K losses over the same forward pass."""
    rng = np.random.default_rng(3)
    several = sequence_of(rng, 9, "cross_entropy", K=3)
    one_each = [
        Targets(
            several.tokens, several.targets[:, [k]], {"weights": several.inputs["weights"][:, [k]]}
        )
        for k in range(3)
    ]
    together, apart = actor_of(), actor_of()
    logprobs, total = accumulated(together, [several], "cross_entropy")
    each, sum_of_each = accumulated(apart, one_each, "cross_entropy")
    assert_close(logprobs[0], np.concatenate(each, axis=1), scale=1)
    assert_close(total, sum_of_each, scale=1)
    norms = [actor.apply(AdamNumbers(1e-2))["grad_norm"] for actor in (together, apart)]
    assert_close(*norms)


def test_forward_changes_nothing_and_scores_any_weights():
    actor, rng = actor_of(), np.random.default_rng(4)
    sequences = [sequence_of(rng, n, "ppo") for n in (12, 4)]
    found, total = accumulated(actor, sequences, "ppo", backward=False)
    assert actor.trainee.gradients is None
    assert_close(total, float(plain_total(weights(), sequences, "ppo")[0]), scale=1)
    (part,) = pack_targets(sequences, SHAPE)
    logprobs, ids, top = actor.score(weights(), part.batch, top_k=3)
    scored, best, of_best = (dict(part.unpack(x)) for x in (logprobs, ids, top))
    assert_close([scored[i] for i in range(2)], found, scale=1)
    assert best[0].shape == (12, 3) and np.all(np.diff(of_best[0], axis=1) <= 0)
    # The most probable token's log-probability is that of the token as a target.
    most = Targets(sequences[0].tokens, best[0], {})
    assert_close(
        of_best[0], np.asarray(plain_logprobs(weights(), most.tokens, jnp.array(best[0]))), scale=1
    )


def test_tokens_are_drawn_in_proportion_to_their_probabilities_at_a_temperature():
    """Evenly spaced numbers draw each token as often as its probability says, up to rounding."""
    actor, rng, draws, temperature = actor_of(), np.random.default_rng(6), 1000, 0.5
    tokens = sequence_of(rng, 5, "cross_entropy").tokens
    numbers = np.tile(np.arange(draws) * (DRAW_NUMBERS // draws), (5, 1)).astype(np.int32)
    given = Targets(tokens, np.concatenate([tokens[:, None], numbers], axis=1), {})
    (part,) = pack_targets([given], SHAPE)
    found = actor.score(weights(), part.batch, draws=draws, temperature=temperature)
    (_, of_target), (_, drawn), (_, logprobs) = (next(part.unpack(x)) for x in found)
    assert of_target.shape == (5, 1)
    V = MODEL.vocab_size
    everything = jnp.tile(jnp.arange(V), (5, 1))
    plain = np.asarray(plain_logprobs(weights(), tokens, everything), np.float64)
    tempered = np.exp(plain / temperature)
    tempered /= tempered.sum(axis=1, keepdims=True)
    for t in range(5):
        count = np.bincount(drawn[t], minlength=V)
        assert np.abs(count - draws * tempered[t]).max() < 1.01
        assert_close(logprobs[t], plain[t][drawn[t]], scale=1)


def test_a_gradient_that_is_not_finite_changes_no_weight():
    actor, rng = actor_of(), np.random.default_rng(5)
    sequence = sequence_of(rng, 6, "cross_entropy")
    sequence.inputs["weights"][2] = np.inf
    accumulated(actor, [sequence], "cross_entropy")
    before = jax.device_get(actor.state.params)
    assert not np.isfinite(actor.apply(AdamNumbers(1.0))["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actor.state.params), before)
    assert actor.trainee.gradients is None
