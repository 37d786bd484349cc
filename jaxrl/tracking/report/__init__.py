"""The report of a run: one HTML file that needs nothing else, to read, keep and send."""

from jaxrl.tracking.report.page import Response, SamplePair, Section, write_report

__all__ = ["Response", "SamplePair", "Section", "write_report"]
