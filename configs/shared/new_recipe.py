"""NEW_RECIPE: GRPO on problems with answers, from an instruction-tuned model.

    jaxrl train --config NEW_RECIPE.py --dry_run     # checks it, and prints the cost of a step
    jaxrl train --config NEW_RECIPE.py

Every setting: `jaxrl train --help`, or one group of them: `jaxrl train --help rollout`.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config


def get_config():
    config = to_config_dict(Config())
    # Results go to runs/NEW_RECIPE/.
    config.name = "NEW_RECIPE"

    # The model: a directory with safetensors, or a name on the Hugging Face hub. Its shape comes with it.
    config.weights = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.tokenizer.path = "HuggingFaceTB/SmolLM2-135M-Instruct"

    # The problems: JSONL, Parquet or Arrow, or a data set on the hub. Fields named question, problem or
    # prompt, and answer or solution, are recognised; prompt_field and answer_field name others.
    config.data.train.path = "openai/gsm8k:main"
    config.data.evaluation.path = "openai/gsm8k:main"
    config.data.evaluation.size = 128
    # Prompts go through the model's chat template. Text around "{prompt}" is your instruction.
    config.data.chat = True
    config.data.template = "{prompt}\nEnd with a line: Answer: NUMBER"
    config.data.max_prompt_tokens = 256

    # The reward: the grader's verdict. docs/rewards.md lists the graders, and shows functions of your own:
    # config.reward.functions = {"short": {"path": "my_rewards.py:short", "weight": 0.5}}
    config.reward.grader = "answer"
    config.reward.overlong_buffer_tokens = 0

    # A step: 16 prompts, 8 answers to each, one update.
    config.algorithm.dataflow = "grpo"
    config.algorithm.updates_per_step = 1
    config.rollout.num_prompts = 16
    config.rollout.num_samples = 8
    config.rollout.max_response_tokens = 256
    # Packed rows hold several samples; rows x row_tokens is what a forward pass takes at once.
    config.train.rows = 8
    config.train.row_tokens = 1024

    # The default of 1e-6 suits 32B parameters and thousands of steps: docs/tutorial.md has a table by size.
    config.optim.lr = 1e-5
    config.optim.lr_warmup_steps = 2

    # The mesh: one device needs no settings. docs/placement.md has more.
    config.evaluation.every = 10
    config.run.num_steps = 50
    config.run.save_every = 10
    return config.lock()
