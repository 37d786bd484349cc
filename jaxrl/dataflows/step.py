"""`Step`, the argument of a dataflow: a typed member for each role and for the functions between them.

    @dataflow(roles=("actor", "reference", "reward"))
    def grpo(step: Step, prompts: PromptSource) -> Metrics:
        batch = step.pack(step.sample(prompts))
        batch = step.reference.logprobs(step.actor.logprobs(batch))
        batch = step.advantages(batch)
        return batch.metrics | step.actor.update(batch)

A dataflow is a function that runs one step, from prompts to metrics, as in HybridFlow's Figure 6. It declares
its roles, and the step has only these. The trainer's loop around it (data, resuming, evaluation, checkpoints,
logs) is the same for all dataflows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.learning import ActorPhase, CriticPhase
from jaxrl.dataflows.preparation import Advantages, Packer, ReferencePhase
from jaxrl.dataflows.rewarding import CostPhase, Multiplier
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.types import Prompts

Phase = TypeVar("Phase")


@dataclasses.dataclass(frozen=True)
class Step:
    """The roles of a step and the functions between them. It has no roles that the dataflow does not declare.

    Attributes:
      sample: function that samples the groups of a step with their rewards (`dataflows.samplers`).
      greedy: function that returns the greedy response to each prompt, with its reward.
      pack: function that packs groups into an `Experience`.
      actor: log-probabilities and updates of the policy.
      advantages: computes advantages from rewards.
      multiplier: Lagrange multiplier of costs.
      phases: phase of each other role, by the role's name.
    """

    sample: Callable[[PromptSource], Sampled]
    greedy: Callable[[Prompts], Sampled]
    pack: Packer
    actor: ActorPhase
    advantages: Advantages
    multiplier: Multiplier
    phases: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def critic(self) -> CriticPhase:
        return self.phase("critic", CriticPhase)

    @property
    def reference(self) -> ReferencePhase:
        return self.phase("reference", ReferencePhase)

    @property
    def cost(self) -> CostPhase:
        return self.phase("cost", CostPhase)

    @property
    def cost_critic(self) -> CriticPhase:
        return self.phase("cost_critic", CriticPhase)

    def phase(self, role: str, kind: type[Phase]) -> Phase:
        """The phase of a role, by the role's name and the phase's type."""
        assert role in self.phases, (
            f"the dataflow uses {role}, which its @dataflow(roles=...) does not name"
        )
        return self.phases[role]
