"""Writes a recipe to start from: python launch/new.py my_recipe."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("new")
