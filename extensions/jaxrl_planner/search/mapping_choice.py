"""Applies the mapping search to a recipe, for `mesh.layout = "auto"` and `jaxrl plan --search`.

    config + devices --> problem of the search --> planner.search --> mesh, placement, slots, rows

A proposed config passes all checks of a run before it is used.

A pool gets the layout of its actor, or of its first role. Roles with another strategy get their own layout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.roles import role_models
from jaxrl_planner.hardware.accelerators import accelerator, accelerator_of
from jaxrl_planner.hardware.cluster import Cluster, MixedCluster
from jaxrl_planner.plan import check_positions
from jaxrl_planner.planned_roles import roles_without_devices
from jaxrl_planner.search.mapping import Mapping
from jaxrl_planner.search.search import search_mapping
from jaxrl_planner.simulation.step_simulator import TASKS, RoleMapping
from jaxrl_planner.simulation.workload import LengthDistribution, train_name
from jaxrl_planner.step_load import assumptions_of, load_of
from jaxrl_planner.step_times import expected_step, tasks_of_run

# Settings that a mapping changes, besides the placement.
_CHANGED = {
    "mesh": ("layout", "sharding", "train", "generate", "fsdp", "expert", "context"),
    "rollout": ("slots", "cache_tokens"),
    "train": ("rows", "pipeline_microbatches", "remat"),
}


def search_for(
    config: Config, cluster: Cluster | MixedCluster, *, responses: LengthDistribution | None = None
) -> Mapping:
    """Finds the fastest mapping of a recipe's roles to a cluster, by simulation.

    Args:
      config: config of the run.
      cluster: cluster to run on.
      responses: lengths of answers; None assumes them.

    Raises:
      UserError: the search does not cover the dataflow or one of its roles, or the models do not fit.
    """
    dataflow = config.algorithm.dataflow
    known = resolve(config)
    roles = known.roles
    uncovered = [role for role in roles if role in ("rollout", "judge")]
    if dataflow not in TASKS or uncovered:
        what = f"role {uncovered[0]}" if uncovered else f"dataflow {dataflow!r}"
        raise UserError(
            f"the mapping search covers {', '.join(TASKS)} without a judge or a rollout pool of its own, and "
            f"this recipe has {what}; set mesh.layout to as_given and name mesh.train and mesh.generate"
        )
    # The search sets rows and microbatches itself.
    work = dataclasses.replace(
        load_of(config, responses).work, microbatch_rows=0, pipeline_microbatches=0
    )
    platform = cluster.groups[0].accelerator.platform
    here = ("offload_inputs",) if platform != "cpu" else ()
    return search_mapping(
        dataflow,
        role_models(known).by_role,
        work,
        cluster,
        assumptions=functools.partial(assumptions_of, config),
        tasks=tasks_of_run(known),
        # A run has one `train.rows` for all roles.
        common_rows=True,
        remats=("none", "full", *here),
    )


def propose(
    config: Config,
    cluster: Cluster | MixedCluster,
    *,
    responses: LengthDistribution | None = None,
) -> tuple[Mapping, Config]:
    """The mapping found by `search_for`, and the config with it, which has passed all checks of a run.

    The cost breakdown of the mapping, and of those to each group alone, is that of the config's plan.

    Raises:
      UserError: as `search_for`; or a setting of the recipe conflicts with the mapping.
    """
    found = search_for(config, cluster, responses=responses)
    alone = [
        (name, best and _planned(config, best, group, responses)[0])
        for (name, best), group in zip(found.alone, cluster.groups, strict=False)
    ]
    found, proposed = _planned(config, found, cluster, responses)
    return dataclasses.replace(found, alone=tuple(alone)), proposed


def _planned(
    config: Config,
    found: Mapping,
    cluster: Cluster | MixedCluster,
    responses: LengthDistribution | None,
) -> tuple[Mapping, Config]:
    # The mapping with the cost breakdown of its plan, and the checked config with it.
    proposed = with_mapping(config, found)
    try:
        planned = roles_without_devices(proposed)
        check_positions(planned.pools, cluster)
    except UserError as error:
        raise UserError(
            f"the fastest mapping for {cluster.name} does not go with this recipe: {error}"
        ) from error
    expected = expected_step(planned, cluster, load_of(proposed, responses))
    return dataclasses.replace(found, breakdown=expected), proposed


def with_mapping(config: Config, found: Mapping) -> Config:
    """Applies a mapping to a config: layouts, pools, slots, and batches that divide over them.

    A microbatch has as many rows as in the simulation.
    """
    actor = found.roles["actor"]
    replicas = actor.layout.num_devices // (actor.layout.p_g * actor.layout.t_g)
    # A pool without its own sharding has that of the actor.
    shardings = {role.layout.sharding for role in found.roles.values()}
    named = ("sharding",) if len(shardings) > 1 else ()
    whole = _settings_of(actor, "sharding")
    placement: dict[str, dict[str, Any]] = {}
    for number, pool in enumerate(found.pools):
        roles = [found.roles[name] for name in pool.roles]
        first = next((role for role in roles if role.slots), roles[0])
        row = placement[f"pool{number}"] = {"roles": pool.roles, **_settings_of(first, *named)}
        if pool.devices < found.num_devices:
            row["devices"] = pool.name
        trained = train_name(first.layout)
        others = [role for role in roles if train_name(role.layout) != trained]
        if others:
            row["layouts"] = {role.name: _settings_of(role, *named) for role in others}
    if set(placement["pool0"]) == {"roles", *_settings_of(actor, *named)}:
        # All roles on all devices with the same strategy: this needs no placement.
        placement = {}
    mesh = dataclasses.replace(config.mesh, layout="as_given", **whole)
    rollout = dataclasses.replace(
        config.rollout, slots=actor.slots * replicas, cache_tokens=actor.cache_tokens * replicas
    )
    train = dataclasses.replace(
        config.train, rows=found.microbatch_rows, pipeline_microbatches=0, remat=found.remat
    )
    return dataclasses.replace(config, mesh=mesh, placement=placement, rollout=rollout, train=train)


def setting_lines(config: Config, proposed: Config) -> list[str]:
    """The changed settings of a proposal, as lines of a recipe file."""
    lines = []
    for section in ("mesh", "rollout", "train"):
        before, after = getattr(config, section), getattr(proposed, section)
        lines += [
            f"config.{section}.{field.name} = {getattr(after, field.name)!r}"
            for field in dataclasses.fields(after)
            if getattr(before, field.name) != getattr(after, field.name)
        ]
    if proposed.placement != config.placement:
        lines.append(f"config.placement = {proposed.placement!r}")
    return lines


def _settings_of(role: RoleMapping, *others: str) -> dict[str, Any]:
    layout = role.layout
    sizes = {
        name: getattr(layout, name) for name in ("generate", "fsdp", "expert", "context", *others)
    }
    return {"train": f"{layout.p}-{layout.t}-{layout.d}", **sizes}


def with_searched_layout(config: Config, devices: Sequence[Any]) -> Config:
    """Applies the search to a config with `mesh.layout` "auto"; returns other configs unchanged.

    Raises:
      UserError: as `search_for`; or the kind of the devices is unknown.
    """
    if not config.mesh.searched:
        return config

    def search() -> dict[str, Any]:
        found, chosen = propose(config, cluster_of(config, devices))
        print("\n".join(found.lines()))
        sections = {
            name: {setting: getattr(getattr(chosen, name), setting) for setting in settings}
            for name, settings in _CHANGED.items()
        }
        return sections | {"placement": chosen.placement}

    # The first process searches for all, because their results must not differ.
    found = hosts.on_first(search)
    sections = {
        name: dataclasses.replace(getattr(config, name), **found[name]) for name in _CHANGED
    }
    return dataclasses.replace(config, placement=found["placement"], **sections)


def cluster_of(config: Config, devices: Sequence[Any]) -> Cluster:
    """The devices of a run as a cluster, as `mesh.layout` describes them or from the hardware table.

    Raises:
      UserError: the kind of the devices is unknown, or their number has no known shape.
    """
    kind = devices[0].device_kind
    described = config.mesh.layout
    kinds = {each.device_kind: accelerator_of(each.device_kind) for each in devices}
    if described == "auto" and len(set(kinds.values())) > 1:
        raise UserError(
            f'mesh.layout "auto" searches for devices of one kind, and this run has {", ".join(kinds)}; run '
            "on one kind (`jaxrl plan --search --topology A+B` tells what a mixture would bring), or set "
            "mesh.layout to as_given"
        )
    known = kinds[kind] if described == "auto" else accelerator(described)
    if known is None:
        raise UserError(
            f'mesh.layout "auto" does not know what a device of kind {kind!r} is able to do; describe it in '
            "a file (docs/planning.md), or measure it, in a checkout, with `python benchmarks/calibrate.py "
            "--out here.json`, and set mesh.layout=here.json; or set mesh.layout to as_given"
        )
    num_hosts = len({device.process_index for device in devices})
    if known.arrangement == "hosts":
        return Cluster(known, (num_hosts, len(devices) // num_hosts))
    chips = {tuple(device.coords) for device in devices}
    sides = tuple(len({chip[side] for chip in chips}) for side in range(3))
    return Cluster(known, sides[: len(known.shapes[-1])])
