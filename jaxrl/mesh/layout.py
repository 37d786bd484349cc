"""A parallel layout: how one mesh of fine axes serves both training and generation.

Training wants p-t-d (pipeline, tensor, data), generation p_g-t_g-d_g-d with d_g = p*t / (p_g*t_g)
(HybridFlow section 5.1). Instead of two sets of process groups there is one mesh whose axes are fine
enough for both:

    data, fsdp, expert, context, stage_gen (p_g), stage_micro (p/p_g), tensor_gen (t_g), tensor_micro (t/t_g)

With `tensor_gen` major and `tensor_micro` minor, a device's training shard is a slice of its generation
shard, and devices that differ only in a micro axis are neighbours: the paper's micro data-parallel group.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

from jaxrl.checks import MAX_COUNT, NAME, PATH, at_least, check_fields, count
from jaxrl.errors import UserError

AXES = (
    "data",
    "fsdp",
    "expert",
    "context",
    "stage_gen",
    "stage_micro",
    "tensor_gen",
    "tensor_micro",
)

# Each has threads of its own.
MAX_SIMULATED_DEVICES = 4096


@dataclasses.dataclass(frozen=True)
class LayoutConfig:
    """What the user asks for.

    Attributes:
      simulated_devices: run on this many simulated CPU devices; 0 takes the real ones. "auto" is 2 on a CPU
        with several cores, in the layout 1-1-2, for models of 256 or wider that train from random weights and
        if nothing else is said of devices; else 0.
      layout: "auto" searches for the fastest mapping of the roles to the devices when the run begins, as
        simulated (docs/planner.md), and takes layouts, pools and slots from it.
      hardware: what the search takes the devices for, a name of `mesh.hardware.ACCELERATORS` or the path of a
        file that `jaxrl calibrate` wrote; "" looks their kind up.
      train: "p-t-d", pipeline, tensor and data parallel size of training.
      generate: "p_g-t_g-d_g-d" of generation; "" keeps the training layout's p and t.
      fsdp: how many of the d replicas share one sharded copy of weights and optimiser state.
      expert: how many of the d replicas split the experts of a mixture; the rest of the model does not
        see this axis, other than as a share of the batch.
      context: how many of the d replicas split each sequence instead of the batch.
      sharding: which of weights, gradients and moments are shared out over which replicas, a name of
        `mesh.groupings.ZERO`.
      offload_training_state: keep master weights, where sampling has its own, and moments in pinned host
        memory while it samples.
    """

    simulated_devices: (
        Annotated[int, at_least(0, at_most=MAX_SIMULATED_DEVICES)] | Literal["auto"]
    ) = "auto"
    layout: Literal["as_given", "auto"] = "as_given"
    hardware: Annotated[str, PATH] = ""
    train: Annotated[str, NAME] = "1-1-1"
    generate: Annotated[str, NAME] = ""
    fsdp: Annotated[int, count(1)] = 1
    expert: Annotated[int, count(1)] = 1
    context: Annotated[int, count(1)] = 1
    sharding: Literal["replicated", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP"] = "FSDP"
    offload_training_state: bool = False

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    """A checked layout. Sizes are those of the paper; `axis_sizes` those of the mesh."""

    p: int
    t: int
    d: int
    p_g: int
    t_g: int
    fsdp: int = 1
    expert: int = 1
    context: int = 1

    @property
    def d_g(self) -> int:
        """Micro data-parallel replicas of generation inside one training replica."""
        return self.p * self.t // (self.p_g * self.t_g)

    @property
    def num_devices(self) -> int:
        """Devices the layout needs."""
        return self.p * self.t * self.d

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis of the mesh, in the order of `AXES`."""
        sizes = (
            self.d // (self.fsdp * self.expert * self.context),
            self.fsdp,
            self.expert,
            self.context,
            self.p_g,
            self.p // self.p_g,
            self.t_g,
            self.t // self.t_g,
        )
        return dict(zip(AXES, sizes, strict=True))

    @property
    def name(self) -> str:
        """Both layouts as the paper writes them."""
        return f"{self.p}-{self.t}-{self.d} / {self.p_g}-{self.t_g}-{self.d_g}-{self.d}"

    @staticmethod
    def from_config(config: LayoutConfig) -> ParallelLayout:
        """Parses and checks a layout; raises UserError with the rule that fails."""
        p, t, d = _sizes(config.train, ("p", "t", "d"), "mesh.train")
        generate = config.generate or f"{p}-{t}-1-{d}"
        p_g, t_g, d_g, d_again = _sizes(generate, ("p_g", "t_g", "d_g", "d"), "mesh.generate")
        for gen, train, what in ((p_g, p, "p_g"), (t_g, t, "t_g")):
            if train % gen:
                raise UserError(
                    f"mesh.generate {generate}: {what}={gen} does not divide {what[0]}={train} of mesh.train "
                    f"{config.train}; generation shards are unions of training shards, so choose a divisor"
                )
        if (d_g, d_again) != (p * t // (p_g * t_g), d):
            raise UserError(
                f"mesh.generate {generate} has d_g={d_g}, d={d_again}, but mesh.train {config.train} leaves "
                f"d_g = p*t/(p_g*t_g) = {p * t // (p_g * t_g)} and d = {d}; "
                f"use {p_g}-{t_g}-{p * t // (p_g * t_g)}-{d}"
            )
        shares = (config.fsdp, config.expert, config.context)
        if d % math.prod(shares):
            raise UserError(
                f"mesh.fsdp={config.fsdp} x mesh.expert={config.expert} x mesh.context={config.context} "
                f"does not divide d={d} of mesh.train {config.train}; all are shares of the d replicas"
            )
        return ParallelLayout(p, t, d, p_g, t_g, *shares)


def _sizes(text: str, names: tuple[str, ...], setting: str) -> list[int]:
    parts = text.split("-")
    if len(parts) != len(names) or not all(map(_is_size, parts)):
        raise UserError(
            f"{setting}={text!r} is not {'-'.join(names)}: {len(names)} numbers from 1 to {MAX_COUNT:,} "
            f"joined by dashes, for example {'-'.join(['1'] * len(names))}"
        )
    return [int(part) for part in parts]


def _is_size(text: str) -> bool:
    # The length first: Python reads no number of thousands of digits.
    return text.isdecimal() and len(text) <= len(str(MAX_COUNT)) and 0 < int(text) <= MAX_COUNT
