"""Converts between Hugging Face's safetensors and Orbax, reads GGUF, and exports what a run trained.

    python launch/convert.py --from hf --path DIR --to orbax --out DIR2
    python launch/convert.py --from orbax --path DIR2 --to hf --out DIR3
    python launch/convert.py --from gguf --path model.gguf --to hf --out DIR
    python launch/convert.py --from run --path runs/dapo_tiny/seed0 --to hf --out DIR [--push OWNER/NAME]

An Orbax directory has the files of a Hugging Face directory (config.json, generation_config.json, tokenizer),
with our parameter tree in `params/` instead of the safetensors files. From a run the newest intact checkpoint
is exported. Adapters are merged into the weights; with --adapter_only they are saved alone, in PEFT's layout.
A run is written in bfloat16 unless --dtype is float32. The conversion runs in host memory, which must hold
the model. User errors are one line on stderr with exit status 2. The output directory appears complete or not
at all.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import jax

from jaxrl.checks import check_path
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.hub.hub_names import HubName, parsed_name
from jaxrl.hub.local_paths import local_model, open_hub
from jaxrl.models.huggingface.orbax_folder import hf_to_orbax, orbax_to_hf
from jaxrl.models.huggingface.weight_export import check_shard_bytes
from jaxrl.tracking.export import export_run


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    # On CPU: host memory may hold a model that no single accelerator holds.
    jax.config.update("jax_platforms", "cpu")
    parser = _parser(program)
    args = parser.parse_args(arguments)
    pushed_to = check_push(args)
    print(convert(args))
    if pushed_to is not None:
        print(open_hub().push_model(args.out, pushed_to, private=not args.public))
    return 0


def check_push(args: argparse.Namespace) -> HubName | None:
    """Returns the name to push to; None if nothing is pushed.

    Raises:
      UserError: --push is no name on the hub, or the result is no directory for the hub.
    """
    if not args.push:
        return None
    if args.target != "hf":
        raise UserError(f"--push takes what --to hf writes, and this is --to {args.target}")
    name = parsed_name(args.push)
    if name is None or name.subset:
        raise UserError(f"--push {args.push!r} is no name on the hub; write OWNER/NAME")
    return name


def convert(args: argparse.Namespace) -> str:
    """Writes the requested directory; returns the message to print.

    Raises:
      UserError: this conversion does not exist, or its source cannot be used.
    """
    check_path("--path", args.path)
    check_path("--out", args.out)
    check_shard_bytes(args.max_shard_bytes)
    if (args.source, args.target) == ("hf", "orbax"):
        hf_to_orbax(pathlib.Path(local_model(str(args.path))), args.out, dtype=args.dtype)
    elif (args.source, args.target) == ("orbax", "hf"):
        orbax_to_hf(args.path, args.out, dtype=args.dtype, max_shard_bytes=args.max_shard_bytes)
    elif (args.source, args.target) == ("gguf", "hf"):
        from jaxrl.models.huggingface.gguf_file import gguf_to_hf

        gguf_to_hf(args.path, args.out)
    elif (args.source, args.target) == ("run", "hf"):
        dtype = args.dtype or "bfloat16"
        step = export_run(
            args.path,
            args.out,
            dtype=dtype,
            max_shard_bytes=args.max_shard_bytes,
            adapter_only=args.adapter_only,
        )
        choice = "" if args.dtype else "; --dtype float32 writes what training keeps"
        return f"{args.out} holds the weights of step {step} in {dtype}{choice}"
    else:
        raise UserError(
            f"--from {args.source} --to {args.target} converts nothing; hf goes to orbax; orbax, "
            "gguf and run go to hf"
        )
    return f"{args.out} holds the model of {args.path}"


def _parser(program: str) -> argparse.ArgumentParser:
    parser = command_parser(program, __doc__)
    parser.add_argument(
        "--from", dest="source", choices=("hf", "orbax", "run", "gguf"), required=True
    )
    parser.add_argument("--path", type=pathlib.Path, required=True, help="directory to read")
    parser.add_argument("--to", dest="target", choices=("hf", "orbax"), required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="type of the result; by default that of the source, or bfloat16 for a run",
    )
    parser.add_argument(
        "--adapter_only",
        action="store_true",
        help="write only the adapters of a run, without the base model",
    )
    parser.add_argument(
        "--push",
        default="",
        metavar="OWNER/NAME",
        help="of --to hf: upload the result to the Hugging Face hub",
    )
    parser.add_argument("--public", action="store_true", help="of --push: everyone may read it")
    parser.add_argument(
        "--max_shard_bytes",
        type=int,
        default=5_000_000_000,
        help="size of a safetensors file (default: %(default)s)",
    )
    return parser
