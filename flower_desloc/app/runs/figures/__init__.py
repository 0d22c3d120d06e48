"""The figures: functions from records of runs to a matplotlib ``Figure``, or None without data.

One run is shown in detail; several are compared, with one line for runs that differ only in their
seed. ``overview.png`` and the report draw the same panels.
"""

from flower_desloc.app.runs.figures.heldout import draw_heldout
from flower_desloc.app.runs.figures.losses import draw_losses, draw_parts
from flower_desloc.app.runs.figures.measures import draw_drift, draw_norms
from flower_desloc.app.runs.figures.partition import draw_holdings
from flower_desloc.app.runs.figures.timeline import draw_timeline
from flower_desloc.app.runs.figures.traffic import draw_bytes

__all__ = [
    "draw_bytes",
    "draw_drift",
    "draw_heldout",
    "draw_holdings",
    "draw_losses",
    "draw_norms",
    "draw_parts",
    "draw_timeline",
]
