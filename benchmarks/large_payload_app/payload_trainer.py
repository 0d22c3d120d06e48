"""A client whose step halves every value, so that memory and time are those of the transfer."""

from collections.abc import Mapping
from functools import cache

import torch
from flwr.app import Context

from flower_desloc.core.worker import Worker
from flower_desloc.flower.client import client_app


def build(config: Mapping[str, str | int | float | bool], _context: Context) -> Worker:
    return worker(int(config["values"]), int(config["tensors"]))


@cache
def worker(values: int, tensors: int) -> Worker:
    parts = torch.nn.ParameterList([torch.zeros(values) for _ in range(tensors)])
    optimizer = torch.optim.SGD(parts.parameters(), lr=1.0)
    # SGD has no states. With an entry here none are created, which would double the memory.
    optimizer.state[parts[0]]["step"] = 0

    def loss_at(_step: int) -> torch.Tensor:
        with torch.no_grad():
            for part in parts:
                part.mul_(0.5)  # exact, so that the server can check it
        return torch.zeros((), requires_grad=True)

    return Worker(module=parts, optimizer=optimizer, loss_at=loss_at, num_examples=1)


app = client_app(build)
