"""The ServerApp: sends one stream to the client and back in one window, and checks it."""

import json
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.flower import internals
from flower_desloc.flower.arrays import from_array, to_array
from flower_desloc.flower.observer import Observer, WindowRecord
from flower_desloc.flower.policy import Policy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write the seconds of the window to the file ``output``."""
    config = context.run_config
    if not config["bundles"]:
        # As in a simulation: array by array.
        internals.is_grid = lambda *_: False
    seconds = transfer(grid, int(config["values"]), int(config["tensors"]))
    Path(str(config["output"])).write_text(json.dumps(seconds))


def transfer(grid: Grid, values: int, tensors: int) -> dict[str, float]:
    watch = Watch()
    strategy = DesLoc(
        SyncSchedule({"params": 1}), 1, policy=Policy(timeout=3000.0), evaluate_clients=False
    )
    # Random, because Flower sends equal chunks only once.
    stream = ArrayRecord({str(i): to_array(part(i, values)) for i in range(tensors)})
    settings = ConfigRecord({"values": values, "tensors": tensors})
    result = strategy.start(grid, stream, settings, observer=watch)
    for number, array in enumerate(result.arrays.values()):
        assert torch.equal(from_array(array), part(number, values).mul_(0.5)), number
    return watch.seconds


class Watch(Observer):
    def window(self, record: WindowRecord) -> None:
        self.seconds: Any = record.seconds


def part(number: int, values: int) -> torch.Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(number))
