import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import NUM_SEQUENCES, Ragged, differences

from jaxrl.algos import segments

seeds = st.integers(0, 10_000)
few = settings(max_examples=15)

segment_scan, last_tokens = map(jax.jit, (segments.segment_scan, segments.last_tokens))
to_sequences = jax.jit(segments.to_sequences, static_argnames="num_sequences")
windowed_scan = jax.jit(segments.windowed_scan, static_argnames="steps")

# Twins of one sequence: its trained values -> one value for every token of it.
WHOLE = {
    "segment_sum": np.sum,
    "segment_mean": lambda x: x.mean() if len(x) else 0.0,
    "segment_max": lambda x: x.max() if len(x) else 0.0,
}
# Its trained values -> one value for each.
EACH = {
    "each_token": lambda x: x,
    "running_sum": np.cumsum,
    "next_values": lambda x: np.append(x[1:], 0.0)[: len(x)],
}
compiled = {name: jax.jit(getattr(segments, name)) for name in {**WHOLE, **EACH}}


def scan_twin(x, decay, steps=None):
    n = len(x)
    return [
        sum(decay**k * x[t + k] for k in range(n - t if steps is None else min(steps, n - t)))
        for t in range(n)
    ]


def test_by_hand():
    # Two sequences and padding: 1 2 (3) | 4 (5) 6 | . with holes in brackets.
    x = np.array([[1, 2, 3, 4, 5, 6, 9]], np.float32)
    mask = np.array([[1, 1, 0, 1, 0, 1, 0]], np.float32)
    where = mask, np.array([[2, 2, 2, 1, 1, 1, 0]], np.int32)
    equal = np.testing.assert_array_equal
    equal(compiled["segment_sum"](x, *where), [[3, 3, 3, 10, 10, 10, 0]])
    equal(jax.jit(segments.segment_count)(*where), [[2, 2, 2, 2, 2, 2, 0]])
    equal(compiled["segment_max"](-x, *where), [[-1, -1, -1, -4, -4, -4, 0]])
    equal(last_tokens(*where), [[0, 1, 0, 0, 0, 1, 0]])
    equal(compiled["next_values"](x, *where), [[2, 0, 0, 6, 6, 0, 0]])
    equal(compiled["running_sum"](x, *where), [[1, 3, 0, 4, 0, 10, 0]])
    equal(segment_scan(x, *where, decay=0.5), [[2, 2, 0, 7, 0, 6, 0]])


@few
@given(seeds)
@pytest.mark.parametrize("name", WHOLE)
def test_a_statistic_of_the_sequence_lies_on_all_its_tokens(name, seed):
    ragged = Ragged.sample(seed)
    field = ragged.values()
    packed = np.asarray(compiled[name](ragged.spoiled(field), *ragged.where))
    for (x,), row in zip(ragged.trained(field), ragged.unpack(packed), strict=True):
        np.testing.assert_allclose(row, np.full(len(row), WHOLE[name](x)), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(packed[ragged.segment_ids == 0], 0)


@few
@given(seeds)
@pytest.mark.parametrize("name", EACH)
def test_a_statistic_of_the_token_equals_its_twin(name, seed):
    ragged = Ragged.sample(seed)
    field = ragged.values()
    packed = compiled[name](ragged.spoiled(field), *ragged.where)
    expected = [EACH[name](x) for (x,) in ragged.trained(field)]
    inside = np.where(ragged.mask > 0, packed, 0) if name == "next_values" else packed
    ragged.assert_equal(inside, expected)


@few
@given(seeds, st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_the_scans_equal_their_twins(seed, decay):
    ragged = Ragged.sample(seed)
    field = ragged.values()
    x = ragged.spoiled(field)
    ragged.assert_equal(
        segment_scan(x, *ragged.where, decay=decay),
        [scan_twin(x, decay) for (x,) in ragged.trained(field)],
    )
    for steps in (1, 3):
        ragged.assert_equal(
            windowed_scan(x, *ragged.where, decay=decay, steps=steps),
            [scan_twin(x, decay, steps) for (x,) in ragged.trained(field)],
        )


@few
@given(seeds)
def test_the_last_trained_token_is_marked_once(seed):
    ragged = Ragged.sample(seed)
    ragged.assert_equal(
        last_tokens(*ragged.where),
        [[0] * (m.sum() - 1) + [1] * bool(m.any()) for m in ragged.masks],
    )


@few
@given(seeds)
def test_to_sequences_and_back(seed):
    ragged = Ragged.sample(seed)
    field = ragged.values()
    total = to_sequences(
        ragged.spoiled(field), ragged.mask, ragged.sequence, num_sequences=NUM_SEQUENCES
    )
    np.testing.assert_allclose(
        total, [x.sum() for (x,) in ragged.trained(field)], rtol=2e-5, atol=2e-6
    )
    packed = np.asarray(jax.jit(segments.to_tokens)(total, ragged.sequence, absent=7.0))
    for row, value in zip(ragged.unpack(packed), total, strict=True):
        np.testing.assert_array_equal(row, np.full(len(row), value))
    np.testing.assert_array_equal(packed[ragged.segment_ids == 0], 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("segment_mean", {}),
        ("running_sum", {}),
        ("next_values", {}),
        ("segment_scan", {"decay": 0.9}),
    ],
)
def test_gradients_equal_differences_and_stay_away_from_nan(name, options):
    ragged = Ragged.sample(3)
    weight = np.random.default_rng(0).normal(size=ragged.mask.shape)

    def total(x):
        y = getattr(segments, name)(jnp.asarray(x), *map(jnp.asarray, ragged.where), **options)
        return jnp.sum(segments.masked(weight * y, ragged.mask))

    with jax.enable_x64(True):
        x = ragged.pack(ragged.values()).astype(np.float64)
        slope_of = jax.jit(jax.grad(total))
        slope, spoiled = slope_of(x), slope_of(np.where(ragged.mask > 0, x, np.nan))
        np.testing.assert_allclose(slope, differences(jax.jit(total), x), rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(spoiled, slope)
