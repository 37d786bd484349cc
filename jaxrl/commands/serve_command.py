"""The command `serve`: OpenAI's API (`serving.server`), or with --tinker that of Tinker (`tinker.server`)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.serving import server as openai_server
from jaxrl.tinker import server as tinker_server


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    serving = tinker_server if "--tinker" in argv else openai_server
    return serving.main(argv)
