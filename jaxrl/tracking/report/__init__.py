"""The report of a run, and the comparison of runs: one self-contained HTML file each."""

from jaxrl.tracking.report.page import PromptResponses, Response, Section, write_report

__all__ = ["PromptResponses", "Response", "Section", "write_report"]
