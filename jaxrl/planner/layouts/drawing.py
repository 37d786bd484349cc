"""Draws the device groups and shards of a layout, as text and as a picture.

Devices are G1, G2, ... in the order of the mesh, as in the figures of the HybridFlow paper.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import jax
import matplotlib
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.rules import shardings
from jaxrl.mesh.sharding_strategies import GATHER_ALL, ShardingStrategy
from jaxrl.planner.layouts.accounting import boxes, intersection

_MAX_GROUPS, _MAX_IDS, _MAX_DEVICES = 8, 24, 16

_TENSOR, _STAGE = ("tensor_gen", "tensor_micro"), ("stage_gen", "stage_micro")
# Names of the device groups of a tensor- and pipeline-parallel strategy, and the mesh axes inside a group.
_TRAIN_GROUPS = {"tensor": _TENSOR, "pipeline": _STAGE}
_GENERATE_GROUPS = {
    "tensor": ("tensor_gen",),
    "pipeline": ("stage_gen",),
    "micro data": ("tensor_micro", "stage_micro"),
}
_SHARES = {"fsdp": ("fsdp",), "expert": ("expert",), "context": ("context",)}

_TRAIN_COLOR, _GENERATE_COLOR, _REDUNDANT_COLOR = "#2b5f8a", "#bcd7ee", "#c8553d"


def groups(sizes: Mapping[str, int], axes: Iterable[str]) -> list[tuple[int, ...]]:
    """Groups of devices that differ only along `axes`; devices are numbered in the order of the mesh."""
    axes = set(axes)
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = list(sizes)
    kept = [i for i, name in enumerate(names) if name not in axes]
    moved = [i for i, name in enumerate(names) if name in axes]
    size = math.prod(ids.shape[i] for i in moved)
    return sorted(map(tuple, ids.transpose(*kept, *moved).reshape(-1, size).tolist()))


def phase_groups(
    strategy: ShardingStrategy, mesh: Mesh | AbstractMesh
) -> list[tuple[str, list[tuple[int, ...]]]]:
    """(phase and kind, groups) of both phases, without groups of one device."""
    sizes = dict(mesh.shape)
    split_by_model = strategy is not GATHER_ALL
    train = _TRAIN_GROUPS | _SHARES if split_by_model else {"ZeRO-3": tuple(sizes)}
    named = [(f"training {kind}", groups(sizes, axes)) for kind, axes in train.items()]
    named += [
        (f"generation {kind}", groups(sizes, axes)) for kind, axes in _GENERATE_GROUPS.items()
    ]
    return [(name, found) for name, found in named if len(found[0]) > 1]


def in_words(found: Sequence[tuple[int, ...]]) -> str:
    """Groups in the notation of the paper, as many as fit in a line: [G1,G3] [G2,G4]."""
    limit = max(2, min(_MAX_GROUPS, _MAX_IDS // len(found[0])))
    shown = [f"[{_ids(group)}]" for group in found[:limit]]
    rest = [f"... {len(found)} in all"] if len(found) > limit else []
    return " ".join(shown + rest)


def _ids(group: tuple[int, ...]) -> str:
    steps = {b - a for a, b in itertools.pairwise(group)}
    # Long groups with a constant interval are abbreviated, to fit in a line.
    if len(group) > _MAX_GROUPS and len(steps) == 1:
        step = steps.pop()
        return f"G{group[0] + 1}..G{group[-1] + 1}" + (f" by {step}" if step > 1 else "")
    return ",".join(f"G{i + 1}" for i in group)


def holdings(
    strategy: ShardingStrategy, layout: ParallelLayout, mesh: Mesh
) -> tuple[np.ndarray, np.ndarray]:
    """The part of the model that each device has in training and in generation.

    The model is drawn as one weight of p layers, width N (the number of devices), and t heads.

    Returns:
      Two arrays [N, 3, (first, last + 1)]: layers, width, heads.
    """
    shape = jax.ShapeDtypeStruct((layout.p, layout.num_devices, layout.t), np.float32)
    axes = ("layers", "embed", "mlp")
    train, generate = (
        boxes(shardings(axes, shape, rules, mesh), shape.shape)
        for rules in (strategy.train, strategy.generate)
    )
    return train, generate


def strips(strategy: ShardingStrategy, layout: ParallelLayout, mesh: Mesh) -> list[str]:
    """Lines for the devices of the first replica: their shards in training and in generation.

    A cell is one tensor shard of one stage: "#" held, "+" held in part, "." not held.
    """
    train, generate = holdings(strategy, layout, mesh)
    count = min(layout.p * layout.t, _MAX_DEVICES)
    lines = []
    for device in range(count):
        before, after = (_cells(h[device], layout) for h in (train, generate))
        lines.append(f"G{device + 1:<3} training {before}   generation {after}")
    return lines


def _cells(box: np.ndarray, layout: ParallelLayout) -> str:
    (layer, last_layer), (part, last_part), (head, last_head) = box.tolist()
    mark = "#" if last_part - part == layout.num_devices else "+"
    rows = [
        "".join(
            mark if layer <= i < last_layer and head <= j < last_head else "."
            for j in range(layout.t)
        )
        for i in range(layout.p)
    ]
    return "|".join(rows)


def draw(
    cases: Sequence[tuple[ShardingStrategy, Mesh]],
    layout: ParallelLayout,
    paths: Sequence[pathlib.Path],
) -> None:
    """Draws the shards of the devices of the first replica, one row per strategy, to picture files.

    A square stands for the model: heads from left to right, layers from top to bottom.

    Args:
      cases: strategies and their meshes.
      layout: layout of all cases.
      paths: picture files; the suffix selects the format.
    """
    count = min(layout.p * layout.t, _MAX_DEVICES)
    figure = Figure(figsize=(1.2 * count + 1.8, 1.75 * len(cases) + 1.2), layout="constrained")
    grid = figure.subplots(len(cases), count, squeeze=False)
    for row, (strategy, mesh) in zip(grid, cases, strict=True):
        train, generate = holdings(strategy, layout, mesh)
        for device, axes in enumerate(row):
            _draw_device(axes, train[device], generate[device], layout)
            axes.set_title(f"G{device + 1}", fontsize=9)
        row[0].set_ylabel(f"{strategy.name}\n({strategy.system})", fontsize=9)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=color, label=label)
        for color, label in (
            (_TRAIN_COLOR, "training shard, a part of the generation shard"),
            (_REDUNDANT_COLOR, "training shard outside it: kept beside it"),
            (_GENERATE_COLOR, "received for generation"),
        )
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3 if count > 4 else 1,
        fontsize=8,
        frameon=False,
    )
    replicas = f"first of {layout.d} replicas, " if layout.d > 1 else ""
    shown = f"{count} of {layout.p * layout.t} devices, " if count < layout.p * layout.t else ""
    figure.suptitle(
        f"{layout.name}: {replicas}{shown}heads across, layers down", fontsize=10, ha="center"
    )
    # A fixed salt keeps the ids in SVG files equal from run to run.
    with matplotlib.rc_context({"svg.hashsalt": "jaxrl", "svg.fonttype": "none"}):
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=150, metadata=metadata)


def _draw_device(
    axes: Axes, train: np.ndarray, generate: np.ndarray, layout: ParallelLayout
) -> None:
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect="equal")
    common = intersection(train, generate)
    for box, color in (
        (generate, _GENERATE_COLOR),
        (train, _REDUNDANT_COLOR),
        (common, _TRAIN_COLOR),
    ):
        if (box[:, 1] > box[:, 0]).all():
            axes.add_patch(Rectangle(*_place(box, layout), facecolor=color, edgecolor="none"))


def _place(box: np.ndarray, layout: ParallelLayout) -> tuple[tuple[float, float], float, float]:
    """Corner, width and height of a box. The FSDP split of the width is drawn inside the layers."""
    (layer, last_layer), (part, last_part), (head, last_head) = box.tolist()
    height = (last_layer - layer) / layout.p
    parts = layout.num_devices
    y = layer / layout.p + height * part / parts
    return (
        (head / layout.t, y),
        (last_head - head) / layout.t,
        height * (last_part - part) / parts,
    )
