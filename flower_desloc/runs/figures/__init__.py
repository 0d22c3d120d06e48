"""The figures: functions from loaded runs to a matplotlib ``Figure``, or None without data.

One run is shown in detail; several are compared, one line for runs that differ in their seed only.
"""

from flower_desloc.runs.figures.clients import final_parts, shares, training_loss
from flower_desloc.runs.figures.drift import drifts
from flower_desloc.runs.figures.heldout import held_out
from flower_desloc.runs.figures.norms import norms
from flower_desloc.runs.figures.timeline import timeline
from flower_desloc.runs.figures.traffic import traffic

__all__ = [
    "drifts",
    "final_parts",
    "held_out",
    "norms",
    "shares",
    "timeline",
    "traffic",
    "training_loss",
]
