"""Measures this machine for the planner: python launch/calibrate.py --out here.json (docs/planner.md)."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("calibrate")
