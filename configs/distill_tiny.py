"""Distillation on two CPU cores: a model of two layers learns from the model of the DAPO demo.

    python launch/train.py --config configs/dapo_tiny.py
    jaxrl convert --path runs/dapo_tiny/seed0 --out runs/dapo_teacher
    python launch/train.py --config configs/distill_tiny.py

The student samples, and the teacher gives the probability of each sampled token. Training grades no
answers.

Hardware: any two cores; about four minutes after the demo. Scores: docs/distillation.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "distill_tiny"
    config.teacher.weights = "runs/dapo_teacher"
    # A smaller student, with an SFT stage of its own: half as long as the demo's.
    config.model.num_layers = 2
    config.sft.run = ""
    config.sft.num_steps = 600
    config.reward.grader_weight = 0.0
    config.algorithm.dataflow = "distill"
    config.algorithm.advantage = "reverse_kl"
    config.algorithm.updates_per_step = 1
    config.optim.lr = 1e-3
    return config
