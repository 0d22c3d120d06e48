"""The app as `flwr run` alone runs it, and what a small run leaves."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from safetensors.torch import load_file
from tiny import TINY

from flower_desloc.config import load, parse
from flower_desloc.sites.supervisor import end_all
from flower_desloc.tools.engines.in_process import run_in_process

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SMALL = [
    "run.steps=12",
    "run.eval_every=6",
    "sync.params=2",
    "sync.exp_avg=6",
    "sync.exp_avg_sq=12",
    *TINY,
    "federation.num_clients=3",
]

pytestmark = pytest.mark.slow


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small run, in one process."""
    output_dir = tmp_path_factory.mktemp("inprocess")
    run_config = {
        "config": "quickstart",
        "overrides": " ".join(SMALL),
        "output-dir": str(output_dir),
    }
    run_in_process(run_config, 3)
    return output_dir / "quickstart"


def test_the_bytes_are_the_formulas_and_half_of_local_adams(in_process):
    found = summary(in_process)
    assert found["status"] == "completed"
    assert found["bytes"]["measured"]["up"] == found["bytes"]["analytic"]["up"]
    assert found["bytes"]["measured"]["down"] == found["bytes"]["analytic"]["down"]
    assert found["ratio"]["local_adam"] == 2


def test_transformers_loads_the_final_weights(in_process):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(in_process / "final")
    saved = load_file(in_process / "final" / "model.safetensors")
    own = model.state_dict()
    assert saved
    assert all(own[name].equal(tensor) for name, tensor in saved.items())


@pytest.mark.timeout(900)
def test_flwr_run_alone_works_and_installs_nothing(tmp_path):
    """As a newcomer types it: Flower starts a SuperLink of its own, which the test must end."""
    home = tmp_path / "home"
    home.mkdir()
    ports = [_free_port() for _ in range(2)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")} | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]),
        "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }

    def flwr(*arguments: str) -> str:
        command = [str(BIN / "flwr"), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        return done.stdout + done.stderr

    run_config = f'overrides="{" ".join(SMALL)}" output-dir="{tmp_path}" learning-rate=0.003 seed=3'
    try:
        said = [flwr("run", str(ROOT), "--stream", "--run-config", run_config)]

        def is_over() -> bool:
            said[1:] = [flwr("ls", "--format", "json")]  # the log may end before the run does
            return "finished" in said[1]

        wait_until(is_over, lambda: said, limit=300)
    finally:
        end_all(home)
    assert (tmp_path / "quickstart" / "summary.json").exists(), "\n".join(said)
    assert summary(tmp_path / "quickstart")["status"] == "completed", "\n".join(said)
    config = parse((tmp_path / "quickstart" / "config.yaml").read_text())
    assert config == load("quickstart", [*SMALL, "optimizer.lr=0.003", "run.seed=3"])
    assert "Installed:" not in said[0]
    assert not list(ROOT.glob("*.fab"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
