"""DAPO on two CPU cores: a model of a few hundred thousand parameters learns to work out integer sums.

    python launch/train.py --config configs/dapo_tiny.py

Hardware: any two cores, 2 GB of memory, no accelerator; about ten minutes.
"""

from jaxrl.trainer.config import Config
from jaxrl.trainer.config_tree import to_config_dict


def get_config():
    config = to_config_dict(Config())
    config.name = "dapo_tiny"
    config.hardware = "two CPU cores"

    # Sums of three or four one-digit numbers from reasoning-gym, for instance "5 + 9 - 7 =".
    for split, seed, size in ((config.data.train, 1, 20_000), (config.data.held_out, 2, 64)):
        split.source = "chain_sum"
        split.task = "chain_sum"
        split.seed = seed
        split.size = size
        split.options = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    config.data.template = "{prompt}\n"
    config.data.max_prompt_tokens = 32

    config.model.vocab_size = 320
    config.model.num_layers = 3

    config.warm_start.num_steps = 900
    config.warm_start.examples_per_step = 16
    config.warm_start.save_every = 300
    config.warm_start.optim.lr = 2e-3
    config.warm_start.optim.lr_warmup_steps = 20
    config.warm_start.optim.lr_decay_steps = 900
    config.warm_start.optim.lr_final = 0.1
    config.warm_start.optim.beta2 = 0.98
    config.warm_start.optim.weight_decay = 0.01

    config.rollout.num_prompts = 24
    config.rollout.num_samples = 8
    config.rollout.generation_prompts = 40
    config.rollout.max_response_tokens = 48

    config.reward.overlong_buffer_tokens = 16
    config.train.row_tokens = 128
    config.train.rows = 6

    config.optim.lr = 3e-4
    config.optim.lr_warmup_steps = 5
    config.optim.beta2 = 0.98
    config.optim.weight_decay = 0.01
    config.run.num_steps = 60
    return config.lock()
