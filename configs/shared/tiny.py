"""What the small recipes share: the demo's task, model and SFT, and a step without dynamic sampling.

Not a recipe of its own: ppo_tiny.py, grpo_tiny.py and the others say what they change.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parents[1] / "dapo_tiny.py")
    # All start from the demo's SFT stage, which is trained if it is not there.
    config.sft.run = "dapo_tiny"
    config.rollout.num_prompts = 24
    config.rollout.num_samples = 8
    config.reward.overlong_buffer_tokens = 0
    config.algorithm.loss_options.clip_high = 0.2
    config.algorithm.loss_options.dual_clip = 3.0
    return config
