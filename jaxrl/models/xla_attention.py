"""Attention in plain XLA, on any device, in memory linear in the length.

    B sequences   T tokens   Q query heads   K kv heads   H head size   G = Q/K
    N blocks of C tokens   S = C keys of a block

A row is cut into blocks, and a tile is the scores of one block of queries against one of keys:

    key block    0  1  2  3
    queries 0    #  .  .  .      #  causal within the tile
    queries 1    #  #  .  .      .  never computed: the future
    queries 2    -  -  #  .      -  never computed: no segment in common with the queries
    queries 3    -  -  #  #

Only one tile exists at a time. The backward pass recomputes it from the log-sum-exp of its rows. This is
FlashAttention (Dao et al., 2022), written for the compiler instead of by hand. Tiles before a sliding window
are skipped too, so the cost of a layer with a window is linear in the length. With shared prompts, tiles
between the answers to one prompt are skipped.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.models.attention_kind import AttentionKind

# Large and finite: a row with every key masked gives a uniform softmax, not NaN.
_MASKED = -1e30


class TreeSegments(NamedTuple):
    """Segments for tree attention: a segment may continue another one, its prefix.

    Example, a prompt P with two answers, whose segments begin with the last token of the prompt:

        tokens        P P P r r P r r r
        segment_ids   1 1 2 2 2 3 3 3 3
        prefix_ids    0 0 1 1 1 1 1 1 1

    Attributes:
      segment_ids_BT: int32; 0 is padding.
      prefix_ids_BT: int32, the segment of the same row that a token sees besides its own; 0 for none.
    """

    segment_ids_BT: jax.Array
    prefix_ids_BT: jax.Array


class _Ids(NamedTuple):
    """Segment ids of the tokens of each block, [N, B, C], and prefix ids; None without prefixes."""

    own: jax.Array
    prefix: jax.Array | None


def xla_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments: jax.Array | TreeSegments,
    kind: AttentionKind,
    *,
    block_tokens: int,
) -> jax.Array:
    """`attention` by matmuls, one tile of `block_tokens` x `block_tokens` scores at a time."""
    B, T, Q, H = q_BTQH.shape
    K, C = k_BTKH.shape[2], min(block_tokens, T)
    N = -(-T // C)

    def blocks(x_BT: jax.Array) -> jax.Array:
        """Pads the length and cuts it into blocks: [N, B, C, ...]."""
        x_BT = jnp.pad(x_BT, ((0, 0), (0, N * C - T)) + ((0, 0),) * (x_BT.ndim - 2))
        return x_BT.reshape(B, N, C, *x_BT.shape[2:]).swapaxes(0, 1)

    q_NBKGCH = blocks(q_BTQH).reshape(N, B, C, K, Q // K, H).transpose(0, 1, 3, 4, 2, 5)
    k_NBKSH, v_NBKSH = (blocks(x).swapaxes(2, 3) for x in (k_BTKH, v_BTKH))
    own, prefix = segments if isinstance(segments, TreeSegments) else (segments, None)
    ids = _Ids(blocks(own), None if prefix is None else blocks(prefix))
    reach = None if kind.reach is None else jnp.int32(kind.reach)
    sinks_KG = None if kind.sinks is None else kind.sinks.reshape(K, Q // K)
    out_NBKGCH = _blocks_attention(q_NBKGCH, k_NBKSH, v_NBKSH, ids, reach, sinks_KG, kind.softcap)
    return out_NBKGCH.transpose(1, 0, 4, 2, 3, 5).reshape(B, N * C, Q, H)[:, :T]


def _forward(
    q_NBKGCH: jax.Array,
    k_NBKSH: jax.Array,
    v_NBKSH: jax.Array,
    ids: _Ids,
    reach: jax.Array | None,
    sinks_KG: jax.Array | None,
    softcap: float,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns the mixed values, and the residuals of the backward pass."""
    tile = functools.partial(_scores, reach=reach, softcap=softcap)

    def mix(query_block):
        i, tiles, q_BKGCH = query_block

        def add(n, sums):
            j = tiles.keys[n]
            top_BKGC, total_BKGC, mixed_BKGCH = sums
            scores, _ = tile(q_BKGCH, k_NBKSH[j], _at(ids, i), ids.own[j], i - j)
            new_top_BKGC = jnp.maximum(top_BKGC, scores.max(-1))
            weights = jnp.exp(scores - new_top_BKGC[..., None])
            decay_BKGC = jnp.exp(top_BKGC - new_top_BKGC)
            mixed = _product("bkgcs,bksh->bkgch", weights.astype(v_NBKSH.dtype), v_NBKSH[j])
            return (
                new_top_BKGC,
                total_BKGC * decay_BKGC + weights.sum(-1),
                mixed_BKGCH * decay_BKGC[..., None] + mixed,
            )

        # Made from an operand: under `shard_map` they must vary over the same mesh axes as the results.
        zeros_BKGCH = jnp.zeros_like(q_BKGCH, jnp.float32)
        zeros_BKGC = zeros_BKGCH[..., 0]
        # If all keys of a tile are masked for a row, it counts them with weight 1. The first real key wipes
        # them out, as decay becomes 0. There always is one: the last tile contains the token itself.
        start = (zeros_BKGC + _MASKED, zeros_BKGC, zeros_BKGCH)
        if sinks_KG is not None:
            # A key that all queries see, with the value 0.
            start = (zeros_BKGC + sinks_KG[None, :, :, None], zeros_BKGC + 1, zeros_BKGCH)
        top_BKGC, total_BKGC, mixed_BKGCH = lax.fori_loop(0, tiles.num, add, start)
        out_BKGCH = (mixed_BKGCH / total_BKGC[..., None]).astype(q_BKGCH.dtype)
        return out_BKGCH, top_BKGC + jnp.log(total_BKGC)

    blocks = jnp.arange(len(q_NBKGCH))
    tiles = _tiles(ids, reach)
    out_NBKGCH, logsumexp_NBKGC = lax.map(mix, (blocks, tiles, q_NBKGCH))
    operands = (q_NBKGCH, k_NBKSH, v_NBKSH, ids, reach, sinks_KG)
    return out_NBKGCH, (*operands, out_NBKGCH, logsumexp_NBKGC)


