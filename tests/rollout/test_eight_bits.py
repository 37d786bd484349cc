"""Weights of the sampler in 8 bits: the samples are those of a model with the rounded weights."""

import dataclasses

import jax
import numpy as np
import pytest
from closeness import assert_close
from plain_pass import plain_logprobs
from slow_values import mostly_slow
from test_engine import (
    BASE,
    MODEL,
    TEMPERATURE,
    R,
    T,
    actor_of,
    answers,
    assert_same,
    make_prompts,
    sample,
    weights,
)

from jaxrl.models.decoder import decoder_graph, weight_types
from jaxrl.models.model_config import LoraConfig
from jaxrl.rollout.driver import OfflineBackend

NARROW = dataclasses.replace(BASE, weights_dtype="int8")
LAYOUTS = {
    "figure 8, fsdp": ("1-4-2", "1-2-2-2", 2),
    "replicas": ("1-1-8", "", 4),
    "stages gathered": ("2-2-2", "1-2-2-2", 1),
    "stages, as in training": ("2-2-2", "2-2-1-2", 1),
}
MODELS = {
    "dense": MODEL,
    "adapters": dataclasses.replace(MODEL, qkv_bias=True, lora=LoraConfig(rank=2)),
    "experts": dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, qkv_bias=False),
}
# The dimensions that are summed over, counted behind the layers.
SUMMED = {"q": (1,), "k": (1,), "v": (1,), "o": (1, 2), "gate": (1,), "up": (1,), "down": (1,)}


def twin(model) -> dict:
    """The weights rounded by NumPy, in float32."""

    def one(path, w):
        *_, projection, leaf = (key.key for key in path)
        if leaf != "weight":
            return w
        dims = SUMMED[projection]
        if model.num_experts and projection in ("gate", "up", "down"):
            dims = (2,)
        scale = np.abs(w).max(dims, keepdims=True) * np.float32(1 / 127)
        return np.rint(w / scale).astype(np.float32) * scale

    return jax.tree_util.tree_map_with_path(one, {"": weights(model)})[""]


