"""Looks whether this machine is ready to train: python launch/doctor.py."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("doctor")
