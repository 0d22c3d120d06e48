"""MLflow. Without ``MLFLOW_TRACKING_URI`` it writes ``mlflow.db`` in the folder of runs."""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from flower_desloc.trackers.tracker import PROJECT, Ending, Tracker

# Of a request, by MLflow's interface.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM, _LONGEST_NAME = 1000, 100, 6000, 250


class MLflow(Tracker):
    """A run of ``MLFLOW_EXPERIMENT_NAME``."""

    def __init__(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient, entities

        self._client, self._entities = MlflowClient(), entities
        if run_id is not None:
            self.id = run_id
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self.id = self._client.create_run(experiment, run_name=name).info.run_id
        params = [entities.Param(k, str(v)[:_LONGEST_PARAM]) for k, v in config.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self.id, params=params[first : first + _MOST_PARAMS])

    def log(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Log all values in requests of a thousand."""
        now = time.time_ns() // 1_000_000
        metrics = [
            self._entities.Metric(metric_name(name), value, now, step)
            for step, named in values.items()
            for name, value in named.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[first : first + _MOST_METRICS])

    def finish(self, ending: Ending) -> None:
        """Upload the summary, the picture and the model, and set the status."""
        if ending.summary:
            self._client.log_dict(self.id, dict(ending.summary), "summary.json")
        if ending.picture is not None:
            self._client.log_artifact(self.id, str(ending.picture))
        if ending.model is not None:
            self._client.log_artifacts(self.id, str(ending.model), "model")
        self._client.set_terminated(self.id, "FINISHED" if ending.completed else "FAILED")

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run has made it since
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(found.experiment_id)


def metric_name(name: str) -> str:
    """Return what MLflow takes as a name; a client may be called otherwise."""
    path = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    return "/".join(part for part in path if part.strip("."))[:_LONGEST_NAME]
