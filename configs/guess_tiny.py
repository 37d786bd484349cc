"""An agent on two CPU cores: a model of 0.6 million parameters learns to guess a number by listening.

    python launch/train.py --config configs/guess_tiny.py

The game is in configs/shared/number_game.py: up to six turns, "It is higher." or "It is lower." between them.
Hardware: any two cores, 2 GB of memory, no accelerator; 23 to 30 minutes of one core's time. Score to
expect: held-out games won (avg@8, temperature 1) from 32 to 44% after SFT to 75 to 94%, four runs of
three seeds (docs/agents.md).
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).with_name("dapo_tiny.py"))
    config.name = "guess_tiny"
    for split in (config.data.train, config.data.evaluation):
        split.path = "shared/number_game.py:make"
        split.source = "number_game"
        split.options = {}
    config.data.template = "{prompt}"
    # Positions with five guesses, of which SFT learns.
    config.data.max_prompt_tokens = 128
    config.rollout.agent = "shared/number_game.py:play"
    config.rollout.max_response_tokens = 64
    # A turn has at most four tokens.
    config.rollout.tokens_per_dispatch = 4
    config.rollout.num_prompts = 16
    config.rollout.generation_prompts = 24
    config.reward.overlong_buffer_tokens = 0
    config.train.row_tokens = 256
    config.sft.num_steps = 1500
    config.sft.examples_per_step = 24
    config.optim.lr = 6e-4
    config.run.num_steps = 60
    return config
