"""Weights & Biases. Offline: ``WANDB_MODE=offline``, and afterwards ``wandb sync``."""

import os
import secrets
from collections.abc import Mapping
from typing import Any

from flower_desloc.trackers.tracker import PROJECT, Ending, Tracker


class Wandb(Tracker):
    """A run of ``WANDB_PROJECT``."""

    def __init__(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        self.id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.id,
            name=name,
            config=dict(config),
            allow_val_change=True,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )

    def log(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Log each step; W&B keeps only ascending ones."""
        for step, named in values.items():
            self._run.log(dict(named), step=step)

    def finish(self, ending: Ending) -> None:
        """Fill the summary, upload, and mark the run as finished or failed."""
        self._run.summary.update(dict(ending.summary))
        if ending.picture is not None:
            self._run.log({"overview": self._wandb.Image(str(ending.picture))}, step=ending.step)
        if ending.model is not None:
            artifact = self._wandb.Artifact(f"model-{self.id}", type="model")
            artifact.add_dir(str(ending.model))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if ending.completed else 1)
