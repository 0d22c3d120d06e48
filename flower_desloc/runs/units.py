"""Numbers as text: the names of :mod:`flower_desloc.config.units`."""

from flower_desloc.config.units import (
    TEXT,
    bytes_text,
    duration_text,
    figures,
    loss_text,
    percent_text,
    period_text,
    size_text,
)

__all__ = [
    "TEXT",
    "bytes_text",
    "duration_text",
    "figures",
    "loss_text",
    "percent_text",
    "period_text",
    "size_text",
]
