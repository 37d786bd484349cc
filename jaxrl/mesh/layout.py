"""A parallel layout: how one mesh of fine axes serves both training and generation.

Training is split p-t-d (pipeline, tensor, data), and generation p_g-t_g-d_g-d with d_g = p*t / (p_g*t_g)
(HybridFlow section 5.1). Instead of two sets of process groups there is one mesh whose axes are fine enough
for both:

    data, fsdp, expert, context, fsdp_gen,
    stage_gen (p_g), stage_micro (p/p_g), tensor_gen (t_g), tensor_micro (t/t_g)

Generation may have more tensor shards than training. Then `fsdp_gen` is the part of `fsdp` that generation
splits tensors over: with g = gcd(t, t_g), tensor_gen is g, tensor_micro t/g and fsdp_gen t_g/g.

`tensor_gen` is major and `tensor_micro` minor. So the training shard of a device is a slice of its generation
shard, and devices that differ only in a micro axis are neighbours: the micro data-parallel group of the
paper. Example: train 1-4-2, generate 1-2-2-2 on 8 devices is a mesh with data 2, tensor_gen 2, tensor_micro
2.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

from jaxrl.checks import MAX_COUNT, NAME, PATH, at_least, count, settings
from jaxrl.errors import UserError

AXES = (
    "data",
    "fsdp",
    "expert",
    "context",
    "fsdp_gen",
    "stage_gen",
    "stage_micro",
    "tensor_gen",
    "tensor_gen_2",
    "tensor_gen_3",
    "tensor_micro",
)
# Together they have the size of tensor_gen, as major and minor factors of it: a few key-value heads are split
# over the first of them.
TENSOR_GEN = ("tensor_gen", "tensor_gen_2", "tensor_gen_3")

# Each simulated device starts its own threads.
MAX_SIMULATED_DEVICES = 4096


Sharding = Literal["replicated", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP"]


@settings
class LayoutConfig:
    """The parallel layout as a user writes it."""

    simulated_devices: (
        Annotated[int, at_least(0, at_most=MAX_SIMULATED_DEVICES)] | Literal["auto"]
    ) = "auto"
    """Number of simulated CPU devices; 0 for real devices. "auto" simulates 2 on a CPU with
    several cores, in the layout 1-1-2, for models at least 256 wide that train from random
    weights, if no other setting describes the devices; else 0.
    """
    layout: Annotated[str, PATH] = "as_given"
    """"auto" searches for the fastest mapping of roles to devices before the run begins, by
    simulation (docs/planning.md), and sets layouts, pools and slots. So does the name of an
    accelerator or the path of a JSON file that describes one; "auto" looks up the kind of the
    devices. "as_given" takes the layouts of the recipe.
    """
    train: Annotated[str, NAME] = "1-1-1"
    """"p-t-d", pipeline, tensor and data parallel size of training."""
    generate: Annotated[str, NAME] = ""
    """"p_g-t_g-d_g-d" of generation; "" keeps p and t of training. Where t_g does not divide t, k =
    t_g / gcd(t, t_g) of the replicas that `fsdp` counts hold one generation shard each, and d is d / k.
    """
    fsdp: Annotated[int, count(1)] = 1
    """Number of replicas (of the d) that share one sharded copy of weights and optimiser state."""
    expert: Annotated[int, count(1)] = 1
    """Number of replicas that split the experts of a mixture. For the rest of the model these
    are data-parallel replicas. Devices of a tensor group split the experts further, as far as
    their number divides.
    """
    context: Annotated[int, count(1)] = 1
    """Number of replicas that split each sequence instead of the batch."""
    sharding: Sharding = "FSDP"
    """Sharding of weights, gradients and moments over replicas, a name of
    `mesh.sharding_strategies.ZERO`.
    """
    offload_training_state: bool = False
    """Keep moments in pinned host memory during generation, and master weights too if
    generation has its own copy.
    """

    @property
    def searched(self) -> bool:
        """Whether the mapping search decides the layouts."""
        return self.layout != "as_given"


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    """A checked layout, in the sizes of the paper; `axis_sizes` has those of the mesh.

    `sharding` is that of weights, gradients and moments over replicas.
    """

    p: int
    t: int
    d: int
    p_g: int
    t_g: int
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    sharding: str = "FSDP"

    @property
    def fsdp_gen(self) -> int:
        """Replicas of training whose devices form one tensor group of generation; 1 if t_g divides t."""
        return self.t_g // math.gcd(self.t, self.t_g)

    @property
    def d_g(self) -> int:
        """Replicas of generation inside `fsdp_gen` training replicas."""
        return self.p * self.t * self.fsdp_gen // (self.p_g * self.t_g)

    @property
    def num_devices(self) -> int:
        return self.p * self.t * self.d

    @property
    def row_shards(self) -> int:
        """Number of training replicas that have rows of their own."""
        return self.d // self.context

    @property
    def row_parts(self) -> int:
        """Number that must divide the rows of a microbatch: replicas with own rows, times stages."""
        return self.p * self.row_shards

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis of the mesh, in the order of `AXES`."""
        tensor = math.gcd(self.t, self.t_g)
        sizes = (
            self.d // (self.fsdp * self.expert * self.context),
            self.fsdp // self.fsdp_gen,
            self.expert,
            self.context,
            self.fsdp_gen,
            self.p_g,
            self.p // self.p_g,
            *_three_factors(tensor),
            self.t // tensor,
        )
        return dict(zip(AXES, sizes, strict=True))

    @property
    def name(self) -> str:
        """Both layouts as the paper writes them."""
        return f"{self.p}-{self.t}-{self.d} / {self.generate}"

    @property
    def generate(self) -> str:
        """The layout of generation as `LayoutConfig.generate` has it."""
        return f"{self.p_g}-{self.t_g}-{self.d_g}-{self.d // self.fsdp_gen}"

    @staticmethod
    def from_config(config: LayoutConfig) -> ParallelLayout:
        """Parses and checks a layout; raises UserError with the rule that is broken."""
        p, t, d = _sizes(config.train, ("p", "t", "d"), "mesh.train")
        generate = config.generate or f"{p}-{t}-1-{d}"
        p_g, t_g, d_g, d_again = _sizes(generate, ("p_g", "t_g", "d_g", "d"), "mesh.generate")
        if p % p_g:
            raise UserError(
                f"mesh.generate {generate}: p_g={p_g} does not divide p={p} of mesh.train {config.train}; "
                "a stage of generation is a union of training stages, so choose a divisor"
            )
        shares = (config.fsdp, config.expert, config.context)
        layout = ParallelLayout(p, t, d, p_g, t_g, *shares, config.sharding)
        if (k := layout.fsdp_gen) > 1 and config.fsdp % k:
            raise UserError(
                f"mesh.generate {generate}: t_g={t_g} does not divide t={t} of mesh.train {config.train}, so "
                f"each shard of generation takes {k} of the replicas that share a copy of the weights; "
                f"mesh.fsdp={config.fsdp} is no multiple of {k}: choose one, or another t_g"
            )
        if d % math.prod(shares):
            raise UserError(
                f"mesh.fsdp={config.fsdp} x mesh.expert={config.expert} x mesh.context={config.context} "
                f"does not divide d={d} of mesh.train {config.train}; all are shares of the d replicas"
            )
        if (d_g, d_again) != (layout.d_g, d // k):
            raise UserError(
                f"mesh.generate {generate} has d_g={d_g}, d={d_again}, but mesh.train {config.train} leaves "
                f"d_g = {layout.d_g} and d = {d // k}; use {layout.generate}"
            )
        return layout


def _three_factors(n: int) -> tuple[int, int, int]:
    """The prime factors, ascending, the first merged: 2 gives 2, 1, 1; 8 gives 2, 2, 2; 32 gives 8, 2, 2."""
    found, divisor = [], 2
    while n > 1:
        while n % divisor:
            divisor += 1
        found.append(divisor)
        n //= divisor
    found = [math.prod(found[:-2]), *found[-2:]] if len(found) > 3 else found
    first, second, third = [*found, 1, 1, 1][:3]
    return first, second, third


def _sizes(text: str, names: tuple[str, ...], setting: str) -> list[int]:
    parts = text.split("-")
    # Check the length first: `int` raises for text of thousands of digits.
    if len(parts) != len(names) or not all(
        part.isdecimal() and len(part) <= len(str(MAX_COUNT)) and 0 < int(part) <= MAX_COUNT
        for part in parts
    ):
        raise UserError(
            f"{setting}={text!r} is not {'-'.join(names)}: {len(names)} numbers from 1 to {MAX_COUNT:,} "
            f"joined by dashes, for example {'-'.join(['1'] * len(names))}"
        )
    return [int(part) for part in parts]