def _backward(
    softcap: float, residuals: tuple[Any, ...], d_out_NBKGCH: jax.Array
) -> tuple[Any, ...]:
    q_NBKGCH, k_NBKSH, v_NBKSH, ids, reach, sinks_KG, out_NBKGCH, logsumexp_NBKGC = residuals
    tile = functools.partial(_scores, reach=reach, softcap=softcap)
    dtype, scale = q_NBKGCH.dtype, q_NBKGCH.shape[-1] ** -0.5
    # The gradient of a softmax subtracts sum(weights * d_weights), which equals out . d_out.
    shift_NBKGC = _product("nbkgch,nbkgch->nbkgc", out_NBKGCH, d_out_NBKGCH)

    def unmix(d_keys_values, query_block):
        i, tiles, q_BKGCH, d_out_BKGCH, logsumexp_BKGC, shift_BKGC = query_block

        def add(n, sums):
            j = tiles.keys[n]
            d_q_BKGCH, d_k_NBKHS, d_v_NBKHS = sums
            scores, slope = tile(q_BKGCH, k_NBKSH[j], _at(ids, i), ids.own[j], i - j)
            weights = jnp.exp(scores - logsumexp_BKGC[..., None])
            d_weights = _product("bkgch,bksh->bkgcs", d_out_BKGCH, v_NBKSH[j])
            d_scores = weights * (d_weights - shift_BKGC[..., None]) * scale
            d_scores = (d_scores if slope is None else d_scores * slope).astype(dtype)
            # Length last. With head size last the scores must be transposed, which took 1.7 times as long on
            # CPU.
            d_k_BKHS = _product("bkgch,bkgcs->bkhs", q_BKGCH, d_scores)
            d_v_BKHS = _product("bkgch,bkgcs->bkhs", d_out_BKGCH, weights.astype(dtype))
            return (
                d_q_BKGCH + _product("bkgcs,bksh->bkgch", d_scores, k_NBKSH[j]),
                d_k_NBKHS.at[j].add(d_k_BKHS),
                d_v_NBKHS.at[j].add(d_v_BKHS),
            )

        zeros_BKGCH = jnp.zeros_like(q_BKGCH, jnp.float32)
        d_q_BKGCH, *d_keys_values = lax.fori_loop(0, tiles.num, add, (zeros_BKGCH, *d_keys_values))
        return d_keys_values, d_q_BKGCH.astype(dtype)

    blocks = jnp.arange(len(q_NBKGCH))
    tiles = _tiles(ids, reach)
    zeros_NBKHS = jnp.zeros_like(k_NBKSH.swapaxes(-1, -2), jnp.float32)
    d_keys_values, d_q_NBKGCH = lax.scan(
        unmix,
        [zeros_NBKHS, zeros_NBKHS],
        (blocks, tiles, q_NBKGCH, d_out_NBKGCH, logsumexp_NBKGC, shift_NBKGC),
    )
    d_k_NBKSH, d_v_NBKSH = (x.swapaxes(-1, -2).astype(dtype) for x in d_keys_values)
    d_sinks_KG = None
    if sinks_KG is not None:
        weights_NBKGC = jnp.exp(sinks_KG[None, None, :, :, None] - logsumexp_NBKGC)
        d_sinks_KG = -(weights_NBKGC * shift_NBKGC).sum((0, 1, 4))
    return d_q_NBKGCH, d_k_NBKSH, d_v_NBKSH, None, None, d_sinks_KG