def logprobs(completions, params, model) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of all tokens by the sampler, and by a plain pass with `params`."""
    sizes = {"longest": T + R, "temperature": TEMPERATURE}
    found, expected = [], []
    for prompt, response, logprob, _ in answers(completions):
        found.append(logprob)
        expected.append(plain_logprobs(model, params, prompt, response, **sizes))
    return np.concatenate(found), np.concatenate(expected)


@pytest.mark.parametrize(
    "model", mostly_slow(MODELS, fast=("dense", "experts"), long=("adapters",))
)
def test_the_sampler_has_the_probabilities_of_the_rounded_weights(model):
    completions = sample(actor_of(config=NARROW, model=model))
    assert_close(*logprobs(completions, twin(model), model), scale=1)
    # And not those of the trainer.
    sampler, trainer = logprobs(completions, weights(model), model)
    assert 1e-3 < np.abs(sampler - trainer).mean() < 0.2


@pytest.fixture(scope="module")
def expected():
    return sample(actor_of(config=NARROW))


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, fast=("figure 8, fsdp",)))
def test_all_layouts_round_alike_and_sample_alike(layout, expected):
    actor = actor_of(*layout, config=NARROW)
    alone = jax.device_get(actor_of(config=NARROW).backend.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actor.backend.params), alone)
    assert_same(sample(actor), expected)


def test_scales_are_split_like_their_channels():
    layers = actor_of(*LAYOUTS["figure 8, fsdp"], config=NARROW).backend.params["layers"]
    specs = {
        name: (leaf.values.sharding.spec, leaf.scale.sharding.spec)
        for name, leaf in (
            ("up", layers["mlp"]["up"]["weight"]),
            ("down", layers["mlp"]["down"]["weight"]),
            ("q", layers["attention"]["q"]["weight"]),
            ("o", layers["attention"]["o"]["weight"]),
        )
    }
    t, none = "tensor_gen", None
    assert {name: tuple(map(tuple, pair)) for name, pair in specs.items()} == {
        "up": ((none, none, t), (none, none, t)),
        "down": ((none, t, none), (none, none, none)),
        "q": ((none, none, t, none), (none, none, t, none)),
        "o": ((none, t, none, none), (none, none, none, none)),
    }


def test_the_training_copy_stays_and_later_weights_are_rounded_again():
    actor = actor_of(*LAYOUTS["figure 8, fsdp"], config=NARROW)
    before = jax.device_get(actor.for_training().params)
    sample(actor, make_prompts([0]), num_samples=1)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actor.state.params), before)
    programs = actor.backend.engine.generate._cache_size()
    try:
        halved = jax.tree.map(lambda w: w / 2, actor.state.params)
        actor.state = actor.state.replace(params=halved)
        sample(actor, make_prompts([0]), num_samples=1)
        up = actor.backend.params["layers"]["mlp"]["up"]["weight"]
        alone = actor_of(config=NARROW).backend.params["layers"]["mlp"]["up"]["weight"]
        np.testing.assert_array_equal(up.values, alone.values)
        np.testing.assert_array_equal(up.scale, alone.scale / 2)
        assert actor.backend.engine.generate._cache_size() == programs
    finally:
        actor.state = actor.state.replace(params=jax.device_put(before, actor.train_shardings))


def test_a_backend_rounds_wide_weights_as_resharding_does(expected):
    """A server or a judge loads wide weights from files."""
    actor = actor_of(*LAYOUTS["figure 8, fsdp"], config=NARROW)
    wide = actor_of(*LAYOUTS["figure 8, fsdp"])
    sample(wide, make_prompts([0]), num_samples=1)
    backend = OfflineBackend(actor.backend.engine, str)
    backend.load(wide.backend.params)
    actor.for_sampling()
    leaves = zip(*(jax.tree.leaves(b.params) for b in (backend, actor.backend)), strict=True)
    for found, want in leaves:
        np.testing.assert_array_equal(found, want)
        assert found.sharding.is_equivalent_to(want.sharding, found.ndim)


def test_samples_do_not_depend_on_how_the_layers_run_nor_on_pages(expected):
    """Prefill in chunks, layers in a scan, and a paged cache."""
    config = dataclasses.replace(NARROW, unroll=1, prefill_chunk_tokens=4, cache="paged")
    assert_same(sample(actor_of(config=config)), expected)


@pytest.mark.slow
def test_deterministic_samples_are_alike_on_every_mesh():
    model = dataclasses.replace(MODEL, num_kv_heads=4)
    config = dataclasses.replace(NARROW, dtype="bfloat16", deterministic=True)
    alone = sample(actor_of(config=config, model=model))
    spread = sample(actor_of("1-4-2", config=config, model=model))
    assert all(np.array_equal(a, b) for a, b in zip(alone.tokens, spread.tokens, strict=True))


@pytest.mark.parametrize(
    "layout", mostly_slow({"one": ("1-1-1",), "figure 8": LAYOUTS["figure 8, fsdp"]}, fast=("one",))
)
def test_pages_in_8_bits_give_the_samples_of_a_contiguous_cache(layout):
    config = dataclasses.replace(NARROW, kv_dtype="int8")
    contiguous = sample(actor_of(config=config))
    paged = dataclasses.replace(config, cache="paged")
    assert_same(sample(actor_of(*layout, config=paged)), contiguous)
    slots = actor_of(*layout, config=paged).backend.engine.abstract_decode_state().context.cache
    types = {leaf.dtype.name for leaf in jax.tree.leaves(slots.pool)}
    assert types == {"int8", "float32"}


def test_only_projections_are_in_8_bits():
    for model in MODELS.values():
        types = weight_types(model, "bfloat16", "int8")
        assert jax.tree.structure(types) == jax.tree.structure(decoder_graph(model)[1])
        flat, _ = jax.tree_util.tree_flatten_with_path(types)
        for path, stored in flat:
            *_, owner, leaf = ("", *(key.key for key in path))
            assert stored.dtype.name == ("int8" if leaf == "weight" else "bfloat16"), (owner, leaf)
    assert {t.dims for _, t in flat if t.dims} == {(1,), (1, 2), (2,)}
