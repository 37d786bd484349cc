"""DPO on two CPU cores: the demo's task from pairs, without sampling.

    python launch/train.py --config configs/dpo_tiny.py

Worked solutions are preferred to guesses. Training starts from the demo's SFT stage.

Hardware: any two cores; two minutes after the demo's SFT stage. Score to expect: see docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.roles.optimizer import OptimConfig


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "dpo_tiny"
    config.preference.path = "shared/worked_sums.py:worked_or_guessed"
    config.preference.loss = "dpo"
    config.preference.options = {"beta": 0.1}
    # The betas are those of the shared SFT stage.
    config.optim = OptimConfig(lr=1e-4, betas=(0.9, 0.98))
    config.run.num_steps = 300
    config.evaluation.every = 100
    config.run.save_every = 100
    return config
