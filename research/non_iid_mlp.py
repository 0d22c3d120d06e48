"""The model of the studies non_iid_digits and non_iid_fashion: a network of one hidden layer.

It costs a tenth of the smallest vision transformer, so that hundreds of runs take an hour.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from flower_desloc.app.config import Config
from flower_desloc.app.tasks.image_classification import ImageClassification
from flower_desloc.app.tasks.image_classification.batches import common_shape
from flower_desloc.app.tasks.image_classification.sources import read
from flower_desloc.app.tasks.source import Source


class Network(nn.Sequential):
    """Pixels, a hidden layer, labels; called as a classifier of transformers is."""

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(pixel_values.flatten(1)))


class MLP(ImageClassification):
    """Image classification by that network, whose hidden layer is ``model.hidden_size`` wide."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._settings = config

    def build_model(self) -> nn.Module:
        config, shape = self._settings, common_shape(self._settings)
        pixels, width = shape.channels * shape.height * shape.width, config.model.hidden_size
        labels = len(read(Source.of(config.data)).names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            return Network(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, labels))

    def save(self, model: nn.Module, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, str(folder / "model.safetensors"))
