"""Shows what a run would read: python launch/data.py --config configs/dapo_tiny.py --show 3."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("data")
