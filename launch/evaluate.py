"""Evaluates a model: python launch/evaluate.py --model DIR --set FILE --n 32 (docs/evaluation.md)."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("evaluate")
