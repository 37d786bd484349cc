"""Trains a recipe: python launch/train.py --config configs/dapo_tiny.py [--config.seed=1] [--dry_run].

On several hosts each runs the same command, with --config.hosts.coordinator=auto or an address
(docs/mesh.md).
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("train")
