"""Continuing without a failed client is offered where the others may not have the cause."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_desloc import DesLoc, SyncSchedule, Worker, client_app
from flower_desloc.app.config import ConfigError
from flower_desloc.core.errors import SetupError
from flower_desloc.core.streams import sparse_gradient
from flower_desloc.flower.failures import ClientError, EveryClientError, FederationError
from flower_desloc.flower.inprocess import InProcessGrid

NODES = [{"partition-id": m, "num-partitions": 2} for m in range(2)]


def ended(error: Exception, *, at_start: bool) -> FederationError:
    """Return what ends a run of which client-1 raises ``error``, at its start or in a step."""

    def build(settings: Any, context: Any) -> Worker:
        module, fails = nn.Linear(2, 1), context.node_config["partition-id"] == 1
        if fails and at_start:
            raise error

        def loss_at(step: int) -> torch.Tensor:
            if fails:
                raise error
            return module(torch.ones(1, 2)).square().mean()

        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return Worker(module=module, optimizer=optimizer, loss_at=loss_at, num_examples=1)

    initial = ArrayRecord(nn.Linear(2, 1).state_dict())
    with pytest.raises(FederationError) as raised:
        DesLoc(SyncSchedule({"params": 1}), 1).start(
            InProcessGrid(client_app(build), NODES), initial
        )
    return raised.value


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESLOC_STATE_DIR", str(tmp_path / "state"))


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ConfigError("task=mine:Task: it lacks loss"),
        SetupError("the optimizer trains 2 tensors"),
        sparse_gradient("table.weight"),
    ],
    ids=str,
)
def test_continuing_is_not_offered_where_every_client_has_what_is_wrong(error, at_start):
    found = ended(error, at_start=at_start)
    assert isinstance(found, EveryClientError)
    assert str(found).endswith(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("data-path=/x: no such file"),
        ValueError("data.batch_size=1 is too small for processes=2 in the node config"),
        FileNotFoundError("site.csv: no such file"),
        OSError("disk full"),
    ],
    ids=str,
)
def test_continuing_is_offered_for_the_failure_of_one_client(error, at_start):
    found = ended(error, at_start=at_start)
    assert type(found) is ClientError
    assert f"{type(error).__name__}: {error}" in str(found)
    assert "leaves a failed client out, while federation.min_clients=1 others" in str(found)
