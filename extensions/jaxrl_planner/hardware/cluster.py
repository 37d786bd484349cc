"""Topologies by name: devices that need not be present, their pools and links, and compilers for them.

    v5p:4x4x8     a slice of 128 chips, by generation and shape; the package libtpu compiles for it
    h100:16x8     16 hosts of 8 GPUs; JAX's CUDA plugin compiles for it, without a GPU or a driver
    h100:2x8+a100:2x8     groups of hosts of different kinds; for simulation only

Neither opens a device. One cannot compile for a kind of device from a file.

A run has a process on each host, and its pools have an equal part of every host (`mesh.pools`):

    2 hosts of 4        host 0    host 1
    pool of 4 devices   0 1 . .   0 1 . .
    pool of 4 devices   . . 0 1   . . 0 1

Not covered: autotuning of programs for GPUs, which needs a device; XLA uses its defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from jaxrl.errors import UserError
from jaxrl.mesh.hardware import FIGURES
from jaxrl.mesh.pools import Pool
from jaxrl.private import compile_kernels_for
from jaxrl_planner.hardware.accelerators import Accelerator, accelerator

# The oldest cuDNN version that current JAX plugins accept.
_CUDNN = (9, 12)


GPU_TARGETS: dict[str, dict[str, Any]] = FIGURES["targets"]
"""Figures of GPUs that can be compiled for without one, by name; "memory" has the driver's bytes."""


def target_text(name: str) -> str:
    """XLA's GpuTargetConfig of a GPU, in text format."""
    gpu = GPU_TARGETS[name]
    # A block may use 1 KiB less of the shared memory than its multiprocessor has.
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      shared_memory_per_block: 49152 shared_memory_per_core: {gpu["shared"]}
      shared_memory_per_block_optin: {gpu["shared"] - 1024}
      core_count: {gpu["cores"]} fpus_per_core: {gpu["fpus"]}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {gpu["bandwidth"]} l2_cache_size: {gpu["l2"]}
      clock_rate_ghz: {gpu["ghz"]} device_memory_size: {gpu["memory"]}
      cuda_compute_capability {{ major: {gpu["capability"]} minor: 0 }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
    platform_name: "CUDA"
    dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
    device_description_str: "{gpu["name"]}\""""


# Names of generations that differ in libtpu.
_LIBTPU_NAMES = {"7x": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: name that the user gave.
      accelerator: kind of the devices.
      devices: devices of all hosts.
      devices_per_host: number of devices joined by fast links; all devices of a TPU slice.
    """

    name: str
    accelerator: Accelerator
    devices: tuple[Any, ...]
    devices_per_host: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of a device; for a GPU the driver's figure, which the compiler also uses."""
        target = GPU_TARGETS.get(self.accelerator.name)
        return target["memory"] if target else int(self.accelerator.memory_gb * 1e9)


def shapes_of_at_least(kind: Accelerator, devices: int) -> str:
    """The two smallest topologies with at least `devices` devices, to complete the message "use ..."."""
    enough = [s for s in kind.growing_shapes() if kind.num_devices(s) >= devices]
    if not enough:
        return f"a kind with more memory ({kind.name} comes with at most {kind.largest:,} devices)"
    named = [f"{kind.name}:{shape_text(s)} ({kind.num_devices(s):,} devices)" for s in enough[:2]]
    return " or ".join(named)


def shape_text(shape: tuple[int, ...]) -> str:
    """The shape in the format of a topology's name, such as "4x4x8"."""
    return "x".join(map(str, shape))


def read_topology(name: str) -> Topology:
    """The topology of a name such as "v5p:4x4x8" or "h100:16x8".

    Raises:
      UserError: there is no such topology, or the package that compiles for it is not installed.
    """
    cluster = Cluster.parse(name)
    kind, shape = cluster.accelerator, cluster.shape
    if kind.arrangement == "torus":
        named = _LIBTPU_NAMES.get(kind.name, kind.name)
        devices = tuple(_tpu_devices(f"{named}:{shape_text(shape)}"))
        return Topology(name, kind, devices, len(devices))
    return Topology(name, kind, tuple(_gpu_devices(kind.name, shape)), shape[1])


def _tpu_devices(name: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"compiling for {name} needs the package libtpu, which is not installed; run pip install libtpu"
        )
    # Without these variables libtpu queries the metadata of a real TPU host, and logs errors.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    # Compiling opens no TPU, so it can ignore the lock of another process.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"topology {name!r} cannot be compiled for ({reason}); name a slice that exists, for example "
            "v5p:4x4x8 or v6e:4x4, or update libtpu: pip install -U libtpu"
        ) from error


def _gpu_devices(chip: str, shape: tuple[int, ...]) -> Sequence[Any]:
    missing = []
    for module in ("jax_plugins.xla_cuda13", "nvidia.cudnn"):
        # The package around a module may be missing too.
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                continue
        missing.append(module)
    if missing:
        version = jax.__version__
        raise UserError(
            f"compiling for {chip} needs jax's CUDA plugin and cuDNN (no GPU, driver or toolkit), of which "
            f"{' and '.join(missing)} is missing; install the extra aot-gpu, or run pip install "
            f"--no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} nvidia-cudnn-cu13"
        )
    if chip not in GPU_TARGETS:
        raise UserError(
            f"{chip} can be planned for, and not compiled for: what the compiler must know of a GPU is there "
            f"for {', '.join(GPU_TARGETS)} alone; name one of these"
        )
    hosts, per_host = shape
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=target_text(chip), topology=f"1x{hosts}x{per_host}"
    ).devices
    if jax.default_backend() != "gpu":
        compile_kernels_for(devices[0])
    return devices


