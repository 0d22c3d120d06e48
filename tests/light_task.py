"""A task that needs PyTorch alone, for tests that start many processes: transformers takes seconds.

The module must be importable by all of them: ``PYTHONPATH`` names its folder (``WITH_LIGHT``).
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WITH_LIGHT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
}
"""Environment in which the module is found."""

Batch = tuple[Tensor, Tensor]


@dataclass
class Rows:
    """The data of a client: inputs around a point of its own."""

    train_batch: Callable[[int], Batch]
    num_examples: int = 16
    description: Mapping[str, int] = field(default_factory=lambda: {"rows": 16})

    def heldout(self) -> list[Batch]:
        return [self.train_batch(99_999)]


class Light:
    """Least squares; ``task_options.seconds`` is how long a batch takes to arrive."""

    def __init__(self, config: Any) -> None:
        self.seed, self.seconds = config.run.seed, config.task_options.get("seconds", 0.0)

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def client_data(self, site: Any) -> Rows:
        def batch(step: int) -> Batch:
            time.sleep(self.seconds)
            draw = torch.Generator().manual_seed(100_000 * site.partition + step)
            inputs = torch.randn(16, 4, generator=draw) + site.partition
            return inputs, torch.sin(inputs[:, :2])

        return Rows(batch)

    def heldout(self) -> dict[str, list[Batch]]:
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        return {"rows": [(inputs, torch.sin(inputs[:, :2]))]}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return mse_loss(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: list[Batch]) -> dict[str, float]:
        losses = [self.loss(model, batch).item() for batch in batches]
        return {"squares": sum(losses), "batches": float(len(losses))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["squares"] / sums["batches"]}

    def save(self, model: nn.Module, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, str(folder / "model.safetensors"))
