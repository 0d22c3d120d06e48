"""The digits of scikit-learn: the task, and a short run."""

from pathlib import Path
from typing import Any

import tiny

from flower_desloc.app.config import load
from flower_desloc.app.tasks import build_task
from flower_desloc.app.tasks.image_classification import ImageClassification
from flower_desloc.app.tasks.source import Source

DIGITS = Source("builtin", validation_fraction=0.2)
SMALL = ["model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=1"]


def digits(*overrides: str) -> ImageClassification:
    task = build_task(load("digits", list(overrides)))
    assert isinstance(task, ImageClassification)
    return task


def run(folder: Path, *overrides: str, clients: int = 3) -> dict[str, Any]:
    steps = ("run.name=run", "run.steps=12", "run.eval_every=6")
    periods = ("sync.params=2", "sync.exp_avg=6", "sync.exp_avg_sq=12")
    words = (*steps, *periods, *SMALL, *overrides)
    return tiny.summary(tiny.train(folder, *words, config="digits", clients=clients))
