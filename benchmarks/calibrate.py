"""Measures this machine for the planner, and writes it as a kind of device: a JSON file for `--topology
here.json:1x8` or `mesh.layout = "here.json"` (docs/planning.md).

    python benchmarks/calibrate.py --out here.json

    matmuls of square matrices by type    -->  bfloat16_tflops, float32_tflops
    one array read and written            -->  memory_gbs
    an all-gather over local devices      -->  link_gbs
    memory that a device reports          -->  memory_gb

Simulated devices share one processor, so each gets an equal part of the measured rates. Links between hosts
are not measured; they get the vendor's rate or the caller's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.devices import host_memory_bytes, simulate
from jaxrl_planner.hardware.accelerators import Accelerator, accelerator_of

_REPEATS = 10


def calibrate(
    name: str,
    *,
    side: int = 1024,
    megabytes: int = 64,
    host_gbs: float = 0.0,
) -> Accelerator:
    """Measures one local device, and an all-gather over all of them if there are several.

    Args:
      name: name of the entry.
      side: side of the square matrices; it must be large enough to keep the device busy.
      megabytes: size of the array for the memory sweep and for the all-gather; larger than the caches.
      host_gbs: GB/s between hosts; 0 uses the table's number of the device, or the rate of a local link.

    Returns:
      An entry with `measured` set: the planner takes its rates as they are.
    """
    devices = jax.local_devices()
    device, sharing = devices[0], _num_sharing(devices)
    matmuls = {dtype: _tera_operations(dtype, side) / sharing for dtype in _MATMULS}
    sweep = _memory_gbs(megabytes) / sharing
    link = _link_gbs(devices, megabytes) if len(devices) > 1 else sweep
    known = accelerator_of(device.device_kind)
    return Accelerator(
        name=name,
        platform=device.platform,
        arrangement="hosts",
        memory_gb=_memory_gb(device, sharing),
        bfloat16_tflops=matmuls["bfloat16"],
        float32_tflops=matmuls["float32"],
        memory_gbs=sweep,
        link_gbs=link,
        host_gbs=host_gbs or (known.host_gbs if known else link),
        devices_per_host=len(devices),
        measured=True,
    )


_MATMULS = ("bfloat16", "float32")


def _num_sharing(devices: list[Any]) -> int:
    """The number of devices that share one processor: all simulated ones."""
    return len(devices) if devices[0].platform == "cpu" else 1


def _tera_operations(dtype: str, side: int) -> float:
    """10^12 operations per second of a matmul of square matrices."""

    @jax.jit
    def matmul(x):
        return jax.lax.dot(x, x, preferred_element_type=jnp.float32)

    x = jnp.ones((side, side), dtype)
    return 2 * side**3 / _fastest_s(lambda: matmul(x)) / 1e12


def _memory_gbs(megabytes: int) -> float:
    """GB/s of reading one array and writing another."""
    x = jnp.ones(megabytes * 250_000, jnp.float32)

    # In place: the system would have to map new memory page by page.
    @jax.jit
    def sweep(y):
        return jax.lax.fori_loop(0, 4, lambda _, z: jax.lax.optimization_barrier(z + 1), y)

    return 4 * 2 * x.nbytes / _fastest_s(lambda: sweep(x)) / 1e9


def _link_gbs(devices: list[Any], megabytes: int) -> float:
    """GB/s that each device receives in an all-gather over all local devices."""
    mesh = Mesh(np.array(devices), ("all",))
    shape = (len(devices), megabytes * 250_000 // len(devices))
    x = jax.device_put(jnp.ones(shape, jnp.float32), NamedSharding(mesh, P("all")))
    gather = jax.jit(lambda y: y + 0, out_shardings=NamedSharding(mesh, P()))
    received = x.nbytes * (len(devices) - 1) / len(devices)
    return received / _fastest_s(lambda: gather(x)) / 1e9


def _memory_gb(device: Any, sharing: int) -> float:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        limit = host_memory_bytes()
    return limit / sharing / 1e9


def _fastest_s(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())  # compiles
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--name", default="here", help="name of the kind (default: %(default)s)")
    parser.add_argument(
        "--side", type=int, default=1024, help="side of the square matrices; 8192 keeps a GPU busy"
    )
    parser.add_argument(
        "--megabytes", type=int, default=64, help="size of the sweep; must exceed the caches"
    )
    parser.add_argument(
        "--simulated-devices", type=int, default=0, help="number of simulated devices on this CPU"
    )
    args = parser.parse_args()
    if args.simulated_devices:
        simulate(args.simulated_devices)
    found = calibrate(args.name, side=args.side, megabytes=args.megabytes)
    args.out.write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
    print(
        f"{args.out}: {found.float32_tflops:.3g} TFLOP/s in float32, {found.bfloat16_tflops:.3g} in "
        f"bfloat16, {found.memory_gbs:.3g} GB/s of memory, {found.link_gbs:.3g} between devices"
    )


if __name__ == "__main__":
    main()