def _mixed(
    q_NBKGCH: jax.Array,
    k_NBKSH: jax.Array,
    v_NBKSH: jax.Array,
    ids: _Ids,
    reach: jax.Array | None,
    sinks_KG: jax.Array | None,
    softcap: float,
) -> jax.Array:
    return _forward(q_NBKGCH, k_NBKSH, v_NBKSH, ids, reach, sinks_KG, softcap)[0]


_blocks_attention = jax.custom_vjp(_mixed, nondiff_argnums=(6,))
_blocks_attention.defvjp(_forward, _backward)


def _product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)


def _at(ids: _Ids, i: jax.Array) -> _Ids:
    return _Ids(ids.own[i], None if ids.prefix is None else ids.prefix[i])


def _scores(
    q_BKGCH: jax.Array,
    k_BKSH: jax.Array,
    queries: _Ids,
    key_ids_BS: jax.Array,
    blocks_back: jax.Array,
    *,
    reach: jax.Array | None,
    softcap: float,
) -> tuple[jax.Array, jax.Array | None]:
    """Masked scores [B, K, G, C, S] of one tile, whose keys lie `blocks_back` blocks before its queries.

    The second result is the derivative of the cap by the uncapped score; None without a cap.
    """
    C, H = q_BKGCH.shape[-2:]
    scores = _product("bkgch,bksh->bkgcs", q_BKGCH, k_BKSH) * (H**-0.5)
    slope = None
    if softcap:
        squashed = jnp.tanh(scores / softcap)
        scores, slope = softcap * squashed, 1 - squashed * squashed
    offset_C = jnp.arange(C)
    distance_CS = blocks_back * C + offset_C[:, None] - offset_C[None, :]
    seen_CS = distance_CS >= 0
    if reach is not None:
        seen_CS &= distance_CS < reach
    theirs_BCS = queries.own[:, :, None] == key_ids_BS[:, None, :]
    if queries.prefix is not None:
        before_BC1 = queries.prefix[:, :, None]
        theirs_BCS |= (before_BC1 == key_ids_BS[:, None, :]) & (before_BC1 > 0)
    return jnp.where((theirs_BCS & seen_CS[None])[:, None, None], scores, _MASKED), slope


class _Tiles(NamedTuple):
    """The blocks of keys to compute, for each block of queries.

    Attributes:
      keys: int32 [N, N], the blocks to compute in ascending order, then the others. The last block to compute
        is the one of the queries.
      num: int32 [N], number of blocks to compute.
    """

    keys: jax.Array
    num: jax.Array


def _tiles(ids: _Ids, reach: jax.Array | None) -> _Tiles:
    needed_NN = needed_tiles(ids.own, ids.prefix, reach)
    return _Tiles(jnp.argsort(~needed_NN, axis=1, stable=True), needed_NN.sum(1))


def needed_tiles(own_NBC: Any, prefix_NBC: Any, reach: Any, xp: Any = jnp) -> Any:
    """The pairs of blocks in which a query of any row may see a key; their tiles are computed.

    Two blocks can share a segment only if the ranges of their ids overlap. Rows of `roles.packing` have
    ascending ids, so almost all overlapping pairs do share one. Other orders give the same result but skip
    fewer tiles. Padding, which comes last, belongs to no range: its blocks have the tile of their own.

    Args:
      own_NBC: int32, segment ids; 0 is padding.
      prefix_NBC: int32, ids of the prefixes as in `TreeSegments`; None without prefixes.
      reach: number of tokens in a window; None without one.
      xp: module of the arrays, `jax.numpy` or `numpy`.

    Returns:
      Bool [N, N], query block by key block.
    """
    N, _, C = own_NBC.shape
    # Padding has id 0, with which every range would begin.
    after_all = np.iinfo(np.int32).max
    low_NB, high_NB = xp.where(own_NBC == 0, after_all, own_NBC).min(-1), own_NBC.max(-1)
    needed_NNB = _overlap(low_NB, high_NB, low_NB, high_NB)
    if prefix_NBC is not None:
        before_NB = xp.where(prefix_NBC == 0, after_all, prefix_NBC).min(-1)
        needed_NNB |= _overlap(before_NB, prefix_NBC.max(-1), low_NB, high_NB)
    block_N = xp.arange(N)
    needed_NN = needed_NNB.any(-1) & (block_N[None] < block_N[:, None])
    if reach is not None:
        # The smallest distance between two blocks is from the first query to the last key.
        needed_NN &= block_N[:, None] * C - (block_N[None] * C + C - 1) < reach
    return needed_NN | (block_N[None] == block_N[:, None])


def _overlap(low_NB: Any, high_NB: Any, other_low_NB: Any, other_high_NB: Any) -> Any:
    """Whether range n of the first set overlaps range m of the second, bool [N, N, B]."""
    return (low_NB[:, None] <= other_high_NB[None]) & (other_low_NB[None] <= high_NB[:, None])
