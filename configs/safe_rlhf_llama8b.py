"""Safe RLHF on Llama-3.1-8B-Instruct: six models; the actor and two critics are trained.

    python launch/train.py --config configs/safe_rlhf_llama8b.py
    python launch/plan.py --config configs/safe_rlhf_llama8b.py --topology h100:2x8    # does it fit?

Hardware: 16 accelerators of 80 GB or more (h100:2x8, v5p:2x2x4). Hours: not measured. Score to expect: not
run by us. Model and data are fetched from the hub as for configs/ppo_llama8b.py. Two directories must
exist:

    models/beaver-8b-reward/    a reward model with the actor's tokenizer (...ForSequenceClassification)
    models/beaver-8b-cost/      a cost model of the same kind; launch/train.py trains both from pairs
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "ppo_llama8b.py")
    config.name = "safe_rlhf_llama8b"
    config.mesh.train = "1-1-16"
    config.mesh.generate = "1-1-1-16"
    config.mesh.fsdp = 16

    config.algorithm.dataflow = "safe_rlhf"
    config.reward.model = "models/beaver-8b-reward"
    config.reward.grader_weight = 0.0
    config.cost.model = "models/beaver-8b-cost"
    config.cost.limit = 0.0
    config.rollout.slots = 16 * 64
    config.train.rows = 16
    return config
