import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.algos import logprobs as definition
from jaxrl.algos.logprobs import logprob_entropy, squared_probabilities, token_logprobs
from jaxrl.models.compute import Compute
from jaxrl.rollout.sampling import truncation_of

B, T, D, V = 2, 11, 4, 7
SEGMENT_IDS_BT = np.array([[1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0], [1] * 11], np.int32)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    hidden_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
    weight_DV = rng.normal(size=(D, V)).astype(np.float32)
    tokens_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    return hidden_BTD, weight_DV, tokens_BT


@functools.partial(jax.jit, static_argnames=("chunk_tokens", "statistic"))
def logprobs(hidden_BTD, weight_DV, tokens_BT, temperature=1.0, *, chunk_tokens=T, **options):
    return token_logprobs(
        lambda hidden, _: hidden @ weight_DV,
        hidden_BTD,
        tokens_BT,
        jnp.asarray(SEGMENT_IDS_BT),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        **options,
    )


def twin(hidden_BTD, weight_DV, tokens_BT, temperature):
    """Token by token in float64: what the hidden state before it says about it."""
    logprob_BT, entropy_BT = np.zeros((B, T)), np.zeros((B, T))
    for b, t in np.ndindex(B, T):
        segment = SEGMENT_IDS_BT[b, t]
        if t == 0 or segment == 0 or SEGMENT_IDS_BT[b, t - 1] != segment:
            continue
        logits_V = hidden_BTD[b, t - 1].astype(np.float64) @ weight_DV / temperature
        log_V = logits_V - np.log(np.exp(logits_V).sum())
        logprob_BT[b, t] = log_V[tokens_BT[b, t]]
        entropy_BT[b, t] = -(np.exp(log_V) * log_V).sum()
    return logprob_BT, entropy_BT


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_equal_to_the_numpy_twin(inputs, temperature):
    logprob_BT, entropy_BT = logprobs(*inputs, temperature)
    expected_logprob_BT, expected_entropy_BT = twin(*inputs, temperature)
    assert_close(logprob_BT, expected_logprob_BT)
    assert_close(entropy_BT, expected_entropy_BT)


@pytest.mark.parametrize("chunk_tokens", [4, T])
def test_squared_probabilities_by_hand(inputs, chunk_tokens):
    hidden_BTD, weight_DV, tokens_BT = inputs
    logprob_BT, sum_pi_squared_BT = logprobs(
        *inputs, 0.5, chunk_tokens=chunk_tokens, statistic=squared_probabilities
    )
    expected_BT, _ = twin(*inputs, 0.5)
    assert_close(logprob_BT, expected_BT)
    # Every token of the vocabulary in turn gives one of the probabilities.
    each_VBT = [twin(hidden_BTD, weight_DV, np.full_like(tokens_BT, v), 0.5)[0] for v in range(V)]
    total_BT = np.where(expected_BT == 0, 0, np.exp(2 * np.array(each_VBT)).sum(axis=0))
    assert_close(sum_pi_squared_BT, total_BT)


def test_chunks_change_neither_values_nor_gradients(inputs):
    hidden_BTD, weight_DV, tokens_BT = inputs
    cotangent_BT = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)

    def weighted(hidden_BTD, weight_DV, chunk_tokens):
        logprob_BT, entropy_BT = logprobs(
            hidden_BTD, weight_DV, tokens_BT, chunk_tokens=chunk_tokens
        )
        return (cotangent_BT * (logprob_BT + 0.3 * entropy_BT)).sum()

    evaluate = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1)), static_argnums=2)
    whole = evaluate(hidden_BTD, weight_DV, T)
    for chunk_tokens in (1, 4, 10, 1000):
        assert_close(evaluate(hidden_BTD, weight_DV, chunk_tokens), whole)


