"""Studies: a grid of runs, each tuned and repeated over seeds, with a table and figures."""

from flower_desloc.tools.study.grid import Study
from flower_desloc.tools.study.results import CellResult, results, table
from flower_desloc.tools.study.study_file import read_study

__all__ = ["CellResult", "Study", "read_study", "results", "table"]
