"""Converts between a Hugging Face directory and an Orbax directory.

An Orbax directory holds our parameter tree in `params/` instead of safetensors files; config.json, the files
of the tokenizer and generation_config.json are the same. Conversion runs on the host, which must have memory
for the model.
"""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.model_files import check_new, copy_companions, new_directory
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.huggingface.weight_loading import checkpoint_dtype, load_params


def hf_to_orbax(path: pathlib.Path, out: pathlib.Path, *, dtype: str | None) -> None:
    """Converts a Hugging Face directory to an Orbax directory; `dtype` None keeps the type of the files."""
    check_new(out)
    config = read_config(path)
    _, shapes, _ = decoder_graph(config)
    shardings = jax.tree.map(lambda _: _on_host(), shapes)
    params = load_params(path, config, shardings, dtype=dtype or checkpoint_dtype(path))
    with new_directory(out) as partial:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "params", params)
        shutil.copyfile(path / "config.json", partial / "config.json")
        copy_companions(path, partial)


def orbax_to_hf(
    path: pathlib.Path, out: pathlib.Path, *, dtype: str | None, max_shard_bytes: int
) -> None:
    """Converts an Orbax directory to a Hugging Face directory; `dtype` None keeps the stored type."""
    check_new(out)
    config = read_config(path)
    params = _restore(path / "params", decoder_graph(config)[1], dtype)
    dtype = dtype or jax.tree.leaves(params)[0].dtype
    save_checkpoint(params, config, out, dtype=dtype, max_shard_bytes=max_shard_bytes, source=path)


def _restore(path: pathlib.Path, shapes: Any, dtype: str | None) -> Params:
    """Restores the parameters in `dtype`; None keeps the stored type."""
    if not path.is_dir():
        raise UserError(
            f"{path} does not exist; name a directory that this command wrote with --to orbax"
        )

    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path.absolute()).item_metadata
        if metadata is None:
            raise UserError(
                f"{path} holds no Orbax checkpoint; name a directory that this command wrote with --to orbax"
            )
        saved = metadata.tree
        if _shapes_by_name(saved) != _shapes_by_name(shapes):
            raise UserError(
                f"{path} does not hold the model that {path.parent / 'config.json'} describes; "
                "convert both again from their source"
            )
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, jnp.dtype(dtype or leaf.dtype), sharding=_on_host()
            ),
            saved,
        )
        return checkpointer.restore(path.absolute(), like)


def _shapes_by_name(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}


def _on_host() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices("cpu")[0])
