"""The command `serve`: OpenAI's API (`jaxrl_serving.server`), or with --tinker Tinker's (`jaxrl_tinker`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from jaxrl import extensions
from jaxrl.errors import UserError
from jaxrl_serving import server


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
    return extensions.lookup("serve --tinker")(argv)
