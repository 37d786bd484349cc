"""Measures the peak memory of a finished run, and shows the plan's figure beside it."""

from __future__ import annotations

import jax

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import peak_memory
from jaxrl.planner.make_plan import trace_plan
from jaxrl.planner.plan import Plan

_GB = 1e9
_PHASES = ("sampling", "learning")


def peak_memory_line(config: Config) -> str:
    """Describes the peak memory of this process, or on accelerators of its fullest device.

    Args:
      config: config of the run, without open settings.
    """
    measured, on_device = peak_memory()
    where = (
        "on the fullest device" if on_device else "in this process, programs and libraries included"
    )
    told = f"memory: at most {measured / _GB:.2f} GB {where}"
    try:
        planned = planned_bytes(trace_plan(config), per_device=on_device)
    except UserError as error:  # a run that has succeeded must not fail here
        return f"{told} (no plan to compare with: {error})"
    return f"{told}; --dry_run counts {planned / _GB:.2f} GB of arrays"


def planned_bytes(plan: Plan, *, per_device: bool) -> int:
    """Bytes that a traced plan counts, in its larger phase.

    Args:
      plan: the plan.
      per_device: of the fullest device; otherwise of all devices of one process.
    """
    pools = [(pool, max(pool.bytes_in(phase) for phase in _PHASES)) for pool in plan.pools]
    if per_device:
        return max(nbytes for _, nbytes in pools)
    return sum(pool.num_devices * nbytes for pool, nbytes in pools) // jax.process_count()
