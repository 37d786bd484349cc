"""Direct preference optimisation: python launch/dpo.py --config configs/dpo_tiny.py.

The offline comparison to reinforcement learning. `launch/convert.py` exports what it has trained.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("dpo")
