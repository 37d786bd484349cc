"""Finds dataflows by their name, or a user's own by its path."""

from __future__ import annotations

from jaxrl.algos.registry import lookup
from jaxrl.dataflows.dapo import dapo
from jaxrl.dataflows.dataflow import Dataflow
from jaxrl.dataflows.distill import distill
from jaxrl.dataflows.grpo import grpo
from jaxrl.dataflows.ppo import ppo
from jaxrl.dataflows.remax import remax
from jaxrl.dataflows.safe_rlhf import safe_rlhf
from jaxrl.dataflows.trpo import trpo
from jaxrl.dataflows.vpg import vpg
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

DATAFLOWS: dict[str, Dataflow] = {
    flow.name: flow for flow in (dapo, distill, grpo, ppo, remax, safe_rlhf, trpo, vpg)
}


def find_dataflow(name: str) -> Dataflow:
    """The dataflow with a name, or at "package.module:function" or "path/to/file.py:function".

    Raises:
      UserError: there is no such dataflow.
    """
    if ":" not in name:
        return lookup(DATAFLOWS, name, "dataflow")
    found = load_function(name, "dataflow", takes=("step", "prompts"))
    if not isinstance(found, Dataflow):
        raise UserError(
            f"dataflow {name!r} does not say which roles it has; put @dataflow(roles=(...)) above it"
        )
    return found
