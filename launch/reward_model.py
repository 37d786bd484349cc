"""Trains a reward or cost model on pairs: python launch/reward_model.py --config configs/reward_tiny.py.

It leaves a Hugging Face directory, <run>/trained_model, for `reward.model` or `cost.model` of other recipes.
"""

import sys

from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.trainer import program


def main(config: Config) -> int:
    """Trains on the pairs that the config names."""
    program.start(config)
    return program.train_reward_model(config)


if __name__ == "__main__":
    sys.exit(command_line.run(main, Config))
