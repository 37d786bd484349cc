"""Exports weights to a Hugging Face directory, or adapters to a PEFT directory; safetensors only.

For each tensor of the table in `weight_table.py`, the shards are fetched from their devices and assembled on
the host. The host holds one file at a time.

Not covered: quantised weights, export from several processes (save with Orbax and convert afterwards).
"""

from __future__ import annotations

import functools
import math
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.models.huggingface.config_json import (
    adapter_config_json,
    config_json,
    fused_tensors,
    read_config_json,
)
from jaxrl.models.huggingface.model_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    copy_companions,
    new_directory,
    write_json,
)
from jaxrl.models.huggingface.weight_table import (
    WeightRule,
    adapter_table,
    bounds_of,
    leaf_at,
    offset_of,
    tensors_of,
    weight_table,
)
from jaxrl.models.model_config import ModelConfig


def save_checkpoint(
    params: Params,
    config: ModelConfig,
    out: str | pathlib.Path,
    *,
    dtype: Any,
    max_shard_bytes: int = 5_000_000_000,
    source: str | pathlib.Path | None = None,
) -> None:
    """Writes a directory that Transformers loads unchanged. It appears complete or not at all.

    Args:
      params: weights on devices of this process, with adapters already merged (`lora.merge`).
      config: shape of the model. Padding rows of the vocabulary above `num_tokens` are written too.
      out: the new directory; must not exist yet.
      dtype: type of the stored tensors, bfloat16 or float32; `exact` ones are float32.
      max_shard_bytes: largest size of a file; a file with a single tensor may be larger.
      source: directory of the model that training started from. Its tokenizer files are copied, and its
        config.json provides values that `config` does not have, such as ids of special tokens. None for none.

    Raises:
      UserError: no architecture of Transformers has this shape, `out` exists, the dtype is not supported, or
        the weights are spread over several processes.
    """
    dtype = _export_dtype(dtype)
    base = None
    if source is not None and (pathlib.Path(source) / "config.json").exists():
        base = read_config_json(source)
    values = config_json(config, dtype=dtype.name, base=base)
    table = weight_table(config, fused=fused_tensors(values))
    num_bytes = {
        name: math.prod(row.tensor_shape) * _type_of(row, dtype).itemsize
        for name, [(row, _), *_] in tensors_of(table).items()
    }
    files = _into_files(num_bytes, max_shard_bytes)
    with new_directory(out) as partial:
        # First, because the weights take their permissions from it.
        write_json(partial / "config.json", values)
        _write_files(params, table, files, partial, dtype)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(num_bytes.values())},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            write_json(partial / INDEX_FILE, index)
        if source is not None:
            copy_companions(pathlib.Path(source), partial)


def table_of_adapter(config: ModelConfig, base: str) -> tuple[WeightRule, ...]:
    """The tensors that `save_adapter` writes; raises UserError if PEFT has no such adapters for a model."""
    if (pathlib.Path(base) / "config.json").exists() and fused_tensors(read_config_json(base)):
        raise UserError(
            f"PEFT has one adapter for q, k and v of {base}, and here each has its own; merge the "
            "adapters into the model instead (without --adapter_only)"
        )
    table = adapter_table(config)
    if of_experts := {row.path.split(".")[-2] for row in table if "E" in row.stacked}:
        # Transformers 5 has one tensor of all experts, onto which PEFT puts such adapters wrongly or not at
        # all, by family.
        raise UserError(
            "PEFT has no adapters for single experts of a model of Transformers 5; merge the adapters into "
            f"the model (without --adapter_only), or leave {', '.join(sorted(of_experts))} out of "
            "model.lora.targets"
        )
    return table


def save_adapter(
    params: Params, config: ModelConfig, out: str | pathlib.Path, *, dtype: Any, base: str
) -> None:
    """Writes a directory that PEFT loads onto the base model: only the adapters, and their config.

    Args:
      params: weights with adapters, on devices of this process.
      config: shape of the model, with `config.lora`.
      out: the new directory; must not exist yet.
      dtype: type of the stored tensors, bfloat16 or float32.
      base: directory or hub name of the base model, for PEFT.

    Raises:
      UserError: `out` exists, the dtype is not supported, the model has no adapters, or the weights are
        spread over several processes.
    """
    dtype = _export_dtype(dtype)
    if not config.lora.rank:
        raise UserError(
            "this model has no adapters to save (lora.rank is 0); save the whole of it instead"
        )
    table = table_of_adapter(config, base)
    with new_directory(out) as partial:
        # First, because the weights take their permissions from it.
        write_json(partial / ADAPTER_CONFIG_FILE, adapter_config_json(config, base=base))
        names = list(tensors_of(table))
        _write_files(params, table, {ADAPTER_FILE: names}, partial, dtype)


def _export_dtype(dtype: Any) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise UserError(f"dtype {dtype.name} cannot be exported; use bfloat16 or float32")
    return dtype


def _type_of(row: WeightRule, dtype: np.dtype) -> np.dtype:
    """The type of a tensor in a file."""
    return np.dtype(np.float32) if row.exact else dtype


def _write_files(
    params: Params,
    table: Iterable[WeightRule],
    files: Mapping[str, Sequence[str]],
    directory: pathlib.Path,
    dtype: np.dtype,
) -> None:
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        raise UserError(
            "these weights are spread over several processes, and export runs in one; save a "
            "checkpoint and convert it with jaxrl convert"
        )
    sources = tensors_of(table)
    # One file at a time, so that the host need not hold the model.
    for file, names in files.items():
        tensors = {}
        for name in names:
            first, _ = sources[name][0]
            of_file = _type_of(first, dtype)
            tensors[name] = np.empty(first.tensor_shape, of_file)
            for row, position in sources[name]:
                leaf, out = leaf_at(params, row.path), row.own_part(tensors[name])
                # Only the shards that hold a part of this tensor, each part once.
                for shard in leaf.addressable_shards:
                    bounds = bounds_of(shard.index, leaf.shape)
                    stacked = bounds[: len(row.stacked)]
                    here = zip(position, stacked, strict=True)
                    if shard.replica_id or not all(begin <= at < end for at, (begin, end) in here):
                        continue
                    # On the device of the shard: a program takes no arrays of different devices.
                    offset = jax.device_put(offset_of(position, stacked), shard.device)
                    back = tuple(row.order.index(i) for i in range(len(row.order)))
                    part = jax.device_get(_extract(shard.data, offset, order=back, dtype=of_file))
                    place = row.in_tensor(dict(zip(row.ours, bounds, strict=True)))
                    place = tuple(slice(*ends) for ends in place.values())
                    out[place] = part.reshape(out[place].shape)
        # Transformers refuses files without a framework name here.
        safetensors.numpy.save_file(tensors, directory / file, metadata={"format": "pt"})
        # safetensors writes files that only the owner can read. Give them the usual permissions.
        shutil.copymode(next(directory.glob("*.json")), directory / file)


def _into_files(num_bytes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """Distributes tensors over files in order, as many per file as fit; names of tensors by file."""
    groups: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in num_bytes.items():
        if size > room and groups[-1]:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": names
        for i, names in enumerate(groups, start=1)
    }


# The offset is an argument, so that all layers share a program.
@functools.partial(jax.jit, static_argnames=("order", "dtype"))
def _extract(
    shard: jax.Array, offset: jax.Array, *, order: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """Extracts the part of one tensor from a shard, in the checkpoint's order of dimensions."""
    for i in range(offset.shape[0]):
        shard = jax.lax.dynamic_index_in_dim(shard, offset[i], 0, keepdims=False)
    return shard.transpose(order).astype(dtype)
