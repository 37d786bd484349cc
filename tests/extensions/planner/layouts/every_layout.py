"""HybridFlow Table 2 against shardings and compiled programs, for every layout of up to N devices.

    python tests/extensions/planner/layouts/every_layout.py 64

Run as a program because the number of simulated devices is fixed once a process has any.
"""

import math
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import numpy as np

from jaxrl.mesh.devices import abstract_mesh, build_mesh, simulate
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import shardings
from jaxrl.mesh.sharding_strategies import GATHER_ALL, HYBRID, STRATEGIES, VANILLA, ShardingStrategy
from jaxrl_planner.resharding_costs import (
    from_shardings,
    of_gather_and_keep,
    of_resharding,
    table_2,
)

# A model that every layout of p*t*d devices splits evenly.
AXES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}


def layouts(max_devices: int) -> Iterator[ParallelLayout]:
    """Every p-t-d of up to `max_devices` devices with every generation layout."""
    sizes = range(1, max_devices + 1)
    for p in sizes:
        for t in range(1, max_devices // p + 1):
            for d in range(1, max_devices // (p * t) + 1):
                for p_g in (n for n in sizes[:p] if p % n == 0):
                    for t_g in (n for n in sizes[:t] if t % n == 0):
                        yield ParallelLayout(p, t, d, p_g, t_g)


def resharding(layout: ParallelLayout, grouping: ShardingStrategy, mesh) -> tuple[Resharding, int]:
    """Of the evenly split model, and the model's bytes."""
    p, N, t = layout.p, layout.num_devices, math.lcm(layout.t, layout.t_g)
    shapes = {
        "up": jax.ShapeDtypeStruct((p, N, t), np.float32),
        "down": jax.ShapeDtypeStruct((p, t, N), np.float32),
    }
    train, generate = (
        shardings(AXES, shapes, rules, mesh) for rules in (grouping.train, grouping.generate)
    )
    move = Resharding(shapes, train, generate, np.float32, donate=grouping.name == HYBRID.name)
    return move, 2 * p * N * t * 4


def check_closed_form(layout: ParallelLayout) -> None:
    """Interval arithmetic on the specs gives the paper's formulas, or says where they are bounds."""
    for grouping in STRATEGIES.values():
        move, model_bytes = resharding(layout, grouping, abstract_mesh(layout, grouping.axes))
        formula, least = table_2(layout, model_bytes)[grouping.name], from_shardings(move.weights)
        context = (layout, grouping.name, formula, least)
        if grouping is HYBRID:
            assert least == formula, context
            continue
        # What gathering everything costs is never less than what the move needs.
        assert least.received <= formula.received, context
        assert least.redundant <= formula.redundant, context
        splits_again = any(
            1 < gen < all_ for gen, all_ in ((layout.t_g, layout.t), (layout.p_g, layout.p))
        )
        if grouping is VANILLA:
            # Some device's training shard lies outside its generation shard, or none does.
            assert least.redundant == (formula.redundant if splits_again else 0), context
        else:
            # ZeRO-3 splits across what generation splits, so t_g p_g parts of a shard differ.
            share = 1 - 1 / (layout.t_g * layout.p_g)
            assert np.isclose(least.redundant, float(formula.redundant) * share), context


def check_hybrid(layout: ParallelLayout, devices) -> None:
    """The compiled resharding receives what Table 2 says and keeps nothing besides."""
    move, model_bytes = resharding(layout, HYBRID, build_mesh(layout, devices, HYBRID.axes))
    formula, measured = table_2(layout, model_bytes)["hybrid"], of_resharding(move)
    context = (layout, formula, measured)
    assert measured.costs.received == formula.received, context
    assert measured.costs.redundant == formula.redundant, context
    assert {c.kind for _, c in measured.collectives} <= {"all-gather"}, context
    # Both leaves fit into a bucket, and the program has no more than one for itself.
    assert formula.peak <= measured.costs.peak, context
    back = [b.slice_program.lower(*b.slice_arguments()).compile().as_text() for b in move.buckets]
    assert not any(word in text for text in back for word in (" all-", " collective-")), context


def check_procedures(layout: ParallelLayout, devices) -> None:
    """Gathering everything and keeping a part costs what Table 2 says, in all three columns."""
    for grouping in (VANILLA, GATHER_ALL):
        mesh = build_mesh(layout, devices, grouping.axes)
        move, model_bytes = resharding(layout, grouping, mesh)
        formula, measured = (
            table_2(layout, model_bytes)[grouping.name],
            of_gather_and_keep(move.weights),
        )
        assert measured.costs == formula, (layout, grouping.name, formula, measured)


def check_compiled(layout: ParallelLayout, devices) -> None:
    """All that is compiled of one layout."""
    devices = devices[: layout.num_devices]
    check_hybrid(layout, devices)
    # Gathering everything does not depend on how generation is split, so once is enough.
    if layout.p_g == layout.p and layout.t_g == layout.t:
        check_procedures(layout, devices)


def main(max_devices: int) -> None:
    """Compiles every layout of powers of two, and all others of up to eight devices."""
    simulate(max_devices)
    devices = jax.devices()
    count = 0
    for layout in layouts(max_devices):
        sizes = (layout.p, layout.t, layout.d, layout.p_g, layout.t_g)
        if layout.num_devices <= 8 or all(n & (n - 1) == 0 for n in sizes):
            check_compiled(layout, devices)
            count += 1
    print(f"{count} layouts of up to {max_devices} devices")


if __name__ == "__main__":
    main(int(sys.argv[1]))
