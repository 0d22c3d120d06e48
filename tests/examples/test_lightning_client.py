"""The example with a Trainer of Lightning."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import ROOT

from flower_desloc import InProcessGrid, from_record

pytestmark = [  # of what Lightning advises and of what it uses
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning"),
]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    pytest.importorskip("lightning")
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    monkeypatch.chdir(tmp_path)
    lightning_client = import_module("lightning_client")

    small = {"STEPS": 16, "PACKAGES": ("dbm", "wsgiref")}
    for name, value in small.items():
        monkeypatch.setattr(lightning_client, name, value)
    return lightning_client


def test_the_example_trains(example, tmp_path):
    nodes = [{"partition-id": m, "state-dir": str(tmp_path)} for m in range(2)]
    trained = from_record(example.main(InProcessGrid(example.client, nodes), None).arrays)
    start = dict(example.new_model().named_parameters())
    assert not any(torch.equal(p, start[key]) for key, p in trained.items())
