"""Direct preference optimisation: python launch/dpo.py --config configs/dpo_tiny.py.

The offline comparison to reinforcement learning. `launch/convert.py --from run` exports what it has trained.
"""

import sys

from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.trainer import program


def main(config: Config) -> int:
    """Trains on the pairs that the config names."""
    program.start(config)
    return program.train_dpo(config)


if __name__ == "__main__":
    sys.exit(command_line.run(main, Config))
