"""Trains a recipe: python launch/train.py --config configs/dapo_tiny.py [--config.seed=1] [--dry_run].

On several hosts each runs the same command, with --config.hosts.coordinator=auto or an address
(docs/placement.md).
"""

import sys

from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.trainer import program


def main(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe, or only checks it and prints what it would take."""
    if dry_run:
        return program.dry_run(config)
    program.start(config)
    return program.train(config)


if __name__ == "__main__":
    sys.exit(
        command_line.run(main, Config, switches={"dry_run": "check and print, allocate nothing"})
    )
