"""Serves a model over HTTP and gRPC: python launch/serve.py --model DIR (docs/serving.md)."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("serve")
