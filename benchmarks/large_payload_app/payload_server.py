"""The ServerApp: sends one stream to the client and back in one window, and checks it."""

import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.flower import federation
from flower_desloc.flower.arrays import from_array, to_array
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.policy import Policy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write the measurements, or the traceback, to the file ``output``."""
    config = context.run_config
    if not config["bundles"]:
        federation.HttpGrid = InMemoryGrid  # as in a simulation: array by array
    try:
        found = transfer(grid, int(config["values"]), int(config["tensors"]))
    except Exception:
        found = {"error": traceback.format_exc()}
    partial = Path(str(config["output"])).with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(str(config["output"]))


def transfer(grid: Grid, values: int, tensors: int) -> dict[str, Any]:
    watch = Watch()
    strategy = DesLoc(
        SyncSchedule({"params": 1}), 1, policy=Policy(timeout=3000.0), evaluate_clients=False
    )
    settings = ConfigRecord({"values": values, "tensors": tensors})
    began = time.time()
    result = strategy.start(grid, made(values, tensors), settings, observer=watch)
    for number, array in enumerate(result.arrays.values()):
        assert torch.equal(from_array(array), part(number, values).mul_(0.5)), number
    return {"began": began, "window": watch.seconds, "bytes": watch.bytes}


class Watch:
    """DesLoc's observer."""

    def started(self, plan: Any) -> None: ...

    def joined(self, client: str, about: Any) -> None: ...

    def window(self, record: WindowRecord) -> None:
        self.seconds = record.seconds
        self.bytes = {"down": record.traffic.down, "up": record.traffic.up}


def made(values: int, tensors: int) -> ArrayRecord:
    # Random, because Flower sends equal chunks only once.
    return ArrayRecord({str(i): to_array(part(i, values)) for i in range(tensors)})


def part(number: int, values: int) -> torch.Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(number))
