import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from extras import import_extra
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, constraint
from jaxrl.models.compute import Compute
from jaxrl.rollout.decode_state import DecodeState, Prefix
from jaxrl.rollout.generate_program import sample, seen_tokens
from jaxrl.rollout.sampling import (
    Truncation,
    _mix,
    by_one_reduction,
    by_reductions,
    draw,
    forbid,
    gumbel_noise,
    penalize,
    sample_keys,
    sample_tokens,
    truncation_of,
)

V = 64
SAMPLES = 4096
compiled_noise = jax.jit(gumbel_noise, static_argnums=2)
keys_of, drawn_by = jax.jit(sample_keys), jax.jit(draw)


def noise_of(
    *, seed=0, step=0, prompts=(0,), indices=(0,), positions=(0,), vocab_size=V
) -> np.ndarray:
    """Noise for one slot per entry; single entries are repeated."""
    num_slots = max(len(prompts), len(indices), len(positions))
    slots = [np.broadcast_to(np.int32(x), (num_slots,)) for x in (prompts, indices, positions)]
    keys_S2 = keys_of(np.uint32(seed), np.int32(step), *slots[:2])
    return np.asarray(compiled_noise(keys_S2, slots[2], vocab_size))


@pytest.fixture(scope="module")
def by_sample() -> np.ndarray:
    """[samples, V]: one prompt, one position, many samples."""
    return noise_of(prompts=(7,), indices=np.arange(SAMPLES), positions=(3,))


@pytest.fixture(scope="module")
def by_position() -> np.ndarray:
    return noise_of(prompts=(7,), indices=(2,), positions=np.arange(SAMPLES))


@pytest.fixture(scope="module")
def by_prompt() -> np.ndarray:
    return noise_of(prompts=np.arange(SAMPLES), indices=(2,), positions=(3,))


@pytest.mark.parametrize("source", ["by_sample", "by_position", "by_prompt"])
def test_noise_is_standard_gumbel(source, request):
    """Mean, variance and distribution function; bounds are five standard errors."""
    noise = request.getfixturevalue(source)
    n = noise.size
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / n)
    # The fourth central moment of a Gumbel variable is 5.4 squared variances.
    assert abs(noise.var() - np.pi**2 / 6) < 5 * np.pi**2 / 6 * np.sqrt(4.4 / n)
    uniform = np.sort(np.exp(-np.exp(-noise.astype(np.float64))).reshape(-1))
    assert np.abs(uniform - (np.arange(n) + 0.5) / n).max() < 2 / np.sqrt(n)


@pytest.mark.parametrize("source", ["by_sample", "by_position", "by_prompt"])
def test_neighbours_are_not_correlated(source, request):
    noise = request.getfixturevalue(source)
    limit = 5 / np.sqrt(noise.size)
    for lag in (1, 2, 8, 32):
        tokens = np.corrcoef(noise[:, :-lag].reshape(-1), noise[:, lag:].reshape(-1))[0, 1]
        slots = np.corrcoef(noise[:-lag].reshape(-1), noise[lag:].reshape(-1))[0, 1]
        assert abs(tokens) < limit, lag
        assert abs(slots) < limit, lag


def test_no_two_tokens_of_the_vocabulary_are_correlated(by_sample):
    """All pairs, over samples: the largest of 2016 correlations of independent noise."""
    pairs = np.corrcoef(by_sample.T)[np.triu_indices(V, 1)]
    assert np.abs(pairs).max() < 5.5 / np.sqrt(SAMPLES)


