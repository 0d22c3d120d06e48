"""The report: one run in detail, or several compared, as one HTML file that needs nothing else."""

from flower_desloc.runs.report.page import write_report
from flower_desloc.runs.loaded import Group, NoRunError, Run, find, grouped, load

__all__ = ["Group", "NoRunError", "Run", "find", "grouped", "load", "write_report"]
