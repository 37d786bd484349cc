"""Settings shared by the small recipes: the demo's task, model and SFT, and a step without dynamic sampling.

This is not a recipe. ppo_tiny.py, grpo_tiny.py and the others state their changes.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parents[1] / "dapo_tiny.py")
    # All start from the demo's SFT stage. If it is missing, it is trained first.
    config.sft.run = "dapo_tiny"
    config.rollout.num_prompts = 24
    config.rollout.num_samples = 8
    config.reward.overlong_buffer_tokens = 0
    config.algorithm.loss_options.clip_high = 0.2
    config.algorithm.loss_options.dual_clip = 3.0
    return config
