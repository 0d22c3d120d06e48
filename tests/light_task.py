"""A task that needs PyTorch alone, for tests that start many processes: transformers takes seconds.

The module must be importable by all of them: ``PYTHONPATH`` names its folder (``WITH_LIGHT``).
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WITH_LIGHT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
}
"""Environment in which the module is found."""

Batch = tuple[Tensor, Tensor]


class Light:
    """Least squares, as in docs/how-to/own-task.md.

    ``task_options.seconds`` is how long a batch takes to arrive.
    """

    def __init__(self, config: Any) -> None:
        self.seed, self.seconds = config.run.seed, config.task_options.get("seconds", 0.0)

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def client_data(self, site: Any) -> Any:
        def batch(number: int) -> Batch:
            time.sleep(self.seconds)
            draw = torch.Generator().manual_seed(100 * site.partition + number)
            inputs = torch.randn(16, 4, generator=draw)
            return inputs, torch.sin(inputs[:, :2] + site.partition)

        return SimpleNamespace(
            num_examples=16,
            description={"rows": 16},
            train_batch=batch,
            heldout=lambda: [batch(-1)],
        )

    def heldout(self) -> dict[str, list[Batch]]:
        return {"rows": self.client_data(SimpleNamespace(partition=0)).heldout()}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return mse_loss(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: list[Batch]) -> dict[str, float]:
        model.eval()
        losses = [self.loss(model, batch).item() for batch in batches]
        return {"squares": sum(losses), "batches": float(len(losses))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["squares"] / sums["batches"]}

    def save(self, model: nn.Module, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: v for k, v in model.state_dict().items() if type(v) is Tensor}
        save_file(state, folder / "model.safetensors")
