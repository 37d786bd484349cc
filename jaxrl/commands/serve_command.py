"""The command `serve`: OpenAI's API (`serving.server`), or with --tinker that of Tinker (`tinker.server`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from jaxrl.errors import UserError
from jaxrl.serving import server


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status.

    Raises:
      UserError: an extra is not installed, or as the server that it runs.
    """
    if "--tinker" not in argv:
        return server.main(argv)
    modules = {"protobuf": "google", "starlette": "starlette", "uvicorn": "uvicorn"}
    absent = [name for name, module in modules.items() if not importlib.util.find_spec(module)]
    if absent:
        raise UserError(f"{', '.join(absent)} not installed; pip install {' '.join(absent)}")
    from jaxrl.tinker.server import main as serve_tinker

    return serve_tinker(argv)
