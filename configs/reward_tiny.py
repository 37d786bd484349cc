"""A reward model on two CPU cores: it learns to tell sums with the right answer from those with a wrong one.

    python launch/reward_model.py --config configs/reward_tiny.py

Pairs are made of the demo's own solutions. It starts from the demo's SFT stage; five minutes.

Hardware: any two cores; five minutes after the demo's SFT stage. Score to expect: see docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "reward_tiny"
    config.preference.pair_generator = "right_or_wrong"
    # As in SFT, but for the rate and the length.
    config.optim.update(config.sft.optim.copy_and_resolve_references())
    config.optim.lr = 1e-3
    config.optim.lr_decay_steps = 2000
    config.run.num_steps = 2000
    config.evaluation.every = 100
    config.run.save_every = 500
    return config
