import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from jaxrl.models.delta_net import (
    DeltaInputs,
    delta_after,
    delta_of_rows,
    no_past,
    one_token,
    one_token_in_place,
)
from jaxrl.models.model_config import ModelConfig

MODEL = ModelConfig(
    num_layers=2,
    layer_pattern=("delta", "full"),
    delta_key_heads=2,
    delta_value_heads=6,
    delta_key_dim=5,
    delta_value_dim=7,
)
N, U, X, Y, W = 2, 3, 5, 7, 4


def inputs_of(B, T, *, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    # Decays from hardly any to almost all, of which a text sees both.
    decay = -np.exp(2 * draw(B, T, N, U) - 2)
    step = 1 / (1 + np.exp(-draw(B, T, N, U)))
    return DeltaInputs(
        (draw(B, T, N, X), draw(B, T, N, X), draw(B, T, N, U, Y)),
        (draw(N, X, W), draw(N, X, W), draw(N, U, Y, W)),
        decay,
        step,
        np.ones((B, T), bool),
    )


def slow(inputs, state=None):
    """The recurrence of one row token by token, as in the module's docstring, in float64."""
    convolved = []
    for i, (x, taps) in enumerate(zip(inputs.qkv, inputs.taps, strict=True)):
        before = (
            np.zeros((W - 1, *x.shape[2:])) if state is None else (state.q, state.k, state.v)[i][0]
        )
        whole = np.concatenate([before, x[0]]).astype(np.float64)
        total = sum(taps[..., w] * whole[w : w + x.shape[1]] for w in range(W))
        convolved.append(total / (1 + np.exp(-total)))
    q, k, v = convolved
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    S = np.zeros((N, U, X, Y)) if state is None else np.asarray(state.matrix[0], np.float64)
    outs = []
    for t in range(len(q)):
        out = np.zeros((N, U, Y))
        for n in range(N):
            for u in range(U):
                S[n, u] *= np.exp(np.float64(inputs.log_decay[0, t, n, u]))
                error = inputs.step[0, t, n, u] * (v[t, n, u] - k[t, n] @ S[n, u])
                S[n, u] += np.outer(k[t, n], error)
                out[n, u] = q[t, n] @ S[n, u] / np.sqrt(X)
        outs.append(out)
    return np.stack(outs), S


def cut(inputs, begin, end):
    """The tokens of a range."""
    at = lambda x: x[:, begin:end]  # noqa: E731
    return DeltaInputs(tuple(map(at, inputs.qkv)), inputs.taps, *map(at, inputs[2:]))


def joined(parts):
    join = lambda *xs: np.concatenate(xs, axis=1)  # noqa: E731
    qkv = tuple(map(join, *(part.qkv for part in parts)))
    return DeltaInputs(qkv, parts[0].taps, *map(join, *(part[2:] for part in parts)))


def row_of(tree, b):
    return jax.tree.map(lambda x: x[b : b + 1], tree)


of_rows = jax.jit(lambda inputs, ids: delta_of_rows(inputs, None, ids)[0])
after = jax.jit(delta_after)


def nothing(B=1):
    return no_past(MODEL, (B,), jnp.float32)


def test_chunks_are_the_recurrence_over_2000_tokens():
    inputs = inputs_of(1, 2000)
    expected, S = slow(inputs)
    found, state = after(inputs, nothing())
    assert_close(found[0], expected)
    assert_close(state.matrix[0], S)
    assert_close(of_rows(inputs, np.ones((1, 2000), np.int32))[0], expected)


def test_one_token_at_a_time_is_the_recurrence():
    inputs = inputs_of(1, 20)
    expected, S = slow(inputs)
    state = nothing()
    for t in range(20):
        out, state = after(cut(inputs, t, t + 1), state)
        assert_close(out[0, 0], expected[t])
    assert_close(state.matrix[0], S)


def test_a_token_in_place_is_that_of_the_four_lines():
    """Two heads with three values each for a key of four, on 5 rows, over 6 tokens."""
    rng = np.random.default_rng(0)
    one = other = jnp.asarray(rng.normal(size=(5, 2, 3, 4, 7)), jnp.float32)
    for _ in range(6):
        q, k = (jnp.asarray(rng.normal(size=(5, 2, 4)), jnp.float32) for _ in range(2))
        v = jnp.asarray(rng.normal(size=(5, 2, 3, 7)), jnp.float32)
        log_decay, step = -rng.random((5, 2, 3)), rng.random((5, 2, 3))
        expected, one = one_token(one, q, k / 2, v, log_decay, step)
        found, other = one_token_in_place(other, q, k / 2, v, log_decay, step)
        assert_close(found, expected, scale=10)
        assert_close(other, one, scale=10)


@pytest.mark.parametrize("lengths", [(70, 3, 64, 1, 62), (1, 2, 3, 194), (200,)])
def test_segments_of_a_row_are_as_alone(lengths):
    """Borders within chunks, at chunks, and several in a chunk; shorter than the convolution too."""
    parts = [
        inputs_of(1, n, seed=i)._replace(taps=inputs_of(1, 1).taps) for i, n in enumerate(lengths)
    ]
    ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
    found = np.split(of_rows(joined(parts), ids)[0], np.cumsum(lengths)[:-1])
    for part, one in zip(parts, found, strict=True):
        assert_close(one, slow(part)[0])


def test_gradients_of_segments_are_as_alone():
    lengths = (40, 2, 58)
    parts = [
        inputs_of(1, n, seed=i)._replace(taps=inputs_of(1, 1).taps) for i, n in enumerate(lengths)
    ]
    ids = np.repeat(np.arange(3, dtype=np.int32), lengths)[None]

    @functools.partial(jax.jit, static_argnums=2)
    def gradient(inputs, ids, begin):
        def loss(inputs):
            out = delta_of_rows(inputs, None, ids)[0]
            weight = 1.0 + jnp.arange(begin, begin + out.shape[1], dtype=jnp.float32) % 7
            return (out**2 * weight[None, :, None, None, None]).sum()

        live = inputs.live
        return jax.grad(lambda x: loss(x._replace(live=live)))(inputs._replace(live=None))

    whole = gradient(joined(parts), ids, 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole))
    begin = 0
    for part, length in zip(parts, lengths, strict=True):
        alone = gradient(part, np.ones((1, length), np.int32), begin)
        one = cut(whole._replace(live=joined(parts).live), begin, begin + length)
        for found, expected in zip((*one.qkv, *one[2:4]), (*alone.qkv, *alone[2:4]), strict=True):
            assert_close(found, expected, 1e-4)
        begin += length


def test_padding_leaves_the_state_alone():
    """Texts of 5, 0 and 2 tokens, padded to 9, leave the states of these alone."""
    inputs = inputs_of(3, 9)
    live = np.arange(9)[None] < np.array([[5], [0], [2]])
    masked = lambda x: np.where(live[..., None, None], x, 0)  # noqa: E731
    padded = inputs._replace(
        log_decay=masked(inputs.log_decay), step=masked(inputs.step), live=live
    )
    rng = np.random.default_rng(1)
    past = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), nothing(3))
    out, state = after(padded, past)
    for b, length in enumerate((5, 0, 2)):
        whole = cut(row_of(inputs, b)._replace(taps=inputs.taps), 0, length)
        expected, S = np.zeros((0, N, U, Y)), past.matrix[b]
        if length:
            expected, S = slow(whole, row_of(past, b))
        assert_close(out[b, :length], expected)
        assert_close(state.matrix[b], S)
        tails = (state.q, past.q), (state.k, past.k), (state.v, past.v)
        for (tail, before), x in zip(tails, inputs.qkv, strict=True):
            np.testing.assert_array_equal(
                tail[b], np.concatenate([before[b], x[b, :length]])[-(W - 1) :]
            )
