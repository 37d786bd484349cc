"""A reward model on two CPU cores: it learns to tell right answers from wrong ones.

    python launch/train.py --config configs/reward_tiny.py

The pairs are generated from the demo's solutions. Training starts from the demo's SFT stage.

Hardware: any two cores; five minutes after the demo's SFT stage. Score to expect: see docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "reward_tiny"
    config.preference.path = "shared/worked_sums.py:right_or_wrong"
    config.preference.loss = "bradley_terry"
    # As in SFT, but for the rate and the length.
    config.optim.update(config.sft.optim.copy_and_resolve_references())
    config.optim.lr = 1e-3
    config.optim.lr_decay_steps = 2000
    config.run.num_steps = 2000
    config.evaluation.every = 100
    config.run.save_every = 500
    return config
