"""What a prediction takes for granted: shares of the vendors' rates that are reached, and bytes of a state.

docs/planner.md says where each number is from; what no source gives is marked "a guess" beside its default.
What lies in memory during an update (arrays beside the logits here, copies in `simulate_passes`) was read off
updates compiled for TPUs and GPUs; nothing else was fitted to a result.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import at_least, between, check_fields, positive, token_count

Share = Annotated[float, between(0, 1, has_low=False)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Shares are of what `mesh.hardware` has; bytes are of one value, on whichever devices it lies.

    Attributes:
      flops_rate: share of the peak that products reach.
      weights_rate: share of the memory bandwidth at which weights are read.
      cache_rate: share of it at which attention reads keys and values.
      link_rate: share of a link that a collective reaches (450 GB/s of an H100: 360).
      overlap: share of a pass's compute behind which gathers of weights and sums of gradients hide. A guess.
      memory_share: share of a device's memory that a program may use.
      scratch_gb: of a device, for temporaries that no term counts.
      collective_latency_s: of one small collective over a tensor-parallel group.
      torus_step_s, hosts_step_s: of one decoding step beside its work, on TPUs and on GPUs.
      dispatch_s: between two dispatches of the engine.
      slot_host_s: that the host adds to a dispatch for each slot of a replica. Nothing for our engine, whose
        host works on arrays of all slots; a Python loop over sequences takes tens of microseconds each.
      dtype: in which products are computed.
      compute_bytes: of a weight or an activation in that type.
      cache_bytes: of a key or value in the cache.
      master_bytes, moments_bytes: of a trained weight and of its optimiser state, kept all the time.
      gradient_bytes: of gradients during an update: one sum in float32.
      reduced_bytes: of a gradient when replicas sum it.
      frozen_bytes: of a weight of a role that does not learn.
      remat: "full" computes each layer again in the backward pass and keeps its input alone.
      reduce_each_microbatch: replicas sum gradients after each microbatch, and not once an update.
      logits_tokens: of which logits exist at a time.
      logits_arrays: of float32, as large as these logits, that an update holds: logits, their exponentials,
        the gradient, and that in 16 bits.
      embedding_arrays: in the products' type, as large as the embedding without FSDP, beside the logits.
    """

    flops_rate: Share = 0.6
    weights_rate: Share = 0.8
    cache_rate: Share = 0.7
    link_rate: Share = 0.8
    overlap: Annotated[float, between(0, 1)] = 0.5
    memory_share: Share = 0.9
    scratch_gb: Annotated[float, at_least(0)] = 1.5
    collective_latency_s: Annotated[float, at_least(0)] = 8e-6
    torus_step_s: Annotated[float, at_least(0)] = 0.3e-3
    hosts_step_s: Annotated[float, at_least(0)] = 2e-3
    dispatch_s: Annotated[float, at_least(0)] = 5e-3
    slot_host_s: Annotated[float, at_least(0)] = 0.0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compute_bytes: Annotated[float, positive()] = 2.0
    cache_bytes: Annotated[float, positive()] = 2.0
    master_bytes: Annotated[float, positive()] = 4.0
    moments_bytes: Annotated[float, at_least(0)] = 8.0
    gradient_bytes: Annotated[float, at_least(0)] = 4.0
    reduced_bytes: Annotated[float, positive()] = 4.0
    frozen_bytes: Annotated[float, positive()] = 4.0
    remat: Literal["full", "none"] = "full"
    reduce_each_microbatch: bool = True
    logits_tokens: Annotated[int, token_count(1)] = 1024
    logits_arrays: Annotated[float, at_least(1)] = 3.5
    embedding_arrays: Annotated[float, at_least(1)] = 2.5

    def __post_init__(self):
        check_fields(self)

    def for_measured_rates(self) -> Assumptions:
        """These, for an entry of the hardware table that was measured: its rates are reached already."""
        return dataclasses.replace(
            self, flops_rate=1.0, weights_rate=1.0, cache_rate=1.0, link_rate=1.0
        )
