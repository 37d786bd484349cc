"""XLA's GpuTargetConfig of GPUs, from public sources: enough to compile for a GPU that is not present.

Sources: NVIDIA's data sheets and white papers of A100, H100, H200 and B200 (multiprocessors, clocks, caches,
bandwidth), and the table of features by compute capability in the CUDA programming guide (shared memory,
registers, threads). Not covered: autotuning, which needs a device; XLA uses its defaults.
"""

from __future__ import annotations

import dataclasses

# The oldest cuDNN version that current JAX plugins accept.
_CUDNN = (9, 12)


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """One kind of GPU.

    Attributes:
      description: the driver's name of it.
      capability: CUDA compute capability, major and minor.
      cores: number of streaming multiprocessors.
      fpus_per_core: number of float32 units of a multiprocessor.
      clock_ghz: maximum clock rate.
      memory_bytes: bytes of memory that the driver reports.
      bandwidth: memory bandwidth in bytes/s.
      l2_bytes: bytes of the L2 cache.
      shared_bytes: bytes of shared memory of a multiprocessor; a block may use 1 KiB less.
    """

    description: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    shared_bytes: int

    def text(self) -> str:
        """The GpuTargetConfig in protobuf text format."""
        major, minor = self.capability
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
          shared_memory_per_block_optin: {self.shared_bytes - 1024}
          core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_bytes}
          clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
        platform_name: "CUDA"
        dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
        device_description_str: "{self.description}\""""


_MIB = 2**20
_AMPERE = ((8, 0), 108, 64, 1.41)
_HOPPER = ((9, 0), 132, 128, 1.98)

GPU_TARGETS = {
    "a100-40": GpuTarget(
        *("NVIDIA A100-SXM4-40GB", *_AMPERE),
        *(40_960 * _MIB, 1_555_000_000_000, 40 * _MIB, 167_936),
    ),
    "a100": GpuTarget(
        *("NVIDIA A100-SXM4-80GB", *_AMPERE),
        *(81_920 * _MIB, 2_039_000_000_000, 40 * _MIB, 167_936),
    ),
    "h100": GpuTarget(
        *("NVIDIA H100 80GB HBM3", *_HOPPER),
        *(84_929_347_584, 3_352_320_000_000, 50 * _MIB, 233_472),
    ),
    "h200": GpuTarget(
        *("NVIDIA H200", *_HOPPER),
        *(143_771 * _MIB, 4_800_000_000_000, 50 * _MIB, 233_472),
    ),
    "b200": GpuTarget(
        *("NVIDIA B200", (10, 0), 148, 128, 1.965),
        *(183_359 * _MIB, 8_000_000_000_000, 126 * _MIB, 233_472),
    ),
}
