"""Compares runs on one HTML page: python launch/report.py RUN RUN ... (docs/runs.md)."""

from jaxrl import cli

if __name__ == "__main__":
    cli.launch("report")
