"""Two devices of a CPU: what `mesh.simulated_devices = "auto"` stands for.

XLA does not share out small operations over cores. With two devices, each with half of the batch, they run on
both: a step of `benchmarks/step_vs_peers.py` took 10.8 s instead of 12.5 on two cores. Nothing is won at the
demo's size (128 wide). A batch that does not halve, a layout of the user's own or an accelerator leave one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os

import jax

from jaxrl.config.schema import Config
from jaxrl.mesh.layout import LayoutConfig

_WIDE = 256
_TWO = {"simulated_devices": 2, "train": "1-1-2"}


def with_cpu_devices(config: Config) -> Config:
    """The config with the number of simulated devices resolved, and the layout that goes with it.

    Does not ask JAX for its devices, since their number is fixed from then on.
    """
    mesh = config.mesh
    if mesh.simulated_devices != "auto":
        return config
    pays = takes_two_devices(config) and _is_on_cpu() and len(os.sched_getaffinity(0)) > 1
    changes = _TWO if pays else {"simulated_devices": 0}
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, **changes))


def takes_two_devices(config: Config) -> bool:
    """Whether a config says nothing of devices, its shape is known and wide, and its batches halve."""
    rollout = config.rollout
    slots = 0 if rollout.slots == "auto" else rollout.slots
    batches = (config.train.rows, slots, rollout.prefill_prompts, config.reward.judge.slots)
    return (
        config.mesh == LayoutConfig()
        and not config.placement
        and not config.hosts.coordinator
        and rollout.driver == "offline"
        # A model of files may be too large to be there twice.
        and not config.weights
        and config.model.d_model >= _WIDE
        and not any(size % 2 for size in batches)
    )


def _is_on_cpu() -> bool:
    if platforms := getattr(jax.config, "jax_platforms", None):
        return platforms == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
