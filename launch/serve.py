"""Serves a model over HTTP: python launch/serve.py --model DIR (docs/serving.md)."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("serve")
