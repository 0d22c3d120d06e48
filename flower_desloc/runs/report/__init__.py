"""The report: one run in detail, or several compared, as one self-contained HTML file."""

from flower_desloc.runs.groups import SeedGroup, grouped
from flower_desloc.runs.record import NoRunError, RunRecord, find, load
from flower_desloc.runs.report.page import write_page, write_report

__all__ = [
    "NoRunError",
    "RunRecord",
    "SeedGroup",
    "find",
    "grouped",
    "load",
    "write_page",
    "write_report",
]
