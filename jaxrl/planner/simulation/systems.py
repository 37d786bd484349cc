"""Fixed costs of this system and of others, so that predictions can be held against published measurements.

A system changes fixed costs only: no rate of a device, no bytes and no rule of the search. docs/planner.md
gives the source of each number, and says which are guesses.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

from jaxrl.errors import UserError
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.workload import Workload


@dataclasses.dataclass(frozen=True)
class System:
    """A training system, as far as the simulation knows it.

    Attributes:
      name: name of the system, for `--as`.
      title: its software.
      costs: fields of `Assumptions` that differ from ours.
      tokens_per_dispatch: decoded tokens of a slot between two visits of the host; 0 takes the recipe's.
      on_gpus_only: whether the system and its costs exist for GPUs only.
    """

    name: str
    title: str
    costs: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )
    tokens_per_dispatch: int = 0
    on_gpus_only: bool = False

    def assumptions(self, ours: Assumptions) -> Assumptions:
        """Our assumptions with the fixed costs of this system."""
        return dataclasses.replace(ours, **self.costs)

    def work(self, ours: Workload) -> Workload:
        """Our workload, dispatched as this system does."""
        tokens = self.tokens_per_dispatch or ours.tokens_per_dispatch
        return dataclasses.replace(ours, tokens_per_dispatch=tokens)

    def check_runs_on(self, cluster: Cluster) -> None:
        """Raises UserError if this system does not exist for these devices."""
        if self.on_gpus_only and cluster.accelerator.arrangement == "torus":
            raise UserError(
                f"{self.name} runs on GPUs, and {cluster.name} is TPUs; name a topology of GPUs, or leave "
                "--as out"
            )


OURS = System("jaxrl", "jaxrl")
SYSTEMS = {
    system.name: system
    for system in (
        OURS,
        System(
            "hybridflow-2024",
            "HybridFlow as in its paper: Ray, Megatron-core 0.6.0, vLLM 0.3.1",
            types.MappingProxyType(
                {
                    # The host schedules each sequence after each token: 29% of vLLM's time, beside 38% on
                    # the GPU (blog post of v0.6.0: Llama 3 8B on an H100). 40 us for each of 256 sequences is
                    # 29/38 of 13 ms, our estimate of a decoding step there.
                    "slot_host_s": 40e-6,
                    # A guess: Python starts each kernel of a step, and messages go between Ray's workers.
                    "hosts_step_s": 5e-3,
                    # A guess: Ray's remote calls with batches as objects, and kernels started from Python.
                    "pass_s": 0.5,
                    # Part of the three above.
                    "call_s": 0.0,
                    "host_s": 0.0,
                }
            ),
            tokens_per_dispatch=1,
            on_gpus_only=True,
        ),
    )
}
