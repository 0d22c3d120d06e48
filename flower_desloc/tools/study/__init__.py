"""A study: a grid of runs, tuned and repeated over seeds, with its table and its pictures."""

from flower_desloc.tools.study.results import Row, results, table
from flower_desloc.tools.study.spec import Study, read_study

__all__ = ["Row", "Study", "read_study", "results", "table"]
