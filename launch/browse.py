"""Shows the samples of a run: python launch/browse.py RUN (docs/evaluation.md)."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("browse")
