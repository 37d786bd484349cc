"""Another project's harness on two CPU cores: mini-swe-agent with a model of 0.6 million parameters.

    pip install -e '.[mini-swe-agent]'
    python launch/train.py --config configs/repair_tiny.py

The model repairs a line of a program by a command, and submits it (configs/shared/repairs.py). Its commands
run in bubblewrap, which has to work here. Hardware: any two cores, 3 GB of memory, no accelerator; about
twelve minutes of one core's time. Score to expect: held-out repairs (avg@4, temperature 1) from 29 to 34%
after SFT to 65 to 68%, three seeds (docs/harnesses.md).
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).with_name("dapo_tiny.py"))
    config.name = "repair_tiny"
    for split, held_out in ((config.data.train, False), (config.data.evaluation, True)):
        split.path = "shared/repairs.py:make"
        split.source = "repairs"
        split.options = {"held_out": held_out}
    config.data.evaluation.size = 64
    config.data.template = "{prompt}"
    config.data.max_prompt_tokens = 128
    config.rollout.agent = "shared/repairs.py:agent"
    config.rollout.max_response_tokens = 128
    config.rollout.num_prompts = 12
    config.rollout.generation_prompts = 16
    config.reward.overlong_buffer_tokens = 0
    config.train.row_tokens = 256
    config.sft.num_steps = 400
    config.sft.examples_per_step = 24
    # With four updates at twice the rate the form of a command was forgotten within ten steps.
    config.algorithm.updates_per_step = 2
    config.optim.lr = 3e-4
    config.evaluation.num_samples = 4
    config.run.num_steps = 30
    return config