@pytest.mark.parametrize(("chunk_tokens", "shards"), [(4, (1, 1)), (4, (2, 2)), (1000, (2, 1))])
def test_only_trained_tokens_have_values_and_gradients(chunk_tokens, shards):
    rng = np.random.default_rng(2)
    shape = (2, 48)
    hidden_BTD = rng.normal(size=(*shape, D)).astype(np.float32)
    weight_DV = rng.normal(size=(D, V)).astype(np.float32)
    tokens_BT = rng.integers(0, V, shape).astype(np.int32)
    trained_BT = rng.random(shape) < 0.3
    trained_BT[:, 0] = False
    cotangent_BT = rng.normal(size=shape).astype(np.float32)

    def weighted(hidden_BTD, weight_DV):
        logprob_BT, entropy_BT = token_logprobs(
            lambda hidden, needed: Compute().product_of_first(
                hidden, weight_DV, needed, out_type=jnp.float32
            ),
            hidden_BTD,
            jnp.asarray(tokens_BT),
            np.ones(shape, np.int32),
            temperature=1.0,
            chunk_tokens=chunk_tokens,
            trained_BT=jnp.asarray(trained_BT),
            shards=shards,
        )
        return (cotangent_BT * logprob_BT).sum(), (logprob_BT, entropy_BT)

    evaluate = jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))
    gradients, (logprob_BT, entropy_BT) = jax.device_get(evaluate(hidden_BTD, weight_DV))
    expected_BTD, expected_DV = np.zeros((*shape, D)), np.zeros((D, V))
    for b, t in np.argwhere(trained_BT):
        logits_V = hidden_BTD[b, t - 1].astype(np.float64) @ weight_DV
        p_V = np.exp(logits_V) / np.exp(logits_V).sum()
        np.testing.assert_allclose(logprob_BT[b, t], np.log(p_V[tokens_BT[b, t]]), rtol=1e-4)
        np.testing.assert_allclose(entropy_BT[b, t], -(p_V * np.log(p_V)).sum(), rtol=1e-4)
        g_V = cotangent_BT[b, t] * (np.eye(V)[tokens_BT[b, t]] - p_V)
        expected_BTD[b, t - 1] += weight_DV @ g_V
        expected_DV += np.outer(hidden_BTD[b, t - 1], g_V)
    for values_BT in (logprob_BT, entropy_BT):
        np.testing.assert_array_equal(np.asarray(values_BT)[~trained_BT], 0)
    assert_close(gradients[0], expected_BTD)
    assert_close(gradients[1], expected_DV)


@jax.jit
def product_of_first(x, needed):
    """The first of 16 rows times ones, and the gradients of the sum by rows and ones."""

    def product(x, weight_DV):
        return Compute().product_of_first(x, weight_DV, needed, out_type=jnp.float32)

    out, pull_back = jax.vjp(product, x, jnp.ones((D, V)))
    return out, *pull_back(jnp.ones_like(out))


@pytest.mark.parametrize(
    ("needed", "computed"), [(0, 0), (1, 4), (4, 4), (5, 8), (13, 16), (16, 16)]
)
def test_what_is_not_needed_is_not_computed(needed, computed):
    """Rows of NaN behind the computed quarters reach neither the product nor its gradients."""
    x = np.ones((1, 16, D), np.float32)
    x[:, computed:] = np.nan
    out, to_x, to_weight = jax.device_get(product_of_first(x, np.int32(needed)))
    np.testing.assert_array_equal(out[0, :, 0], D * (np.arange(16) < computed))
    np.testing.assert_array_equal(to_x[0, :, 0], V * (np.arange(16) < computed))
    np.testing.assert_array_equal(to_weight, computed)


def test_gradients_of_logits_are_multiplied_in_the_type_of_activations():
    """A factor of float32 would make the products of the head on GPUs about twice as slow."""

    def total(x, weight_DV):
        compute = Compute(dtype=jnp.bfloat16)
        out = compute.product_of_first(x, weight_DV, jnp.int32(16), out_type=jnp.float32)
        return (out * 0.3).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    shapes = jax.ShapeDtypeStruct((1, 16, D), "bfloat16"), jax.ShapeDtypeStruct((D, V), "float32")
    products = re.findall(r"dot_general.* : \((.*)\) ->", gradient.lower(*shapes).as_text())
    # Of four sizes, to the hidden states and to the head.
    assert len(products) >= 8
    assert all(factors.count("xbf16") == 2 for factors in products)


@pytest.fixture(params=["log_softmax_entropy", "by_one_reduction"])
def way(request, monkeypatch):
    """Both ways to compute the sums over the vocabulary: that of CPU, and that of accelerators."""
    monkeypatch.setattr(definition, "_in_few_passes", getattr(definition, request.param))
    return jax.jit(getattr(definition, request.param))


def test_first_and_second_derivatives_by_hand(way):
    """Of p = (1/2, 1/4, 1/4): dH/dx_v = -p_v (log p_v + H), and the Hessian of log p is p p^T - diag(p)."""
    logits_V = np.log(np.float32([0.5, 0.25, 0.25]))
    of_both = jax.jit(jax.jacrev(lambda x: logprob_entropy(x, jnp.array(1))))
    of_logprob, of_entropy = of_both(logits_V)
    np.testing.assert_allclose(of_logprob, [-0.5, 0.75, -0.25], atol=1e-6)
    by_hand_V = np.log(2) * np.array([-0.25, 0.125, 0.125])
    np.testing.assert_allclose(of_entropy, by_hand_V, atol=1e-6)
    entropy = lambda x: definition.log_softmax_entropy(x)[0][1]  # noqa: E731
    hessian_VV = jax.jit(jax.hessian(entropy))(logits_V)
    by_hand_VV = [[-0.25, 0.125, 0.125], [0.125, -0.1875, 0.0625], [0.125, 0.0625, -0.1875]]
    np.testing.assert_allclose(hessian_VV, by_hand_VV, atol=1e-6)


