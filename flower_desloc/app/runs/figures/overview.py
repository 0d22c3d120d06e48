"""``overview.png``: held-out loss, bytes, averages and drift of a run in one figure."""

from pathlib import Path

from matplotlib.figure import Figure

from flower_desloc.app.runs.figures import measures, style
from flower_desloc.app.runs.figures.losses import fill_heldout_loss
from flower_desloc.app.runs.figures.timeline import fill_averages
from flower_desloc.app.runs.figures.traffic import fill_bytes
from flower_desloc.app.runs.record import RunRecord


def draw(run: RunRecord, path: Path) -> None:
    """Draw the run into ``path``."""
    overview(run).savefig(path, dpi=140)


def overview(run: RunRecord) -> Figure:
    """Return the figure of a run."""
    made, (loss, sent, averages, drift) = style.figure(2, 2, 7.6)
    made.set_figwidth(12)
    fill_heldout_loss(loss, run)
    style.title(sent, "Bytes sent", "\n")  # the legend is below the title
    fill_bytes(sent, [run])
    fill_averages(averages, run)
    style.steps_axis(averages, [run])
    measures.fill(drift, [run], measures.DRIFT)
    planned = run.summary["config"]["steps"]
    partly = f" ({run.status} after {run.num_steps} of {planned} steps)"
    name = run.name if run.status == "completed" else f"{run.name}{partly}"
    style.headline(made, name, f"{run.optimizer_and_clients}, {run.averaged}")
    return made
