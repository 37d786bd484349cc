"""Settings that a config leaves open ("auto"). They are decided before the run, which accepts none.

    mesh.simulated_devices = "auto"   two simulated devices on a CPU, or one: decided here
    mesh.layout = "auto"              the fastest mapping to these devices: by the planner
    rollout.slots = "auto"            as many slots as these devices hold: by the planner
    train.remat = "auto"              the least recomputation that fits these devices: by the planner

One simulated device stays if the batch is odd, the user set a layout, or there is an accelerator.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl import extensions
from jaxrl.config.schema import Config
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.trainer.findings import RunKind

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


def is_settled(config: Config) -> bool:
    """Whether no setting is open ("auto"); only such a config can run."""
    return not config.mesh.searched and config.rollout.slots != "auto"


def chooses_slots(config: Config) -> bool:
    """Whether slots are to be chosen, or the pages of more agents than slots."""
    rollout = config.rollout
    if rollout.slots == "auto" or not rollout.agent or rollout.cache_tokens:
        return rollout.slots == "auto"
    return rollout.slots < config.prompts_per_batch * rollout.num_samples


def resolved(config: Config, devices: Sequence[Any], *, kind: RunKind) -> Config:
    """Returns the config with every open setting resolved for the given devices. Collective.

    Args:
      config: config of the run.
      devices: devices of the run, in the order of `jax.devices()`.
      kind: kind of run; its missing requirements are reported before anything is compiled.

    Raises:
      UserError: the planner is not installed, or as its `resolved`.
    """
    name = 'mesh.layout="auto" or rollout.slots="auto"'
    counts = devices[0].platform != "cpu" and not kind.pairs
    tunes = chooses_slots(config) or (counts and config.train.remat == "auto")
    # A run can do without the pages of agents, and recomputes everything if nobody counts what fits.
    if is_settled(config) and not (tunes and extensions.is_installed(name)):
        return config
    return extensions.lookup(name)(config, devices, kind=kind)
