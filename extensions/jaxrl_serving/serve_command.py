"""The command `serve`: OpenAI's API (`jaxrl_serving.server`), or with --tinker Tinker's (`jaxrl_tinker`)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl import extensions
from jaxrl_serving import server
from jaxrl_serving.serve_config import check_packages


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status.

    Raises:
      UserError: an extra is not installed, or as the server that it runs.
    """
    if "--tinker" not in argv:
        return server.main(argv)
    check_packages(protobuf="google")
    return extensions.lookup("serve --tinker")(argv)
