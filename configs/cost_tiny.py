"""A cost model on two CPU cores: answers without steps cost, answers with steps do not.

    python launch/train.py --config configs/cost_tiny.py

The pairs are generated from the demo's solutions. Training starts from the demo's SFT stage.

Hardware: any two cores; one minute after the demo's SFT stage. Score to expect: nearly all pairs in order.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.roles.optimizer import OptimConfig


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "cost_tiny"
    config.preference.path = "shared/worked_sums.py:worked_or_guessed"
    config.preference.loss = "cost_preference"
    # The betas are those of the shared SFT stage.
    config.optim = OptimConfig(lr=3e-4, betas=(0.9, 0.98))
    config.run.num_steps = 200
    config.evaluation.every = 100
    config.run.save_every = 100
    return config
