"""A simulation on a Ray cluster of two nodes, both on this machine."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from light_task import WITH_LIGHT
from processes import output_of
from test_simulation import BIN, SMALL
from tiny import summary
from typer.testing import CliRunner

from flower_desloc.app.cli import app
from flower_desloc.app.sites.deployment.environment import free_port
from flower_desloc.app.sites.supervisor import end_all
from flower_desloc.flower.client_state import STATE_DIR, STATE_SHARED, state_folder

SETTINGS = [*SMALL, "run.steps=16", "run.eval_every=8", "simulation.num_clients=4"]

TASK = """\
import os
from light_task import Light

class Traced(Light):
    def client_data(self, site):
        if node := os.environ.get("DESLOC_TEST_NODE"):
            with open(f"{os.path.dirname(__file__)}/seen", "a") as file:
                print(node, site.partition, file=file)
        return super().client_data(site)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Start the two nodes, of one CPU each; return the cluster's address."""
    port = free_port()
    common = ["--num-cpus", "1", "--disable-usage-stats", "--node-ip-address", "127.0.0.1"]
    head = ["--head", "--port", str(port), "--include-dashboard", "false"]
    address = f"127.0.0.1:{port}"
    # A socket's path may have about a hundred characters.
    short = Path(os.path.realpath("/tmp")) / f"r{port}"
    arguments = {"a": [*head, "--temp-dir", str(short)], "b": ["--address", address]}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    try:
        for node, flags in arguments.items():
            start = [BIN / "ray", "start", *flags, *common]
            # By FLWR_HOME they are found again.
            own = {"DESLOC_TEST_NODE": node, "PYTHONPATH": "", "FLWR_HOME": str(short)}
            variables = environment | own
            try:
                output_of(start, env=variables, timeout=120)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                errors = getattr(error, "stderr", None) or b""  # of a timeout; bytes
                print(f"ray start failed, and is tried again: {error}", errors)
                if node == "a":
                    end_all(short)
                output_of(start, env=variables, timeout=120)
        yield address
    finally:
        end_all(short)
        shutil.rmtree(short, ignore_errors=True)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    words = ["run", "quickstart", *SETTINGS, "task=traced:Traced", "--output-dir", str(folder)]
    result = CliRunner().invoke(app, [*words, *arguments])
    assert result.exit_code == 0, result.output
    return summary(folder / "quickstart")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_nodes_end_with_the_weights_of_one_process_and_a_client_moves(
    cluster, tmp_path, monkeypatch
):
    (tmp_path / "traced.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), WITH_LIGHT["PYTHONPATH"]]))
    monkeypatch.syspath_prepend(tmp_path)
    alone = run(tmp_path / "alone", "--engine", "inprocess")
    spread = run(tmp_path / "spread", "--ray-address", cluster)
    assert spread["weights_sha256"] == alone["weights_sha256"]
    lines = {tuple(line.split()) for line in (tmp_path / "seen").read_text().splitlines()}
    served = {line for line in lines if len(line) == 2}
    assert {node for node, _ in served} == {"a", "b"}
    assert len(served) > len({client for _, client in served})  # some client was on both
    assert not (tmp_path / "spread" / ".clients").exists()


def test_a_machine_without_the_shared_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "shared"))
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
    assert state_folder(context) == tmp_path / "shared"
    monkeypatch.setenv(STATE_SHARED, "1")
    with pytest.raises(FileNotFoundError, match="put --output-dir on a disk that all machines"):
        state_folder(context)
    (tmp_path / "shared").mkdir()
    assert state_folder(context) == tmp_path / "shared"


def test_a_cluster_is_for_simulations_and_brings_its_own_workers():
    for other in (["--engine", "inprocess"], ["--workers", "2"]):
        result = CliRunner().invoke(app, ["run", "quickstart", "--ray-address", "a:1", *other])
        assert result.exit_code == 2
        assert "--ray-address is for --engine simulation" in result.output
