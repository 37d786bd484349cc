"""Loads the weights of a Hugging Face directory into our parameter tree; safetensors only.

A table (`weight_table.py`, which also explains the letters of dimensions) maps the tensors of a checkpoint to
our tree. Loading, and export in `weight_export.py`, follow it.

The host never holds more than one tensor. A leaf that stacks all layers can be larger than a whole file, so
it is assembled on the devices. The shard of each device starts as zeros. Layer by layer, the part of the
tensor that belongs to the shard is read from the file, sent, and written to its place in our order of
dimensions.

    model.layers.0.self_attn.q_proj.weight --slice--> device 0: layers.attention.q.weight [L, D/2, Q, H]
                                 [QH, D]   --slice--> device 1: layers.attention.q.weight [L, D/2, Q, H]

Not covered: pickled weights, quantised weights but MXFP4, which is widened as it is read.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from flax import traverse_util
from jax.sharding import NamedSharding, Sharding

from jaxrl.errors import UserError
from jaxrl.files import open_file, read_json_object
from jaxrl.hub.hub_names import fetch_hint
from jaxrl.models.decoder import Params
from jaxrl.models.huggingface.model_files import ADAPTER_FILE, INDEX_FILE, SINGLE_FILE
from jaxrl.models.huggingface.weight_table import (
    FUSED,
    Bounds,
    WeightRule,
    adapter_table,
    bounds_of,
    leaf_at,
    offset_of,
    tensors_of,
    weight_table,
)
from jaxrl.models.model_config import ModelConfig

logger = logging.getLogger(__name__)

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

# Buffers that old versions of Transformers stored, which follow from config.json, and Qwen's layer that
# predicts the token after the next. Both are ignored.
_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|mtp\..+")

# Prefixes of the text model in a checkpoint with images, and the names that Transformers gives it alone.
# Transformers writes "language_model.model." or "model.language_model.", by version.
_OF_TEXT = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)

# Tensors beside the text model, and Qwen's layer that predicts the token after the next.
_OF_OTHER_SENSES = re.compile(
    r"(model\.)?(?P<name>\w*(vision|visual|audio|image|multi_modal)\w*|mtp)\."
)

_MAX_NAMES_LISTED = 4

# Values of two tensors that are compared in one step.
_COMPARED_AT_ONCE = 1 << 22

# Largest size of all headers of a directory together. The 92,000 tensors of DeepSeek-V3 have headers of 12
# MB. safetensors itself would read up to 100 MB, which takes 4 s and a gigabyte of memory.
_MAX_HEADER_BYTES = 1 << 25


def load_params(
    directory: str | pathlib.Path, config: ModelConfig, shardings: Any, *, dtype: Any = jnp.float32
) -> Params:
    """Loads the weights of a Hugging Face directory directly into their shards.

    Each device gets only the slices that it needs. The host holds one tensor at a time, of which it reads the
    rows that its devices need.

    Args:
      directory: directory with model.safetensors, or with several files and model.safetensors.index.json.
      config: the shape; see `config_json.read_config`.
      shardings: tree of the parameters with a Sharding at each leaf, or a list of those of the layers.
      dtype: type of the result; values are rounded to it on the devices, but for `exact` ones.

    Raises:
      UserError: a file is missing, damaged or changed meanwhile, or a tensor is missing, unexpected, or of
        another shape or type than in `config`; the message names it. All headers are checked before any data
        is read.
    """
    stored = check_params(directory, config)
    return _load_table(stored, _table_of(stored, config), shardings, jnp.dtype(dtype))


def _table_of(stored: Mapping[str, Stored], config: ModelConfig) -> tuple[WeightRule, ...]:
    """The table of a checkpoint, by the names of its tensors."""
    fused = [part for part in FUSED if any(f".{part}" in name for name in stored)]
    return weight_table(config, fused=fused)


def check_params(directory: str | pathlib.Path, config: ModelConfig) -> dict[str, Stored]:
    """Reads the headers of a directory's files and checks them against `config`; reads no data.

    Raises:
      UserError: as `load_params`.
    """
    directory = pathlib.Path(directory)
    stored = _all_headers(directory)
    if any(name.startswith(prefix) for name in stored for prefix, _ in _OF_TEXT[:2]):
        stored = _text_tensors(stored, directory)
    stored = _with_mxfp4(stored)
    if config.sharing_layers:
        # Published files have these tensors, and no layer uses them.
        last = range(config.num_layers - config.sharing_layers, config.num_layers)
        for i, name in itertools.product(last, ("k_proj", "v_proj", "k_norm")):
            stored.pop(f"model.layers.{i}.self_attn.{name}.weight", None)
    if config.tie_embeddings:
        _tie(stored)
    _check_headers(stored, _table_of(stored, config), directory)
    return stored


def _text_tensors(stored: Mapping[str, Stored], directory: pathlib.Path) -> dict[str, Stored]:
    """The tensors of a model with images, those of its text model by the names they have alone."""
    of_text: dict[str, Stored] = {}
    others = set()
    for name, tensor in stored.items():
        prefix, ours = next((pair for pair in _OF_TEXT if name.startswith(pair[0])), ("", ""))
        if not prefix and (part := _OF_OTHER_SENSES.match(name)):
            others.add(part["name"])
            continue
        alone = ours + name.removeprefix(prefix)
        if alone in of_text:
            raise UserError(
                f"{directory} has both {of_text[alone].name} and {name}; copy the files of one model again"
            )
        of_text[alone] = tensor
    logger.info("%s: the text model is used; %s is not read", directory, _listed(sorted(others)))
    return of_text


def _tie(stored: dict[str, Stored]) -> None:
    """Leaves one of two tensors that a tied model shares, as Transformers does if they are equal.

    Of different ones Transformers 4 and vLLM use the embedding alone, and Transformers 5 both. The files do
    not say which of the two models was trained.
    """
    head = stored.get("lm_head.weight")
    if head is None:
        return
    embedding = stored.setdefault("model.embed_tokens.weight", head)
    if not _equal(embedding, head):
        raise UserError(
            f"{head.file} has a {head.name} that differs from {embedding.name}, but config.json says "
            "tie_word_embeddings: set that to false to use both, or remove the tensor to use the embedding"
        )
    del stored["lm_head.weight"]


# A run checks the files of a model more than once.
@functools.lru_cache(maxsize=64)
def _equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors have the same values; reads both, a few rows at a time, up to a difference."""
    if one.shape != other.shape:
        return False
    if (one.file, one.begin) == (other.file, other.begin):
        return True
    if not {one.dtype, other.dtype} <= _FLOATS:
        return False
    step = max(1, _COMPARED_AT_ONCE // max(1, math.prod(one.shape[1:])))
    rows = [slice(i, min(i + step, one.shape[0])) for i in range(0, one.shape[0], step)]
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open_file(x.file, absent=_CHANGED)) for x in (one, other)]
        for part in rows:
            a, b = (
                _TensorInFile(file, x)[part,] for file, x in zip(files, (one, other), strict=True)
            )
            same = a.dtype == b.dtype and a.tobytes() == b.tobytes()
            # Every type is exact in float64.
            if not (
                same or np.array_equal(*(x.astype(np.float64) for x in (a, b)), equal_nan=True)
            ):
                return False
        for file, x in zip(files, (one, other), strict=True):
            _check_unchanged(file, x)
    return True


