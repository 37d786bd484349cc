"""Packed responses: every token in its place, and no memory for microbatches that nothing uses."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import answers_of, prompts_of

from jaxrl.roles.batches import pack_completions
from jaxrl.roles.packing import PackedShape, RowLimits
from jaxrl.tracking.sample_rows import logprobs_by_response
from jaxrl.types import Completions

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def completions_of(prompt_lengths: list[int], lengths: list[list[int]], seed: int) -> Completions:
    """G responses of these lengths to each prompt; every number differs, and some tokens have mask 0."""
    rng = np.random.default_rng(seed)
    flat = [n for group in lengths for n in group]
    numbers = iter(rng.permutation(sum(prompt_lengths) + sum(flat)).astype(np.int32) + 1)

    def tokens(count: int) -> np.ndarray:
        return np.array([next(numbers) for _ in range(count)], np.int32)

    responses = tuple(tokens(n) for n in flat)
    return answers_of(
        prompts_of(*map(tokens, prompt_lengths)),
        responses,
        [-rng.random(n) for n in flat],
        mask=tuple(rng.integers(0, 2, n).astype(np.float32) for n in flat),
        turns=((),) * len(flat),
    )


@st.composite
def batches(draw):
    """Completions, the shape for any such, and how to pack them."""
    N, G, updates = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    prompt_lengths = draw(st.lists(st.integers(1, 5), min_size=N * updates, max_size=N * updates))
    one = st.lists(st.integers(1, 7), min_size=G, max_size=G)
    lengths = draw(st.lists(one, min_size=N * updates, max_size=N * updates))
    completions = completions_of(prompt_lengths, lengths, draw(st.integers(0, 99)))
    tokens = draw(st.integers(12, 30))
    shape = RowLimits(draw(st.integers(1, 3)), tokens, 12).shape(
        len(completions), minibatches=updates
    )
    trained_B = np.array([draw(st.booleans()) for _ in range(len(completions))])
    return completions, shape, draw(st.booleans()), trained_B


def slowly(completions: Completions, trained_B, name: str, b: int, position: int) -> float:
    """The value of a field at a position of sequence b, prompt included."""
    prompt = completions.prompts.tokens[b // completions.num_samples]
    at = position - len(prompt)
    if at < 0:
        return prompt[position] if name == "tokens" else 0
    response = completions.tokens[b][at], completions.mask[b][at] * trained_B[b]
    values = dict(zip(("tokens", "loss_mask"), response, strict=True))
    return (values | {"rollout_logprob": completions.rollout_logprob[b][at]})[name]


@given(batches())
def test_every_token_is_where_its_sequence_and_position_say(batch):
    completions, shape, share_prompts, trained_B = batch
    packed, _ = pack_completions(
        completions, shape, share_prompts=share_prompts, trained_B=trained_B
    )
    sequence, positions, segment = (
        np.asarray(x).reshape(-1) for x in (packed.sequence, packed.positions, packed.segment_ids)
    )
    fields = {
        name: np.asarray(getattr(packed, name)).reshape(-1)
        for name in ("tokens", "loss_mask", "rollout_logprob")
    }
    found = set()
    for i in np.flatnonzero(segment):
        # A shared prompt is that of the sequence behind it.
        shared = sequence[i] < 0
        b = sequence[i:][sequence[i:] >= 0][0] if shared else sequence[i]
        assert shared or (b, positions[i]) not in found
        found.add((b, positions[i]))
        for name, x in fields.items():
            assert x[i] == slowly(completions, trained_B, name, b, positions[i]), name
    for b, response in enumerate(completions.tokens):
        first = len(completions.prompts.tokens[b // completions.num_samples])
        assert {(b, first + i) for i in range(-1, len(response))} <= found
    for x in (*fields.values(), sequence, positions):
        assert not x[segment == 0].any(), "padding is 0"
    used = np.arange(shape.microbatches) < np.asarray(packed.num_micro_U)[:, None]
    assert (np.asarray(packed.weight)[used] == 1).all()


def of_responses(completions: Completions, packing, packed: np.ndarray) -> dict[int, np.ndarray]:
    """What an array has for the tokens of each response."""
    rows = packed[packing.rows(packing.starts)]
    return logprobs_by_response(packing, rows, completions.lengths_B.tolist())


@given(batches())
def test_logprobs_of_responses_are_found_in_packed_rows(batch):
    completions, shape, share_prompts, _ = batch
    packed, packing = pack_completions(completions, shape, share_prompts=share_prompts)
    found = of_responses(completions, packing, packed.rollout_logprob)
    for b, logprob in enumerate(completions.rollout_logprob):
        np.testing.assert_array_equal(found[b], logprob)


# Trained are .1 .2 .3 .4 .5 .6 .7 .9: the quantile .75 is .6 + .25 (.7 - .6), the quantile .5 is .45.
ENTROPIES = ((0.1, 0.9, 0.3, 0.5), (0.2, 0.8, 0.4), (0.7, 0.6), (1.0, 0.05, 0.15))
TRAINED = ((1, 1, 1, 1), (1, 0, 1), (1, 1), (0, 0, 0))


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.25, [[0, 1, 0, 0], [0, 0, 0], [1, 0], [0, 0, 0]]),
        (0.5, [[0, 1, 0, 1], [0, 0, 0], [1, 1], [0, 0, 0]]),
        (1e-6, [[0, 1, 0, 0], [0, 0, 0], [0, 0], [0, 0, 0]]),
        (1.0, TRAINED),
    ],
)
@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_share_of_tokens_with_the_highest_entropy(share, expected, share_prompts):
    completions = dataclasses.replace(
        completions_of([2, 3], [[4, 3], [2, 3]], seed=0),
        entropy=tuple(np.float32(x) for x in ENTROPIES),
        mask=tuple(np.float32(x) for x in ((1, 1, 1, 1), (1, 0, 1), (1, 1), (1, 1, 1))),
    )
    shape = RowLimits(1, 24, 12).shape(4, minibatches=2)
    packed, packing = pack_completions(
        completions,
        shape,
        share_prompts=share_prompts,
        trained_B=np.array([True, True, True, False]),
        top_entropy=share,
    )
    found = of_responses(completions, packing, packed.weight * packed.loss_mask)
    assert [found[b].tolist() for b in range(4)] == [list(x) for x in expected]
    assert packed.loss_mask.sum() == 8, "the others stay in the divisor"


def test_equal_entropies_are_all_trained_and_none_is_no_error():
    completions = completions_of([2], [[4, 3]], seed=0)
    shape = RowLimits(1, 24, 12).shape(2, minibatches=1)
    packed, _ = pack_completions(completions, shape, top_entropy=0.1)
    np.testing.assert_array_equal(packed.weight * packed.loss_mask, packed.loss_mask)
    nothing, _ = pack_completions(completions, shape, top_entropy=0.1, trained_B=np.zeros(2, bool))
    assert not nothing.loss_mask.any()


@given(batches(), st.integers(0, 7))
def test_processes_fill_their_own_rows_of_one_batch(batch, which):
    completions, shape, share_prompts, trained_B = batch
    own_R = np.array([which >> r & 1 for r in range(shape.rows)], bool)
    options = {"share_prompts": share_prompts, "trained_B": trained_B, "top_entropy": 0.5}
    whole, _ = pack_completions(completions, shape, **options)
    own, other = (
        pack_completions(completions, shape, own_R=rows, **options)[0] for rows in (own_R, ~own_R)
    )
    for x, y, z in zip(*map(jax.tree.leaves, (whole, own, other)), strict=True):
        if x.ndim > 1:
            np.testing.assert_array_equal(y[:, :, own_R], x[:, :, own_R])
            assert not y[:, :, ~own_R].any()
            np.testing.assert_array_equal(y + z, x)
        else:
            np.testing.assert_array_equal(y, x)


@given(batches(), st.integers(0, 7), st.booleans())
def test_a_process_asks_for_the_rows_that_it_fills(batch, which, by_entropy):
    """It has none at first. All are asked for only where the highest entropies of all are searched."""
    completions, shape, share_prompts, trained_B = batch
    own_R = np.array([which >> r & 1 for r in range(shape.rows)], bool)
    options = {"share_prompts": share_prompts, "own_R": own_R}
    options |= {"trained_B": trained_B, "top_entropy": 0.5 if by_entropy else 1.0}
    expected, packing = pack_completions(completions, shape, **options)
    asked = []

    def rows_with(name: str, wanted_B: np.ndarray) -> tuple[np.ndarray, ...]:
        each = zip(getattr(completions, name), wanted_B, strict=True)
        return tuple(x if wanted else np.full_like(x, -1) for x, wanted in each)

    def with_rows(absent: Completions, wanted_B: np.ndarray) -> Completions:
        asked.append(wanted_B.tolist())
        fields = ("tokens", "rollout_logprob", "entropy")
        return dataclasses.replace(absent, **{name: rows_with(name, wanted_B) for name in fields})

    nothing = with_rows(completions, np.zeros(len(completions), bool))
    nothing = dataclasses.replace(nothing, fetch=with_rows)
    packed, _ = pack_completions(nothing, shape, **options)
    for x, y in zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
    rows = [start // shape.tokens % shape.rows for start in packing.starts.tolist()]
    assert asked[1:] == [[by_entropy or bool(own_R[r]) for r in rows]]


def test_microbatches_that_nothing_uses_take_no_memory():
    completions = completions_of([3], [[5, 6]], 0)
    shape = PackedShape(minibatches=1, microbatches=4096, rows=2, tokens=8192)
    before = resident_bytes()
    packed, _ = pack_completions(completions, shape)
    after = resident_bytes()
    arrays = jax.tree.leaves(packed)
    assert sum(x.nbytes for x in arrays) > 2e9
    assert after - before < 1e8


def test_rows_of_other_processes_take_no_memory():
    completions = completions_of([3] * 64, [[20_000]] * 64, 0)
    shape = PackedShape(minibatches=4, microbatches=1, rows=16, tokens=2**18)
    before = resident_bytes()
    packed, _ = pack_completions(completions, shape, own_R=np.arange(16) == 3)
    after = resident_bytes()
    # Ten arrays of 67 MB, of which one row is 4 MB. Arrays up to 32 MB may take memory that was used before.
    assert sum(x.nbytes for x in jax.tree.leaves(packed)) > 6.4e8
    assert after - before < 1.5e8


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def test_prompts_are_shared_by_the_lengths_that_occur_not_by_their_limits():
    """60-token prompts in rows for one answer of the limit, or for eight: the answers decide."""
    rows = PackedShape(minibatches=1, microbatches=32, rows=4, tokens=256)
    longer = PackedShape(minibatches=1, microbatches=32, rows=2, tokens=1600)

    def shares(shape: PackedShape, response_tokens: int) -> bool:
        completions = completions_of([60] * 8, [[response_tokens] * 8] * 8, seed=0)
        return pack_completions(completions, shape, share_prompts="auto")[0].prefix_ids is not None

    # Of 60 + 38 tokens five share a short row; of 60 + 192 eight share a long one.
    assert shares(rows, 38) and shares(longer, 192) and shares(longer, 110)
    # One of 60 + 192 fills a short row, one of 60 + 900 a long one; and 60 of 60 + 420 are few.
    assert not (shares(rows, 192) or shares(longer, 900) or shares(longer, 420))


def test_auto_packs_as_the_choice_does():
    completions = completions_of([6, 5], [[4, 3], [1, 2]], seed=1)
    shape = RowLimits(1, 24, 12).shape(4, minibatches=1)
    auto, shared = (
        pack_completions(completions, shape, share_prompts=x)[0] for x in ("auto", True)
    )
    jax.tree.map(np.testing.assert_array_equal, auto, shared)
