"""Resolves the settings that a config leaves open, before the run begins: takes and returns a config.

    mesh.layout = "auto"              the fastest mapping that the search finds for these devices
    rollout.slots = "auto"            the number of slots that fits these devices, by their compiler
    mesh.simulated_devices = "auto"   two simulated devices on a CPU, or one

Commands call this first. A run itself accepts no open setting.

One device stays if the batch is odd, the user set a layout, or there is an accelerator.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl.config.schema import Config
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.planner.search.mapping_choice import with_searched_layout
from jaxrl.planner.slot_choice import is_open, with_chosen_slots
from jaxrl.trainer.algorithm import algorithm_of, pools_of
from jaxrl.trainer.findings import RunKind, find_everything
from jaxrl.trainer.program import claimed, is_settled

# At the demo's width of 128 two devices are no gain.
_WIDE = 256
# XLA does not split small operations over cores. With two devices, each runs half of the batch on its own
# core: a step of `benchmarks/step_vs_peers.py` took 10.8 s instead of 12.5 s on two cores.
_TWO = {"simulated_devices": 2, "train": "1-1-2"}


def with_cpu_devices(config: Config) -> Config:
    """Returns the config with `simulated_devices` resolved, and with the matching layout."""
    mesh, rollout = config.mesh, config.rollout
    if mesh.simulated_devices != "auto":
        return config
    if platforms := getattr(jax.config, "jax_platforms", None):
        on_cpu = platforms == "cpu"
    else:
        # JAX is not asked for its devices: the call would fix their number.
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        on_cpu = not plugins and importlib.util.find_spec("libtpu") is None
    slots = 0 if rollout.slots == "auto" else rollout.slots
    batches = (config.train.rows, slots, rollout.prefill_prompts)
    pays = (
        on_cpu
        and len(os.sched_getaffinity(0)) > 1
        # The config leaves devices open.
        and mesh == LayoutConfig()
        and not config.placement
        and not config.hosts.coordinator
        and rollout.driver == "offline"
        # A model from files may be too large for two copies.
        and not config.weights
        and config.model.d_model >= _WIDE
        and not any(size % 2 for size in batches)
    )
    changes = _TWO if pays else {"simulated_devices": 0}
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, **changes))


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
    if is_settled(config) and not is_open(config):
        return config
    with (
        claimed(config) as config,
        StopSignal(within_s=config.run.stop_within_s) as stop,
        stop.ends_at_once(),
    ):
        # First, because the slots depend on the layout.
        config = with_searched_layout(config, devices)
        pools = pools_of(config, algorithm_of(config).roles)
        # What is missing is reported before minutes of compiling.
        find_everything(config, kind, pools, devices)
        return with_chosen_slots(config, devices)
