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
between the answers to one prompt are skipped, and windows count the places in the sequences.

**Ring attention** (Liu et al., 2023, arXiv 2310.01889). Devices that share a row have a part of its tokens
each. Keys and values travel around them, and the sums of a softmax grow with every part that comes by. In
the backward pass the gradients of keys and values travel with them. A part is two chunks of the row, one near
its beginning and one near its end (`mesh.ring`), so that all devices have about as many tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.attention_kind import AttentionKind

# Large and finite: a row with every key masked gives a uniform softmax, not NaN.
_MASKED = -1e30


class TreeSegments(NamedTuple):
    """Segments for tree attention: a segment may continue another one, its prefix.

    Example, a prompt P with two answers, whose segments begin with the last token of the prompt:

        tokens        P P P r r P r r r
        segment_ids   1 1 2 2 2 3 3 3 3
        prefix_ids    0 0 1 1 1 1 1 1 1
        positions     0 1 2 3 4 2 3 4 5

    Attributes:
      segment_ids_BT: int32; 0 is padding.
      prefix_ids_BT: int32, the segment of the same row that a token sees besides its own; 0 for none.
      positions_BT: int32, places in the sequences, by which windows are counted; None without windows.
    """

    segment_ids_BT: jax.Array
    prefix_ids_BT: jax.Array
    positions_BT: jax.Array | None = None


class Ring(NamedTuple):
    """What the kernel knows of the devices that share a row.

    Attributes:
      first_N: int32, place in the row of the first token of each chunk that this device holds.
      size: number of devices.
      shift: function that sends a pytree of arrays to the next device, and returns the one from the device
        before.
    """

    first_N: jax.Array
    size: int
    shift: Callable[[Any], Any]


class _Queries(NamedTuple):
    """Blocks of queries.

    Attributes:
      q: [N, B, K, G, C, H].
      own, prefix: ids of their tokens, [N, B, C], as in `TreeSegments`.
      first: int32 [N], places of the first token of each block.
      positions: those of `TreeSegments`, [N, B, C], if windows need them.
    """

    q: jax.Array
    own: jax.Array
    prefix: jax.Array | None
    first: jax.Array
    positions: jax.Array | None


class _Keys(NamedTuple):
    """Blocks of keys and values.

    Attributes:
      k, v: [N, B, K, S, H].
      own: ids of their tokens, [N, B, S].
      first: int32 [N], places of the first token of each block.
      positions: positions of their tokens, in the same form as the queries'.
    """

    k: jax.Array
    v: jax.Array
    own: jax.Array
    first: jax.Array
    positions: jax.Array | None


class _Static(NamedTuple):
    """What does not change between calls of one program."""

    softcap: float
    ring_size: int = 1
    shift: Callable[[Any], Any] | None = None


