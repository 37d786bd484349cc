"""Metrics of the work in a packed batch: padding, balance between devices, speed.

U minibatches   M microbatches   R rows   T tokens of a row   S shards of the rows
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrl.mesh.hardware import roof_of
from jaxrl.mesh.rules import TRAIN_RULES, shards_of
from jaxrl.roles.flops import attention_flops, token_flops, training_flops
from jaxrl.roles.packed_model import PackedModel
from jaxrl.types import PackedBatch

# Timers of the phase that updates the model.
_UPDATES = ("timing_s/update_actor", "timing_s/update")


def work_metrics(model: PackedModel, batch: PackedBatch, *, epochs: int = 1) -> dict[str, float]:
    """Work metrics of a batch on the host that `model` learns from, `epochs` times.

    Returns:
      perf/padding: share of padding in the microbatches that run.
      perf/imbalance: largest work of a device over the mean, summed over microbatches, because devices wait
        for each other after each of them; 1 is even. Padding counts like tokens. Attention counts within
        segments only.
      perf/update_tflop: operations of the update on one device, in 10^12 (`roles.flops`).
      perf/roof_tflops: peak rate of a device in 10^12 per second; absent if unknown.
    """
    row_shards = shards_of("batch", TRAIN_RULES, model.mesh)
    segments = [_segments(batch, u) for u in range(len(np.asarray(batch.num_micro_U)))]
    first, stop = (np.concatenate(part) for part in list(zip(*segments, strict=True))[:2])
    num_micro = int(np.sum(batch.num_micro_U))
    _, _, R, T = batch.tokens.shape
    # A branch costs as much as its whole sequence minus the shared prefix.
    operations = training_flops(model.model, stop).sum() - training_flops(model.model, first).sum()
    metrics = {
        "perf/padding": 1 - float((stop - first).sum()) / max(1, num_micro * R * T),
        "perf/imbalance": _imbalance(
            model, segments, np.asarray(batch.num_micro_U), R, T, row_shards
        ),
        "perf/update_tflop": epochs * float(operations) / 1e12 / model.mesh.size,
    }
    roof = roof_of(model.mesh.devices.flat[0].device_kind)
    if roof is not None:
        metrics["perf/roof_tflops"] = roof.tflops(model.train.dtype)
    return metrics


def work_rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Speed of the update, from the metrics of a step and its `timing_s`; empty without an update.

    Returns:
      perf/tflops_per_device: operations of the model per second and device, in 10^12.
      perf/mfu: the same divided by the peak rate of the device (model FLOPs utilisation); absent if unknown.
    """
    seconds = sum(metrics.get(name, 0.0) for name in _UPDATES)
    if not seconds or "perf/update_tflop" not in metrics:
        return {}
    rate = metrics["perf/update_tflop"] / seconds
    rates = {"perf/tflops_per_device": rate}
    if "perf/roof_tflops" in metrics:
        rates["perf/mfu"] = rate / metrics["perf/roof_tflops"]
    return rates


def _segments(batch: PackedBatch, u: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each segment of a minibatch: (first position, position after the last, row in [M * R])."""
    used = int(np.asarray(batch.num_micro_U)[u])
    T = batch.tokens.shape[-1]
    ids, positions = (
        np.asarray(x)[u, :used].reshape(-1, T) for x in (batch.segment_ids, batch.positions)
    )
    rows, ends = np.nonzero((ids > 0) & (ids != np.pad(ids[:, 1:], ((0, 0), (0, 1)))))
    starts = np.nonzero((ids > 0) & (ids != np.pad(ids[:, :-1], ((0, 0), (1, 0)))))
    return positions[starts], positions[rows, ends] + 1, rows


def _imbalance(
    model: PackedModel,
    segments: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    num_micro_U: np.ndarray,
    R: int,
    T: int,
    row_shards: int,
) -> float:
    most = mean = 0.0
    for (first, stop, rows), num_micro in zip(segments, num_micro_U, strict=True):
        attention = 3 * (attention_flops(model.model, stop) - attention_flops(model.model, first))
        per_row = np.bincount(rows, attention, minlength=int(num_micro) * R)
        work = per_row + T * token_flops(model.model).training
        work_MS = work.reshape(int(num_micro), row_shards, -1).sum(-1)
        most += work_MS.max(-1).sum()
        mean += work_MS.mean(-1).sum()
    return most / mean if mean else 1.0
