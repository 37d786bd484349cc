"""How weights get from one pool to another over two processes: seconds, bytes, and memory of each process.

    python benchmarks/handover.py [--megabytes 1000]
    python benchmarks/handover.py --topology v5p:4x4x8

Two processes on this machine have four simulated devices each, two of the learner's pool and two of the
sampler's. Every shard that arrives is compared with what it should be. A process may grow by its own shards
and one bucket: input, output and temporaries of the largest program on its four devices. Data travel inside
one memory, so seconds mean little.

With --topology nothing runs: Qwen2.5-32B from one half of the devices to the other, compiled ahead of time.
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
from jaxrl.models.decoder import decoder_graph, weight_types
from jaxrl.models.shapes import model_shapes
from jaxrl_planner.compiled.traffic import collectives
from jaxrl_planner.hardware.cluster import read_topology

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
    parser.add_argument("--topology", default="")
    parser.add_argument("--process", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.process is not None:
        return measure(args)
    if args.topology:
        return compile_ahead(args.topology)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, f"--megabytes={args.megabytes}", f"--port={port}"]
    # Without it glibc keeps freed buffers of some megabytes, and they count as memory of the process.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
    running = [subprocess.Popen([*command, f"--process={i}"], env=env) for i in range(PROCESSES)]
    return max(process.wait() for process in running)


def measure(args):
    simulate(DEVICES, processes=PROCESSES)
    hosts.start(hosts.HostsConfig(f"localhost:{args.port}", PROCESSES, args.process))
    if hosts.is_first():
        names = ("learner", "sampler", "type", "a device receives", "process 0", "process 1")
        names += ("own", "bucket", "s")
        print("MB\n\n|", " | ".join(names), "|\n" + "|---" * len(names) + "|", flush=True)
    shapes = shapes_of(args.megabytes)
    for learner, fsdp, sampler, dtype in CASES:
        train, generate = sides(AXES, shapes, learner, fsdp, sampler, jax.devices())
        params = jax.jit(
            lambda: {name: numbers(x.shape) for name, x in shapes.items()}, out_shardings=train
        )()
        move = Handover(shapes, train, generate, dtype)
        received, scratch, _ = figures(move)
        # The first call compiles.
        check(move.to_generate(params))
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before, start = memory("VmRSS"), time.perf_counter()
        moved = jax.block_until_ready(move.to_generate(params))
        seconds, grown = time.perf_counter() - start, memory("VmHWM") - before
        check(moved)
        local = jax.local_device_count()
        own, bucket = received * local // 2, scratch * local
        (first,), (second,) = hosts.gather(lambda: [grown])  # noqa: B023
        if hosts.is_first():
            sizes = [f"{x / 1e6:,.0f}" for x in (received, first, second, own, bucket)]
            row = (f"{learner}, fsdp {fsdp}", sampler, dtype, *sizes, f"{seconds:.1f}")
            print("|", " | ".join(row), "|", flush=True)
        assert max(first, second) <= own + bucket, "a process grows by more than a bucket"
    return 0


def compile_ahead(name):
    jax.config.update("jax_platforms", "cpu")
    devices, model = read_topology(name).devices, model_shapes("qwen2.5-32b")
    d = len(devices) // 2
    _, shapes, axes = decoder_graph(model)
    train, generate = sides(axes, shapes, f"1-8-{d // 8}", d // 8, f"1-4-{d // 4}", devices)
    print("| type | a device receives, GB | programs | rounds | largest temporaries |")
    print("|---|---|---|---|---|")
    for dtype in ("", "int8"):
        move = Handover(shapes, train, generate, weight_types(model, "bfloat16", dtype))
        received, _, inside = figures(move)
        calls = sum(bucket.num_slices for bucket in move.buckets)
        rounds = max(len(route.rounds) for bucket in move.buckets for route in bucket.routes)
        share = f"{inside / received:.2%} of a device's own weights"
        print(f"| {dtype or 'bfloat16'} | {received / 1e9:.2f} | {calls} | {rounds} | {share} |")
    return 0


def sides(axes, shapes, learner, fsdp, sampler, devices):
    """Shardings of weights in two pools of layouts p-t-d."""
    table = {
        "learn": {"roles": ("actor",), "train": learner, "fsdp": fsdp},
        "sample": {"roles": ("rollout",), "train": sampler},
    }
    roles = ("actor", "rollout")
    pools = take_devices(read_placement(table, LayoutConfig(), roles), devices)
    meshes = [pools.pool_of(role).mesh_of(role) for role in roles]
    rules = zip((TRAIN_RULES, GENERATE_RULES), meshes, strict=True)
    return [shardings(axes, shapes, rule, mesh) for rule, mesh in rules]


def figures(move):
    """As compiled: bytes that a sampling device receives, those of the largest program, temporaries."""
    received, scratch, inside = 0, 0, 0
    for bucket in move.buckets:
        routes, shapes = bucket.move_arguments()
        program, devices = move_program.lower(routes, shapes).compile(), routes[0].mesh.size
        for each in collectives(program.as_text(), devices):
            received = received + bucket.num_slices * each.received(devices)
        memory = program.memory_analysis()
        inside = max(inside, memory.temp_size_in_bytes)
        ends = memory.argument_size_in_bytes + memory.output_size_in_bytes
        scratch = max(scratch, ends + memory.temp_size_in_bytes)
    assert set(received) == {0, move.received_bytes}, "what shapes and shardings say, each"
    return move.received_bytes, scratch, inside


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
