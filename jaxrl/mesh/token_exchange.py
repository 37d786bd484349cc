"""Sends every token to the devices that hold its experts, and their sums back.

Devices of an `expert` group hold consecutive experts. Either all of them gather all tokens of the group, or
each token goes once to every device that holds one of its experts, as in DeepEP. In rows of D numbers that a
device receives for each of its own tokens, there and back, with r devices and A of E experts for each token:

    gather      2 (r - 1)
    exchange    2 (r - 1) p    p = 1 - C(E - E/r, A) / C(E, A), the probability that a device has one

Example: DeepSeek-V3 (8 of 256) over 32 devices, 62 rows and 14. No token is dropped: a device has room for
all tokens of its group, as if it gathered them.

    N tokens of a device   r devices   A experts of a token   S = N min(A, r) rows to send at most   D width
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# As `jax.lax.ragged_all_to_all`.
RaggedMove = Callable[..., jax.Array]

# An exchange waits for the numbers of its rows first, and its messages differ in size.
_LEAST_GAIN = 2.0


def exchanged_share(devices: int, num_experts: int, per_token: int) -> float:
    """p, the bytes of an exchange over those of a gather, if all experts are chosen equally often."""
    elsewhere = num_experts - num_experts // devices
    return 1 - math.comb(elsewhere, per_token) / math.comb(num_experts, per_token)


def exchange_pays(devices: int, num_experts: int, per_token: int) -> bool:
    """Whether an exchange sends at most half of the bytes of a gather."""
    return exchanged_share(devices, num_experts, per_token) * _LEAST_GAIN <= 1


def exchange_tokens(
    x_BTD: jax.Array,
    expert_BTA: jax.Array,
    share_BTA: jax.Array,
    *,
    num_experts: int,
    axis: str,
    move: RaggedMove,
) -> tuple[list[jax.Array], Callable[[jax.Array], jax.Array]]:
    """Sends tokens to their experts, inside a `shard_map` over the `axis` of a group.

    Args:
      x_BTD, expert_BTA, share_BTA: tokens of this device, their experts, and the weights of these; padding
        has expert `num_experts`.
      num_experts: number of all experts.
      axis: axis of the group.
      move: `jax.lax.ragged_all_to_all`.

    Returns:
      ([x, expert, share] of the tokens that have an expert here, [1, r N, ...] and padding behind them; a
      function that returns results [1, r N, D] to their senders, and adds up those of each token: [B, T, D]).
    """
    A, r = expert_BTA.shape[-1], jax.lax.axis_size(axis)
    # Padding has expert `num_experts`, so its owner is r: no device.
    owner_NA = expert_BTA.reshape(-1, A) // (num_experts // r)
    N = len(owner_NA)
    S = N * min(A, r)
    goes_rN = (owner_NA[None] == jnp.arange(r)[:, None, None]).any(-1)
    # The rows to send are sorted by receiver.
    token_S = jnp.argsort(~goes_rN.reshape(-1), stable=True)[:S].astype(jnp.int32) % N
    row_rN = (jnp.cumsum(goes_rN.reshape(-1)) - 1).reshape(r, N)
    row_NA = jnp.take_along_axis(row_rN.T, jnp.minimum(owner_NA, r - 1), axis=1)
    # Two experts on one device: the row counts once. Padding has none.
    again_NA = (jnp.tril(owner_NA[:, :, None] == owner_NA[:, None], -1)).any(-1)
    row_NA = jnp.where(again_NA | (owner_NA >= r), S, row_NA)

    size_rr = jax.lax.all_gather(goes_rN.sum(1, dtype=jnp.int32), axis)  # [sender, receiver]
    # Where the rows of a receiver begin with the sender, and those of a sender with the receiver.
    at_sender_rr = jnp.cumsum(size_rr, axis=1) - size_rr
    at_receiver_rr = jnp.cumsum(size_rr, axis=0) - size_rr
    me = jax.lax.axis_index(axis)
    there = (at_sender_rr[me], size_rr[me], at_receiver_rr[me], size_rr[:, me])
    home = (at_receiver_rr[:, me], size_rr[:, me], at_sender_rr[:, me], size_rr[me])

    def send(x: jax.Array, fill: int) -> jax.Array:
        rows_S = _rows(x.reshape(N, -1), token_S, row_NA)
        # Room for all tokens of the group: the shape is fixed, and all of them may come here.
        empty = jnp.full((r * N, rows_S.shape[1]), fill, x.dtype)
        return move(rows_S, empty, *there, axis_name=axis)[None]

    def back(out: jax.Array) -> jax.Array:
        empty = jnp.zeros((S, out.shape[-1]), out.dtype)
        return _added(move(out[0], empty, *home, axis_name=axis), row_NA).reshape(x_BTD.shape)

    return [send(x_BTD, 0), send(expert_BTA, num_experts), send(share_BTA, 0)], back


def _added(rows_S: jax.Array, row_NA: jax.Array) -> jax.Array:
    """The sum of each token's rows."""
    # Row S does not exist and reads as 0. Sums are in float32, so that bfloat16 rows are rounded once.
    parts_NA = rows_S.at[row_NA].get(mode="fill", fill_value=0)
    return parts_NA.sum(1, dtype=jnp.float32).astype(rows_S.dtype)


@jax.custom_vjp
def _rows(x_N: jax.Array, token_S: jax.Array, row_NA: jax.Array) -> jax.Array:
    """The rows to send. Its gradient is a gather: on GPUs a scatter adds in random order."""
    del row_NA
    return x_N[token_S]


_rows.defvjp(
    lambda x_N, token_S, row_NA: (x_N[token_S], row_NA),
    lambda row_NA, g: (_added(g, row_NA), None, None),
)


def gather_tokens(
    arrays: list[Any], axes: tuple[str, ...]
) -> tuple[list[Any], Callable[[jax.Array], jax.Array]]:
    """All tokens of a group, and a function that adds up results and returns those of each device."""
    for axis in axes:
        gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis=0, tiled=True)
        arrays = jax.tree.map(gather, arrays)

    def back(out: jax.Array) -> jax.Array:
        for axis in reversed(axes):
            out = jax.lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)
        return out

    return arrays, back
