"""The report of a run: one self-contained HTML file."""

from jaxrl.tracking.report.page import Response, SamplePair, Section, write_report

__all__ = ["Response", "SamplePair", "Section", "write_report"]
