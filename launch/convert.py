"""Converts a model between Hugging Face's safetensors and Orbax, both ways, and exports what a run trained.

    python launch/convert.py --from hf --path DIR --to orbax --out DIR2
    python launch/convert.py --from orbax --path DIR2 --to hf --out DIR3
    python launch/convert.py --from run --path runs/dapo_tiny/seed0 --to hf --out DIR

The Orbax directory is the Hugging Face directory with `params/`, our parameter tree, in the place of the
safetensors files: config.json, the tokenizer's files and generation_config.json come along. Of a run the
newest intact checkpoint is exported; adapters are merged into the weights, or with --adapter_only saved
alone in PEFT's layout. Conversion
runs on the host, which must have room for the model. What the user can fix is one line on stderr and
exit status 2; the output directory appears whole or not at all.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.model_files import check_new, copy_companions, new_directory
from jaxrl.models.huggingface.weight_export import check_shard_bytes, save_checkpoint
from jaxrl.models.huggingface.weight_loading import checkpoint_dtype, load_params
from jaxrl.trainer.export import export_run


def hf_to_orbax(path: pathlib.Path, out: pathlib.Path, *, dtype: str | None) -> None:
    """Writes the Orbax directory of a Hugging Face directory; `dtype` None keeps that of the files."""
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
    """Writes the Hugging Face directory of an Orbax directory; `dtype` None keeps that of the params."""
    check_new(out)
    config = read_config(path)
    params = _restore(path / "params", decoder_graph(config)[1], dtype)
    dtype = dtype or jax.tree.leaves(params)[0].dtype
    save_checkpoint(params, config, out, dtype=dtype, max_shard_bytes=max_shard_bytes, source=path)


def _restore(path: pathlib.Path, shapes: Any, dtype: str | None) -> Params:
    """The parameters, in `dtype` or as they were saved."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and converts; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", choices=("hf", "orbax", "run"), required=True)
    parser.add_argument("--path", type=pathlib.Path, required=True, help="directory to read")
    parser.add_argument("--to", dest="target", choices=("hf", "orbax"), required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the result; default: as it is, of a run bfloat16",
    )
    parser.add_argument(
        "--adapter_only", action="store_true", help="of a run: the adapters without the base model"
    )
    parser.add_argument(
        "--max_shard_bytes",
        type=int,
        default=5_000_000_000,
        help="size of a safetensors file (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    try:
        check_shard_bytes(args.max_shard_bytes)
        if (args.source, args.target) == ("hf", "orbax"):
            hf_to_orbax(args.path, args.out, dtype=args.dtype)
            print(f"{args.out} holds the model of {args.path}")
        elif (args.source, args.target) == ("orbax", "hf"):
            orbax_to_hf(args.path, args.out, dtype=args.dtype, max_shard_bytes=args.max_shard_bytes)
            print(f"{args.out} holds the model of {args.path}")
        elif (args.source, args.target) == ("run", "hf"):
            step = export_run(
                args.path,
                args.out,
                dtype=args.dtype or "bfloat16",
                max_shard_bytes=args.max_shard_bytes,
                adapter_only=args.adapter_only,
            )
            print(f"{args.out} holds the weights of step {step}")
        else:
            raise UserError(
                f"--from {args.source} --to {args.target} converts nothing; hf goes to orbax, orbax and "
                "run go to hf"
            )
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
