"""A plan: the memory and time that a run needs, from shapes and, if compiled, from the compiler.

    trace      buffers of every pool, operations of every program; on a topology
               also the expected seconds of a step                                   seconds
    compile    also memory, traffic and roofline of every program, on a topology     minutes
    search     the same as compile, for the mapping that the search finds            minutes

The memory of a program is the compiler's figure; other buffers are counted from shapes. Seconds and hours are
predictions and are marked as such. `plan_output` prints the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.config.shapes import step_shape
from jaxrl.errors import UserError
from jaxrl.mesh.handover import Handover
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.pipeline import bubble, microbatches_of
from jaxrl.mesh.pools import Pool, take_devices
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shards_of
from jaxrl_planner.compiled.ahead import CompiledProgram
from jaxrl_planner.hardware.cluster import Cluster, MixedCluster, Topology, group_of
from jaxrl_planner.memory import ResidentBuffers, phase_bytes
from jaxrl_planner.planned_roles import PlannedRoles
from jaxrl_planner.simulation.workload import train_name
from jaxrl_planner.step_times import StepTimes

PHASES = ("sampling", "learning")
_SAMPLERS = frozenset({"actor", "rollout", "judge"})
_GB = 1e9


@dataclasses.dataclass(frozen=True)
class PlannedPool:
    """A pool of devices.

    Attributes:
      name: name of the pool.
      layout: description of its training and generation layouts.
      num_devices: number of devices.
      resident_buffers: buffers on each device; in traced plans also the largest temporaries of updates.
      programs: compiled programs of its roles; empty in a traced plan.
    """

    name: str
    layout: str
    num_devices: int
    resident_buffers: tuple[ResidentBuffers, ...]
    programs: tuple[CompiledProgram, ...] = ()

    def bytes_in(self, phase: str) -> int:
        """Bytes per device while "sampling" or "learning", without temporaries of compiled programs."""
        return phase_bytes(self.resident_buffers, phase)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resources that a run needs. `plan_output.show` prints it.

    Attributes:
      title: title of the run.
      pools: pools of devices.
      notes: (subject, text) pairs to print; in a traced plan also the batch flow of a step.
      target: devices that it was compiled for; None if it was only traced.
      times: predicted seconds of a step; None if no devices are named.
    """

    title: str
    pools: tuple[PlannedPool, ...]
    notes: tuple[tuple[str, str], ...] = ()
    target: Topology | None = None
    times: StepTimes | None = None

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        return tuple(program for pool in self.pools for program in pool.programs)

    @property
    def fits(self) -> bool:
        """Whether every compiled program fits; True for a traced plan, which has none."""
        return all(program.fits for program in self.programs)

    def as_json(self) -> dict[str, Any]:
        """All figures, in bytes and seconds."""
        times = self.times
        found: dict[str, Any] = {
            "title": self.title,
            "fits": self.fits,
            "notes": self.notes,
            "pools": [
                dataclasses.asdict(pool)
                | {"bytes": {phase: pool.bytes_in(phase) for phase in PHASES}}
                for pool in self.pools
            ],
        }
        if times is not None:
            found["predicted"] = {
                "topology": times.cluster.name,
                "step_s": times.step_s,
                "at_least_s": times.at_least_s,
                "steps": times.num_steps,
                "chip_hours": times.chip_hours(times.step_s),
                "tasks": [dataclasses.asdict(task) for task in times.tasks],
            }
        return found


def check_positions(pools: Sequence[Pool], cluster: Cluster | MixedCluster) -> None:
    """Raises UserError if a run with a process on each host of a cluster cannot place its pools.

    There may be too few devices, pools may overlap, or a pool may not divide over the hosts of its group.
    """
    for group in cluster.groups:
        here = [
            dataclasses.replace(pool, span=pool.span and tuple(n - group.first for n in pool.span))
            for pool in pools
            if group_of(pool, cluster) == group
        ]
        try:
            take_devices(here, group.devices)
        except UserError as error:
            raise UserError(f"{group.name}, a process on each host: {error}") from error


