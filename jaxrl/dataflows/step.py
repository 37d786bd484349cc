"""A step as dataflows see it: the roles and what is between them, each a member with a type.

    @dataflow(roles=("actor", "reference", "reward"))
    def grpo(step: Step, prompts: PromptSource) -> Metrics:
        batch = step.pack(step.sample(prompts))
        batch = step.reference.logprobs(step.actor.logprobs(batch))
        batch = step.advantages(batch)
        return batch.metrics | step.actor.update(batch)

A dataflow is a function of one step, from prompts to metrics, as in HybridFlow's Figure 6. It says which
roles it has; who builds the step gives it these and no others. The loop around it (data, resuming,
evaluation, checkpoints, logs) is the same for all and lies in the trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from jaxrl.dataflows.costs import CostPhase, Multiplier
from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.learning import ActorPhase, CriticPhase
from jaxrl.dataflows.preparation import Advantages, Packer, ReferencePhase
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.types import Prompts

Part = TypeVar("Part")


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's roles and what connects them. Roles that the dataflow has not declared are not there.

    Attributes:
      sample: a step's groups with their rewards, by one of `dataflows.samplers`.
      greedy: the likeliest response to each prompt, with its reward.
      pack: groups to `Experience`.
      actor: log-probabilities and updates of the policy.
      advantages: from rewards to advantages.
      critic_phase, reference_phase, cost_phase, cost_critic_phase, multiplier_phase: what `critic`,
        `reference`, `cost`, `cost_critic` and `multiplier` return.
    """

    sample: Callable[[PromptSource], Sampled]
    greedy: Callable[[Prompts], Sampled]
    pack: Packer
    actor: ActorPhase
    advantages: Advantages
    critic_phase: CriticPhase | None = None
    reference_phase: ReferencePhase | None = None
    cost_phase: CostPhase | None = None
    cost_critic_phase: CriticPhase | None = None
    multiplier_phase: Multiplier | None = None

    @property
    def critic(self) -> CriticPhase:
        """Values and updates of the critic."""
        return _declared(self.critic_phase, "critic")

    @property
    def reference(self) -> ReferencePhase:
        """Log-probabilities of the reference policy."""
        return _declared(self.reference_phase, "reference")

    @property
    def cost(self) -> CostPhase:
        """Costs of responses."""
        return _declared(self.cost_phase, "cost")

    @property
    def cost_critic(self) -> CriticPhase:
        """Values and updates of the critic of costs."""
        return _declared(self.cost_critic_phase, "cost_critic")

    @property
    def multiplier(self) -> Multiplier:
        """The Lagrange multiplier of costs."""
        return _declared(self.multiplier_phase, "cost")


def _declared(part: Part | None, role: str) -> Part:
    assert part is not None, (
        f"the dataflow uses {role}, which its @dataflow(roles=...) does not name"
    )
    return part
