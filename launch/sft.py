"""Supervised fine-tuning: python launch/sft.py --config configs/sft_tiny.py.

It learns worked solutions, or the conversations of a file (configs/sft_conversations_tiny.py): the stage that
launch/train.py begins with, alone. `launch/convert.py` exports what it has trained.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("sft")
