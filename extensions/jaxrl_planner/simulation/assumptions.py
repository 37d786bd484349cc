"""Assumptions of predictions: fractions of the vendors' rates that are reached, and bytes per value.

docs/planning.md gives the source of each number; numbers without a source are marked "a guess" beside their
default. The memory in use during an update (logits arrays here, copies in `simulate_passes`) was read from
updates compiled for TPUs and GPUs. No other number was fitted to a result.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxrl_planner.hardware.accelerators import Accelerator
from jaxrl_planner.simulation.kernel_times import TABLES, UNCOUNTED, KernelTable, TokenCounts

Remat = Literal["none", "full", "offload_inputs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Fractions refer to the rates of `mesh.hardware`; bytes are per value. `on` makes those of a device.

    Attributes:
      flops_rate: fraction of the peak that matmuls reach.
      weights_rate: fraction of the memory bandwidth at which weights are read.
      cache_rate: fraction of the memory bandwidth at which attention reads keys and values.
      link_rate: fraction of a link's bandwidth that a collective reaches (450 GB/s of an H100: 360).
      overlap: fraction of a pass's compute that hides gathers of weights and sums of gradients.
      memory_share: fraction of a device's memory that a program may use.
      scratch_gb: GB per device for temporaries that no other term counts.
      latency_scale: factor of the latencies of collectives (`collective_times.py`); 0 leaves them out.
      step_s: further seconds of a decoding step, where kernels are not counted.
      kernels: what a token and an update cost beside multiplying and reading weights and cache.
      token: what was counted of that in the compiled program of a plan; None takes the numbers of `kernels`.
      call_s: fixed seconds of a program call until its first result is on the host: a forward pass, all
        updates of a step, a prefill batch, a dispatch of the engine.
      host_s: host seconds per dispatch for each slot of all replicas.
      dtype: data type of matmuls.
      compute_bytes: bytes of a weight or an activation in that type.
      sampled_bytes: bytes of a weight inside layers in generation; 0 means `compute_bytes`.
      cache_bytes: bytes of a key or value in the cache.
      fixed_slots: whether the engine always decodes all slots, idle ones included. With a kernel that reads
        each slot's own length it has one program; without, it has others for fewer slots.
      master_bytes, moments_bytes: resident bytes of a trained weight and of its optimiser state.
      gradient_bytes: bytes of a gradient during an update, which sums in float32.
      reduced_bytes: bytes of a gradient in the sum over replicas.
      frozen_bytes: bytes of a weight of a role that is not trained.
      attention: implementation of attention over packed rows. Plain XLA skips tiles without a common
        segment; cuDNN and splash compute them and mask them. cuDNN computes tiles before a window too, unless
        all layers have one (docs/decoding.md).
      remat: rematerialisation. "full" keeps only the input of each layer and recomputes the rest in the
        backward pass; "offload_inputs" keeps these inputs in host memory.
      offload_gbs: GB/s between a device and host memory, each way, beside the other devices of the host.
      reduce_each_microbatch: whether replicas sum gradients after each microbatch instead of once per update.
      logits_tokens: number of tokens whose logits exist at the same time.
      logits_arrays: number of float32 arrays of the size of these logits that an update holds: logits, their
        exponentials, the gradient, and the gradient in 16 bits.
      embedding_arrays: number of further arrays of the size of the unsharded embedding, in the matmul type.
    """

    flops_rate: float = 0.6
    weights_rate: float = 0.8
    cache_rate: float = 0.7
    link_rate: float = 0.8
    # A guess.
    overlap: float = 0.5
    memory_share: float = 0.9
    scratch_gb: float = 1.5
    latency_scale: float = 1.0
    # A guess.
    step_s: float = 2e-3
    kernels: KernelTable = UNCOUNTED
    token: TokenCounts | None = None
    # Measured with 800 arrays on a CPU; a guess for accelerators.
    call_s: float = 1.25e-3
    # Our engine has one host for all replicas, which works on arrays of all slots: 0.8 ms at 4,096 slots.
    host_s: float = 0.8e-3 / 4096
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compute_bytes: float = 2.0
    sampled_bytes: float = 0.0
    cache_bytes: float = 2.0
    fixed_slots: bool = False
    master_bytes: float = 4.0
    moments_bytes: float = 8.0
    gradient_bytes: float = 4.0
    reduced_bytes: float = 4.0
    frozen_bytes: float = 4.0
    attention: Literal["xla", "cudnn", "splash"] = "xla"
    remat: Remat = "full"
    # A guess: PCIe 5 has 64.
    offload_gbs: float = 25.0
    reduce_each_microbatch: bool = True
    logits_tokens: int = 1024
    logits_arrays: float = 3.5
    embedding_arrays: float = 2.5

    @staticmethod
    def on(kind: Accelerator, **others: Any) -> Assumptions:
        """The assumptions for a kind of device: fractions of a vendor's rates, and all of measured ones.

        Args:
          kind: kind of the devices.
          others: values of other fields.
        """
        fractions = ("flops_rate", "weights_rate", "cache_rate", "link_rate")
        found: dict[str, Any] = dict.fromkeys(fractions if kind.measured else (), 1.0)
        if kind.platform in TABLES:
            found |= {"kernels": TABLES[kind.platform], "step_s": 0.0}
        return Assumptions(**found, **others)
