"""Converts a model: python launch/convert.py --from hf --path DIR --to orbax --out DIR2.

Or exports what a run has trained: --from run --path runs/dapo_tiny/seed0 --to hf --out DIR.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("convert")
