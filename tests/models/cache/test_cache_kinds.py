"""Every kind of cache gives what the full forward pass gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_writes import filled

from jaxrl.models.attention import attention
from jaxrl.models.cache.cache_kind import CacheKind, cache_bytes
from jaxrl.models.cache.kv_cache import CacheShape
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import LoraConfig, ModelConfig

TINY = ModelConfig(
    vocab_size=24, num_layers=3, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=8
)
MODELS = {
    "plain": TINY,
    "windows": dataclasses.replace(
        TINY, sliding_window=3, layer_pattern=("sliding", "full"), rope_local_theta=100.0
    ),
    "heads of two sizes": dataclasses.replace(
        TINY,
        num_layers=4,
        sliding_window=3,
        layer_pattern=("sliding", "full"),
        rope_local_theta=100.0,
        full_head_dim=12,
        full_kv_heads=1,
        keys_as_values=True,
    ),
    # Adapters too, which are a part of the absorbed weights.
    "latents, after dense layers": dataclasses.replace(
        TINY,
        num_kv_heads=4,
        qkv_bias=False,
        kv_latent=10,
        q_latent=6,
        rope_dim=2,
        value_dim=7,
        interleaved_rotary=True,
        num_experts=4,
        experts_per_token=2,
        first_dense_layers=1,
        dense_d_ff=20,
        lora=LoraConfig(rank=2),
    ),
    "windows, capped": dataclasses.replace(
        TINY, sliding_window=4, layer_pattern=("sliding",), attention_softcap=2.0
    ),
}
UNROLLED = {"stacked": False, "per layer": True}
COMPUTE = Compute()
B, T, PROMPT, CHUNK, BUFFER = 2, 14, 4, 3, 4
CAPACITY = 20


@functools.cache
def model_of(config):
    graph, shapes, _ = decoder_graph(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: 0.3 * rng.normal(size=s.shape).astype(np.float32), shapes)
    return graph, jax.tree.map(jnp.asarray, params)


@functools.cache
def expected(config):
    """Logits [B, T, V] of a full forward pass."""
    graph, params = model_of(config)
    ones = jnp.ones((B, T), jnp.int32)

    @jax.jit
    def whole(params):
        model = nnx.merge(graph, params)
        attend = lambda q, k, v, kind, *_: (attention(q, k, v, ones, kind), None)  # noqa: E731
        hidden = model(TOKENS, positions(0, T), attend, compute=COMPUTE).hidden_BTD
        return model.logits(hidden, compute=COMPUTE)

    return np.asarray(whole(params))


TOKENS = np.random.default_rng(1).integers(0, 24, (B, T)).astype(np.int32)


def positions(begin, end):
    return np.broadcast_to(np.arange(begin, end, dtype=np.int32), (B, end - begin))


def kind_of(name, config, dtype=jnp.float32):
    shape = CacheShape(
        config.num_periods,
        config.cached_heads,
        config.cached_dim,
        dtype,
        periodic=config if config.period > 1 else None,
        first_layers=config.first_dense_layers,
        latent=config.kv_latent > 0,
    )
    return CacheKind(shape, UNROLLED[name])


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", UNROLLED)
def test_prefill_extension_and_decoding_equal_the_full_forward_pass(name, config):
    kind = kind_of(name, config)
    graph, params = model_of(config)
    live_B = np.ones(B, bool)

    def logits_of(model, pass_, tokens_BT, begin):
        places_BT = begin + positions(0, tokens_BT.shape[1])
        live_BT = jnp.ones(tokens_BT.shape, bool)
        hidden, new = pass_.run(model, tokens_BT, places_BT, live_BT, COMPUTE)
        return model.logits(hidden, compute=COMPUTE), new

    @jax.jit
    def prefill(params, tokens_BT):
        fresh = kind.prefill(attention, jnp.ones((B, PROMPT), jnp.int32))
        logits, cache = logits_of(nnx.merge(graph, params), fresh, tokens_BT, 0)
        return logits, kind.resize(cache, CAPACITY)

    @jax.jit
    def extend(params, cache, tokens_BT):
        model, length_B = nnx.merge(graph, params), jnp.full(B, PROMPT)
        on_top = kind.extend(model, cache, length_B)
        logits, new = logits_of(model, on_top, tokens_BT, PROMPT)
        return logits, kind.write(cache, new, length_B, live_B)

    @jax.jit
    def decode(params, cache, buffer, tokens_BT, length, i):
        model = nnx.merge(graph, params)
        step = kind.decoding(model, cache, jnp.full(B, length))
        logits, new = logits_of(model, step(buffer, i, live_B), tokens_BT, length + i)
        return logits, kind.put(buffer, new, i)

    write, start = jax.jit(kind.write), jax.jit(lambda: kind.buffer(B, BUFFER))
    at = PROMPT + CHUNK
    logits, cache = prefill(params, TOKENS[:, :PROMPT])
    found = [logits]
    logits, cache = extend(params, cache, TOKENS[:, PROMPT:at])
    found.append(logits)
    # Room beyond the last token, since a buffer is written whole.
    assert CAPACITY >= T + BUFFER - 1
    while at < T:
        buffer = start()
        for i in range(min(BUFFER, T - at)):
            token = TOKENS[:, at + i : at + i + 1]
            logits, buffer = decode(params, cache, buffer, token, np.int32(at), np.int32(i))
            found.append(logits)
        cache = write(cache, buffer, np.full(B, at, np.int32), live_B)
        at += BUFFER
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected(config), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("name", UNROLLED)
def test_slots_move_with_all_they_hold(name, dtype):
    kind = kind_of(name, TINY, dtype)
    some = filled(kind, 3, 8, seed=0)

    @jax.jit
    def run(some):
        larger = kind.resize(some, 12)
        moved = kind.copy(kind.empty(4, 12), some, jnp.array([2, -1, 0, 2]))
        taken = kind.take(moved, jnp.array([0, 2, 3])), kind.take(larger, jnp.array([2, 0, 2]))
        return kind.resize(larger, 8), *taken, kind.take(moved, jnp.array([1]))

    same, taken, expected, untouched = run(some)
    jax.tree.map(np.testing.assert_array_equal, (same, taken), (some, expected))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), untouched)


@pytest.mark.parametrize("name", UNROLLED)
def test_bytes_are_those_of_the_arrays(name):
    kind = kind_of(name, TINY, jnp.int8)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(kind.empty(3, 8)))
    # A key and a value of a byte per entry, and for each a scale of four.
    assert cache_bytes(kind, 3, 8) == num_bytes == 3 * 8 * 2 * TINY.num_layers * 2 * (8 + 4)


@pytest.mark.parametrize("name", UNROLLED)
def test_every_leaf_has_named_axes_and_leads_with_slots(name):
    kind = kind_of(name, TINY, jnp.int8)
    cache = kind.empty(3, 8)
    names = jax.tree.leaves(
        kind.axes(cache), is_leaf=lambda x: isinstance(x, tuple) and x and isinstance(x[0], str)
    )
    for leaf, axes in zip(jax.tree.leaves(cache), names, strict=True):
        assert leaf.ndim == len(axes)
        assert leaf.shape[axes.index("batch")] == 3
        assert leaf.shape[axes.index("length")] == 8
