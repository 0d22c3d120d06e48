"""Adapters to experiment trackers, each an extra of the same name.

A tracker is named in ``run.trackers``. ``flower_desloc.app.runs.tracking`` sends it what a run has
recorded; the adapters themselves know only their service.
"""

from typing import Final

TRACKERS: Final = {
    "wandb": "flower_desloc.trackers.wandb:Wandb",
    "mlflow": "flower_desloc.trackers.mlflow:MLflow",
    "trackio": "flower_desloc.trackers.trackio:Trackio",
}
"""Name of the tracker, of the package that it needs and of the extra -> its adapter."""
