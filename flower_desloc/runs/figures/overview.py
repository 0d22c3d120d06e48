"""``overview.png``: held-out loss, bytes, averages and drift of a run in one figure."""

from pathlib import Path

from flower_desloc.config.units import period_text
from flower_desloc.runs.figures.drift import fill_measure
from flower_desloc.runs.figures.losses import fill_heldout_loss
from flower_desloc.runs.figures.style import figure, headline, steps_axis, title
from flower_desloc.runs.figures.timeline import fill_averages
from flower_desloc.runs.figures.traffic import fill_bytes
from flower_desloc.runs.record import RunRecord


def draw(run: RunRecord, path: Path) -> None:
    """Draw the run into ``path``."""
    made, (loss, sent, averages, drift) = figure(2, 2, 7.6)
    made.set_figwidth(12)
    fill_heldout_loss(loss, run)
    title(sent, "Bytes sent", "\n")  # the legend is below the title
    fill_bytes(sent, [run])
    fill_averages(averages, run)
    steps_axis(averages, [run])
    fill_measure(drift, run)
    headline(made, _name(run), _description(run))
    made.savefig(path, dpi=140)


def _name(run: RunRecord) -> str:
    if run.status == "completed":
        return run.name
    planned = run.summary["config"]["steps"]
    return f"{run.name} ({run.status} after {run.num_steps} of {planned} steps)"


def _description(run: RunRecord) -> str:
    config, clients = run.summary["config"], run.summary["clients"]
    streams = ", ".join(f"{stream} {period_text(p)}" for stream, p in run.periods.items())
    average = " on average" if config["coin_seed"] is not None else ""
    plural = "" if clients == 1 else "s"
    return f"{config['optimizer']} on {clients} client{plural}, averaged: {streams} steps{average}"
