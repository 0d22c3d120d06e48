"""The app for Flower's Hub: what is uploaded, simulated sites, and sites with data of their own."""

import importlib
import os
import runpy
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from processes import output_of

from flower_desloc.flower.inprocess import InProcessGrid

HUB = Path(__file__).resolve().parents[1] / "hub"
MEGABYTE = 1_000_000


@pytest.fixture
def app(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(HUB)
    monkeypatch.chdir(tmp_path)

    def run(nodes: list[dict[str, Any]], **changes: Any) -> None:
        client = importlib.import_module("desloc_quickstart.client_app").app
        server = importlib.import_module("desloc_quickstart.server_app").app
        config = tomllib.loads((HUB / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
            "config"
        ]
        nodes = [{"state-dir": str(tmp_path / "state"), **node} for node in nodes]
        server(InProcessGrid(client, nodes), Context(1, 0, {}, RecordDict(), {**config, **changes}))

    return run


def accuracies(text: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if "accuracy" in line]


@pytest.mark.soak
def test_it_learns_in_a_simulation(app, tmp_path, capsys):
    app([{"partition-id": i, "num-partitions": 4} for i in range(4)])
    measured = accuracies(capsys.readouterr().out)
    assert measured[0] < 0.3
    assert measured[-1] > 0.85
    assert torch.load(tmp_path / "final_model.pt").keys() == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip


def test_it_learns_at_sites_with_data_of_their_own(app, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["task", str(tmp_path / "data"), "2"])
    runpy.run_module("desloc_quickstart.task", run_name="__main__")
    sites = [{"data-path": str(tmp_path / "data" / f"site-{i}"), "name": f"s{i}"} for i in (0, 1)]
    app(sites, **{"num-steps": 64})
    assert accuracies(capsys.readouterr().out)[-1] > 0.7


def test_it_is_built_within_the_hubs_limits(tmp_path):
    """`flwr build` checks names, license and components; the Hub takes 1 MB a file, 10 in all."""
    copy = tmp_path / "desloc-quickstart"
    shutil.copytree(HUB, copy, ignore=shutil.ignore_patterns("__pycache__", "*.fab"))
    build = [str(Path(sys.executable).with_name("flwr")), "build"]
    environment = {**os.environ, "FLWR_HOME": str(tmp_path / "home")}
    output_of(build, cwd=copy, env=environment)
    (fab,) = copy.glob("*.fab")
    files = {info.filename: info.file_size for info in zipfile.ZipFile(fab).infolist()}
    assert {"README.md", "LICENSE", "pyproject.toml"} <= files.keys()
    assert {
        f"desloc_quickstart/{n}.py" for n in ("task", "client_app", "server_app")
    } <= files.keys()
    assert len(files) < 15
    assert max(files.values()) < MEGABYTE
    assert fab.stat().st_size < 10 * MEGABYTE
