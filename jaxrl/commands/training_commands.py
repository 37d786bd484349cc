"""`jaxrl train`: reads the command line, then imports what trains.

Kept apart from `run_commands`, so that a mistyped setting is reported before JAX is imported.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence

from jaxrl import extensions
from jaxrl.config import command_line
from jaxrl.config.schema import Config


def train(argv: Sequence[str]) -> int:
    """Trains a recipe, by reinforcement learning, on pairs or on examples, or only plans it."""

    def command(config: Config, *, dry_run: bool, supervise: bool) -> int:
        """Trains a recipe, or only checks it and prints what it would take."""
        if supervise and not dry_run:
            # The started command must not supervise again.
            arguments = [text for text in argv[1:] if not re.match("--?supervise(=|$)", text)]
            return extensions.lookup("train --supervise")(config, arguments)
        # Only now: settings are read without JAX, whose import takes seconds.
        module = importlib.import_module("jaxrl.commands.run_commands")
        return module.train_or_plan(config, dry_run=dry_run)

    switches = {
        "dry_run": "check and print, allocate nothing",
        "supervise": "start again after the loss of a host, from the newest checkpoint",
    }
    return command_line.run(command, Config, switches=switches, argv=argv)