def xla_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments: jax.Array | TreeSegments,
    kind: AttentionKind,
    *,
    block_tokens: int,
    ring: Ring | None = None,
) -> jax.Array:
    """`attention` by matmuls, one tile of `block_tokens` x `block_tokens` scores at a time.

    With `ring` the arrays are this device's part of the rows, and T is the number of tokens of the part.
    """
    B, T, Q, H = q_BTQH.shape
    K = k_BTKH.shape[2]
    chunk_first = jnp.zeros(1, jnp.int32) if ring is None else ring.first_N
    chunks = len(chunk_first)
    C = min(block_tokens, T // chunks)
    padding = -(T // chunks) % C

    def blocks(x_BT: jax.Array) -> jax.Array:
        """Pads the length of each chunk and cuts it into blocks: [N, B, C, ...]."""
        x_BT = x_BT.reshape(B, chunks, T // chunks, *x_BT.shape[2:])
        x_BT = jnp.pad(x_BT, ((0, 0), (0, 0), (0, padding)) + ((0, 0),) * (x_BT.ndim - 3))
        return x_BT.reshape(B, -1, C, *x_BT.shape[3:]).swapaxes(0, 1)

    q_NBKGCH = blocks(q_BTQH)
    N = len(q_NBKGCH)
    q_NBKGCH = q_NBKGCH.reshape(N, B, C, K, Q // K, H).transpose(0, 1, 3, 4, 2, 5)
    k_NBKSH, v_NBKSH = (blocks(x).swapaxes(2, 3) for x in (k_BTKH, v_BTKH))
    own, prefix, positions = (
        segments if isinstance(segments, TreeSegments) else (segments, None, None)
    )
    assert prefix is None or positions is not None or not kind.window, "windows count positions"
    first = (chunk_first[:, None] + C * jnp.arange(N // chunks, dtype=jnp.int32)[None]).reshape(N)
    positions = None if positions is None or not kind.window else blocks(positions)
    prefix = None if prefix is None else blocks(prefix)
    queries = _Queries(q_NBKGCH, blocks(own), prefix, first, positions)
    keys = _Keys(k_NBKSH, v_NBKSH, queries.own, first, positions)
    reach = None if kind.reach is None else jnp.int32(kind.reach)
    static = _Static(kind.softcap) if ring is None else _Static(kind.softcap, *ring[1:])
    sinks_KG = None if kind.sinks is None else kind.sinks.reshape(K, Q // K)
    out_NBKGCH = _blocks_attention(queries, keys, reach, sinks_KG, static)
    out_BNCQH = out_NBKGCH.transpose(1, 0, 4, 2, 3, 5).reshape(B, chunks, -1, Q, H)
    return out_BNCQH[:, :, : T // chunks].reshape(B, T, Q, H)


def _forward(
    queries: _Queries,
    keys: _Keys,
    reach: jax.Array | None,
    sinks_KG: jax.Array | None,
    static: _Static,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns the mixed values, and the residuals of the backward pass."""
    mix = functools.partial(_mix, queries, reach=reach, sinks_KG=sinks_KG, softcap=static.softcap)
    if static.ring_size == 1:
        found = mix(keys, None, last=True)
    else:
        # The next part is on its way while one is mixed.
        assert static.shift is not None, "of a ring"
        coming, sums = static.shift(keys), mix(keys, None, last=False)
        coming, sums = lax.fori_loop(
            0,
            static.ring_size - 2,
            lambda _, now: (static.shift(now[0]), mix(*now, last=False)),  # pyright: ignore
            (coming, sums),
        )
        found = mix(coming, sums, last=True)
    found = checkpoint_name(found, "attended")
    return found[0], (queries, keys, reach, sinks_KG, *found)


def _mix(
    queries: _Queries,
    keys: _Keys,
    sums: Any,
    *,
    reach: jax.Array | None,
    sinks_KG: jax.Array | None,
    softcap: float,
    last: bool,
) -> tuple[jax.Array, ...]:
    """Adds some keys to the sums of a softmax.

    Args:
      queries, keys: blocks.
      sums: what an earlier call returned; None for the part of the row that has the queries themselves.
      reach: number of tokens in a window; None without one.
      sinks_KG: sinks of the query heads; None without them.
      softcap: score cap.
      last: whether no further keys come.

    Returns:
      (highest scores [N, B, K, G, C], sums of the weights, mixed values [N, B, K, G, C, H]), or of the last
      keys (mixed values, log-sum-exp of the scores).
    """

    def mix(query_block):
        one, tiles, sums = query_block

        def add(n, sums):
            j = tiles.keys[n]
            top_BKGC, total_BKGC, mixed_BKGCH = sums
            v_BKSH = keys.v[j]
            scores, _ = _scores(one, _at(keys, j), reach=reach, softcap=softcap)
            new_top_BKGC = jnp.maximum(top_BKGC, scores.max(-1))
            weights = jnp.exp(scores - new_top_BKGC[..., None])
            decay_BKGC = jnp.exp(top_BKGC - new_top_BKGC)
            mixed = _product("bkgcs,bksh->bkgch", weights.astype(v_BKSH.dtype), v_BKSH)
            return (
                new_top_BKGC,
                total_BKGC * decay_BKGC + weights.sum(-1),
                mixed_BKGCH * decay_BKGC[..., None] + mixed,
            )

        if sums is None:
            zeros_BKGCH = jnp.zeros_like(one.q, jnp.float32)
            zeros_BKGC = zeros_BKGCH[..., 0]
            # If all keys of a tile are masked for a row, it counts them with weight 1. The first real key
            # wipes them out, as decay becomes 0. There always is one: the token itself.
            sums = (zeros_BKGC + _MASKED, zeros_BKGC, zeros_BKGCH)
            if sinks_KG is not None:
                # A key that all queries see, with the value 0.
                sums = (zeros_BKGC + sinks_KG[None, :, :, None], zeros_BKGC + 1, zeros_BKGCH)
        sums = lax.fori_loop(0, tiles.num, add, sums)
        if not last:
            return sums
        top_BKGC, total_BKGC, mixed_BKGCH = sums
        out_BKGCH = (mixed_BKGCH / total_BKGC[..., None]).astype(one.q.dtype)
        return out_BKGCH, top_BKGC + jnp.log(total_BKGC)

    return lax.map(mix, (queries, _tiles(queries, keys, reach), sums))


def _backward(
    static: _Static, residuals: tuple[Any, ...], d_out_NBKGCH: jax.Array
) -> tuple[Any, ...]:
    queries, keys, reach, sinks_KG, out_NBKGCH, logsumexp_NBKGC = residuals
    # The gradient of a softmax subtracts sum(weights * d_weights), which equals out . d_out.
    shift_NBKGC = _product("nbkgch,nbkgch->nbkgc", out_NBKGCH, d_out_NBKGCH)
    given = (queries, d_out_NBKGCH, logsumexp_NBKGC, shift_NBKGC)
    unmix = functools.partial(_unmix, given, reach=reach, softcap=static.softcap)
    zeros_NBKHS = jnp.zeros_like(keys.k.swapaxes(-1, -2), jnp.float32)
    d_keys_values = (zeros_NBKHS, zeros_NBKHS)
    if static.ring_size == 1:
        d_q_NBKGCH, d_keys_values = unmix(keys, None, d_keys_values)
    else:
        shift: Any = static.shift

        # The sums of a part are on their way with it, one step behind: what a device adds is not known before
        # it has computed, while the keys can be sent at once.
        def turn(_, now):
            keys, d_q, d_keys_values = now
            coming = shift(keys)
            d_q, d_keys_values = unmix(keys, d_q, d_keys_values)
            return coming, d_q, shift(d_keys_values)

        d_q_NBKGCH = jnp.zeros_like(queries.q, jnp.float32)
        coming, d_q_NBKGCH, d_keys_values = lax.fori_loop(
            0, static.ring_size - 1, turn, (keys, d_q_NBKGCH, d_keys_values)
        )
        d_q_NBKGCH, d_keys_values = unmix(coming, d_q_NBKGCH, d_keys_values)
        # One more step, and gradients are where their keys are.
        d_keys_values = shift(d_keys_values)
    dtype = queries.q.dtype
    d_k_NBKSH, d_v_NBKSH = (x.swapaxes(-1, -2).astype(dtype) for x in d_keys_values)
    d_sinks_KG = None
    if sinks_KG is not None:
        weights_NBKGC = jnp.exp(sinks_KG[None, None, :, :, None] - logsumexp_NBKGC)
        # A sink has the value 0, so only the subtracted product is left.
        d_sinks_KG = -(weights_NBKGC * shift_NBKGC).sum((0, 1, 4))
    return (
        _Queries(d_q_NBKGCH.astype(dtype), None, None, None, None),  # pyright: ignore
        _Keys(d_k_NBKSH, d_v_NBKSH, None, None, None),  # pyright: ignore
        None,
        d_sinks_KG,
    )


def _unmix(
    given: tuple[Any, ...],
    keys: _Keys,
    d_q_NBKGCH: jax.Array | None,
    d_keys_values: tuple[jax.Array, jax.Array],
    *,
    reach: jax.Array | None,
    softcap: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Adds the gradients by way of some keys.

    Args:
      given: queries, gradients of the mixed values [N, B, K, G, C, H], and [N, B, K, G, C] of the log-sum-exp
        of the scores and of the products of the mixed values and their gradients.
      keys: blocks.
      d_q_NBKGCH, d_keys_values: sums so far, float32; keys and values as [N, B, K, H, S].
      reach, softcap: as for `_mix`.

    Returns:
      (gradient of the queries, gradients of keys and values). Without a sum before it, that of the queries
      is in their type.
    """
    dtype, scale = keys.k.dtype, keys.k.shape[-1] ** -0.5

    def unmix(d_keys_values, query_block):
        (one, d_out_BKGCH, logsumexp_BKGC, shift_BKGC), tiles, d_q_BKGCH = query_block

        def add(n, sums):
            j = tiles.keys[n]
            key_block = _at(keys, j)
            d_q_BKGCH, d_k_NBKHS, d_v_NBKHS = sums
            scores, slope = _scores(one, key_block, reach=reach, softcap=softcap)
            weights = jnp.exp(scores - logsumexp_BKGC[..., None])
            d_weights = _product("bkgch,bksh->bkgcs", d_out_BKGCH, key_block.v)
            d_scores = weights * (d_weights - shift_BKGC[..., None]) * scale
            d_scores = (d_scores if slope is None else d_scores * slope).astype(dtype)
            # Length last. With head size last the scores must be transposed, which took 1.7 times as long on
            # CPU.
            d_k_BKHS = _product("bkgch,bkgcs->bkhs", one.q, d_scores)
            d_v_BKHS = _product("bkgch,bkgcs->bkhs", d_out_BKGCH, weights.astype(dtype))
            return (
                d_q_BKGCH + _product("bkgcs,bksh->bkgch", d_scores, key_block.k),
                d_k_NBKHS.at[j].add(d_k_BKHS),
                d_v_NBKHS.at[j].add(d_v_BKHS),
            )

        alone = d_q_BKGCH is None
        d_q_BKGCH = jnp.zeros_like(one.q, jnp.float32) if alone else d_q_BKGCH
        d_q_BKGCH, *d_keys_values = lax.fori_loop(0, tiles.num, add, (d_q_BKGCH, *d_keys_values))
        # In a ring the sum goes on over the parts of other devices, so it stays float32.
        return tuple(d_keys_values), d_q_BKGCH.astype(dtype) if alone else d_q_BKGCH

    tiles = _tiles(given[0], keys, reach)
    d_keys_values, d_q = lax.scan(unmix, d_keys_values, (given, tiles, d_q_NBKGCH))
    return d_q, d_keys_values


def _mixed(
    queries: _Queries,
    keys: _Keys,
    reach: jax.Array | None,
    sinks_KG: jax.Array | None,
    static: _Static,
) -> jax.Array:
    return _forward(queries, keys, reach, sinks_KG, static)[0]


_blocks_attention = jax.custom_vjp(_mixed, nondiff_argnums=(4,))
_blocks_attention.defvjp(_forward, _backward)


def _product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)


def _at(keys: _Keys, j: jax.Array) -> _Keys:
    return jax.tree.map(lambda x: x[j], keys)


def _scores(
    queries: _Queries, keys: _Keys, *, reach: jax.Array | None, softcap: float
) -> tuple[jax.Array, jax.Array | None]:
    """Masked scores [B, K, G, C, S] of the tile of one block of queries and one of keys.

    The second result is the derivative of the cap by the uncapped score; None without a cap.
    """
    C, H = queries.q.shape[-2:]
    scores = _product("bkgch,bksh->bkgcs", queries.q, keys.k) * (H**-0.5)
    slope = None
    if softcap:
        squashed = jnp.tanh(scores / softcap)
        # Before the mask, which the cap would make a small score; the slope is that of tanh.
        scores, slope = softcap * squashed, 1 - squashed * squashed
    offset_C = jnp.arange(C)
    distance_CS = queries.first - keys.first + offset_C[:, None] - offset_C[None, :]
    seen_CS = distance_CS >= 0
    theirs_BCS = queries.own[:, :, None] == keys.own[:, None, :]
    if queries.prefix is not None:
        before_BC1 = queries.prefix[:, :, None]
        theirs_BCS |= (before_BC1 == keys.own[:, None, :]) & (before_BC1 > 0)
    if queries.positions is not None and keys.positions is not None and reach is not None:
        # Other answers may lie between an answer and its prompt.
        theirs_BCS &= queries.positions[:, :, None] - keys.positions[:, None, :] < reach
    elif reach is not None:
        seen_CS &= distance_CS < reach
    return jnp.where((theirs_BCS & seen_CS[None])[:, None, None], scores, _MASKED), slope


class _Tiles(NamedTuple):
    """The blocks of keys to compute, for each block of queries.

    Attributes:
      keys: int32 [N, N], the blocks to compute in ascending order, then the others.
      num: int32 [N], number of blocks to compute.
    """

    keys: jax.Array
    num: jax.Array


def _tiles(queries: _Queries, keys: _Keys, reach: jax.Array | None) -> _Tiles:
    apart = (queries.first, keys.own, keys.first)
    positions = None
    if queries.positions is not None:
        positions = (queries.positions, keys.positions)
    needed_NN = needed_tiles(queries.own, queries.prefix, reach, apart, positions)
    return _Tiles(jnp.argsort(~needed_NN, axis=1, stable=True), needed_NN.sum(1))


def needed_tiles(
    own_NBC: Any,
    prefix_NBC: Any,
    reach: Any,
    apart: Any = None,
    positions: Any = None,
    xp: Any = jnp,
) -> Any:
    """The pairs of blocks in which a query of any row may see a key; their tiles are computed.

    Two blocks can share a segment only if the ranges of their ids overlap.

    Args:
      own_NBC: int32, segment ids of the queries; 0 is padding.
      prefix_NBC: int32, ids of the prefixes as in `TreeSegments`; None without prefixes.
      reach: number of tokens in a window; None without one.
      apart: (first places of the blocks of queries [N], segment ids of the keys [M, B, C], first places of
        their blocks [M]); None if queries and keys are those of whole rows.
      positions: (those of the queries [N, B, C], of the keys [M, B, C]), if windows count them; else None.
      xp: module of the arrays, `jax.numpy` or `numpy`.

    Returns:
      Bool [N, M], query block by key block.
    """
    N, _, C = own_NBC.shape
    first_N = xp.arange(N) * C
    first_N, keys_MBC, first_M = (first_N, own_NBC, first_N) if apart is None else apart
    # Padding has id 0, with which every range would begin.
    after_all = np.iinfo(np.int32).max

    def ranges(ids_NBC: Any) -> tuple[Any, Any]:
        return xp.where(ids_NBC == 0, after_all, ids_NBC).min(-1), ids_NBC.max(-1)

    of_keys = ranges(keys_MBC)
    # Rows of `roles.packing` have ascending ids, so almost all overlapping pairs share a segment. Other
    # orders give the same result but skip fewer tiles.
    needed_NMB = _overlap(*ranges(own_NBC), *of_keys)
    if prefix_NBC is not None:
        needed_NMB |= _overlap(*ranges(prefix_NBC), *of_keys)
    if positions is not None:
        nearest_NMB = positions[0].min(-1)[:, None] - positions[1].max(-1)[None]
        needed_NMB &= nearest_NMB < reach
    back_NM = first_N[:, None] - first_M[None]
    needed_NM = needed_NMB.any(-1) & (back_NM > 0)
    if reach is not None and positions is None:
        # The smallest distance between two blocks is from the first query to the last key.
        needed_NM &= back_NM - (C - 1) < reach
    # Padding belongs to no range; its blocks have the tile of their own.
    return needed_NM | (back_NM == 0)


def _overlap(low_NB: Any, high_NB: Any, other_low_NB: Any, other_high_NB: Any) -> Any:
    """Whether range n of the first set overlaps range m of the second, bool [N, N, B]."""
    return (low_NB[:, None] <= other_high_NB[None]) & (other_low_NB[None] <= high_NB[:, None])
