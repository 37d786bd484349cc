"""The tasks of each role of a dataflow in a step, in HybridFlow's three stages.

    generation     the actor samples                                    (ReMax: and answers greedily)
    preparation    log-probabilities, values, scores                    one forward pass each
    training       the actor and the critics are trained

A reward function without a model uses no device: leave its role out of `models`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from jaxrl.dataflows.dataflow import Dataflow
from jaxrl.dataflows.lookup import DATAFLOWS
from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl.trainer.role_table import ROLES

STAGES = ("generation", "preparation", "training")


@dataclasses.dataclass(frozen=True)
class RoleTasks:
    """The tasks of a role.

    Attributes:
      name: name of the role.
      trains: whether it is trained, and so has an optimiser state.
      generates: whether it samples.
      forwards: number of forward passes over the sequences in preparation; may be a fraction.
      greedy: whether its work includes greedy answers.
      optional: whether the dataflow can run without a model for it.
    """

    name: str
    trains: bool = False
    generates: bool = False
    forwards: float = 1.0
    greedy: bool = False
    optional: bool = False


def role_tasks(
    flow: Dataflow, roles: Sequence[str] = (), *, own_forwards: float = 1.0
) -> tuple[RoleTasks, ...]:
    """The tasks of a dataflow's roles: critics learn, and whatever else is frozen reads once.

    Args:
      flow: dataflow.
      roles: roles of a run; empty takes those that the dataflow declares.
      own_forwards: share of the sequences whose old log-probabilities the actor computes in preparation; its
        update computes the others.
    """

    def of(role: str) -> RoleTasks:
        if role == "actor":
            greedy = flow.greedy_baseline
            return RoleTasks(
                role, trains=True, generates=True, forwards=own_forwards, greedy=greedy
            )
        row = ROLES[role]
        # A reward model scores the greedy answers too.
        greedy = flow.greedy_baseline and role == "reward"
        optional = row.optional or role in _UNKNOWN_COSTS
        return RoleTasks(role, trains=row.trains, greedy=greedy, optional=optional)

    return tuple(of(role) for role in roles or flow.roles)


# A search may leave them out, though a run does not.
_UNKNOWN_COSTS = ("cost", "cost_critic")

TASKS: Mapping[str, tuple[RoleTasks, ...]] = {
    name: role_tasks(flow) for name, flow in DATAFLOWS.items()
}


def tasks_of(
    dataflow: str,
    models: Mapping[str, ModelConfig],
    tasks: Sequence[RoleTasks] | None = None,
) -> tuple[RoleTasks, ...]:
    """The roles of a dataflow that have a model.

    Args:
      dataflow: name of the dataflow.
      models: model of each role.
      tasks: tasks of the roles, to replace those of `TASKS`; exactly one role must generate.

    Raises:
      UserError: the dataflow or a role is unknown, or a role that needs a model has none.
    """
    if tasks is None and dataflow not in TASKS:
        near = difflib.get_close_matches(dataflow, TASKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"dataflow {dataflow!r} is not one of {', '.join(TASKS)}{hint}")
    roles = tuple(TASKS[dataflow] if tasks is None else tasks)
    generating = sum(role.generates for role in roles)
    if generating != 1:
        raise UserError(f"{generating} roles of {dataflow} generate; exactly one does, the actor")
    names = [role.name for role in roles]
    unknown = [name for name in models if name not in names]
    if unknown:
        raise UserError(
            f"role {unknown[0]!r} is not one of {dataflow}'s, {', '.join(names)}; leave its model out"
        )
    missing = [r.name for r in roles if r.name not in models and not r.optional]
    if missing:
        raise UserError(
            f"{dataflow} has no model for {', '.join(missing)}; name one, for example "
            f'{{"{missing[0]}": model_shapes("qwen2.5-7b")}}'
        )
    return tuple(role for role in roles if role.name in models)
