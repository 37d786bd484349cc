"""Applies the experts of a mixture to the tokens that chose them. No token is dropped.

    B sequences   T tokens   N = B*T   A experts of a token   M = N*A pairs   G experts held   D width
    F width of an expert   K chunks of n tiles of t rows

The (token, expert) pairs are sorted by expert, and each expert multiplies its own rows. There are two
implementations with equal results:

    grouped   `jax.lax.ragged_dot`, which compiles to grouped matmuls on TPUs. On CPU and CUDA XLA computes
              every expert on every row: with 32 experts 32 times the operations and the memory (jaxlib
                0.10.2)
    tiled     the rows of each expert are cut into tiles. Chunks of tiles are computed one after the other,
    and
              empty chunks are skipped
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.gates import GATES

# gate, up, down -> weight, and where there are such, bias, lora_a, lora_b; each has a leading dimension E.
ExpertWeights = dict[str, dict[str, jax.Array]]

# (x_BTD, expert_BTA, share_BTA, weights, logical axes of the weights, activation) -> out_BTD
ExpertLayer = Callable[[jax.Array, jax.Array, jax.Array, ExpertWeights, Any, str], jax.Array]


# Largest number of rows of a tile: enough for the matmul to outweigh reading the weights of its expert.
_MOST_ROWS = 512
# Rows of a chunk. The weights of all its tiles are copied next to each other, so this bounds memory.
_CHUNK_ROWS = 8192
# Name of the jitted function that computes a chunk; the planner finds its operations by this name.
EXPERT_TILES = "tiles_of_experts"
# Smallest number of chunks, so that enough empty ones can be skipped.
_FEWEST_CHUNKS = 8


def experts_for(platform: str | None) -> Callable[..., jax.Array]:
    """The faster implementation on a platform; None for no platform."""
    return apply_experts if platform == "tpu" else apply_experts_in_tiles


def apply_experts(
    x_BTD: jax.Array,
    expert_BTA: jax.Array,
    share_BTA: jax.Array,
    weights: ExpertWeights,
    axes: Any = None,
    activation: str = "silu",
    *,
    first_expert: jax.Array | int = 0,
    expert_shards: int = 1,
) -> jax.Array:
    """Sum over each token's experts of share * down(GATES[activation](gate(x), up(x))).

    Args:
      x_BTD: activations.
      expert_BTA: int32, the experts of each token; experts that are not held here contribute 0.
      share_BTA: weight of each of these experts in the sum.
      weights: weights of the experts held here, which have consecutive numbers.
      axes: logical axes of `weights`, for `mesh.parallel_layers`; not used here.
      activation: a name of `gates.GATES`.
      first_expert: number of the first expert held here.
      expert_shards: number of devices that share all experts; not used here.

    Returns:
      [B, T, D], in the type of `x_BTD`.
    """
    del axes, expert_shards
    D, A = x_BTD.shape[-1], expert_BTA.shape[-1]
    held, num_held = _held(expert_BTA, weights, first_expert)
    order = jnp.argsort(held)
    rows_per_expert = jnp.bincount(held, length=num_held + 1)[:num_held].astype(jnp.int32)

    x = x_BTD.reshape(-1, D)[order // A]
    grouped = functools.partial(_grouped, rows_per_expert=rows_per_expert, expert=held[order])
    hidden = GATES[activation](grouped(x, weights["gate"]), grouped(x, weights["up"]))
    out = grouped(hidden, weights["down"])
    # Rows behind the last group are not written by `ragged_dot` and may hold anything, even NaN.
    out = jnp.where((held[order] < num_held)[:, None], out, 0)
    return _summed(jnp.zeros_like(out).at[order].set(out, unique_indices=True), share_BTA)


def _held(
    expert_BTA: jax.Array, weights: ExpertWeights, first_expert: jax.Array | int
) -> tuple[jax.Array, int]:
    """(expert of each pair [M], counted from the first held one; G), in the order of the tokens.

    Pairs whose expert is held elsewhere get G. They sort behind all others, where no matmul reaches them.
    """
    num_held = weights["gate"]["weight"].shape[0]
    held = expert_BTA.reshape(-1) - first_expert
    return jnp.where((held >= 0) & (held < num_held), held, num_held), num_held


def _summed(out_MD: jax.Array, share_BTA: jax.Array) -> jax.Array:
    """The weighted sum over the experts of each token: [B, T, D]."""
    by_token = out_MD.reshape(*share_BTA.shape, -1)
    return jnp.einsum("btad,bta->btd", by_token, share_BTA.astype(out_MD.dtype))


def _grouped(
    x: jax.Array,
    projection: dict[str, jax.Array],
    *,
    rows_per_expert: jax.Array,
    expert: jax.Array,
) -> jax.Array:
    out = jax.lax.ragged_dot(x, projection["weight"], rows_per_expert)
    if "bias" in projection:
        out = out + projection["bias"].at[expert].get(mode="clip")
    if "lora_a" in projection:
        low_rank = jax.lax.ragged_dot(x, projection["lora_a"], rows_per_expert)
        out = out + jax.lax.ragged_dot(low_rank, projection["lora_b"], rows_per_expert)
    return out


def apply_experts_in_tiles(
    x_BTD: jax.Array,
    expert_BTA: jax.Array,
    share_BTA: jax.Array,
    weights: ExpertWeights,
    axes: Any = None,
    activation: str = "silu",
    *,
    first_expert: jax.Array | int = 0,
    expert_shards: int = 1,
) -> jax.Array:
    """`apply_experts` in tiles; weight gradients are summed in float32."""
    del axes
    held, num_held = _held(expert_BTA, weights, first_expert)
    tiles = _tiles(held, num_held, expert_BTA.shape[-1], expert_shards)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    return _summed(_in_tiles(x_ND, weights, tiles, activation), share_BTA)


class _Tiles(NamedTuple):
    """The assignment of (token, expert) pairs to rows of tiles.

    Example: G = 2 experts, tiles of t = 2 rows, pairs 0..4 with experts 1 0 1 1 0:

        tile 0   expert 0   pairs 1 4
        tile 1   expert 1   pairs 0 2
        tile 2   expert 1   pairs 3 -       place_M = 2 0 3 4 1

    Attributes:
      expert_Kn: int32, expert of each tile; G for empty tiles, which come last.
      token_Knt: int32, token of each row; arbitrary for unused rows.
      pair_Knt: int32, pair of each row; M for unused rows.
      place_M: int32, row of each pair, counted over all tiles; out of range for pairs held elsewhere.
    """

    expert_Kn: jax.Array
    token_Knt: jax.Array
    pair_Knt: jax.Array
    place_M: jax.Array


def _tiles(held_M: jax.Array, num_held: int, per_token: int, shards: int = 1) -> _Tiles:
    """Cuts the sorted pairs of each expert into tiles.

    Args:
      held_M: expert of each pair, as `_held` has it.
      num_held: G.
      per_token: pairs of a token.
      shards: number of devices that share all experts, so that 1 / shards of the pairs are expected here.
    """
    num_pairs = held_M.shape[0]
    # (K, n, t) that suffice for this number of pairs, however they are distributed over experts. Each expert
    # may end in a tile that is not full: up to one more tile per expert.
    half = max(1, num_pairs // (2 * num_held * shards))
    rows = min(_MOST_ROWS, max(8, 1 << (half.bit_length() - 1)))
    most = num_pairs // rows + num_held
    in_chunk = max(1, min(most // (_FEWEST_CHUNKS * shards), _CHUNK_ROWS // rows))
    chunks = -(-most // in_chunk)
    order_M = jnp.argsort(held_M).astype(jnp.int32)
    count = jnp.bincount(held_M, length=num_held + 1)[:num_held].astype(jnp.int32)
    first_row = jnp.cumsum(count) - count
    tiles = -(-count // rows)
    last_tile = jnp.cumsum(tiles)
    first_tile = last_tile - tiles

    tile = jnp.arange(chunks * in_chunk, dtype=jnp.int32)
    expert = jnp.searchsorted(last_tile, tile, side="right").astype(jnp.int32)
    own = jnp.minimum(expert, num_held - 1)
    in_tile = jnp.arange(rows, dtype=jnp.int32)[None]
    within = (tile - first_tile[own])[:, None] * rows + in_tile
    is_row = (expert < num_held)[:, None] & (within < count[own][:, None])
    pair = order_M[jnp.minimum(first_row[own][:, None] + within, num_pairs - 1)]

    # The row of a pair: the rows of all tiles of earlier experts, and its rank among the pairs of its expert.
    rank_M = (
        jnp.zeros_like(order_M)
        .at[order_M]
        .set(jnp.arange(num_pairs, dtype=jnp.int32), unique_indices=True)
    )
    own_M = jnp.minimum(held_M, num_held - 1)
    place_M = first_tile[own_M] * rows + rank_M - first_row[own_M]
    shape = (chunks, in_chunk, rows)
    return _Tiles(
        expert.reshape(chunks, in_chunk),
        (pair // per_token).reshape(shape),
        jnp.where(is_row, pair, num_pairs).reshape(shape),
        jnp.where(held_M < num_held, place_M, np.prod(shape).astype(np.int32)),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_tiles(x_ND: jax.Array, weights: ExpertWeights, tiles: _Tiles, activation: str) -> jax.Array:
    """Applies the expert of each pair to its token: [M, D], zeros for pairs held elsewhere."""
    num_held = weights["gate"]["weight"].shape[0]

    def chunk(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert_n, token_nt = of

        def run() -> jax.Array:
            return tiles_of_experts(x_ND[token_nt], _of_tiles(weights, expert_n), activation)

        nothing = functools.partial(jnp.zeros, (*token_nt.shape, x_ND.shape[-1]), x_ND.dtype)
        return jax.lax.cond(expert_n[0] < num_held, run, nothing)

    return _rows(jax.lax.map(chunk, (tiles.expert_Kn, tiles.token_Knt)), tiles)


def _in_tiles_backward(activation: str, saved, d_out_MD: jax.Array):
    x_ND, weights, tiles = saved
    apply = functools.partial(tiles_of_experts, activation=activation)
    num_held = weights["gate"]["weight"].shape[0]

    def chunk(d_weights: ExpertWeights, of: tuple[jax.Array, ...]):
        expert_n, token_nt, pair_nt = of

        def run(d_weights: ExpertWeights):
            d_out = d_out_MD.at[pair_nt].get(mode="fill", fill_value=0)
            _, pull = jax.vjp(apply, x_ND[token_nt], _of_tiles(weights, expert_n))
            d_x, d_tiles = pull(d_out)
            # A matmul with one-hot rows, not a scatter: on GPUs a scatter adds in random order, and the sum
            # would not be reproducible.
            whose = jax.nn.one_hot(expert_n, num_held, axis=0, dtype=_sum_type(d_out))
            add = functools.partial(jnp.tensordot, whose, axes=1, precision="highest")
            return jax.tree.map(
                lambda total, one: total + add(one.astype(total.dtype)), d_weights, d_tiles
            ), d_x

        def nothing(d_weights: ExpertWeights):
            return d_weights, jnp.zeros((*token_nt.shape, x_ND.shape[-1]), x_ND.dtype)

        return jax.lax.cond(expert_n[0] < num_held, run, nothing, d_weights)

    none_yet = jax.tree.map(lambda w: jnp.zeros(w.shape, _sum_type(w)), weights)
    of_chunks = (tiles.expert_Kn, tiles.token_Knt, tiles.pair_Knt)
    d_weights, d_x = jax.lax.scan(chunk, none_yet, of_chunks)
    by_token = _rows(d_x, tiles).reshape(x_ND.shape[0], -1, x_ND.shape[1])
    return (
        by_token.sum(axis=1, dtype=_sum_type(x_ND)).astype(x_ND.dtype),
        jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights),
        None,
    )


_in_tiles.defvjp(lambda *of: (_in_tiles(*of), of[:3]), _in_tiles_backward)


def _sum_type(array: jax.Array) -> Any:
    return array.dtype if array.dtype.itemsize > 4 else jnp.float32


def _rows(tiled: jax.Array, tiles: _Tiles) -> jax.Array:
    """[K, n, t, D] --> [M, D], in the order of the pairs."""
    flat = tiled.reshape(-1, tiled.shape[-1])
    return flat.at[tiles.place_M].get(mode="fill", fill_value=0)


def _of_tiles(weights: ExpertWeights, expert_n: jax.Array) -> ExpertWeights:
    """The weights of the expert of each tile."""
    return jax.tree.map(lambda w: w.at[expert_n].get(mode="clip"), weights)


@functools.partial(jax.jit, static_argnames="activation")
def tiles_of_experts(x: jax.Array, weights: ExpertWeights, activation: str) -> jax.Array:
    """[n, t, D] --> [n, t, D], tile i with weights i. It is jitted to give it the name `EXPERT_TILES`."""
    gate, up = _batched(x, weights["gate"]), _batched(x, weights["up"])
    return _batched(GATES[activation](gate, up), weights["down"])


def _batched(x: jax.Array, projection: dict[str, jax.Array]) -> jax.Array:
    out = x @ projection["weight"]
    if "bias" in projection:
        out = out + projection["bias"][:, None]
    if "lora_a" in projection:
        out = out + (x @ projection["lora_a"]) @ projection["lora_b"]
    return out
