"""Trains a reward or cost model on pairs: python launch/reward_model.py --config configs/reward_tiny.py.

It leaves a Hugging Face directory, <run>/trained_model, for `reward.model` or `cost.model` of other recipes.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("reward-model")
