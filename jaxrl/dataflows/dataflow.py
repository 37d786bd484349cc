"""What makes a function a dataflow: the roles that it declares, and a name to find it by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step
from jaxrl.errors import UserError

# Every role that a dataflow may declare.
ROLES = ("actor", "critic", "reference", "reward", "cost", "cost_critic")

StepFunction = Callable[[Step, PromptSource], Metrics]


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """A function of one step and what it needs.

    Attributes:
      function: from prompts to metrics.
      roles: it has. A critic, a cost model and a critic of costs must then be there; a reference and a reward
        model only where the run has a use for them.
      dynamic_sampling: its steps are full when enough groups are mixed.
      greedy_baseline: it gives the estimator of advantages the reward of a greedy response.
    """

    function: StepFunction
    roles: tuple[str, ...]
    dynamic_sampling: bool = False
    greedy_baseline: bool = False

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    @property
    def title(self) -> str:
        """What people call it."""
        return self.name.upper().replace("_", " ")

    def __call__(self, step: Step, prompts: PromptSource) -> Metrics:
        """One step."""
        return self.function(step, prompts)


def dataflow(
    *, roles: tuple[str, ...], dynamic_sampling: bool = False, greedy_baseline: bool = False
) -> Callable[[StepFunction], Dataflow]:
    """Declares a function of one step as a dataflow; arguments as of `Dataflow`.

    Raises:
      UserError: there is no such role, or no actor.
    """
    unknown = [role for role in roles if role not in ROLES]
    if unknown or "actor" not in roles:
        raise UserError(
            f"a dataflow with the roles {', '.join(roles) or 'none'}; it has an actor, and perhaps others of "
            f"{', '.join(ROLES)}"
        )

    def declared(function: StepFunction) -> Dataflow:
        return Dataflow(function, roles, dynamic_sampling, greedy_baseline)

    return declared
