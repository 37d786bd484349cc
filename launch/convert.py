"""Exports what a run has trained: python launch/convert.py --path runs/dapo_tiny/seed0 --out DIR."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("convert")
