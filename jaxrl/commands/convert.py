"""Exports what a run has trained, as a Hugging Face directory for Transformers, vLLM or PEFT.

    jaxrl convert --path runs/dapo_tiny/seed0 --out DIR [--push OWNER/NAME]

The newest intact checkpoint is exported, with the files of the tokenizer. Adapters are merged into the
weights; with --adapter_only they are saved alone, in PEFT's layout. Weights are written in bfloat16 unless
--dtype is float32. The export runs in host memory, which must hold the model. User errors are one line on
stderr with exit status 2. The output directory appears complete or not at all.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Annotated

import jax

from jaxrl.checks import at_least, check_value
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.hub.hub_names import parsed_name
from jaxrl.hub.local_paths import open_hub
from jaxrl.tracking.run_weights import export_run, has_value_head


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("--path", type=pathlib.Path, required=True, help="folder of the run")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="type of the result (default: bfloat16)"
    )
    parser.add_argument(
        "--adapter_only",
        action="store_true",
        help="write only the adapters of a run, without the base model",
    )
    parser.add_argument(
        "--push", default="", metavar="OWNER/NAME", help="upload the result to the Hugging Face hub"
    )
    parser.add_argument("--public", action="store_true", help="of --push: everyone may read it")
    parser.add_argument(
        "--max_shard_bytes",
        type=int,
        default=5_000_000_000,
        help="size of a safetensors file (default: %(default)s)",
    )
    # On CPU: host memory may hold a model that no single accelerator holds.
    jax.config.update("jax_platforms", "cpu")
    args = parser.parse_args(arguments)
    # Everything that can be wrong is checked before the export, which may take minutes.
    pushed_to = parsed_name(args.push) if args.push else None
    if args.push and (pushed_to is None or pushed_to.subset):
        raise UserError(f"--push {args.push!r} is no name on the hub; write OWNER/NAME")
    check_value(
        "max_shard_bytes", args.max_shard_bytes, Annotated[int, at_least(1, at_most=10**15)]
    )
    dtype = args.dtype or "bfloat16"
    step = export_run(
        args.path,
        args.out,
        dtype=dtype,
        max_shard_bytes=args.max_shard_bytes,
        adapter_only=args.adapter_only,
    )
    choice = "" if args.dtype else "; --dtype float32 writes what training keeps"
    choice += "; the value head is left out" if has_value_head(args.path, step) else ""
    print(f"{args.out} holds the weights of step {step} in {dtype}{choice}")
    if pushed_to is not None:
        print(open_hub().push_model(args.out, pushed_to, private=not args.public))
    return 0
