"""Maps settings of the last release that no longer exist to their replacements."""

from __future__ import annotations

# Dotted name, or a group prefix that ends with a dot -> text for the error message.
REMOVED = {
    "algorithm.correction.veto": 'set algorithm.correction.reject with the rule "veto"',
    "algorithm.one_step_off": "give the role rollout a pool of its own and set rollout.partial",
    "critic.optim.lr": "set critic.lr",
    "critic.optim.": "the critic's optimiser is that of the actor but for its rate; set optim.{leaf}",
    "critic.optim": "set critic.lr; all else is as in optim",
    "data.curriculum.decay": "data.curriculum.by is left; a newly graded group keeps 0.75 of older counts",
    "data.curriculum.least_chance": "data.curriculum.by is left; every problem keeps a chance of 0.05",
    "data.evaluation.limit": "set data.evaluation.size",
    "data.evaluation.weight": "every evaluation problem is answered",
    "data.shuffle_seed": "the order of prompts follows seed",
    "data.train.limit": "set data.train.size",
    "hardware": "write it into the docstring of the recipe",
    "preference.every": "set evaluation.every",
    "preference.made": "set preference.pair_generator",
    "preference.num_steps": "set run.num_steps",
    "preference.optim.": "set optim.{leaf}",
    "preference.optim": "set optim",
    "reward.judge.high": "set reward.judge.score_range, (0.0, 10.0)",
    "reward.judge.low": "set reward.judge.score_range, (0.0, 10.0)",
    "reward.judge.max_response_chars": "it is twice reward.judge.max_prompt_tokens",
    "rollout.if_too_few": "set rollout.on_shortage",
    "rollout.smallest_bucket": "the engine chooses it",
    "rollout.unroll": "the engine chooses it",
    "run.report_samples": "the report shows 8 problems",
    "run.collapse": "it is called run.divergence now",
    "run.collapse.": "it is called run.divergence.{leaf} now",
    "run.collapse.ranges.": "it is called run.divergence.ranges.{leaf} now",
    "run.collapse.reward_loss": 'add "critic/score/mean": (LOWEST, HIGHEST) to run.divergence.ranges',
    "run.divergence.reward_loss": 'add "critic/score/mean": (LOWEST, HIGHEST) to run.divergence.ranges',
    "run.wandb_project": 'set run.loggers, ("tensorboard", "wandb:PROJECT")',
    "train.products": "set train.matmuls",
    "train.unroll": "the learner chooses it",
    "warm_start.": "it is called sft.{leaf} now",
    "warm_start.optim.": "it is called sft.optim.{leaf} now",
    "warm_start.optim.beta1": "it takes the run's; set optim.beta1",
    "warm_start.optim.beta2": "it takes the run's; set optim.beta2",
    "warm_start.optim.epsilon": "it takes the run's; set optim.epsilon",
    "warm_start.optim.grad_clip": "it takes the run's; set optim.grad_clip",
    "warm_start.optim.moments": "it takes the run's; set optim.moments",
    "warm_start.optim.moments_on_host": "it takes the run's; set optim.moments_on_host",
    "warm_start.optim.lr_stable_steps": "SFT decays at once; leave it out",
}


def replacement_of(name: str) -> str:
    """The text that tells what replaces a removed setting; "" if `name` was never a setting.

    Args:
      name: dotted name of the setting.
    """
    group, _, leaf = name.rpartition(".")
    found = REMOVED.get(name) or REMOVED.get(f"{group}.", "")
    return found.format(leaf=leaf)