def load_adapter(directory: str | pathlib.Path, config: ModelConfig, shardings: Any) -> Params:
    """Loads the adapters of a PEFT directory (adapter_model.safetensors) directly into their shards.

    Args:
      directory: a directory written by `save_adapter` or PEFT's save_pretrained.
      config: the shape; `config.lora` describes the adapters.
      shardings: tree of the parameters with a Sharding at each leaf.

    Returns:
      A tree with the adapters only, in float32, for `lora.join`.

    Raises:
      UserError: as `load_params`.
    """
    stored = check_adapter(directory, config)
    return _load_table(stored, adapter_table(config), shardings, jnp.dtype(jnp.float32))


def check_adapter(directory: str | pathlib.Path, config: ModelConfig) -> dict[str, Stored]:
    """Reads the header of a PEFT directory's file and checks it against `config`.

    Raises:
      UserError: as `load_adapter`.
    """
    path = pathlib.Path(directory) / ADAPTER_FILE
    stored = _read_headers([path], absent="name a directory that PEFT or jaxrl saved")[path.name]
    _check_headers(stored, adapter_table(config), path.parent)
    return stored


# Headers


@dataclasses.dataclass(frozen=True)
class Stored:
    """The header entry of one tensor.

    Attributes:
      name: name of the tensor.
      file: path of its file.
      shape: shape of the tensor.
      dtype: its type in the notation of safetensors ("BF16").
      begin: offset of its first byte in the file.
      version: what tells the file from later ones of that path, from `_version`.
      parts: blocks and scales, if the tensor is in MXFP4.
    """

    name: str
    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str
    begin: int
    version: tuple[int, ...]
    parts: tuple[Stored, ...] = ()


