"""The example with a training loop of its own, and the same client by ``loss_at``."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import assert_same
from flwr.clientapp import ClientApp
from scripts import ROOT

from flower_desloc import Clipping, InProcessGrid, Worker, client_app, from_record
from flower_desloc.core.accumulation import accumulated


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    own_loop = import_module("own_loop")

    for name, value in {"STEPS": 26, "WARMUP": 4, "LENGTH": 16, "ROWS": 2}.items():
        monkeypatch.setattr(own_loop, name, value)
    return own_loop


def trained(example: Any, app: ClientApp, folder: Path) -> dict[str, torch.Tensor]:
    nodes = [{"partition-id": m, "state-dir": str(folder)} for m in range(2)]
    return from_record(example.main(InProcessGrid(app, nodes), None).arrays)


def test_both_forms_end_with_the_same_weights(example, tmp_path):
    def build(config: Any, context: Any) -> Worker:
        worker = example.build(config, context)
        data = example.text(example.PACKAGES[context.node_config["partition-id"]])
        model, parts = worker.module, example.ACCUMULATE

        def loss_at(step: int) -> torch.Tensor:
            losses = (model(*example.batch(data, step, micro)) / parts for micro in range(parts))
            return accumulated(losses, list(model.parameters()))

        return replace(
            worker,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1.0),
            loss_at=loss_at,
            lr_schedule=example.learning_rate,
            clipping=Clipping(norm=example.CLIP),
        )

    in_loop = trained(example, example.client, tmp_path / "loop")
    assert_same(in_loop, trained(example, client_app(build), tmp_path / "loss_at"))
    start = dict(example.GPT().named_parameters())
    assert not any(torch.equal(in_loop[key], p) for key, p in start.items() if "norm" not in key)
