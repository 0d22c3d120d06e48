"""The library without the extra ``app``: it runs, and what needs the extra names it."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from scripts import ROOT

from flower_desloc.core.extras import to_install

IN_PROCESS = """
import stock_app
from flwr.app import Context, RecordDict
from flower_desloc import InProcessGrid

nodes = [{"partition-id": i, "state-dir": "."} for i in range(2)]
context = Context(1, 0, {}, RecordDict(), {"lr": 0.1})
stock_app.server(InProcessGrid(stock_app.client, nodes), context)
"""


def required(name: str, extra: str = "") -> set[str]:
    """Return the names of the distributions that one needs, itself included."""
    found, waiting = set(), [(name, extra)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for text in distribution(name).requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, each) for each in ("", *needed.extras)]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that runs Python with the library's own dependencies only."""
    folder = tmp_path_factory.mktemp("alone")
    for name in required("flower-desloc") - {"flower-desloc"}:
        installed = distribution(name)
        tops = {file.parts[0] for file in installed.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(installed.locate_file(top))))
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "examples" / "stock_app")))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_an_app_of_one_s_own_needs_only_the_library(alone):
    done = alone("-c", IN_PROCESS)
    assert done.returncode == 0, done.stderr
    assert "slopes: tensor" in done.stdout


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("flower_desloc.app.cli", "app", "app"),
        ("flower_desloc.adapters.transformers", "TrainerClient", "transformers"),
        ("flower_desloc.adapters.lightning", "LightningClient", "lightning"),
        ("flower_desloc.flower.flight.transfer", "TensorServer", "flight"),
    ],
)
def test_what_needs_an_extra_names_it(alone, module, name, extra):
    done = alone("-c", f"from {module} import {name}")
    assert done.stderr.splitlines()[-1].endswith(to_install(extra))
