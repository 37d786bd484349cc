"""How long weights take from the training to the generation layout, by grouping.

    python benchmarks/resharding.py [--train 1-4-2] [--generate 1-2-2-2] [--megabytes 256] [--repeats 5]

Runs on the accelerators there are, if they are as many as the layout asks for, else on simulated CPU
devices, where a move is a copy inside one memory: ratios mean something there, seconds do not.
JAX_PLATFORMS=cpu simulates in any case.
"""

import argparse
import os
import statistics
import time

# XLA warns of every move that it can only make by gathering everything; here that is what is measured.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import shardings
from jaxrl.mesh.sharding_strategies import GATHER_ALL, HYBRID, VANILLA
from jaxrl_planner.resharding_costs import gather_everything, of_gather_and_keep, of_resharding

AXES = {
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "q": ("layers", "embed", "heads", "head_dim"),
    "o": ("layers", "heads", "head_dim", "embed"),
}
LAYERS, HEADS = 8, 16


def shapes_of(megabytes):
    """A stack of layers of about so many megabytes; each has 10 D^2 weights, D the width."""
    width = max(256, round((megabytes * 1e6 / (LAYERS * 10 * 4)) ** 0.5 / 256) * 256)
    shapes = {
        "up": (LAYERS, width, 4 * width),
        "down": (LAYERS, 4 * width, width),
        "q": (LAYERS, width, HEADS, width // HEADS),
        "o": (LAYERS, HEADS, width // HEADS, width),
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def seconds(move, params):
    """Time of one call, everything arrived."""
    jax.block_until_ready(params)
    start = time.perf_counter()
    moved = jax.block_until_ready(move(params))
    return time.perf_counter() - start, moved


def gather_and_keep(train, generate):
    """The procedure of DeepSpeed-Chat and HybridFlow-V, leaf by leaf."""
    gather = {name: jax.jit(gather_everything(sharding)) for name, sharding in train.items()}
    keep = {
        name: jax.jit(lambda leaf: leaf, out_shardings=sharding)
        for name, sharding in generate.items()
    }
    return lambda params: {name: keep[name](gather[name](leaf)) for name, leaf in params.items()}


def devices_for(layout):
    """Accelerators if there are enough, else simulated devices."""
    jax.config.update("jax_num_cpu_devices", layout.num_devices)
    found = jax.devices()
    return (found if len(found) >= layout.num_devices else jax.devices("cpu"))[: layout.num_devices]


def measure(layout, devices, shapes, repeats):
    """(name, bytes received, all times) of every way; their runs alternate, so that all see one machine."""
    ways = []
    for grouping in (HYBRID, VANILLA, GATHER_ALL):
        mesh = build_mesh(layout, devices, grouping.axes)
        train, generate = (
            shardings(AXES, shapes, rules, mesh) for rules in (grouping.train, grouping.generate)
        )
        fresh = jax.jit(
            lambda: {name: jnp.ones(s.shape, s.dtype) for name, s in shapes.items()},
            out_shardings=train,
        )
        move = Resharding(shapes, train, generate, jnp.float32, donate=grouping is HYBRID)
        received = of_resharding(move).costs.received
        ways.append((f"{grouping.name}, from two tables", received, fresh, move.to_generate))
        if grouping is not HYBRID:
            received = of_gather_and_keep(move.weights).costs.received
            procedure = gather_and_keep(train, generate)
            ways.append((f"{grouping.name}, as in the paper", received, fresh, procedure))
        else:
            back = Resharding(shapes, train, generate, jnp.float32, donate=True)
            ways.append(
                (
                    f"{grouping.name}, back to training",
                    0,
                    lambda move=back, fresh=fresh: move.to_generate(fresh()),
                    back.to_train,
                )
            )
    times = [[] for _ in ways]
    for _ in range(repeats + 1):
        for found, (_, _, fresh, move) in zip(times, ways, strict=True):
            found.append(seconds(move, fresh())[0])
    # The first run compiles.
    return [
        (name, received, found[1:])
        for (name, received, _, _), found in zip(ways, times, strict=True)
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", default="1-4-2")
    parser.add_argument("--generate", default="1-2-2-2")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    layout = ParallelLayout.from_config(LayoutConfig(train=args.train, generate=args.generate))
    shapes = shapes_of(args.megabytes)
    model_bytes = sum(leaf.size for leaf in shapes.values()) * 4
    devices = devices_for(layout)
    rows = measure(layout, devices, shapes, args.repeats)
    base = statistics.median(rows[0][2])
    table = Table(
        title=f"{layout.name}, M = {model_bytes / 1e6:,.0f} MB, {layout.num_devices} "
        f"{devices[0].device_kind} devices"
    )
    table.add_column("resharding")
    for column in ("received / M", "median ms", "fastest ms", "ratio"):
        table.add_column(column, justify="right")
    for name, received, times in rows:
        median = statistics.median(times)
        table.add_row(
            name,
            f"{received / model_bytes:.4f}",
            f"{1e3 * median:.1f}",
            f"{1e3 * min(times):.1f}",
            f"{median / base:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