def _with_mxfp4(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors with one entry in place of the blocks and scales of MXFP4."""
    found = dict(stored)
    for name, blocks in stored.items():
        whole = name.removesuffix("_blocks")
        scales = stored.get(f"{whole}_scales")
        if whole == name or scales is None:
            continue
        # Blocks [E, N, K / 32, 16] and scales [E, N, K / 32] stand for [E, K, N].
        fits = blocks.shape == (*scales.shape, _MXFP4_BLOCK // 2) and len(scales.shape) == 3
        if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise UserError(
                f"{name} in {blocks.file} has shape {list(blocks.shape)} and type {blocks.dtype}, its scales "
                f"{list(scales.shape)} and {scales.dtype}, which is not MXFP4; copy the published files again"
            )
        del found[name], found[scales.name]
        E, N, num_blocks = scales.shape
        if whole in found:
            raise UserError(
                f"{blocks.file} has {name}, and {found[whole].file} has {whole}, which are the same weights; "
                "copy the published files again"
            )
        shape = (E, num_blocks * _MXFP4_BLOCK, N)
        parts = (blocks, scales)
        found[whole] = dataclasses.replace(
            blocks, name=whole, shape=shape, dtype="MXFP4", parts=parts
        )
    return found


def _all_headers(directory: pathlib.Path) -> dict[str, Stored]:
    """All tensors of a directory, by name."""
    if (directory / SINGLE_FILE).exists():
        return _read_headers([directory / SINGLE_FILE])[SINGLE_FILE]
    path = directory / INDEX_FILE
    if not path.exists():
        found = sorted(path.name for path in directory.glob("*"))
        raise UserError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; it has {_listed(found)}; name a "
            "directory with safetensors, since pickled weights can run any program when they are read"
            f"{fetch_hint(str(directory))}"
        )
    index = read_json_object(path, absent="copy the published file")
    file_of = index.get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
        raise UserError(f"{path} has no weight_map of names; copy the published file again")
    for file in file_of.values():
        # An index is untrusted: a name must not point outside of the directory.
        if pathlib.PurePath(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{path} names {file!r}, which is no safetensors file beside it; copy the published file "
                "again"
            )
    files = [directory / file for file in sorted(set(file_of.values()))]
    headers = _read_headers(files, absent=f"{INDEX_FILE} names it; copy the missing file")
    for name, file in file_of.items():
        if name not in headers[file]:
            raise UserError(
                f"{directory / file} has no tensor {name}, but {INDEX_FILE} says so; copy both files again, "
                "they are of different models or versions"
            )
    tensors: dict[str, Stored] = {}
    for tensor in itertools.chain(*(headers[file.name].values() for file in files)):
        first = tensors.setdefault(tensor.name, tensor)
        if not _equal(first, tensor):
            raise UserError(
                f"{first.file} and {tensor.file} have different tensors {tensor.name}; copy the files of one "
                "model again"
            )
    return tensors


def _read_headers(
    paths: Sequence[pathlib.Path], *, absent: str = "copy it again"
) -> dict[str, dict[str, Stored]]:
    """The tensors of each file, by the names of the files."""
    total = 0
    for path in paths:
        with open_file(path, absent=absent) as file:
            # Each file begins with the size of its header. Ignore a size that exceeds the file: the file is
            # truncated, and safetensors will refuse it.
            size = int.from_bytes(file.read(8), "little")
            total += size if size <= os.fstat(file.fileno()).st_size else 0
        if total > _MAX_HEADER_BYTES:
            raise UserError(
                f"up to {path} there are headers of {total:,} bytes; at most {_MAX_HEADER_BYTES:,} are read, "
                "several times as much as the largest published models have: copy the files again"
            )
    headers: dict[str, dict[str, Stored]] = {}
    for path in paths:
        try:
            # It checks types, sizes and offsets, but does not tell the offsets.
            with safetensors.safe_open(path, "np"), open_file(path, absent=absent) as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
                header.pop("__metadata__", None)
                headers[path.name] = {
                    name: Stored(
                        name,
                        path,
                        tuple(entry["shape"]),
                        entry["dtype"],
                        8 + size + entry["data_offsets"][0],
                        _version(file),
                    )
                    for name, entry in header.items()
                }
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"{path} is cut short or no safetensors file ({error}); copy it again, it may also be a Git "
                "LFS pointer"
            ) from error
    return headers


def _check_headers(
    stored: Mapping[str, Stored], table: Iterable[WeightRule], directory: pathlib.Path
) -> None:
    """Raises UserError for tensors that are missing, unexpected or malformed."""
    shapes = {name: row.tensor_shape for name, [(row, _), *_] in tensors_of(table).items()}
    if missing := [name for name in shapes if name not in stored]:
        raise UserError(
            f"{directory} lacks {_listed(missing)}, which the model of its config.json has; copy the files "
            "again, or correct config.json"
        )
    # Layers that predict the token after the next, numbered behind the last layer. Nothing else has this.
    further = [
        name.removesuffix("eh_proj.weight") for name in stored if name.endswith(".eh_proj.weight")
    ]
    further = tuple(prefix for prefix in further if not any(n.startswith(prefix) for n in shapes))
    unexpected = [
        name
        for name in stored
        if not (name in shapes or name.startswith(further) or _HARMLESS.fullmatch(name))
    ]
    if unexpected:
        raise UserError(
            f"{directory} has {_listed(unexpected)} in {stored[unexpected[0]].file.name}, which the model of "
            "its config.json does not have; the files are of another model, or config.json is"
        )
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise UserError(
                f"{name} in {tensor.file} has shape {list(tensor.shape)}, but config.json says "
                f"{list(shape)}; use the files of one model"
            )
        if tensor.dtype not in _FLOATS and not tensor.parts:
            raise UserError(
                f"{name} in {tensor.file} has type {tensor.dtype}, but weights must be one of "
                f"{', '.join(sorted(_FLOATS))}; use the checkpoint that is not quantised"
            )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES_LISTED
    shown = ", ".join(names[:_MAX_NAMES_LISTED]) or "nothing"
    return f"{shown} and {more} more" if more > 0 else shown


# Loading


def _load_table(
    stored: Mapping[str, Stored], table: Iterable[WeightRule], shardings: Any, dtype: np.dtype
) -> Params:
    with contextlib.ExitStack() as opened:
        files = {
            part.file: opened.enter_context(open_file(part.file, absent=_CHANGED, buffering=0))
            for whole in stored.values()
            for part in whole.parts or (whole,)
        }

        def tensor_of(name: str) -> _TensorInFile | Mxfp4Tensor:
            whole = stored[name]
            parts = [_TensorInFile(files[part.file], part) for part in whole.parts or (whole,)]
            return Mxfp4Tensor(*parts) if whole.parts else parts[0]

        leaves = {
            row.path: _load_leaf(
                tensor_of,
                row,
                leaf_at(shardings, row.path),
                np.dtype(np.float32) if row.exact else dtype,
            )
            for row in table
        }
        for tensor in stored.values():
            _check_unchanged(files[tensor.file], tensor)
    return traverse_util.unflatten_dict(leaves, sep=".")


# Files are read, not mapped into memory: one that another program cuts short would end this process (SIGBUS).
_CHANGED = "another program changes it: start again when that has ended"
_NUMPY = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    "U8": np.uint8,
}


def _version(file: IO[bytes]) -> tuple[int, ...]:
    """What changes if a file is replaced or written to."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_unchanged(file: IO[bytes], tensor: Stored) -> None:
    """Raises UserError if an open file is not the one whose header has been read."""
    if _version(file) != tensor.version:
        raise UserError(f"{tensor.file} has changed while it was read; {_CHANGED}")


class _TensorInFile:
    """A tensor in an open file, of which ranges are read when it is indexed."""

    def __init__(self, file: IO[bytes], stored: Stored):
        self._file, self._stored = file, stored
        self._blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def __getitem__(self, at: tuple[slice, ...]) -> np.ndarray:
        """The values within ranges of the first dimensions.

        Rows are read whole and kept: other devices need other columns of them.
        """
        shape = self._stored.shape
        ends = [part.indices(size)[:2] for part, size in zip(at, shape, strict=False)]
        # Of several matrices, a part of each.
        split = 2 if len(ends) > 2 and ends[1] != (0, shape[1]) else 1
        rows = tuple(ends[:split])
        if rows not in self._blocks:
            self._blocks[rows] = self._read(rows)
        return self._blocks[rows][(slice(None),) * split + at[split:]]

    def _read(self, rows: Sequence[tuple[int, int]]) -> np.ndarray:
        stored, dtype = self._stored, np.dtype(_NUMPY[self._stored.dtype])
        whole = stored.shape[len(rows) :]
        block = np.empty([*(end - begin for begin, end in rows), *whole], dtype)
        inner, (begin, end) = math.prod(whole) * dtype.itemsize, rows[-1]
        matrices = range(*rows[0]) if len(rows) > 1 else (0,)
        num_bytes = (end - begin) * inner
        rest = block.reshape(-1).view(np.uint8).data
        for i in matrices:
            part, rest = rest[:num_bytes], rest[num_bytes:]
            self._fill(part, stored.begin + (i * stored.shape[len(rows) - 1] + begin) * inner)
        return block

    def _fill(self, part: memoryview, offset: int) -> None:
        while part:
            try:
                # Linux reads 2 GiB at most in one call.
                count = os.preadv(self._file.fileno(), [part], offset)
            except OSError as error:
                raise UserError(
                    f"{self._stored.file} cannot be read ({error.strerror}); copy it again"
                ) from error
            if not count:
                raise UserError(f"{self._stored.file} has been cut short; {_CHANGED}")
            part, offset = part[count:], offset + count


def _load_leaf(
    tensor_of: Callable[[str], Any],
    row: WeightRule,
    sharding: Sharding | list[Sharding],
    dtype: np.dtype,
    layer: int | None = None,
) -> Any:
    """Loads a leaf, or a list with that of each layer, or that of one layer."""
    if isinstance(sharding, list):
        return [_load_leaf(tensor_of, row, one, dtype, i) for i, one in enumerate(sharding)]
    shape, num_stacked, own = row.leaf_shape, len(row.stacked), ()
    if layer is not None:
        shape, own = shape[1:], ((layer, layer + 1),)
    elif num_stacked and isinstance(sharding, NamedSharding) and sharding.spec:
        # As many layers as the stages of a pipeline hold; further ones stay 0.
        axes = sharding.spec[0] or ()
        axes = [axes] if isinstance(axes, str) else axes
        stages = math.prod(sharding.mesh.shape[axis] for axis in axes)
        shape = (-(-shape[0] // stages) * stages, *shape[1:])
    # Read once for all devices that hold the same shard.
    devices_of: dict[Bounds, list[Any]] = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of[*own, *bounds_of(index, shape)].append(device)
    shards = {
        device: jnp.zeros([end - begin for begin, end in bounds], dtype, device=device)
        for bounds, devices in devices_of.items()
        for device in devices
    }
    for position in row.positions():
        tensor = tensor_of(row.tensor_name(position))
        for bounds, devices in devices_of.items():
            stacked = bounds[:num_stacked]
            if not all(
                begin <= at < end for at, (begin, end) in zip(position, stacked, strict=True)
            ):
                continue
            piece = _read_piece(tensor, row, dict(zip(row.ours, bounds, strict=True)))
            offset = offset_of(position, stacked)
            for device in devices:
                on_device = jax.device_put((piece, offset), device)
                shards[device] = _insert(shards[device], *on_device, order=row.order)
        # Wait; otherwise parts of many tensors would queue up in host memory.
        jax.block_until_ready([*shards.values()])
    arrays = [x.reshape(x.shape[len(own) :]) for x in shards.values()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def _read_piece(tensor: Any, row: WeightRule, bounds: Mapping[str, tuple[int, int]]) -> np.ndarray:
    """Reads the part of a tensor within `bounds` of our leaf, and splits its merged dimensions."""
    ranges, shape, rest, own = [], [], [], slice(None)
    at = row.in_tensor(bounds)
    for first, *others in row.stored.split():
        width = math.prod(map(row.size_in_tensor, others))
        begin, end = at[first]
        offset, whole = row.part if row.part and not ranges else (0, width)
        if row.grouped and not ranges:
            # Read the groups whole.
            own, offset, width = slice(offset, offset + width), 0, whole
        ranges.append(slice(offset + begin * width, offset + end * width))
        shape += [end - begin, *map(row.size_in_tensor, others)]
        rest += [slice(None), *(slice(*at[c]) for c in others)]
    piece = tensor[tuple(ranges)]
    if row.grouped:
        piece = piece.reshape(shape[0], -1, *piece.shape[1:])[:, own]
    piece = piece.reshape(shape)[tuple(rest)]
    return piece.reshape([end - begin for c, (begin, end) in at.items() if c in row.ours])


@functools.partial(jax.jit, static_argnames="order", donate_argnums=0)
def _insert(
    shard: jax.Array, piece: jax.Array, offset: jax.Array, *, order: tuple[int, ...]
) -> jax.Array:
    """Writes the part of one tensor to its place in a shard."""
    stacked = shard.ndim - piece.ndim
    piece = piece.transpose(order).astype(shard.dtype)
    begin = [*(offset[i] for i in range(stacked)), *[jnp.int32(0)] * piece.ndim]
    return jax.lax.dynamic_update_slice(shard, piece.reshape(*[1] * stacked, *piece.shape), begin)


# MXFP4

_MXFP4_BLOCK = 32
_MXFP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_VALUES = np.array([*_MXFP4_POSITIVE, *(-value for value in _MXFP4_POSITIVE)], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """A tensor in MXFP4, of which ranges are read when it is indexed. gpt-oss is published so:

    NAME_blocks   uint8 [E, N, K / 32, 16]   two values of 4 bits a byte, the first in the low half
    NAME_scales   uint8 [E, N, K / 32]       exponent of the block's power of two, plus 127
    NAME          bfloat16 [E, K, N]         what they stand for: input dimension first

    Attributes:
      blocks, scales: the two stored tensors.
    """

    blocks: Any
    scales: Any

    def __getitem__(self, at: tuple[slice, slice, slice]) -> np.ndarray:
        """The values at ranges of [E, K, N], bfloat16. All of them are exact."""
        experts, ins, outs = at
        first, last = ins.start // _MXFP4_BLOCK, -(-ins.stop // _MXFP4_BLOCK)
        packed = self.blocks[experts, outs, first:last]
        exponents = self.scales[experts, outs, first:last].astype(np.int32) - 127
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(
            *packed.shape[:-1], _MXFP4_BLOCK
        )
        values = np.ldexp(_MXFP4_VALUES[codes], exponents[..., None]).astype(ml_dtypes.bfloat16)
        values = values.reshape(*values.shape[:2], -1)
        begin = ins.start - first * _MXFP4_BLOCK
        return values[..., begin : begin + ins.stop - ins.start].swapaxes(1, 2)
