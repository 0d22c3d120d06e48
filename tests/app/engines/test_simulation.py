"""The app as `flwr run` alone runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from light_task import WITH_LIGHT
from processes import output_of, wait_until
from scripts import without_environment
from tiny import TINY, summary

from flower_desloc.app.config import load, parse
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.sites.deployment.environment import free_port
from flower_desloc.app.sites.supervisor import end_all

BIN = Path(sys.executable).parent
SMALL = [
    "run.steps=12",
    "run.eval_every=6",
    "sync.params=2",
    "sync.exp_avg=6",
    "sync.exp_avg_sq=12",
    *TINY,
    "simulation.num_clients=3",
]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_flwr_run_alone_works_and_installs_nothing(tmp_path):
    """As a newcomer types it: Flower starts a SuperLink of its own, which the test must end."""
    home, clone = tmp_path / "home", tmp_path / "clone"
    home.mkdir()
    clone.mkdir()
    app = str(without_environment(clone))
    ports = [free_port() for _ in range(2)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")} | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_ADDRESS": "local",  # no cluster that somebody has left behind
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]),
        "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        **WITH_LIGHT,
    }

    def flwr(*arguments: str) -> str:
        command = [str(BIN / "flwr"), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        return done.stdout + done.stderr

    short = [*SMALL, "task=light_task:Light", "run.steps=4", "run.eval_every=2"]
    run_config = f'overrides="{" ".join(short)}" output-dir="here" learning-rate=0.003 seed=3'
    try:
        said = [flwr("run", app, "--stream", "--run-config", run_config)]

        def is_over() -> bool:
            said[1:] = [flwr("ls", "--format", "json")]  # the log may end before the run does
            return "finished" in said[1]

        wait_until(is_over, lambda: said, limit=300)
    finally:
        end_all(home)
    folder = tmp_path / "here" / "quickstart"
    assert (folder / "summary.json").exists(), "\n".join(said)
    assert summary(folder)["status"] == "completed", "\n".join(said)
    assert f"the run is written to {folder.parent};" in said[0]
    config = parse((folder / "config.yaml").read_text())
    assert config == load("quickstart", [*short, "optimizer.lr=0.003", "run.seed=3"])
    assert "Installed:" not in said[0]
    assert not list(clone.glob("*.fab"))


KILLED = """
import os, signal
from pathlib import Path
from light_task import Light

class Killed(Light):
    def client_data(self, site):
        data = super().client_data(site)
        batch, flag = data.train_batch, Path(__file__).with_name("killed-once")

        def train_batch(step):
            if site.partition == 1 and step >= 2 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return batch(step)

        data.train_batch = train_batch
        return data
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_killed_process_costs_no_client_its_window(tmp_path):
    (tmp_path / "killed_task.py").write_text(KILLED)
    words = ["task=killed_task:Killed", "run.steps=6", "run.eval_every=0", "sync.params=2"]
    words += ["sync.exp_avg=2", "sync.exp_avg_sq=2", "simulation.num_clients=5"]
    command = [BIN / "desloc", "run", "quickstart", *words, "federation.on_failure=continue"]
    environment = os.environ | WITH_LIGHT
    said = output_of([*command, "--workers", "2"], cwd=tmp_path, env=environment)
    windows = list(read_lines(tmp_path / "runs" / "quickstart" / "metrics.jsonl"))
    assert (tmp_path / "killed-once").exists()
    assert [len(window["clients"]) for window in windows] == [0, 5, 5, 5]
    assert "the process that simulates client-1 has died" in said
