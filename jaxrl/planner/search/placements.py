"""Placements: all partitions of a set of roles into pools that share devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxrl.errors import UserError

Placement = tuple[tuple[str, ...], ...]


def placements_of(names: Sequence[str]) -> Iterator[Placement]:
    """All set partitions of the roles: 15 for four roles, 203 for six (Bell numbers).

    The first has all roles in one pool, the last has one pool per role. Pools are in the order of their first
    roles, and roles in the order given.
    """
    if not names:
        yield ()
        return
    *before, last = names
    for placement in placements_of(before):
        for i, pool in enumerate(placement):
            yield (*placement[:i], (*pool, last), *placement[i + 1 :])
        yield (*placement, (last,))


def checked_placement(placement: Sequence[Sequence[str]], names: Sequence[str]) -> Placement:
    """A user's placement in the order of `placements_of`.

    Raises:
      UserError: a role is missing, in two pools, or unknown.
    """
    given = [name for pool in placement for name in pool]
    if sorted(given) != sorted(names):
        raise UserError(
            f"placement {placement_name([tuple(pool) for pool in placement])} has not each of the roles "
            f"{', '.join(names)} in exactly one pool; put every one into one"
        )
    order = {name: i for i, name in enumerate(names)}
    pools = [tuple(sorted(pool, key=order.__getitem__)) for pool in placement if pool]
    return tuple(sorted(pools, key=lambda pool: order[pool[0]]))


def placement_name(placement: Sequence[Sequence[str]]) -> str:
    """The placement as text, such as "actor + reference | critic + reward"."""
    return " | ".join(" + ".join(pool) for pool in placement)
