"""The decorator `@dataflow`, which declares the roles of a step function."""

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
    """A function that runs one step, and its needs.

    Attributes:
      function: function of (step, prompts) that returns metrics.
      roles: its roles: the actor and names of `trainer.role_table.ROLES`. A run has the reference and the
        reward model only if its settings need them, and the other roles always.
      dynamic_sampling: whether a step samples until enough groups are mixed.
      greedy_baseline: whether it passes the reward of a greedy response to the advantage estimator.
      trust_region: whether its actor takes one step of TRPO per batch instead of updates of an optimiser
        (`roles.trust_region`).
      gives: other arrays that it passes to the estimator, by the names of the estimator's arguments.
    """

    function: StepFunction
    roles: tuple[str, ...]
    dynamic_sampling: bool = False
    greedy_baseline: bool = False
    gives: tuple[str, ...] = ()
    trust_region: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def title(self) -> str:
        return self.name.upper().replace("_", " ")

    def __call__(self, step: Step, prompts: PromptSource) -> Metrics:
        return self.function(step, prompts)


def dataflow(
    *,
    roles: tuple[str, ...],
    dynamic_sampling: bool = False,
    greedy_baseline: bool = False,
    gives: tuple[str, ...] = (),
    trust_region: bool = False,
) -> Callable[[StepFunction], Dataflow]:
    """Declares a step function as a dataflow. The arguments are attributes of `Dataflow`.

    Raises:
      UserError: there is no actor.
    """
    if "actor" not in roles:
        raise UserError(
            f"a dataflow with the roles {', '.join(roles) or 'none'} has nothing that samples; add 'actor'"
        )

    def declared(function: StepFunction) -> Dataflow:
        return Dataflow(function, roles, dynamic_sampling, greedy_baseline, gives, trust_region)

    return declared
