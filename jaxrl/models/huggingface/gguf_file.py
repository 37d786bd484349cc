"""Converts a GGUF file (llama.cpp) to a Hugging Face directory, without torch and without Transformers.

    GGUF                        Hugging Face directory
    qwen2.* keys                config.json                                          gguf_config.py
    blk.0.attn_q.weight, ...    model.safetensors, dequantised to float32
    tokenizer.ggml.* keys       tokenizer.json, tokenizer_config.json, generation_config.json
                                                                                     gguf_tokenizer.py
    tokenizer.chat_template     chat_template.jinja

llama.cpp stores some tensors in another way: rows of q and k of Llama lie in another order, norms of Gemma
have 1 added, and the experts of a layer are one tensor.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import safetensors.numpy

from jaxrl.errors import UserError
from jaxrl.files import check_file
from jaxrl.models.huggingface.config_json import parse_config
from jaxrl.models.huggingface.gguf_config import REMEDY, architecture_of, config_values
from jaxrl.models.huggingface.model_files import SINGLE_FILE, new_directory, write_json
from jaxrl.models.huggingface.weight_table import weight_table
from jaxrl.models.model_config import ModelConfig

try:
    import gguf

    from jaxrl.models.huggingface.gguf_tokenizer import write_tokenizer
except ModuleNotFoundError as error:  # so whoever needs this file imports it late
    raise UserError(
        "GGUF files are read with the package gguf, which is not installed; run pip install gguf"
    ) from error

_ABSENT = "name a .gguf file"
_ROPE_DIVISORS = "rope_freqs.weight"
_SUFFIXES = (".weight", ".bias")
# A model of several files names their number here.
_SPLIT_COUNT = "split.count"


def gguf_to_hf(path: str | pathlib.Path, out: str | pathlib.Path) -> None:
    """Writes a directory that jaxrl and Transformers load. It appears complete or not at all.

    Args:
      path: the GGUF file.
      out: the new directory; must not exist yet.

    Raises:
      UserError: the file is not readable, holds a model that is not covered, or `out` exists.
    """
    check_file(path, absent=_ABSENT)
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(
            f"{path} is no complete GGUF file ({error}); copy the published file again"
        ) from error
    keys = {name: field.contents() for name, field in reader.fields.items()}
    architecture = architecture_of(keys, str(path))
    if keys.get(_SPLIT_COUNT, 1) != 1:
        raise UserError(
            f"{path} is one of {keys[_SPLIT_COUNT]} files of a model; merge them with "
            "llama-gguf-split --merge"
        )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    find = functools.partial(_tensor_named, path, stored)
    values = config_values(
        keys,
        str(path),
        vocab_size=int(find("token_embd.weight").shape[-1]),  # GGUF lists dimensions backwards
        tied="output.weight" not in stored,
        rope_divisors=_expanded(path, find(_ROPE_DIVISORS)) if _ROPE_DIVISORS in stored else None,
    )
    config = parse_config(values, origin=str(path))
    names = _names(keys["general.architecture"], config)
    if unknown := sorted(stored.keys() - names.values() - {_ROPE_DIVISORS}):
        raise UserError(
            f"{path} has the tensor {unknown[0]}, which {architecture.language_model} does not have; "
            f"{REMEDY}"
        )
    with new_directory(out) as partial:
        write_json(partial / "config.json", values)
        write_tokenizer(keys, partial, str(path))
        # Experts of a layer follow each other, so their common tensor is expanded once.
        values_of = functools.lru_cache(maxsize=1)(lambda name: _expanded(path, find(name)))
        in_pairs = keys["general.architecture"] == "llama"
        tensors = dict(_tensors(path, names, values_of, config, in_pairs=in_pairs))
        safetensors.numpy.save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
        # safetensors writes files that only the owner can read. Give them the usual permissions.
        (partial / SINGLE_FILE).chmod((partial / "config.json").stat().st_mode)


def _tensor_named(
    path: str | pathlib.Path, stored: Mapping[str, gguf.ReaderTensor], name: str
) -> gguf.ReaderTensor:
    if name not in stored:
        raise UserError(f"{path} has no tensor {name}; copy the published file again")
    return stored[name]


def _expanded(path: str | pathlib.Path, tensor: gguf.ReaderTensor) -> np.ndarray:
    """The values of a tensor in float32."""
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UserError(
            f"{path} has {tensor.name} as {tensor.tensor_type.name}, which the package gguf cannot expand; "
            "take a file of another type, such as Q8_0"
        ) from error
    return values.astype(np.float32, copy=False)


def _names(architecture: str, config: ModelConfig) -> dict[str, str]:
    """Names in the GGUF file by the names of `weight_table`; experts of a layer share one."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    lookup = gguf.get_tensor_name_map(arch, config.num_layers)
    names = {}
    for row in weight_table(config):
        for position in row.positions():
            name = row.tensor_name(position)
            of_layer = row.name.replace("{E}.", "").format(L=position[0] if position else "")
            found = lookup.get_name(of_layer, try_suffixes=_SUFFIXES)
            assert found is not None, f"the package gguf knows no name of {name}"
            names[name] = found
    return names


def _tensors(
    path: str | pathlib.Path,
    names: Mapping[str, str],
    values_of: Callable[[str], np.ndarray],
    config: ModelConfig,
    *,
    in_pairs: bool,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor of the Hugging Face checkpoint, by name, in float32.

    Args:
      path: the GGUF file, for messages.
      names: names in the GGUF file.
      values_of: returns the values of a tensor of the GGUF file.
      config: the shape.
      in_pairs: True if rows of q and k that are rotated together are neighbours.
    """
    for row in weight_table(config):
        for position in row.positions():
            name = row.tensor_name(position)
            values = values_of(names[name])
            shape = row.tensor_shape
            if "E" in row.stacked:
                shape = (config.num_experts, *shape)
            if values.shape != shape:
                raise UserError(
                    f"{path} has {names[name]} of shape {values.shape} and not {shape}; copy the published "
                    "file again"
                )
            if "E" in row.stacked:
                values = values[position[1]]
            if config.zero_centered_norms and name.endswith("norm.weight"):
                values = values - 1
            if in_pairs and name.endswith(("q_proj.weight", "k_proj.weight")):
                values = _halves_apart(values, config.head_dim)
            yield name, np.ascontiguousarray(values)


def _halves_apart(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows of q or k, [heads * H, D]: llama.cpp rotates neighbours, Transformers the two halves."""
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)
