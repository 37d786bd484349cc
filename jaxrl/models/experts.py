"""Applies the experts of a mixture to the tokens that chose them. No token is dropped.

    B sequences   T tokens   N = B*T   A experts of a token   M = N*A pairs   G experts held   D width
    F width of an expert   K chunks of C rows, or of n tiles of t rows

The (token, expert) pairs are sorted by expert, and each expert multiplies its own rows. A token's
share of an expert multiplies what goes into the expert's last matmul, not its result, so that the gradient of
the shares needs no result computed once more. There are three implementations with equal results:

    grouped   `jax.lax.ragged_dot`, which compiles to grouped matmuls on TPUs
    kernel    grouped matmuls by a kernel for Hopper GPUs (`kernels.grouped_matmul`), chunk after chunk of
              the sorted rows
    tiled     the rows of each expert are cut into tiles, and a chunk is a number of tiles

Chunks without a pair are skipped: where the experts are spread over many devices, these are most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.gates import GATES
from jaxrl.models.kernels.grouped_matmul import WIDTH_MULTIPLE, grouped_matmul, runs_on

# gate, up, down -> weight, and where there are such, bias, lora_a, lora_b; each has a leading dimension E.
ExpertWeights = dict[str, dict[str, jax.Array]]

# (x_BTD, expert_BTA, share_BTA, weights, logical axes of the weights, activation) -> out_BTD
ExpertLayer = Callable[[jax.Array, jax.Array, jax.Array, ExpertWeights, Any, str], jax.Array]

# (rows [M, D], matrices [G, D, F], number of rows of each matrix [G]) -> [M, F], as `jax.lax.ragged_dot`. The
# result behind the rows of the last matrix, and its gradient, may be anything, even NaN.
GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# Largest number of rows of a tile: enough for the matmul to outweigh reading the weights of its expert.
_MOST_ROWS = 512
# Most new tokens that all experts are applied to. For so many the products take about as long as what else
# happens to the weights: tiles read, write and read them again, and on TPUs XLA copies them out of the stack
# of layers for `ragged_dot`.
MOST_TOKENS_TO_ALL = {"gpu": 2048, "tpu": 512}
# The same where a kernel reads the weights where they are.
_MOST_BESIDE_KERNEL = 512
# Smallest number of rows of a tile.
_FEWEST_ROWS = 8
# Rows of a chunk of tiles. The weights of all its tiles are copied next to each other, so this bounds memory.
_CHUNK_ROWS = 8192
# Smallest number of chunks of tiles, so that enough empty ones can be skipped.
_FEWEST_CHUNKS = 8
# Rows of a chunk of sorted rows. Each chunk adds the gradients of all weights, which takes as long as the
# matmuls of some thousand rows.
_SORTED_ROWS = 131_072
# Name of the jitted functions that compute a chunk; the planner finds their operations by this name.
EXPERT_ROWS = "rows_of_experts"


def experts_for(
    device: Any, dtype: Any, *, equal_tiles: bool = False, by_kernel: bool = True
) -> Callable[..., jax.Array]:
    """The fastest implementation for a kind of device, or for None, and a type of activations.

    With `equal_tiles` tiles have as many rows on every mesh, so that matmuls round alike. `by_kernel` allows
    a kernel (`kernels.proof`).
    """
    dtype = jnp.dtype(dtype)
    platform = "cpu" if device is None else device.platform
    most = MOST_TOKENS_TO_ALL.get(platform)
    if platform == "tpu":
        way = apply_experts
    elif by_kernel and runs_on(device) and dtype == jnp.bfloat16:
        way = functools.partial(_apply_experts_by_kernel, device=device)
        most = _MOST_BESIDE_KERNEL
    else:
        # Not `ragged_dot`: on CPU and CUDA, XLA computes every expert on every row, which is 32 times the
        # operations and memory with 32 experts (jaxlib 0.10.2 to 0.12.0).
        way = apply_experts_in_tiles
        if equal_tiles:
            way = functools.partial(way, most_rows=_FEWEST_ROWS)
    if equal_tiles or not most:
        return way
    return functools.partial(_apply_while_decoding, most=most, otherwise=way)


def _apply_while_decoding(
    x_BTD: jax.Array,
    expert_BTA: jax.Array,
    share_BTA: jax.Array | None,
    weights: ExpertWeights,
    *rest: Any,
    most: int,
    otherwise: Callable[..., jax.Array],
    expert_shards: int = 1,
    **others: Any,
) -> jax.Array:
    """`apply_all_experts` to up to `most` new tokens that need a quarter of the experts; else `otherwise`."""
    tokens, pairs = x_BTD.shape[0], expert_BTA.size // expert_shards
    needed = 4 * pairs >= weights["gate"]["weight"].shape[0]
    if x_BTD.shape[1] == 1 and tokens <= most and needed and share_BTA is not None:
        return apply_all_experts(x_BTD, expert_BTA, share_BTA, weights, *rest, **others)
    return otherwise(
        *(x_BTD, expert_BTA, share_BTA, weights, *rest), expert_shards=expert_shards, **others
    )


def apply_all_experts(
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
    """`apply_experts` with a product of every token and every held expert, most of them times 0.

    A decoding device waits for the weights, and reads each once. In tiles a GPU would copy those of each tile
    first, and ask the host before each chunk: 13.5 GB and 274 times for a token of four layers of gpt-oss. A
    TPU would copy them all out of their stack, 6.4 GB.
    """
    del axes, expert_shards
    num_held = weights["gate"]["weight"].shape[0]
    # Zeros for experts held elsewhere.
    chosen_BTAG = jax.nn.one_hot(expert_BTA - first_expert, num_held, dtype=share_BTA.dtype)
    share_NG = (chosen_BTAG * share_BTA[..., None]).sum(2).reshape(-1, num_held)
    x_GND = x_BTD.reshape(1, -1, x_BTD.shape[-1])
    if weights["gate"]["weight"].shape[2] % 128:
        # Else XLA makes one product of all experts, and copies weights that its tiles do not fit first: two
        # of three matrices of gpt-oss, but none of Qwen3-30B-A3B.
        x_GND = jnp.broadcast_to(x_GND, (num_held, *x_GND.shape[1:]))
        x_GND = jax.lax.optimization_barrier(x_GND)

    def project(x: jax.Array, projection: dict[str, jax.Array]) -> jax.Array:
        out_GNF = x @ projection["weight"]
        if "bias" in projection:
            out_GNF = out_GNF + projection["bias"][:, None]
        if "lora_a" in projection:
            out_GNF = out_GNF + (x @ projection["lora_a"]) @ projection["lora_b"]
        return out_GNF

    hidden_GNF = GATES[activation](project(x_GND, weights["gate"]), project(x_GND, weights["up"]))
    hidden_GNF = jnp.where(share_NG.T[..., None] != 0, _weighted(hidden_GNF, share_NG.T), 0)
    down, exact = weights["down"], {"preferred_element_type": _sum_type(x_BTD)}
    # One product over all neurons of all experts.
    out_ND = jnp.einsum("gnf,gfd->nd", hidden_GNF, down["weight"], **exact)
    if "lora_a" in down:
        low_GNr = hidden_GNF @ down["lora_a"]
        out_ND = out_ND + jnp.einsum("gnr,grd->nd", low_GNr, down["lora_b"], **exact)
    if "bias" in down:
        out_ND = out_ND + share_NG.astype(out_ND.dtype) @ down["bias"].astype(out_ND.dtype)
    return out_ND.astype(x_BTD.dtype).reshape(x_BTD.shape)


def apply_experts(
    x_BTD: jax.Array,
    expert_BTA: jax.Array,
    share_BTA: jax.Array | None,
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
      share_BTA: weight of each of these experts in the sum; None for no sum.
      weights: weights of the experts held here, which have consecutive numbers.
      axes: logical axes of `weights`, for `mesh.parallel_layers`; not used here.
      activation: a name of `gates.GATES`.
      first_expert: number of the first expert held here.
      expert_shards: number of devices that share all experts; not used here.

    Returns:
      [B, T, D], in the type of `x_BTD`; without a sum [B, T, A, D].
    """
    del axes, expert_shards
    D, A = x_BTD.shape[-1], expert_BTA.shape[-1]
    held, num_held = _held(expert_BTA, weights, first_expert)
    order = jnp.argsort(held)
    rows_G = jnp.bincount(held, length=num_held + 1)[:num_held].astype(jnp.int32)
    experts = (rows_G, held[order])
    share_M = None if share_BTA is None else share_BTA.reshape(-1)[order]
    x_MD = x_BTD.reshape(-1, D)[order // A]
    out = _mlp(x_MD, share_M, weights, experts, activation, jax.lax.ragged_dot)
    # Back into the order of the pairs. Rows behind the held experts are 0 (`_mlp`).
    out_MD = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return _summed(out_MD, expert_BTA, share_BTA)


def _held(
    expert_BTA: jax.Array, weights: ExpertWeights, first_expert: jax.Array | int
) -> tuple[jax.Array, int]:
    """(expert of each pair [M], counted from the first held one; G), in the order of the tokens.

    Pairs whose expert is held elsewhere get G.
    """
    num_held = weights["gate"]["weight"].shape[0]
    held = expert_BTA.reshape(-1) - first_expert
    # G sorts behind all experts, where no matmul reaches.
    return jnp.where((held >= 0) & (held < num_held), held, num_held), num_held


def _summed(out_MD: jax.Array, expert_BTA: jax.Array, share_BTA: jax.Array | None) -> jax.Array:
    """The sum over the experts of each token: [B, T, D]; without shares [B, T, A, D]."""
    by_token = out_MD.reshape(*expert_BTA.shape, -1)
    if share_BTA is None:
        return by_token
    return by_token.sum(axis=2, dtype=_sum_type(out_MD)).astype(out_MD.dtype)


def _weighted(hidden: jax.Array, share: jax.Array | None) -> jax.Array:
    """Rows [..., F] times their shares [...], rounded once."""
    if share is None:
        return hidden
    return (hidden.astype(_sum_type(hidden)) * share[..., None]).astype(hidden.dtype)


def _mlp(
    x_MD: jax.Array,
    share_M: jax.Array | None,
    weights: ExpertWeights,
    experts: tuple[jax.Array, jax.Array],
    activation: str,
    multiply: GroupedMatmul,
) -> jax.Array:
    """Applies the experts to rows that are sorted by them: [M, D].

    Args:
      x_MD: rows.
      share_M: what their results are multiplied by; None for 1.
      weights: weights of the G experts.
      experts: (int32 [G], number of rows of each expert; int32 [M], expert of each row, G behind these rows).
      activation: a name of `gates.GATES`.
      multiply: see `GroupedMatmul`.
    """
    rows_G, expert_M = experts
    live_M1 = (expert_M < len(rows_G))[:, None]

    def grouped(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.where(live_M1, multiply(x, weight, rows_G), 0)

    def project(x: jax.Array, projection: dict[str, jax.Array], share_M: Any = None) -> jax.Array:
        out = grouped(x, projection["weight"])
        if "bias" in projection:
            bias = projection["bias"].at[expert_M].get(mode="fill", fill_value=0)
            out = out + _weighted(bias, share_M)
        if "lora_a" in projection:
            out = out + grouped(grouped(x, projection["lora_a"]), projection["lora_b"])
        return out

    # What `multiply` gives unused rows as a gradient may be NaN, and must not reach the tokens.
    x_MD = jnp.where(live_M1, x_MD, 0)
    hidden = GATES[activation](project(x_MD, weights["gate"]), project(x_MD, weights["up"]))
    return project(_weighted(hidden, share_M), weights["down"], share_M)


def apply_experts_in_tiles(
    x_BTD: jax.Array,
    expert_BTA: jax.Array,
    share_BTA: jax.Array | None,
    weights: ExpertWeights,
    axes: Any = None,
    activation: str = "silu",
    *,
    first_expert: jax.Array | int = 0,
    expert_shards: int = 1,
    most_rows: int = _MOST_ROWS,
    multiply: GroupedMatmul | None = None,
) -> jax.Array:
    """`apply_experts` in tiles of up to `most_rows` rows; weight gradients are summed in float32.

    With the kernel `multiply` in chunks of the sorted pairs instead.
    """
    del axes
    held, num_held = _held(expert_BTA, weights, first_expert)
    sizes = (num_held, expert_BTA.shape[-1], expert_shards)
    if multiply is None:
        chunks, way = _tiles(held, *sizes, most_rows), _TILES
    else:
        chunks, way = _sorted(held, *sizes), _by(multiply)
    share_M = None if share_BTA is None else share_BTA.reshape(-1)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    out_MD: Any = _in_chunks(x_ND, share_M, weights, chunks, way, activation)
    return _summed(out_MD, expert_BTA, share_BTA)


@functools.cache
def _kernel(device: Any) -> GroupedMatmul:
    return functools.partial(grouped_matmul, device=device)


def _apply_experts_by_kernel(
    x_BTD: jax.Array, expert_BTA: jax.Array, share_BTA: Any, weights: Any, *rest, device, **held
) -> jax.Array:
    """`apply_experts_in_tiles` by `grouped_matmul`, or in tiles for widths that it does not take."""
    widths = [width for leaf in jax.tree.leaves(weights) for width in leaf.shape[1:]]
    fits = all(width % WIDTH_MULTIPLE == 0 for width in widths)
    multiply = _kernel(device) if fits else None
    return apply_experts_in_tiles(
        *(x_BTD, expert_BTA, share_BTA, weights, *rest), multiply=multiply, **held
    )


class _Chunks(NamedTuple):
    """The assignment of (token, expert) pairs to the rows of chunks.

    Example: G = 2 experts, pairs 0..4 with experts 1 0 1 1 0. Tiles of t = 2 rows, and sorted rows:

        tile 0   expert 0   pairs 1 4
        tile 1   expert 1   pairs 0 2
        tile 2   expert 1   pairs 3 -       place_M = 2 0 3 4 1
        rows     experts 0 0 1 1 1, pairs 1 4 0 2 3     place_M = 2 0 3 4 1

    Attributes:
      live_K: bool, whether a chunk has any pair.
      experts: the experts of tiles, int32 [K, n], G for empty tiles, which come last; of sorted rows the
        arguments `experts` of `_mlp`, [K, G] and [K, C].
      token: int32 [K, n, t] or [K, C], token of each row; arbitrary for unused rows.
      pair: int32, pair of each row; M for unused rows.
      place_M: int32, row of each pair, counted over all chunks; out of range for pairs held elsewhere.
    """

    live_K: jax.Array
    experts: Any
    token: jax.Array
    pair: jax.Array
    place_M: jax.Array


def _sorted(held_M: jax.Array, num_held: int, per_token: int, shards: int = 1) -> _Chunks:
    """Cuts the sorted pairs into chunks; arguments as for `_tiles`."""
    num_pairs = held_M.shape[0]
    # One or two chunks have all pairs of this device if the experts are chosen about equally often.
    K = max(shards, -(-num_pairs // _SORTED_ROWS))
    C = -(-num_pairs // K)
    order_M = jnp.argsort(held_M).astype(jnp.int32)
    count_G = jnp.bincount(held_M, length=num_held + 1)[:num_held].astype(jnp.int32)
    last_G = jnp.cumsum(count_G)
    first_K = C * jnp.arange(K, dtype=jnp.int32)
    inside = functools.partial(jnp.clip, min=first_K[:, None], max=first_K[:, None] + C)
    rows_KG = inside(last_G[None]) - inside((last_G - count_G)[None])
    expert, pair = (
        jnp.pad(x, (0, K * C - num_pairs), constant_values=fill).reshape(K, C)
        for x, fill in ((held_M[order_M], num_held), (order_M, num_pairs))
    )
    pair = jnp.where(expert < num_held, pair, num_pairs)
    return _Chunks(
        first_K < last_G[-1],
        (rows_KG, expert),
        jnp.minimum(pair, num_pairs - 1) // per_token,
        pair,
        jnp.where(held_M < num_held, _inverse(order_M), K * C),
    )


def _inverse(order_M: jax.Array) -> jax.Array:
    """The place of each pair in an order of the pairs."""
    places = jnp.arange(len(order_M), dtype=jnp.int32)
    return jnp.zeros_like(order_M).at[order_M].set(places, unique_indices=True)


def _tiles(
    held_M: jax.Array, num_held: int, per_token: int, shards: int = 1, most_rows: int = _MOST_ROWS
) -> _Chunks:
    """Cuts the sorted pairs of each expert into tiles.

    Args:
      held_M: expert of each pair, as `_held` has it.
      num_held: G.
      per_token: pairs of a token.
      shards: number of devices that share all experts, so that 1 / shards of the pairs are expected here.
      most_rows: largest number of rows of a tile.
    """
    num_pairs = held_M.shape[0]
    # (K, n, t) that suffice for this number of pairs, however they are distributed over experts. Each expert
    # may end in a tile that is not full: up to one more tile per expert.
    half = max(1, num_pairs // (2 * num_held * shards))
    rows = min(most_rows, max(_FEWEST_ROWS, 1 << (half.bit_length() - 1)))
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
    own_M = jnp.minimum(held_M, num_held - 1)
    place_M = first_tile[own_M] * rows + _inverse(order_M) - first_row[own_M]
    shape = (chunks, in_chunk, rows)
    expert = expert.reshape(chunks, in_chunk)
    return _Chunks(
        expert[:, 0] < num_held,
        expert,
        (pair // per_token).reshape(shape),
        jnp.where(is_row, pair, num_pairs).reshape(shape),
        jnp.where(held_M < num_held, place_M, np.prod(shape).astype(np.int32)),
    )


class _Way(NamedTuple):
    """How the rows of a chunk are multiplied with the weights of their experts.

    Attributes:
      apply: (rows [..., D], shares [...], weights, experts as in `_Chunks`, activation) -> [..., D].
      gradients: (the same, gradient of the result) -> (gradients of the rows, shares and weights).
    """

    apply: Callable[..., jax.Array]
    gradients: Callable[..., tuple[jax.Array, jax.Array | None, ExpertWeights]]


def _of_pairs(values_M: jax.Array | None, pair: jax.Array) -> jax.Array | None:
    """The values of the pairs of rows, 0 in unused rows."""
    return values_M if values_M is None else values_M.at[pair].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _in_chunks(
    x_ND: jax.Array,
    share_M: jax.Array | None,
    weights: ExpertWeights,
    chunks: _Chunks,
    way: _Way,
    activation: str,
) -> jax.Array:
    """Applies the expert of each pair to its token: [M, D], zeros for pairs held elsewhere."""

    def chunk(of: tuple[Any, ...]) -> jax.Array:
        live, experts, token, pair = of

        def run() -> jax.Array:
            return way.apply(x_ND[token], _of_pairs(share_M, pair), weights, experts, activation)

        nothing = functools.partial(jnp.zeros, (*token.shape, x_ND.shape[-1]), x_ND.dtype)
        return jax.lax.cond(live, run, nothing)

    return _rows(jax.lax.map(chunk, chunks[:4]), chunks)


def _in_chunks_backward(way: _Way, activation: str, saved, d_out_MD: jax.Array):
    x_ND, share_M, weights, chunks = saved

    def gradients(experts: Any, token: jax.Array, pair: jax.Array):
        share, d_out = _of_pairs(share_M, pair), _of_pairs(d_out_MD, pair)
        d_x, d_share, d_weights = way.gradients(
            *(x_ND[token], share, weights, experts, activation, d_out)
        )
        return (d_x, d_share), d_weights

    def chunk(d_weights: ExpertWeights, of: tuple[Any, ...]):
        live, *arrays = of

        def run(d_weights: ExpertWeights):
            d_rows, more = gradients(*arrays)
            return jax.tree.map(lambda d, one: d + one.astype(d.dtype), d_weights, more), d_rows

        def nothing(d_weights: ExpertWeights):
            return d_weights, jax.tree.map(jnp.zeros_like, jax.eval_shape(gradients, *arrays)[0])

        return jax.lax.cond(live, run, nothing, d_weights)

    if len(chunks.live_K) == 1:
        # Nothing to add up, which would take 4 bytes for each weight.
        (d_x, d_share), d_weights = gradients(*jax.tree.map(lambda x: x[0], chunks[1:4]))
    else:
        none_yet = jax.tree.map(lambda w: jnp.zeros(w.shape, _sum_type(w)), weights)
        d_weights, (d_x, d_share) = jax.lax.scan(chunk, none_yet, chunks[:4])
    by_token = _rows(d_x, chunks).reshape(x_ND.shape[0], -1, x_ND.shape[1])
    return (
        by_token.sum(axis=1, dtype=_sum_type(x_ND)).astype(x_ND.dtype),
        None if d_share is None else _rows(d_share[..., None], chunks)[:, 0],
        jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights),
        None,
    )


_in_chunks.defvjp(lambda *of: (_in_chunks(*of), of[:4]), _in_chunks_backward)


def _sum_type(array: jax.Array) -> Any:
    # float64 stays, for tests of gradients.
    return array.dtype if array.dtype.itemsize > 4 else jnp.float32


def _rows(of_chunks: jax.Array, chunks: _Chunks) -> jax.Array:
    """[K, ..., D] --> [M, D], in the order of the pairs."""
    flat = of_chunks.reshape(-1, of_chunks.shape[-1])
    return flat.at[chunks.place_M].get(mode="fill", fill_value=0)


def _of_tiles(weights: ExpertWeights, expert_n: jax.Array) -> ExpertWeights:
    """The weights of the expert of each tile."""
    return jax.tree.map(lambda w: w.at[expert_n].get(mode="clip"), weights)


def _gradients_of_tiles(
    x_ntD: jax.Array,
    share_nt: jax.Array | None,
    weights: ExpertWeights,
    expert_n: jax.Array,
    activation: str,
    d_out_ntD: jax.Array,
) -> tuple[jax.Array, jax.Array | None, ExpertWeights]:
    apply = functools.partial(_rows_in_tiles, activation=activation)
    _, pull = jax.vjp(apply, x_ntD, share_nt, _of_tiles(weights, expert_n))
    d_x, d_share, d_tiles = pull(d_out_ntD)
    # A matmul with one-hot rows, not a scatter: on GPUs a scatter adds in random order, and the sum would
    # not be reproducible.
    num_held = weights["gate"]["weight"].shape[0]
    whose = jax.nn.one_hot(expert_n, num_held, axis=0, dtype=_sum_type(d_out_ntD))
    add = functools.partial(jnp.tensordot, whose, axes=1, precision="highest")
    return d_x, d_share, jax.tree.map(lambda one: add(one.astype(whose.dtype)), d_tiles)


def _apply_tiles(
    x_ntD: jax.Array,
    share_nt: jax.Array | None,
    weights: ExpertWeights,
    expert_n: jax.Array,
    activation: str,
) -> jax.Array:
    return _rows_in_tiles(x_ntD, share_nt, _of_tiles(weights, expert_n), activation)


_TILES = _Way(_apply_tiles, _gradients_of_tiles)


def _named(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Jits a function of a chunk under the name `EXPERT_ROWS`."""
    function.__name__ = EXPERT_ROWS
    return jax.jit(function, static_argnames="activation")


@_named
def _rows_in_tiles(
    x: jax.Array, share: jax.Array | None, weights: ExpertWeights, activation: str
) -> jax.Array:
    """[n, t, D] --> [n, t, D], tile i with weights i."""
    gate, up = _batched(x, weights["gate"]), _batched(x, weights["up"])
    return _batched(_weighted(GATES[activation](gate, up), share), weights["down"], share)


def _batched(
    x: jax.Array, projection: dict[str, jax.Array], share: jax.Array | None = None
) -> jax.Array:
    out = x @ projection["weight"]
    if "bias" in projection:
        out = out + _weighted(projection["bias"][:, None], share)
    if "lora_a" in projection:
        out = out + (x @ projection["lora_a"]) @ projection["lora_b"]
    return out


@functools.cache
def _by(multiply: GroupedMatmul) -> _Way:
    """The way of grouped matmuls."""

    @_named
    def apply(
        x_CD: jax.Array, share_C: Any, weights: ExpertWeights, experts: Any, activation: str
    ) -> jax.Array:
        return _mlp(x_CD, share_C, weights, experts, activation, multiply)

    def gradients(
        x_CD: jax.Array,
        share_C: Any,
        weights: ExpertWeights,
        experts: Any,
        activation: str,
        d_out_CD: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None, ExpertWeights]:
        _, pull = jax.vjp(lambda *of: apply(*of, experts, activation), x_CD, share_C, weights)
        return pull(d_out_CD)

    return _Way(apply, gradients)