@pytest.mark.parametrize("source", ["by_sample", "by_position", "by_prompt"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_follow_the_softmax(source, seed, request):
    """Chi-square of 4096 draws from 16 categories of very different probability."""
    noise = request.getfixturevalue(source)[:, 16 * seed : 16 * seed + 16]
    logits_V = 1.2 * np.random.default_rng(seed).normal(size=16).astype(np.float32)
    p_V = np.exp(logits_V) / np.exp(logits_V).sum()
    tokens = np.asarray(jax.jit(sample_tokens)(logits_V[None], noise))
    counts_V = np.bincount(tokens, minlength=16)
    chi_square = ((counts_V - SAMPLES * p_V) ** 2 / (SAMPLES * p_V)).sum()
    # 15 degrees of freedom: 44.3 is exceeded once in ten thousand.
    assert chi_square < 44.3


def test_successive_tokens_are_drawn_independently(by_position):
    """Chi-square of pairs (token at t, token at t + 1) over a uniform vocabulary of 8."""
    tokens = by_position[:, :8].argmax(-1)
    counts = np.bincount(8 * tokens[:-1] + tokens[1:], minlength=64)
    expected = (SAMPLES - 1) / 64
    # 63 degrees of freedom: 113.6 is exceeded once in ten thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 113.6


def test_likely_tokens_of_a_large_vocabulary_keep_their_share():
    """Half of the mass on one token, the rest spread over 2**13: the tail of the noise decides."""
    vocab_size, num_samples = 2**13, 500
    noise = noise_of(indices=np.arange(num_samples), vocab_size=vocab_size)
    logits_V = np.zeros(vocab_size, np.float32)
    logits_V[17] = np.log(vocab_size - 1)
    hits = (np.asarray(jax.jit(sample_tokens)(logits_V[None], noise)) == 17).mean()
    assert abs(hits - 0.5) < 5 * 0.5 / np.sqrt(num_samples)


BASE = {"seed": 5, "step": 6, "prompts": (7,), "indices": (8,), "positions": (9,)}


@pytest.mark.parametrize("name", BASE)
def test_noise_depends_on_each_of_its_inputs(name):
    base = noise_of(**BASE)
    np.testing.assert_array_equal(noise_of(**BASE), base)
    value = BASE[name]
    changed = noise_of(**BASE | {name: (value[0] + 1,) if isinstance(value, tuple) else value + 1})
    assert (changed != base).mean() > 0.99


def test_inputs_are_not_mixed_up():
    """No two of the 3**5 combinations share their noise: (step 1, prompt 0) is not (step 0, prompt 1)."""
    prompts, indices, positions = (grid.reshape(-1) for grid in np.mgrid[:3, :3, :3])
    noise = [
        noise_of(seed=seed, step=step, prompts=prompts, indices=indices, positions=positions)
        for seed in range(3)
        for step in range(3)
    ]
    assert len(np.unique(np.concatenate(noise), axis=0)) == 3**5


def test_all_bits_of_a_key_count():
    """2**18 samples, two tokens: with 32 bits of state about eight pairs would share their noise."""
    noise = noise_of(indices=np.arange(2**18), vocab_size=2)
    assert len(np.unique(noise.view(np.uint64))) == 2**18


def test_the_hash_spreads_every_bit():
    """Flipping one input bit flips each output bit in about half of 2000 cases."""
    words = np.random.default_rng(0).integers(0, 2**32, (2000, 1), np.uint32)
    bit = np.uint32(1) << np.arange(32, dtype=np.uint32)
    mixed = jax.jit(_mix)
    flipped = np.asarray(mixed(words)) ^ np.asarray(mixed(words ^ bit))
    share = (flipped[:, :, None] & bit > 0).mean(axis=0)
    assert np.abs(share - 0.5).max() < 0.1


def test_noise_does_not_depend_on_the_other_slots_or_the_order():
    prompts, indices, positions = (np.random.default_rng(0).integers(0, 99, 12) for _ in range(3))
    together = noise_of(prompts=prompts, indices=indices, positions=positions)
    back = slice(None, None, -1)
    reversed_ = noise_of(prompts=prompts[back], indices=indices[back], positions=positions[back])
    np.testing.assert_array_equal(together, reversed_[back])
    for s in range(12):
        alone = noise_of(
            prompts=prompts[s : s + 1], indices=indices[s : s + 1], positions=positions[s : s + 1]
        )
        np.testing.assert_array_equal(together[s], alone[0])


def test_padding_the_vocabulary_leaves_the_noise_of_real_tokens():
    np.testing.assert_array_equal(noise_of(vocab_size=48)[0], noise_of(vocab_size=V)[0, :48])


def test_noise_is_the_same_compiled_and_split_over_devices():
    slots = np.arange(8, dtype=np.int32)
    keys_S2 = keys_of(np.uint32(1), np.int32(2), slots, slots)
    # Operation by operation.
    plain = gumbel_noise(keys_S2, slots, V)
    mesh = jax.make_mesh((4, 2), ("slots", "vocab"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.NamedSharding(mesh, jax.P("slots", "vocab"))
    sharded = jax.jit(lambda k, p: gumbel_noise(k, p, V), out_shardings=split)(keys_S2, slots)
    assert_close(sharded, plain, rtol=1e-6)


# Truncation


def truncation(slots=1, **limits) -> Truncation:
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return jax.tree.map(lambda x: np.full(slots, x), truncation_of(**defaults | limits))


def kept(logits, **limits):
    """Indices of the tokens that can still be drawn: those that are, where the noise is all for them."""
    V = len(logits)
    logits_VV, noise_VV = np.tile(np.float32(logits), (V, 1)), 1e4 * np.eye(V, dtype=np.float32)
    token_V = np.asarray(drawn_by(logits_VV, noise_VV, truncation(slots=V, **limits)))
    return np.flatnonzero(token_V == np.arange(V)).tolist()


PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = np.log(PROBABILITIES)


def test_truncation_by_hand():
    assert kept(LOGITS) == [0, 1, 2, 3, 4]
    assert kept(LOGITS, top_k=2) == [1, 3]
    assert kept(LOGITS, top_k=9) == [0, 1, 2, 3, 4]
    # .4 + .25 are .65, so a third is needed for .7 and none for .6.
    assert kept(LOGITS, top_p=0.7) == [1, 3, 4]
    assert kept(LOGITS, top_p=0.6) == [1, 3]
    assert kept(LOGITS, top_p=1e-6) == [1]
    # At least half of .4.
    assert kept(LOGITS, min_p=0.49) == [1, 3, 4]
    # Of the first three, .4 / .85 and .25 / .85 are above .7 together.
    assert kept(LOGITS, top_k=3, top_p=0.7) == [1, 3]
    assert kept(LOGITS, top_k=3, top_p=0.9, min_p=0.6) == [1, 3]


def test_slots_are_truncated_apart():
    apart = truncation(slots=2)
    limits = dataclasses.replace(apart, top_k=np.int32([0, 1]), top_p=np.float32([0.6, 1.0]))
    both = np.float32([LOGITS, LOGITS])
    for wanted, drawn in [(3, [3, 1]), (1, [1, 1]), (4, [1, 1])]:
        noise = np.float32([1e4 * (np.arange(5) == wanted)] * 2)
        assert drawn_by(both, noise, limits).tolist() == drawn


def twin(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """The same by sorting, in double precision."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp(logits[order].astype(np.float64) - logits.max())
    p[top_k or len(p) :] = 0
    p /= p.sum()
    stays = (p > 0) & (np.cumsum(p) - p < top_p) & (p >= min_p * p[0])
    return np.sort(order[stays]).tolist()


QWEN, SLOTS = 151_936, 12


@pytest.mark.parametrize("scale", [5.0, 0.5], ids=["few tokens decide", "all tokens do"])
@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": 0.7},
        {"top_p": 0.99},
        {"top_p": 0.02},
        {"top_k": 50},
        {"top_k": 1000},
        {"min_p": 0.02},
        {"top_k": 300, "top_p": 0.9},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_of_a_vocabulary_of_152k_is_drawn_what_sorting_leaves(limits, scale):
    logits = scale * np.random.default_rng(0).normal(size=QWEN).astype(np.float32)
    noise = noise_of(prompts=np.arange(SLOTS), vocab_size=QWEN)
    together = np.broadcast_to(logits, (SLOTS, QWEN))
    drawn = drawn_by(together, noise, truncation(slots=SLOTS, **limits))
    inside = twin(logits, **limits)
    np.testing.assert_array_equal(drawn, [inside[(logits + row)[inside].argmax()] for row in noise])


def test_draws_of_which_few_are_inside_are_found_still():
    """A limit that a hundredth of all draws meet, beside a slot without one and one of nothing but NaN."""
    logits = np.random.default_rng(0).normal(size=(3, 2000)).astype(np.float32)
    logits[2] = np.nan
    noise = noise_of(prompts=(0, 1, 2), vocab_size=2000)
    limits = dataclasses.replace(truncation(slots=3), top_p=np.float32([1e-45, 1.0, 0.5]))
    drawn = drawn_by(logits, noise, limits).tolist()
    assert drawn == [int(logits[0].argmax()), int((logits + noise)[1].argmax()), 1999]


def test_a_draw_is_the_first_of_the_largest_and_of_nothing_but_nan_a_token():
    logits = np.float32([[0, 3, 1, 3, 2], [-1e30] * 5, [np.nan] * 5])
    assert jax.jit(sample_tokens)(logits, np.zeros_like(logits)).tolist() == [1, 0, 4]


FORMS = {
    "of CPU": lambda x, choice, noise: by_reductions(x, lambda: choice, lambda: noise, True),
    "one reduction": by_one_reduction,
}


@pytest.mark.parametrize(
    ("form", "vocab_size"), [("of CPU", 152_064), ("one reduction", 2000)], ids=str
)
def test_a_draw_and_its_sums_are_those_of_the_definition(form, vocab_size):
    """The token of logits plus noise, bit for bit; log-probabilities and entropies of float64 to 5e-6."""
    x = 3 * np.random.default_rng(0).normal(size=(4, vocab_size)).astype(np.float32)
    choice = np.where(np.arange(vocab_size) % 3 == 0, np.float32(-1e30), x)
    noise = noise_of(indices=np.arange(4), vocab_size=vocab_size)
    noise = np.where(np.arange(4)[:, None] == 3, np.float32(0), noise)  # greedy
    drawn = jax.jit(FORMS[form])(x, choice, noise)
    token = (choice + noise).argmax(axis=-1)
    np.testing.assert_array_equal(drawn.token, token)
    weight = np.exp(x.astype(np.float64))
    logprobs = np.log(weight / weight.sum(axis=-1, keepdims=True))
    wanted = logprobs[np.arange(4), token], -(np.exp(logprobs) * logprobs).sum(axis=-1)
    np.testing.assert_allclose(drawn.logprob, wanted[0], rtol=0, atol=5e-6)
    np.testing.assert_allclose(drawn.entropy, wanted[1], rtol=0, atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_ties_forbidden_tokens_and_nan_are_drawn_as_ever(form):
    """The first of the largest; of nothing but NaN, or with one, the last, whose log-probability is NaN."""
    nan = np.nan
    x = np.float32([[0, 3, 1, 3, 2], [-1e30] * 5, [nan] * 5, [1, nan, 7, 7, 0]])
    drawn = jax.jit(FORMS[form])(x, x, np.zeros_like(x))
    assert drawn.token.tolist() == [1, 0, 4, 4]
    assert np.isnan(drawn.logprob).tolist() == [False, False, True, True]
    # Five equal logits, however small.
    assert_close([drawn.logprob[1], drawn.entropy[1]], [-np.log(5), np.log(5)], rtol=1e-6)


def test_a_vocabulary_of_several_devices_is_reduced_where_it_is():
    mesh = jax.make_mesh((8,), ("vocab",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "vocab"))
    rng = np.random.default_rng(0)
    x, noise = (rng.normal(size=(3, 1152)).astype(np.float32) for _ in range(2))
    compiled = jax.jit(by_one_reduction, in_shardings=split).lower(x, x, noise).compile()
    assert "f32[3,144]" in compiled.as_text()
    assert "f32[3,1152]" not in compiled.as_text()
    together = compiled(*(jax.device_put(each, split) for each in (x, x, noise)))
    alone = jax.jit(by_one_reduction)(x, x, noise)
    np.testing.assert_array_equal(together.token, alone.token)
    assert_close(together[1:], alone[1:], rtol=1e-5)


def state_of(limits: Truncation) -> DecodeState:
    unread = dict.fromkeys(("context", "count", "limit", "active", "stops", "decoded"))
    slots = np.arange(len(limits.top_k), dtype=np.int32)
    keys, ones = keys_of(np.uint32(1), np.int32(2), slots, slots), np.ones(len(slots), np.float32)
    return DecodeState(**unread, key=keys, temperature=ones, truncation=limits)


def test_a_slot_without_limits_does_not_feel_those_of_others():
    """Not even by rounding."""
    logits = np.random.default_rng(0).normal(size=(2, 3000)).astype(np.float32)
    free = truncation(slots=2)
    limited = dataclasses.replace(free, top_p=np.float32([1.0, 0.2]))

    @jax.jit
    def drawn(state):
        none = lambda: jnp.zeros(logits.shape, bool)  # noqa: E731
        return sample(jnp.asarray(logits), state, jnp.arange(2), (1,), none, Compute())

    beside, alone = drawn(state_of(limited)), drawn(state_of(free))
    for one, other in zip(beside, alone, strict=True):
        assert one[0] == other[0]


def test_a_gpu_reads_the_logits_in_one_reduction_and_meets_one_conditional():
    logits = np.zeros((2, 640), np.float32)

    def drawn(logits, state):
        none = lambda: jnp.zeros(logits.shape, bool)  # noqa: E731
        return sample(logits, state, jnp.arange(2), (1,), none, Compute())

    traced = jax.jit(drawn).trace(logits, state_of(truncation(slots=2)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    main = text[text.index("func.func public @main") :]
    # A choice by platform has one branch in a program for one. What is inside of a branch is indented.
    *before, conditional = re.split(r"^    \S+ = \"stablehlo.case\"", main, flags=re.MULTILINE)
    assert re.search(r"^    }, {$", conditional, flags=re.MULTILINE)
    passes = re.findall(r"across dimensions = \[1\] : .tensor<2x640x.*", "".join(before))
    assert [line.count("tensor<2x640x") for line in passes] == [6]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "limits",
    [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_truncation_is_that_of_transformers(limits, seed):
    torch = import_extra("parity", "torch")
    process = import_extra("parity", "transformers.generation.logits_process")
    logits = 2 * np.random.default_rng(seed).normal(size=60).astype(np.float32)
    theirs = torch.from_numpy(logits)[None]
    for name, value in limits.items():
        warper = getattr(process, f"{name.title().replace('_', '')}LogitsWarper")
        theirs = warper(value)(None, theirs)
    assert kept(logits, **limits) == np.flatnonzero(np.isfinite(theirs[0].numpy())).tolist()


def test_the_repetition_penalty_is_that_of_transformers():
    torch = import_extra("parity", "torch")
    process = import_extra("parity", "transformers.generation.logits_process")
    logits = 2 * np.random.default_rng(0).normal(size=20).astype(np.float32)
    said = np.array([3, 3, 7, 0])
    theirs = process.RepetitionPenaltyLogitsProcessor(1.3)(
        torch.from_numpy(said)[None], torch.from_numpy(logits.copy())[None]
    )
    seen_1V = np.isin(np.arange(20), said)[None]
    penalized = jax.jit(lambda x, limits: penalize(x, limits, lambda: jnp.asarray(seen_1V)))
    ours = penalized(logits[None], truncation(repetition_penalty=1.3))
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_stop_ids_wait_for_the_minimum_length():
    limits = truncation(slots=2, min_tokens=4)
    of_slots = jax.jit(forbid, static_argnums=3)
    out = of_slots(np.zeros((2, 5), np.float32), limits, np.int32([3, 4]), (1, 2))
    np.testing.assert_array_equal(
        np.asarray(out) > -1, [[True, False, False, True, True], [True] * 5]
    )


@pytest.mark.parametrize("limits", [{"min_tokens": -1}, {"repetition_penalty": 0.0}], ids=str)
def test_a_penalty_or_minimum_out_of_range_is_refused(limits):
    with pytest.raises(UserError, match=f"{next(iter(limits))} = {next(iter(limits.values()))}"):
        truncation(**limits)


def test_no_device_gathers_the_logits_of_other_replicas():
    """Also in the branch of truncated sampling, whose memory every program has."""
    mesh = jax.make_mesh((8,), ("data",))
    by_slot = NamedSharding(mesh, PartitionSpec("data"))
    zeros = np.zeros((16, 4096), np.float32)
    arrays = zeros, zeros, truncation(slots=16, top_k=5, top_p=0.9)
    compiled = jax.jit(draw, in_shardings=by_slot).lower(*arrays).compile()
    assert "f32[2,4096]" in compiled.as_text()
    assert "f32[16,4096]" not in compiled.as_text()


@pytest.mark.parametrize("vocab_size", [128 * 9, pytest.param(128 * 16, marks=pytest.mark.long)])
def test_devices_that_share_a_vocabulary_gather_no_logits(vocab_size):
    """With and without limits and penalty; and they draw the tokens that one device draws."""
    mesh = build_mesh(ParallelLayout.from_config(LayoutConfig(train="1-8-1")))
    compute = Compute(constrain=constraint(mesh, GENERATE_RULES))
    slots = 6
    limits = truncation(slots=slots)
    limits = dataclasses.replace(
        limits,
        top_p=np.float32([1.0, 0.5, 0.9, 1.0, 1.0, 0.02]),
        top_k=np.int32([0, 0, 40, 3, 0, 0]),
        repetition_penalty=np.float32([1.0, 1.0, 1.0, 1.0, 1.5, 1.0]),
        renormalized=np.array([True, True, False, True, True, True]),
    )
    history = jnp.asarray(np.random.default_rng(1).integers(0, vocab_size, (slots, 100)))
    context = Prefix(None, history, jnp.full(slots, 80), jnp.arange(slots))
    no_more = jnp.full((slots, 1), vocab_size)
    state = state_of(limits)
    logits = np.random.default_rng(0).normal(size=(slots, vocab_size)).astype(np.float32)

    def drawn(logits, state, compute):
        seen = lambda: seen_tokens(vocab_size, context, no_more)  # noqa: E731
        return sample(logits, state, jnp.arange(slots), (1,), seen, compute)

    split = NamedSharding(mesh, PartitionSpec(None, GENERATE_RULES["vocab"]))
    program = jax.jit(drawn, static_argnums=2)
    compiled = program.lower(jax.device_put(logits, split), state, compute).compile()
    assert f"f32[{slots},{vocab_size // 8}]" in compiled.as_text()
    assert f"f32[{slots},{vocab_size}]" not in compiled.as_text()
    together = compiled(jax.device_put(logits, split), state)
    alone = program(logits, state, Compute())
    np.testing.assert_array_equal(together[0], alone[0])
    assert_close(together[1:], alone[1:], rtol=1e-5)
