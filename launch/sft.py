"""Supervised fine-tuning: python launch/sft.py --config configs/sft_tiny.py.

It learns worked solutions, or the conversations of a file (configs/sft_conversations_tiny.py): the stage that
launch/train.py begins with, alone. `launch/convert.py --from run` exports what it has trained.
"""

import sys

from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.trainer import program


def main(config: Config) -> int:
    """Trains the warm start of a recipe."""
    program.start(config)
    return program.fine_tune(config)


if __name__ == "__main__":
    sys.exit(command_line.run(main, Config))
