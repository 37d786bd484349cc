"""Serves a model: an OpenAI-compatible HTTP endpoint, and JetStream's gRPC (docs/serving.md).

    python launch/serve.py --model DIR [--http_port 8000] [--grpc_port 9000 | --http_only]

DIR is a Hugging Face directory. launch/convert.py makes one from the result of a run. The server
listens only on this machine unless --host is given, which needs a key. After SIGTERM or Ctrl-C it finishes
open requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxrl.flags import add_flags, command_parser, settings_of
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.mesh.compile_messages import announce_compilations
from jaxrl.serving.serve_config import ServeConfig
from jaxrl.serving.server import serve


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = _parser(program)
    args = parser.parse_args(arguments)
    try:
        config = settings_of(ServeConfig, args, grpc=not args.http_only)
    except ValueError as error:
        parser.error(str(error))
    keep_compiled_programs()
    announce_compilations()
    return serve(config)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = command_parser(program, __doc__)
    add_flags(parser, ServeConfig, without=("grpc",))
    parser.add_argument(
        "--port",
        dest="http_port",
        type=int,
        default=argparse.SUPPRESS,
        help="short for --http_port",
    )
    parser.add_argument("--http_only", action="store_true", help="leave gRPC out")
    return parser