_TPU_HOST_CHIPS = 4


class ClusterDevice(NamedTuple):
    """A device of a cluster that need not be present, as `mesh.pools.take_devices` reads it."""

    id: int
    process_index: int


class Ring(NamedTuple):
    """The links of the slowest of several groups of devices, each of which is a ring.

    Attributes:
      members: number of devices of a group.
      near, far: hops of a gather over fast links, and over slower ones.
      gbs: vendor's GB/s at which each member sends to the next one, if all groups send at the same time.
    """

    members: int
    near: int
    far: int
    gbs: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in a shape.

    Attributes:
      accelerator: kind of the devices.
      shape: hosts x devices for GPUs, sides of the torus in chips for TPUs.
      whole_hosts: whether a pool has whole hosts or a part of one, as in the system of the HybridFlow paper.
        Our runs cannot do this.
      first: position of its first device, in a `MixedCluster`.
    """

    accelerator: Accelerator
    shape: tuple[int, ...]
    whole_hosts: bool = False
    first: int = 0

    def __post_init__(self):
        kind, shape = self.accelerator, self.shape
        if kind.exists(shape):
            return
        hint = ""
        if kind.arrangement == "hosts":
            there = f"HOSTSx{kind.devices_per_host}, or as 1x4 or another half of one host, up to"
        else:
            enough = [s for s in kind.growing_shapes() if math.prod(s) >= math.prod(shape)]
            multiple = kind.side_multiple
            many = f", and sides that are multiples of {multiple}" if multiple else ""
            there = f"{', '.join(map(shape_text, kind.shapes))}{many}, up to"
            hint = f"; the next larger is {shape_text(enough[0])}" if enough else ""
        raise UserError(
            f"{self.name} is no topology that exists; {kind.name} comes as {there} {kind.largest:,} "
            f"devices{hint}"
        )

    @staticmethod
    def parse(text: str) -> Cluster:
        """Parses "KIND:AxBxC"; KIND is a name of the hardware table or the path of a JSON file.

        Raises:
          UserError: the text, the kind or the topology is wrong.
        """
        if len(texts_of_groups(text)) > 1:
            raise UserError(
                f"topology {text} names groups of hosts, and programs are compiled for one kind; name "
                "one group, or simulate a step on all with `jaxrl plan --config RECIPE --search`"
            )
        kind, _, sides = text.rpartition(":")
        parts = sides.split("x")
        if not kind or not all(p.isdecimal() and len(p) < 8 and int(p) for p in parts):
            raise UserError(
                f"topology {text!r} is not KIND:AxB or KIND:AxBxC; write for example h100:16x8 (hosts x "
                "GPUs) or v5p:4x4x8 (sides of the slice in chips)"
            )
        return Cluster(accelerator(kind), tuple(map(int, parts)))

    @property
    def name(self) -> str:
        """The name, in the format of `parse`."""
        return f"{self.accelerator.name}:{shape_text(self.shape)}"

    @property
    def num_devices(self) -> int:
        return self.accelerator.num_devices(self.shape)

    @property
    def host_devices(self) -> int:
        """The number of devices of a host; TPU hosts have four chips."""
        kind = self.accelerator
        if kind.arrangement == "hosts":
            return self.shape[1]
        return (
            min(_TPU_HOST_CHIPS, math.prod(self.shape)) * self.num_devices // math.prod(self.shape)
        )

    @property
    def num_hosts(self) -> int:
        return self.num_devices // self.host_devices

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """Itself alone, as of `MixedCluster`."""
        return (self,)

    @property
    def devices(self) -> tuple[ClusterDevice, ...]:
        """The devices of a run with a process on each host."""
        per_host = self.num_devices if self.whole_hosts else self.host_devices
        return tuple(ClusterDevice(n, n // per_host) for n in range(self.num_devices))

    @functools.cached_property
    def pool_sizes(self) -> tuple[int, ...]:
        """The possible sizes of a pool, ascending."""
        if not self.whole_hosts:
            return tuple(self.num_hosts * k for k in range(1, self.host_devices + 1))
        # Whole hosts, or a part of one by its smallest divisors.
        slabs = max(self.shape) if self.accelerator.arrangement == "torus" else self.shape[0]
        slab = self.num_devices // slabs
        parts, size = set(), slab
        while size > 1:
            size //= next(q for q in range(2, size + 1) if size % q == 0)
            parts.add(size)
        return tuple(sorted(parts | {slab * k for k in range(1, slabs + 1)}))

    def ring(self, groups: np.ndarray) -> Ring:
        """The links of groups of devices inside a pool.

        Args:
          groups: int [groups, members], positions of all devices of the pool; neighbours in a row send to
            each other.
        """
        kind, members = self.accelerator, groups.shape[1]
        here = self.host_devices if self.whole_hosts else -(-groups.size // self.num_hosts)
        # Devices are numbered host by host.
        hosts = groups // here
        crossings = int((hosts[:, 1:] != hosts[:, :-1]).sum(axis=1).max(initial=0))
        part = here / self.host_devices
        if kind.arrangement == "torus":
            # A ring goes both ways. All devices of a slice are neighbours. A pool with a part of each host
            # has that part of every link: the chips of other pools lie between its own.
            hops, far = -(-members // 2), -(-crossings // 2) if part < 1 else 0
            return Ring(members, hops - far, far, kind.link_gbs * (part if far else 1))
        if not crossings:
            return Ring(members, members - 1, 0, kind.link_gbs)
        # A pool with a part of each host has that part of the host's links to others, and the groups that
        # leave the host share it.
        leaving = np.bincount(hosts[hosts != np.roll(hosts, -1, axis=1)]).max()
        gbs = min(kind.link_gbs, kind.host_gbs * part / int(leaving))
        return Ring(members, members - 1 - crossings, crossings, gbs)


@dataclasses.dataclass(frozen=True)
class MixedCluster:
    """Groups of hosts, which may differ in kind. Devices are numbered group by group.

    A pool lies in one group, because an SPMD program has devices of one kind.
    """

    groups: tuple[Cluster, ...]

    @staticmethod
    def of(*groups: Cluster) -> MixedCluster:
        """Groups side by side.

        Raises:
          UserError: their platforms differ.
        """
        ends = itertools.accumulate(group.num_devices for group in groups)
        placed = [
            dataclasses.replace(group, first=end - group.num_devices)
            for group, end in zip(groups, ends, strict=True)
        ]
        found = MixedCluster(tuple(placed))
        if len({group.accelerator.platform for group in groups}) > 1:
            which = ", ".join(f"{g.accelerator.name}: {g.accelerator.platform}" for g in groups)
            raise UserError(
                f"topology {found.name} has devices of several platforms ({which}), and JAX gives a run "
                "those of one; name groups of one platform"
            )
        return found

    @property
    def name(self) -> str:
        return "+".join(group.name for group in self.groups)

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)


def texts_of_groups(text: str) -> list[str]:
    """Splits "A+B" into the topologies of its groups; the path of a kind may have a plus too."""
    return re.sub(r"(:[0-9x]+)\+(?=.)", r"\1\n", text).split("\n")


def read_cluster(text: str) -> Cluster | MixedCluster:
    """Parses a topology, or several joined by "+".

    Raises:
      UserError: as `Cluster.parse`; or the platforms of the groups differ.
    """
    groups = tuple(map(Cluster.parse, texts_of_groups(text)))
    return groups[0] if len(groups) == 1 else MixedCluster.of(*groups)


def group_of(pool: Pool, cluster: Cluster | MixedCluster) -> Cluster:
    """The group of a cluster that has the devices of a pool.

    Raises:
      UserError: the devices of the pool are not named, or not of one group.
    """
    if isinstance(cluster, Cluster):
        return cluster
    first, last = pool.span or (-1, -1)
    ends = [(group, group.first + group.num_devices) for group in cluster.groups]
    found = next((group for group, end in ends if group.first <= first and last < end), None)
    if found is None:
        groups = ", ".join(f"{group.first}-{end - 1} of {group.name}" for group, end in ends)
        raise UserError(
            f"pool {pool.name} names no devices of one group of {cluster.name} ({groups}); name `devices` of "
            "one group for each pool of placement, or add --search"
        )
    return found
