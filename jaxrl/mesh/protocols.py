"""Transfer protocols: how a role's inputs are dispatched and its outputs collected (HybridFlow, appendix B).

In HybridFlow a protocol is a pair of functions: one splits a batch over the ranks before a remote call, the
other merges the results of the ranks. Here it is a pair of functions from a role's mesh to a PartitionSpec.
Splitting and merging are then ordinary resharding:

    values = critic.values(actor.generate(prompts))     each call takes arrays from the host, its own mesh or
                                                        another pool's, and reshards them itself

"Collect from rank 0" means here: an array is split over the axes whose ranks hold different parts, and
replicated over the others. Nothing is copied to a controller; a reader takes any of the equal copies.

Define your own protocol in three lines:

    HALVES = Protocol("HALVES", lambda mesh, shape: P("data"), lambda mesh, shape: P())

    class RewardModel:
        @protocol(HALVES)
        def scores(self, batch): ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.handover import put
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, Rules, partition_spec

# (mesh, shape of an array) -> its PartitionSpec; None leaves the array where it is.
SpecOf = Callable[[Mesh | AbstractMesh, tuple[int, ...]], P | None]

Role = TypeVar("Role")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The sharding of the arguments and of the results of a role's method.

    Attributes:
      name: name in errors.
      distribute, collect: functions that give the PartitionSpec of an argument, or of a result, on the role's
        mesh.
    """

    name: str
    distribute: SpecOf
    collect: SpecOf

    def place(self, mesh: Mesh, tree: Any) -> Any:
        """Moves the arrays of `tree` to `mesh`, as arguments of the role; leaves other values unchanged."""
        return _move(self.distribute, mesh, tree)

    def gather(self, mesh: Mesh, tree: Any) -> Any:
        """Moves the arrays of `tree`, results of a role on `mesh`, to the sharding that callers get."""
        return _move(self.collect, mesh, tree)


def _move(spec_of: SpecOf, mesh: Mesh, tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        # A tracer is inside a larger compiled program, where the compiler moves arrays itself.
        if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, Tracer):
            return leaf
        spec = spec_of(mesh, leaf.shape)
        return leaf if spec is None else put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)


def protocol(
    pair: Protocol,
) -> Callable[
    [Callable[Concatenate[Role, Arguments], Result]],
    Callable[Concatenate[Role, Arguments], Result],
]:
    """Decorator that declares the protocol of a role's method; the role must have a `mesh`.

    The method then accepts arrays from anywhere: the host, the role's own mesh, another pool.
    """

    def declare(
        method: Callable[Concatenate[Role, Arguments], Result],
    ) -> Callable[Concatenate[Role, Arguments], Result]:
        @functools.wraps(method)
        def call(role: Role, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            mesh: Mesh = role.mesh  # pyright: ignore[reportAttributeAccessIssue]
            args, kwargs = pair.place(mesh, (args, kwargs))
            return pair.gather(mesh, method(role, *args, **kwargs))

        return call

    return declare


def whole(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> P:
    """Replicates the whole array on every device."""
    del mesh, shape
    return P()


def as_it_is(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> None:
    """Leaves the array where it is."""
    del mesh, shape


def first_dim(name: str, axis: str, rules: Rules) -> SpecOf:
    """Splits the first dimension as `rules` split a logical axis; scalars are whole."""

    def spec_of(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> P:
        axes = (axis, *(None,) * (len(shape) - 1))[: len(shape)]
        return partition_spec(axes, shape, rules, dict(mesh.shape), name)

    return spec_of


def rows_and_length(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> P:
    """Splits [..., R, T]: rows over training replicas, tokens over context. Smaller arrays are whole."""
    if len(shape) < 2:
        return P()
    axes = (*(None,) * (len(shape) - 2), "batch", "length")
    return partition_spec(axes, shape, TRAIN_RULES, dict(mesh.shape), "per-token data")


def all_devices(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> P | None:
    """Splits the first dimension over all devices; scalars are whole."""
    every: Rules = {"devices": tuple(mesh.axis_names)}
    return first_dim("DP_PROTO", "devices", every)(mesh, shape)


_DP_GROUPS = first_dim(
    "3D_PROTO", "replicas", {"replicas": ("data", "fsdp", "expert", "context", "fsdp_gen")}
)
_MICRO_DP = first_dim("3D_ALL_MICRO_DP", "batch", GENERATE_RULES)
_STAGES = first_dim("3D_PP_ONLY", "layers", TRAIN_RULES)

ONE_TO_ALL = Protocol("ONE_TO_ALL", whole, as_it_is)
"""Paper: broadcast to all ranks; gather all results. Ours: inputs whole on every device; the result is a
global array, which holds the results of all ranks already. For loading, saving, settings."""

THREE_D_PROTO = Protocol("3D_PROTO", _DP_GROUPS, _DP_GROUPS)
"""Paper: split over data-parallel groups, broadcast inside each; collect from tensor rank 0 of the last stage
of each. Ours: the first dimension over the d replicas, whole over stages and tensor ranks, both ways. For
models with p-t-d layouts."""

THREE_D_ALL_MICRO_DP = Protocol("3D_ALL_MICRO_DP", _MICRO_DP, _MICRO_DP)
"""Paper: split over micro data-parallel replicas, broadcast inside each; collect from local rank 0 of each.
Ours: the first dimension over the d replicas and the micro axes, whole over the p_g x t_g devices of a
replica, both ways. For generation."""

THREE_D_PP_ONLY = Protocol("3D_PP_ONLY", whole, _STAGES)
"""Paper: broadcast; collect from the ranks with t = 0, d = 0 of every stage. Ours: inputs whole; results,
whose first dimension counts layers or stages, split over the stages. For looking into a pipeline."""

DP_PROTO = Protocol("DP_PROTO", all_devices, all_devices)
"""Paper: split over all data-parallel ranks; gather all. Ours: the first dimension over every device of the
mesh, both ways: all devices are data-parallel ranks. For FSDP, ZeRO and workers without weights."""

ALL_TO_ALL = Protocol("ALL_TO_ALL", as_it_is, as_it_is)
"""Paper: no operation, the data are on their ranks; gather all. Ours: no operation either way. For data
that the caller has placed."""

PER_TOKEN = Protocol("PER_TOKEN", rows_and_length, rows_and_length)
"""Not in the paper. Arrays [..., R, T] with one value per token: rows over the training replicas, tokens of a
row over context, both ways. For log-probabilities and values."""

METRICS = Protocol("METRICS", rows_and_length, whole)
"""Not in the paper: its controller averages the reports of the ranks. Inputs are per-token data; results
are scalars that the program has reduced over the whole mesh. They are equal on every device, so any host can
read them without communication. For updates."""
