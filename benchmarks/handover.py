"""How weights get from one pool to another over two processes: seconds, bytes, and memory of each process.

    python benchmarks/handover.py [--megabytes 1000]

Two processes on this machine have four simulated devices each, two of the learner's pool and two of the
sampler's. Every shard that arrives is compared with what it should be. A process may grow by its own shards
and one bucket: input, output and temporaries of the largest program on its four devices. Data travel inside
one memory, so seconds mean little.
"""

import argparse
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from resharding import AXES, shapes_of

from jaxrl.mesh import hosts
from jaxrl.mesh.devices import simulate
from jaxrl.mesh.handover import Handover, move_program
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.mesh.pools import read_placement, take_devices
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.planner.compiled.traffic import collectives

PROCESSES, DEVICES = 2, 8
# (learner, its fsdp, sampler, type)
CASES = (
    ("1-4-1", 1, "1-2-2", "float32"),
    ("1-1-4", 4, "1-4-1", "float32"),
    ("1-1-4", 4, "1-4-1", "bfloat16"),
)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--process", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.process is not None:
        return measure(args)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    own = [f"--megabytes={args.megabytes}", f"--port={port}"]
    commands = [[sys.executable, __file__, *own, f"--process={i}"] for i in range(PROCESSES)]
    # Without it glibc keeps freed buffers of some megabytes, and they count as memory of the process.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
    running = [subprocess.Popen(command, env=env) for command in commands]
    return max(process.wait() for process in running)


def measure(args):
    simulate(DEVICES, processes=PROCESSES)
    hosts.start(hosts.HostsConfig(f"localhost:{args.port}", PROCESSES, args.process))
    if hosts.is_first():
        names = (
            "learner",
            "sampler",
            "type",
            "a device receives",
            "process 0",
            "process 1",
            "own",
            "bucket",
            "s",
        )
        print("MB\n\n|", " | ".join(names), "|\n" + "|---" * len(names) + "|", flush=True)
    shapes = shapes_of(args.megabytes)
    for learner, fsdp, sampler, dtype in CASES:
        table = {
            "learn": {"roles": ("actor",), "train": learner, "fsdp": fsdp},
            "sample": {"roles": ("rollout",), "train": sampler},
        }
        pools = take_devices(
            read_placement(table, LayoutConfig(), ("actor", "rollout")), jax.devices()
        )
        meshes = [pools.pool_of(role).mesh_of(role) for role in ("actor", "rollout")]
        rules = zip((TRAIN_RULES, GENERATE_RULES), meshes, strict=True)
        train, generate = (shardings(AXES, shapes, rule, mesh) for rule, mesh in rules)
        params = jax.jit(
            lambda: {name: numbers(x.shape) for name, x in shapes.items()}, out_shardings=train
        )()
        move = Handover(shapes, train, generate, dtype)
        received, scratch = figures(move)
        assert received == move.received_bytes, "the programs receive what shapes and shardings say"
        # The first call compiles.
        check(move.to_generate(params))
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before, start = memory("VmRSS"), time.perf_counter()
        moved = jax.block_until_ready(move.to_generate(params))
        seconds, grown = time.perf_counter() - start, memory("VmHWM") - before
        check(moved)
        local = jax.local_device_count()
        own, bucket = move.received_bytes * local // 2, scratch * local
        (first,), (second,) = hosts.gather(lambda: [grown])  # noqa: B023
        if hosts.is_first():
            sizes = [f"{x / 1e6:,.0f}" for x in (received, first, second, own, bucket)]
            row = (f"{learner}, fsdp {fsdp}", sampler, dtype, *sizes, f"{seconds:.1f}")
            print("|", " | ".join(row), "|", flush=True)
        assert max(first, second) <= own + bucket, "a process grows by more than a bucket"
    return 0


def figures(move):
    """As compiled: bytes that a sampling device receives, and bytes per device of the largest program."""
    received, scratch = np.zeros(DEVICES), 0
    for bucket in move.buckets:
        program = move_program.lower(*bucket.move_arguments()).compile()
        for each in collectives(program.as_text(), DEVICES):
            received += bucket.num_slices * each.received(DEVICES)
        memory = program.memory_analysis()
        sizes = (
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.temp_size_in_bytes,
        )
        scratch = max(scratch, sum(sizes))
    assert len(set(received)) == 2, "all sampling devices receive as much, learning ones nothing"
    return received.max(), scratch


def numbers(shape, index=None):
    """Whole numbers below 256, which every type holds; all of them, or a part of the array."""
    index = index or (slice(None),) * len(shape)
    total = 0
    for dim, (size, part) in enumerate(zip(shape, index, strict=True)):
        xp = np if isinstance(index[0].start, int) else jnp
        own = (xp.arange(size, dtype=np.int32) * (2 * dim + 3))[part]
        total = total + own.reshape(-1, *(1,) * (len(shape) - dim - 1))
    return (total % 251).astype(np.float32)


def check(params):
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            index = tuple(slice(part.start or 0, part.stop) for part in shard.index)
            # A slice at a time, to be light.
            wanted = numbers(leaf.shape, index)
            assert (np.asarray(shard.data).astype(np.float32) == wanted).all()


def memory(name):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
