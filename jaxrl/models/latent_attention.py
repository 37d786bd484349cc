"""Multi-head latent attention (arXiv 2405.04434): keys and values are projections of a short vector.

    B sequences   T tokens   D width   Q query heads   N and R dimensions of a head without and with rotation
    V size of a head's values   C size of a latent

A token has a latent c [C] and a rotated key r [R] for all heads. A head's key is [W_k c, r], its value W_v c.
Both forms below give the same result, up to rounding:

    plain      keys and values of all heads, for training and prefill
    absorbed   q (W_k c) = (q W_k) c, so the latents [c, r] themselves are keys and, but for r, values: one
               key-value head for all query heads. A cache holds C + R numbers per token and layer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.compute import Compute
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.modules import Projection, RMSNorm, Rotation, constant, normal, rotate

# That of the latents' norms, whatever `rms_norm_eps` says.
_EPS = 1e-6


class Indexers(nnx.Module):
    """The indexers of DeepSeek-V3.2, kept for export: they are not run, and no update changes them.

    They choose the `index_topk` tokens that a token attends to, which are all in the texts supported here.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        layers, width = (None, len(config.indexed_layers)), ("embed", config.d_model)
        # Split as far as they divide, as key-value heads are.
        heads, size = ("kv_heads", config.index_heads), ("head_dim", config.index_dim)
        latent = ("embed", config.q_latent)
        self.q = normal(rngs.params(), (layers, latent, heads, size), config.q_latent)
        self.k = normal(rngs.params(), (layers, width, size), config.d_model)
        self.k_scale = constant(1.0, (layers, size), exact=True)
        self.k_bias = constant(0.0, (layers, size), exact=True)
        self.head_weights = constant(0.0, (layers, width, heads), exact=True)


class LatentAttention(nnx.Module):
    """Projects to queries and latents, attends, and projects back.

    Adapters named q are on both projections of the queries, k on that to the latents, v on that from them.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, heads = ("embed", config.d_model), ("heads", config.num_heads)
        of_query = ("head_dim", config.head_dim)
        of_key_value = ("head_dim", config.head_dim - config.rope_dim + config.value_dim)
        options: Any = {"lora": config.lora, "rngs": rngs}
        inner = width
        if config.q_latent:
            # "embed" names what fsdp splits, and one axis of an array can have it.
            self.q_a = Projection("q", (width,), ((None, config.q_latent),), **options)
            inner = ("embed", config.q_latent)
            self.q_norm = RMSNorm(((None, config.q_latent),), _EPS)
        self.q = Projection("q", (inner,), (heads, of_query), **options)
        both = (None, config.kv_latent + config.rope_dim)
        self.kv_a = Projection("k", (width,), (both,), **options)
        self.kv_norm = RMSNorm(((None, config.kv_latent),), _EPS)
        self.kv_b = Projection(
            "v", (("embed", config.kv_latent),), (heads, of_key_value), **options
        )
        self.o = Projection("o", (heads, ("head_dim", config.value_dim)), (width,), **options)
        self.config = config

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: Rotation,
        attend: Callable[..., tuple[jax.Array, Any]],
        compute: Compute,
    ) -> tuple[jax.Array, Any]:
        """Returns [B, T, D] and the second result of `attend`.

        With `Compute.absorbs`, `attend` gets latents as keys and as values. Else it gets the latents
        [B, T, 1, C + R] too, which are what a cache holds.
        """
        config = self.config
        C, R, V = config.kv_latent, config.rope_dim, config.value_dim
        N = config.head_dim - R
        queries_in = self.q_norm(self.q_a(x_BTD, compute)) if config.q_latent else x_BTD
        q_BTQH = checkpoint_name(self.q(queries_in, compute), "qkv")
        latent_BTC, k_BTR = jnp.split(self.kv_a(x_BTD, compute), [C], axis=-1)
        latent_BTC = self.kv_norm(latent_BTC)
        k_BT1R = rotate(self._halves(k_BTR[:, :, None]), rotation)
        latents = checkpoint_name(jnp.concatenate([latent_BTC[:, :, None], k_BT1R], -1), "qkv")
        # `attend` divides scores by the root of the size of a head, as it is there.
        size = C + R if compute.absorbs else max(N + R, V)
        scale = (size / (N + R)) ** 0.5
        if config.rope_scaling is not None:
            scale *= config.rope_scaling.score_factor
        q_BTQH = (q_BTQH.astype(jnp.float32) * scale).astype(q_BTQH.dtype)
        q_BTQN, q_BTQR = jnp.split(q_BTQH, [N], axis=-1)
        q_BTQR = rotate(self._halves(q_BTQR), rotation)
        of_heads = ("batch", "length", "heads", "head_dim")
        if compute.absorbs:
            to_keys_CQN, to_values_CQV = jnp.split(self.kv_b.merged(compute), [N], axis=-1)
            q_BTQC = jnp.einsum("btqn,cqn->btqc", q_BTQN, to_keys_CQN)
            q = compute.constrain(jnp.concatenate([q_BTQC, q_BTQR], -1), of_heads)
            mixed, layer_out = attend(q, latents, latents)
            mixed_BTQV = jnp.einsum("btqc,cqv->btqv", mixed[..., :C], to_values_CQV)
        else:
            k_BTQN, v_BTQV = jnp.split(self.kv_b(latents[:, :, 0, :C], compute), [N], axis=-1)
            k_BTQR = jnp.broadcast_to(latents[..., C:], q_BTQR.shape)
            arrays = (
                jnp.concatenate([q_BTQN, q_BTQR], -1),
                jnp.concatenate([k_BTQN, k_BTQR], -1),
                v_BTQV,
            )
            # Kernels take heads of one size.
            q, k, v = (
                compute.constrain(jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]), of_heads)
                for x in arrays
            )
            mixed, layer_out = attend(q, k, v, latents)
            mixed_BTQV = mixed[..., :V]
        return checkpoint_name(self.o(mixed_BTQV, compute), "attention_out"), layer_out

    def _halves(self, x_BTNR: jax.Array) -> jax.Array:
        """Puts pairs that are neighbours where `rotate` has them, a half of the dimensions apart."""
        if not self.config.interleaved_rotary:
            return x_BTNR
        return x_BTNR.reshape(*x_BTNR.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x_BTNR.shape)