def planned_pool(
    pool: Pool,
    buffers: Sequence[ResidentBuffers],
    programs: Sequence[CompiledProgram] = (),
    *,
    where: str = "",
) -> PlannedPool:
    """Describes a pool: where it is, how its roles are sharded, its buffers and its compiled programs."""
    # Roles of a pool may have different layouts.
    by_layout: dict[ParallelLayout, list[str]] = {}
    for role, layout in pool.layouts.items():
        by_layout.setdefault(layout, []).append(role)
    shown = []
    for layout, roles in by_layout.items():
        whose = f"{' and '.join(roles)} " if len(by_layout) > 1 else ""
        samples = not _SAMPLERS.isdisjoint(roles)
        generation = f", generation {layout.generate}" if samples else ""
        shown.append(f"{whose}training {train_name(layout)}{generation}")
    return PlannedPool(
        *(pool.name, where + "; ".join(shown), pool.num_devices, tuple(buffers), tuple(programs))
    )


def seconds_text(seconds: float) -> str:
    """Formats seconds, with three digits below 10, and as ms or us below 1 s: "99 us"."""
    size = abs(seconds)
    if size >= 10 or not size:
        return f"{seconds:,.1f} s" if size else "0 s"
    unit, name = (1, "s") if size >= 1 else (1e-3, "ms") if size >= 1e-3 else (1e-6, "us")
    return f"{seconds / unit:.3g} {name}"


def size_text(nbytes: float) -> str:
    """Formats bytes, as GB from 0.1 GB on."""
    return f"{nbytes / _GB:,.2f} GB" if nbytes >= _GB / 10 else f"{nbytes / 1e6:,.2f} MB"


def describe_flow(roles: PlannedRoles) -> Iterator[tuple[str, str]]:
    """(stage, numbers) pairs of a step, in order."""
    rollout, engine = roles.config.rollout, roles.engine.config
    dataflow, replicas = roles.resolved.dataflow, roles.engine.shards
    dynamic = dataflow.dynamic_sampling
    prompts = roles.config.prompts_per_batch
    sampled = prompts * rollout.num_samples
    greedy = f", and {prompts:,} greedy ones" if dataflow.greedy_baseline else ""
    limit = rollout.max_generation_batches
    most = f"at most {limit} batches a step" if limit else "as many batches as a step takes"
    batches = f"; {most}" if dynamic else ""
    yield (
        "generation batch",
        f"{prompts:,} prompts x {rollout.num_samples} samples = {sampled:,} responses of "
        f"at most {engine.max_response_tokens:,} tokens{greedy}{batches}",
    )
    idle = rollout.slots != "auto" and rollout.slots > engine.slots
    room = f"room for {roles.engine.cache_sizes[-1]:,} tokens in each"
    if (pages := roles.engine.pages) is not None:
        count = pages.num_pages - 1
        room = f"{count:,} pages of {pages.page_tokens} tokens on each replica, for all its slots"
    yield (
        "decoding",
        f"{engine.slots:,} slots over {replicas} replicas, {engine.slots // replicas} on each, {room}; every "
        f"slot is filled {sampled / engine.slots:.1f} times a batch"
        + (f"; rollout.slots {rollout.slots:,} are more than its samples" if idle else ""),
    )
    yield (
        "prefill",
        f"{engine.prefill_prompts} prompts x {engine.max_prompt_tokens:,} tokens, "
        f"{engine.prefill_prompts // replicas} on each replica",
    )
    config, train, actor = roles.config, roles.config.train, roles.roles.actor
    if isinstance(handover := actor.resharding, Handover):
        yield (
            "hand-over",
            f"{size_text(handover.received_bytes)} of weights to each device of the sampler, in "
            f"{sum(bucket.num_slices for bucket in handover.buckets)} programs",
        )
    U, M, R, T = dataclasses.astuple(step_shape(config))
    sequences = rollout.num_prompts * rollout.num_samples
    which = "with right and wrong answers" if dynamic else "all of them"
    yield "groups kept", f"{rollout.num_prompts:,}, {which} = {sequences:,} sequences"
    yield (
        "learning",
        f"{U} updates x {sequences // U:,} sequences, each in at most {M} microbatches of {R} rows x "
        f"{T:,} tokens",
    )
    for program, rules, mesh, rows, requested in (
        ("prefill", GENERATE_RULES, roles.engine.mesh, engine.prefill_prompts, 0),
        ("decoding", GENERATE_RULES, roles.engine.mesh, engine.slots, 0),
        ("learning", TRAIN_RULES, actor.mesh, train.rows, train.pipeline_microbatches),
    ):
        stages = shards_of("layers", rules, mesh)
        if stages > 1:
            micro = microbatches_of(rows, rules, mesh, requested)
            yield (
                f"pipeline, {program}",
                f"{stages} stages x {micro} microbatches of {rows // micro} rows: "
                f"idle for {bubble(stages, micro):.0%} of the time",
            )
