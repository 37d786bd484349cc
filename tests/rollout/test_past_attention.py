"""The kernel of the past on a mesh, interpreted, against plain XLA on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from closeness import assert_close
from meshes import mesh_of

from jaxrl.mesh.rules import GENERATE_RULES
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import cache_of
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
    of_past = jax.jit(past_attention(kernel, mesh, GENERATE_RULES))(q, cache, LAYER, length_B)
    one_layer = jax.tree.map(lambda x: x[LAYER], cache)
    assert_close(
        cached_attention(q, k, v, [], of_past), cached_attention(q, k, v, [(one_layer, length_B)])
    )
