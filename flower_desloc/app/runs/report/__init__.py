"""The report: one run in detail, or several compared, as one self-contained HTML file."""

from flower_desloc.app.runs.record import NoRunError, find, load
from flower_desloc.app.runs.report.page import write_page, write_report

__all__ = ["NoRunError", "find", "load", "write_page", "write_report"]
