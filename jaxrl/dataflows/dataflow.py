"""What makes a function a dataflow: the roles that it declares, and a name to find it by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step
from jaxrl.errors import UserError

StepFunction = Callable[[Step, PromptSource], Metrics]


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """A function of one step and what it needs.

    Attributes:
      function: from prompts to metrics.
      roles: it has, the actor and names of `trainer.role_table.ROLES`. A reference and a reward model are
        there only where the run has a use for them, the others always.
      dynamic_sampling: its steps are full when enough groups are mixed.
      greedy_baseline: it gives the estimator of advantages the reward of a greedy response.
      gives: further arrays that it gives the estimator, by the names of the estimator's arguments.
    """

    function: StepFunction
    roles: tuple[str, ...]
    dynamic_sampling: bool = False
    greedy_baseline: bool = False
    gives: tuple[str, ...] = ()

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
    *,
    roles: tuple[str, ...],
    dynamic_sampling: bool = False,
    greedy_baseline: bool = False,
    gives: tuple[str, ...] = (),
) -> Callable[[StepFunction], Dataflow]:
    """Declares a function of one step as a dataflow; arguments as of `Dataflow`.

    Raises:
      UserError: there is no actor.
    """
    if "actor" not in roles:
        raise UserError(
            f"a dataflow with the roles {', '.join(roles) or 'none'} has nothing that samples; add 'actor'"
        )

    def declared(function: StepFunction) -> Dataflow:
        return Dataflow(function, roles, dynamic_sampling, greedy_baseline, gives)

    return declared
