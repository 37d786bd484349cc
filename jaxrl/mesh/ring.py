"""How devices of the context axis share the rows of a training batch.

The context axis has c = u * r devices, and attention needs whole rows. Two ways lead there, also together:

**Exchange** (u; DeepSpeed-Ulysses, arXiv 2309.14509). Neighbours swap parts of the sequence for parts of the
heads, and swap the results back. u divides the heads of a device.

**Ring** (r; arXiv 2310.01889). Keys and values travel around. It takes any number of devices, and moves few
bytes where query heads share key-value heads.

A causal row costs more at its end. So tokens are laid out in another order for a ring, for all layers of the
stack: of 2 r chunks, part a holds chunks a and 2 r - 1 - a. With r = 4:

    chunks in the row     0 1 | 2 3 | 4 5 | 6 7
    after `spread`        0 7 | 1 6 | 2 5 | 3 4      `unspread` brings them back

T tokens of a row   Q query heads and K kv heads of a device
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.mesh.rules import Rules, axes_of, partition_spec, per_device


@dataclasses.dataclass(frozen=True)
class ContextSplit:
    """What the devices of the context axis do, see above. Device i is member i % u of part i // u.

    Attributes:
      exchanged: u, devices that exchange parts of a row for heads.
      ring: r, parts of a row that travel.
    """

    exchanged: int = 1
    ring: int = 1

    @property
    def size(self) -> int:
        return self.exchanged * self.ring

    def groups(self) -> list[list[int]] | None:
        """The devices that exchange with each other; None if all do."""
        if self.ring == 1:
            return None
        return np.arange(self.size).reshape(self.ring, self.exchanged).tolist()

    def next_part(self) -> list[tuple[int, int]]:
        """(device, device that its part goes to)."""
        return [(i, (i + self.exchanged) % self.size) for i in range(self.size)]

    def chunks(self, tokens: int) -> int:
        """Number of chunks of a part. Rows that do not divide keep their order, with one chunk a part."""
        return 2 if self.ring > 1 and tokens % (2 * self.size) == 0 else 1

    @property
    def halves(self) -> list[int]:
        """The half of a chunk, 0 to 2 c - 1 in the row, that lies at each place after `spread`."""
        u, r = self.exchanged, self.ring
        chunks = [chunk for part in range(r) for chunk in (part, 2 * r - 1 - part)]
        return [half for chunk in chunks for half in range(chunk * u, (chunk + 1) * u)]

    def in_order(self, x: jax.Array, *, back: bool = False) -> jax.Array:
        """Whole rows [B, T, ...] on one device from the order of `spread` to their own, or back."""
        if self.chunks(x.shape[1]) == 1:
            return x
        order = np.array(self.halves)
        halves = x.reshape(x.shape[0], 2 * self.size, -1, *x.shape[2:])
        return halves[:, order if back else np.argsort(order)].reshape(x.shape)

    def heads_sent(self, query_heads: int, kv_heads: int) -> float:
        """Heads that a device sends in a layer's forward pass, for each of its T / c tokens.

        Args:
          query_heads, kv_heads: Q and K.
        """
        u, r = self.exchanged, self.ring
        # Queries, keys and values, and back the outputs, of which 1 / u stay here. Then every part of keys
        # and values visits all other devices of its ring.
        # With fewer key-value heads than exchanging devices, heads are copied until each has one.
        held = max(kv_heads, u)
        return 2 * (query_heads + held) * (u - 1) / u + 2 * held * (r - 1)


# No device shares its rows.
ONE_DEVICE = ContextSplit()


def splits(size: int, query_heads: int, kv_heads: int) -> list[ContextSplit]:
    """The ways to share rows that the heads of a device allow, from many exchanging devices to none."""
    return [
        ContextSplit(u, size // u)
        for u in range(size, 0, -1)
        if size % u == 0 and query_heads % u == 0 and (kv_heads % u == 0 or u % kv_heads == 0)
    ]


def pick_split(size: int, query_heads: int, kv_heads: int, *, whole_rows: bool) -> ContextSplit:
    """Chooses how a context axis of `size` devices shares rows.

    Args:
      size: c.
      query_heads, kv_heads: Q and K.
      whole_rows: whether a kernel is at hand that is faster than others and needs whole rows.

    Returns:
      An exchange for such a kernel if the heads divide; else the way that sends the fewest bytes.
    """
    ways = splits(size, query_heads, kv_heads)
    # Plain XLA, which a ring needs, is slower than such a kernel by more than the bytes are worth.
    if whole_rows and ways[0].ring == 1:
        return ways[0]
    return min(ways, key=lambda way: way.heads_sent(query_heads, kv_heads))


def spread(x: jax.Array, split: ContextSplit, mesh: Mesh, rules: Rules) -> jax.Array:
    """Lays [B, T, ...] out in the order for a ring; nothing changes without one."""
    return _moved(x, split, mesh, rules, back=False)


def unspread(x: jax.Array, split: ContextSplit, mesh: Mesh, rules: Rules) -> jax.Array:
    """Brings [B, T, ...] back from the order of `spread`."""
    return _moved(x, split, mesh, rules, back=True)


def _moved(x: jax.Array, split: ContextSplit, mesh: Mesh, rules: Rules, *, back: bool) -> jax.Array:
    if split.chunks(x.shape[1]) == 1:
        return x
    sizes = dict(mesh.shape)
    axes = ("batch", "length", *["activation"] * (x.ndim - 2))
    spec = partition_spec(axes, x.shape, rules, sizes, "row")
    move = functools.partial(
        _move_halves, split=split, axes=axes_of("length", rules, sizes), back=back
    )
    return per_device(move, mesh, in_specs=(spec,), out_specs=spec)(x)


def _move_halves(
    x: jax.Array, *, split: ContextSplit, axes: tuple[str, ...], back: bool
) -> jax.Array:
    """Sends the two halves of each device's tokens to their places for a ring, or back."""
    place = np.argsort(split.halves)
    # Whether the second half that comes to a device lies before the first one there.
    swapped = np.zeros(split.size, bool)
    swapped[place[::2] // 2] = place[::2] % 2 == 1
    swap = jnp.asarray(swapped)[jax.lax.axis_index(axes)]

    # All devices run one program, so those that need no swap choose their halves by value, too.
    def swap_if(x: jax.Array) -> jax.Array:
        return jnp.where(swap, jnp.roll(x, x.shape[1] // 2, axis=1), x)

    moved = []
    # No device gets two first halves, or two second ones, so each kind is one permutation.
    for which, half in enumerate(jnp.split(swap_if(x) if back else x, 2, axis=1)):
        ways = [(i, int(p) // 2) for i, p in enumerate(place[which::2])]
        ways = [(b, a) for a, b in ways] if back else ways
        moved.append(jax.lax.ppermute(half, axes, ways))
    out = jnp.concatenate(moved, axis=1)
    return out if back else swap_if(out)
