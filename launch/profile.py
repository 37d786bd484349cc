"""Traces one step of a recipe: python launch/profile.py --config configs/dapo_tiny.py.

Prints seconds, operations, bytes and shares of the roof by phase and by kind of operation; the trace is in
the run's folder, for TensorBoard or Perfetto (docs/learning.md).
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("profile")
