"""The kernel of the past on a mesh, interpreted, against plain XLA on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from byte_engine import MODEL
from closeness import assert_close
from flax import nnx
from meshes import mesh_of

from jaxrl.mesh.rules import GENERATE_RULES
from jaxrl.models.attention_kind import FULL
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import CacheShape, cache_of
from jaxrl.models.cache.paged_cache import PagedCache
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.kernels.paged_attention import paged_attention_tpu
from jaxrl.rollout.cache_choice import past_attention

L, B, Q, C, H, LAYER = 2, 4, 8, 64, 128, 1


def test_every_device_attends_with_its_own_slots_and_heads():
    """Two kv heads over four parts: they are replicated, and each part uses one."""
    kv_heads = 2
    mesh = mesh_of("1-4-2", "1-4-1-2")
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(B, heads, H)), jnp.float32) for heads in (Q, *[kv_heads] * 2)
    )
    tokens = [rng.normal(size=(L, B, C, kv_heads, H)).astype(np.float32) for _ in range(2)]
    cache = cache_of(*map(jnp.asarray, tokens), jnp.bfloat16, "head_dim")
    length_B = jnp.array([0, 1, 50, 64], jnp.int32)

    kernel = functools.partial(paged_attention_tpu, interpret=True)
    attend = jax.jit(past_attention(kernel, mesh, GENERATE_RULES))
    # Of the buffer the first tokens of the cache.
    buffer, used_B = jax.tree.map(lambda x: x[..., :16, :], cache), jnp.full(B, 7, jnp.int32)
    out = attend(q, cache, LAYER, length_B, k, v, buffer, used_B, FULL)
    caches = [
        (jax.tree.map(lambda x: x[LAYER], x), n) for x, n in ((cache, length_B), (buffer, used_B))
    ]
    assert_close(out, cached_attention(q, k, v, caches))


def test_pages_of_first_dense_layers_are_read_on_a_mesh():
    model = dataclasses.replace(
        MODEL, head_dim=H, num_experts=4, experts_per_token=2, first_dense_layers=1, dense_d_ff=8
    )
    graph, shapes, _ = decoder_graph(model)
    read = []

    def kernel(q_BQH, cache, *rest, **options):
        read.append(cache.pool.k.shape[0])
        return paged_attention_tpu(q_BQH, cache, *rest, interpret=True, **options)

    kind = PagedCache(
        CacheShape(1, model.num_kv_heads, H, jnp.bfloat16, "head_dim", first_layers=1),
        kernel=past_attention(kernel, mesh_of("1-4-2", "1-4-1-2"), GENERATE_RULES),
        page_tokens=16,
        num_pages=18,
        gather=None,
    )

    def step(params, cache, buffer):
        decoder, zeros_B = nnx.merge(graph, params), jnp.zeros(B, jnp.int32)
        one = kind.decoding(decoder, cache, zeros_B)(buffer, jnp.int32(0), zeros_B == 0)
        return one.run(
            decoder, zeros_B[:, None], zeros_B[:, None], zeros_B[:, None] == 0, Compute()
        )

    _, new = jax.eval_shape(step, shapes, kind.empty(B, C), kind.buffer(B, 4))
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), new, kind.buffer(B, 1))
    assert read == [1, 1]