def test_gradients_of_bfloat16_logits_of_a_large_vocabulary(way):
    """Against float64 in NumPy: dx = a (onehot - p) - b p (log p + H), rounded to the logits' type."""
    rng, vocabulary = np.random.default_rng(0), 152_064
    logits_NV = rng.normal(0, 4, (4, vocabulary)).astype(jnp.bfloat16)
    tokens_N, a, b = rng.integers(0, vocabulary, 4), 3.0, 0.01

    def loss(logits_NV):
        logprob_N, entropy_N = logprob_entropy(logits_NV, tokens_N)
        return a * logprob_N.sum() + b * entropy_N.sum()

    gradient_NV = jax.jit(jax.grad(loss))(logits_NV)
    x_NV = np.asarray(logits_NV, np.float64)
    log_NV = x_NV - np.log(np.exp(x_NV).sum(axis=1, keepdims=True))
    p_NV = np.exp(log_NV)
    entropy_N1 = -(p_NV * log_NV).sum(axis=1, keepdims=True)
    expected_NV = -a * p_NV - b * p_NV * (log_NV + entropy_N1)
    expected_NV[np.arange(4), tokens_N] += a
    assert gradient_NV.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(gradient_NV, np.float64), expected_NV, rtol=6e-3, atol=1e-9
    )


def test_the_gradient_of_a_token_scatters_nothing(way):
    """On TPU a scatter would hold one more array of the logits' size."""
    shapes = jax.ShapeDtypeStruct((8, 997), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    program = jax.jit(jax.grad(lambda x, tokens: logprob_entropy(x, tokens)[0].sum()))
    assert "scatter" not in program.lower(*shapes).as_text()


def test_one_reduction_leaves_a_vocabulary_of_eight_devices_where_it_is(monkeypatch):
    monkeypatch.setattr(definition, "_in_few_passes", definition.by_one_reduction)
    mesh = jax.make_mesh((8,), ("vocab",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "vocab"))
    x_NV = np.random.default_rng(0).normal(0, 3, (3, 1152)).astype(np.float32)
    tokens_N = np.array([0, 600, 1151])

    def loss(x_NV):
        logprob_N, entropy_N = logprob_entropy(x_NV, tokens_N)
        return (logprob_N * entropy_N).sum()

    compiled = jax.jit(jax.value_and_grad(loss), in_shardings=split).lower(x_NV).compile()
    assert "f32[3,144]" in compiled.as_text()
    assert "f32[3,1152]" not in compiled.as_text()
    monkeypatch.setattr(definition, "_in_few_passes", definition.log_softmax_entropy)
    alone = jax.jit(lambda x_NV: jax.value_and_grad(loss)(x_NV))(x_NV)
    assert_close(compiled(jax.device_put(x_NV, split)), alone, rtol=2e-5)


def gradient_of_chunks(vocabulary, tokens, **options):
    """The gradient of log-probabilities of B rows, by hidden states and head, traced."""
    tokens_BT = jnp.zeros((B, tokens), jnp.int32)

    def total(hidden_BTD, weight_DV):
        return token_logprobs(
            lambda hidden, _: hidden @ weight_DV,
            hidden_BTD,
            tokens_BT,
            jnp.ones_like(tokens_BT),
            temperature=1.0,
            **options,
        )[0].sum()

    shapes = (
        jax.ShapeDtypeStruct((B, tokens, D), "float32"),
        jax.ShapeDtypeStruct((D, vocabulary), "float32"),
    )
    return jax.jit(jax.grad(total, argnums=(0, 1))).trace(*shapes)


def test_a_chunk_keeps_the_sums_and_no_more_for_its_backward_pass(monkeypatch):
    """Three numbers a token are kept of the forward pass: the backward pass reduces nothing but gradients."""
    monkeypatch.setattr(definition, "_in_few_passes", definition.by_one_reduction)
    text = str(gradient_of_chunks(997, 64, chunk_tokens=4).jaxpr)
    assert len(re.findall(r"= reduce\[", text)) == 1


def test_entropy_by_hand_with_ids_that_have_no_probability(way):
    logprobs_V, entropy = way(np.float32([0.0, 0.0, -1e30]))
    np.testing.assert_allclose(np.exp(logprobs_V), [0.5, 0.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(2), rtol=1e-6)


@pytest.mark.parametrize(
    "truncation", [None, truncation_of(top_k=50, top_p=0.9, min_p=0.01)], ids=["whole", "truncated"]
)
def test_logits_of_the_whole_batch_are_never_in_memory(truncation):
    """Forward and backward: no intermediate holds B x T x V values."""
    vocabulary, tokens, chunk_tokens = 997, 64, 4
    program = gradient_of_chunks(
        vocabulary, tokens, chunk_tokens=chunk_tokens, truncation=truncation
    )
    text = program.lower().compile().as_text()
    assert f"{chunk_tokens},{vocabulary}]" in text
    for positions in (B * tokens, f"{B * tokens // chunk_tokens},{chunk_tokens}", f"{B},{tokens}"):
        assert f"{positions},{vocabulary}]" not in text
