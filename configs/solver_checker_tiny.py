"""Two roles on two CPU cores: a model of 0.6 million parameters learns to work out sums, and to check them.

    python launch/train.py --config configs/solver_checker_tiny.py

Both roles are in configs/shared/solver_and_checker.py, and of one policy;
--config.rollout.frozen_roles.checker=start freezes one. Hardware: any two cores, 2 GB of
memory, no accelerator. Score to expect: held-out sums that the solver gets right, and answers that the
checker judges right (avg@8, temperature 1), from 48 to 52% after SFT to 82 to 92% (docs/agents.md).
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).with_name("dapo_tiny.py"))
    config.name = "solver_checker_tiny"
    for split in (config.data.train, config.data.evaluation):
        split.path = "shared/solver_and_checker.py:make"
    config.data.template = "{prompt}"
    config.data.max_prompt_tokens = 64
    config.rollout.agent = "shared/solver_and_checker.py:agent"
    config.rollout.agent_roles = ("solver", "checker")
    # Groups of both roles: 24 problems at a time.
    config.rollout.generation_prompts = 48
    config.reward.overlong_buffer_tokens = 0
    config.train.row_tokens = 128
    config.sft.num_steps = 2000
    config.run.num_steps = 20
    return config
