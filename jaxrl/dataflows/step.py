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
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxrl.dataflows.costs import CostPhase, Multiplier
from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.learning import ActorPhase, CriticPhase
from jaxrl.dataflows.preparation import Advantages, Packer, ReferencePhase
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.types import Prompts

Phase = TypeVar("Phase")


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's roles and what connects them. Roles that the dataflow has not declared are not there.

    Attributes:
      sample: a step's groups with their rewards, by one of `dataflows.samplers`.
      greedy: the likeliest response to each prompt, with its reward.
      pack: groups to `Experience`.
      actor: log-probabilities and updates of the policy.
      advantages: from rewards to advantages.
      multiplier: the Lagrange multiplier of costs.
      phases: of the other roles by name, for `phase`.
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
        """Values and updates of the critic."""
        return self.phase("critic", CriticPhase)

    @property
    def reference(self) -> ReferencePhase:
        """Log-probabilities of the reference policy."""
        return self.phase("reference", ReferencePhase)

    @property
    def cost(self) -> CostPhase:
        """Costs of responses."""
        return self.phase("cost", CostPhase)

    @property
    def cost_critic(self) -> CriticPhase:
        """Values and updates of the critic of costs."""
        return self.phase("cost_critic", CriticPhase)

    def phase(self, role: str, kind: type[Phase]) -> Phase:
        """What a role does in a step, by the role's name and the type of its phase."""
        del kind  # tells a type checker what it is
        assert role in self.phases, (
            f"the dataflow uses {role}, which its @dataflow(roles=...) does not name"
        )
        return self.phases[role]
