"""Checks the memory of a run, and resolves the settings that its config leaves open, before the run begins.

It takes a config and returns a config:

    mesh.layout = "auto"      the fastest mapping that the search finds for these devices
    rollout.slots = "auto"    the number of slots that fits these devices, by their compiler

Commands call this first. A run itself accepts no open setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.planner.memory_check import check_memory_here
from jaxrl.planner.search.mapping_choice import with_searched_layout
from jaxrl.planner.slot_choice import with_chosen_slots
from jaxrl.trainer.algorithm import algorithm_of, pools_of
from jaxrl.trainer.findings import RunKind, find_everything
from jaxrl.trainer.program import claimed, is_settled


def resolved(config: Config, devices: Sequence[Any], *, kind: RunKind) -> Config:
    """Returns the config with every open setting resolved for the given devices. Collective.

    A config without open settings is returned as it is.

    Args:
      config: config of the run.
      devices: devices of the run, in the order of `jax.devices()`.
      kind: kind of run; its missing requirements are reported before anything is compiled.

    Raises:
      UserError: one group of arrays exceeds the memory of all devices, the run lacks something, its folder is
        in use, the search does not cover the recipe, or nothing fits.
    """
    check_memory_here(config, devices)
    if is_settled(config):
        return config
    with (
        claimed(config) as config,
        StopSignal(within_s=config.run.stop_within_s) as stop,
        stop.ends_at_once(),
    ):
        config = with_searched_layout(config, devices)
        pools = pools_of(config, algorithm_of(config).roles)
        find_everything(config, kind, pools, devices)
        return with_chosen_slots(config, devices)
