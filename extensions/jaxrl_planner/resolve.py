"""Resolves the settings that a config leaves open, before the run begins: takes and returns a config.

    mesh.layout = "auto"              the fastest mapping that the search finds for these devices
    rollout.slots = "auto"            the number of slots that fits these devices, by their compiler
    train.remat = "auto"              the least recomputation that fits these devices, by shapes

`jaxrl.trainer.open_settings` calls this for a config that has one. A run itself accepts no open setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.trainer.findings import RunKind, find_everything
from jaxrl.trainer.program import claimed
from jaxrl.trainer.resolved import resolve
from jaxrl_planner.remat_choice import with_chosen_remat
from jaxrl_planner.search.mapping_choice import with_searched_layout
from jaxrl_planner.slot_choice import with_chosen_slots


def resolved(config: Config, devices: Sequence[Any], *, kind: RunKind) -> Config:
    """Returns the config with every open setting resolved for the given devices. Collective.

    Args:
      config: config of the run.
      devices: devices of the run, in the order of `jax.devices()`.
      kind: kind of run; its missing requirements are reported before anything is compiled.

    Raises:
      UserError: one group of arrays exceeds the memory of all devices, the run lacks something, its folder is
        in use, the search does not cover the recipe, or nothing fits.
    """
    with (
        claimed(config) as found,
        StopSignal(within_s=config.run.stop_within_s) as stop,
        stop.ends_at_once(),
    ):
        # First, because the slots depend on the layout.
        found = resolve(with_searched_layout(found.config, devices))
        # What is missing is reported before minutes of compiling.
        find_everything(found, kind, devices)
        config = with_chosen_slots(found, devices)
        return with_chosen_remat(resolve(config), devices) if not kind.pairs else config
