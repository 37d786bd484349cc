"""Safe RLHF on two CPU cores: right answers are the reward, answers without steps the cost.

    python launch/train.py --config configs/safe_rlhf_tiny.py

Train the cost model first: python launch/train.py --config configs/cost_tiny.py

Hardware: any two cores; four minutes after the demo's SFT stage. Score to expect: see docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "safe_rlhf_tiny"
    config.algorithm.dataflow = "safe_rlhf"
    config.cost.model = "runs/cost_tiny/seed0/trained_model"
    # Mostly worked answers: the cost model puts these below 0.
    config.cost.limit = 0.0
    config.cost.pretrain_coef = 0.0
    config.rollout.num_prompts = 192
    config.rollout.num_samples = 1
    config.algorithm.advantage = "gae"
    config.algorithm.advantage_options = {"gamma": 1.0, "lam": 0.95}
    config.algorithm.whiten = True
    config.algorithm.kl.reward_coef = 0.001
    config.critic.lr = 1e-3
    config.critic.warmup_steps = 2
    return config
