"""Supervised fine-tuning on a file of your own: the demo's small model learns the assistant's messages.

    python launch/train.py --config configs/sft_conversations_tiny.py --config.sft.path=FILE

Each line of the file is a conversation, {"messages": [{"role": "user", "content": ...}, {"role":
"assistant", ...}]}, or a question with its answer, {"prompt": ..., "response": ...}. The tokenizer is
trained on the file. Set `tokenizer.path` and `weights` to fine-tune a published model.

Hardware: any two cores. Score to expect: none, because nothing is held out; watch the loss.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.config.config_tree import to_config_dict
from jaxrl.data.data_config import EvaluationSourceConfig, SourceConfig


def get_config():
    config = load_recipe(pathlib.Path(__file__).with_name("dapo_tiny.py"))
    config.name = "sft_conversations_tiny"
    config.run.num_steps = 0
    config.data.train = to_config_dict(SourceConfig())
    config.data.evaluation = to_config_dict(EvaluationSourceConfig())
    config.sft.path = "conversations.jsonl"
    config.sft.num_steps = 300
    config.sft.examples_per_step = 16
    # A conversation longer than a row is left out.
    config.train.row_tokens = 512
    return config
