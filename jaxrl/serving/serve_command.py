"""Serves a model: an OpenAI-compatible HTTP endpoint, and JetStream's gRPC (docs/serving.md).

    python launch/serve.py --model DIR [--http_port 8000] [--grpc_port 9000 | --http_only]

DIR is a Hugging Face directory; what a run has trained becomes one by launch/convert.py --from run. It
listens on this machine alone unless --host says otherwise. SIGTERM and Ctrl-C let open requests end.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from jaxrl.errors import EXIT_USER_ERROR, UserError
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.serving.serve_config import ServeConfig
from jaxrl.serving.server import serve

_HELP = {
    "name": "what requests call the model (default: the directory's name)",
    "host": "address to listen on; 0.0.0.0 is everybody, who need no password",
    "http_port": "0 takes a free one",
    "grpc_port": "0 takes a free one",
    "slots": "samples decoded side by side",
    "prefill_prompts": "prompts of one prefill",
    "max_prompt_tokens": "longest prompt; 0 takes what the model's context and the memory leave",
    "max_response_tokens": "longest response; 0 likewise",
    "tokens_per_dispatch": "tokens between two pieces of a streamed answer",
    "mesh": "p-t-d, pipeline, tensor and data parallel size",
    "dtype": "of weights and activations: float32, bfloat16, or auto: float32 on CPUs, bfloat16 on "
    "accelerators",
    "max_waiting": "samples that may wait for a slot",
    "max_body_bytes": "of a request",
    "max_connections": "open to the HTTP endpoint; more are answered with 503",
    "grace_s": "seconds for open requests to end after SIGTERM",
}


def main(argv: Sequence[str]) -> int:
    """Serves as the program's name and its arguments say; returns the exit status."""
    program, *arguments = argv
    parser = _parser(program)
    settings = vars(parser.parse_args(arguments))
    try:
        config = ServeConfig(grpc=not settings.pop("http_only"), **settings)
    except ValueError as error:
        parser.error(str(error))
    keep_compiled_programs()
    try:
        return serve(config)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=pathlib.Path(program).name,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    for name, text in _HELP.items():
        default = getattr(ServeConfig, name)
        shown = f"{text} (default: {default})" if default != "" else text
        parser.add_argument(f"--{name}", type=type(default), default=default, help=shown)
    parser.add_argument("--http_only", action="store_true", help="leave gRPC out")
    return parser
