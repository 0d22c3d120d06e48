"""The private SuperLink of a simulation: workers, environment, and that it leaves nothing."""

import os
import sys
import tempfile
import venv
from pathlib import Path

import psutil
import pytest
from configurations import with_values
from processes import command_line, processes_with, wait_until

from flower_desloc.app.config import Config
from flower_desloc.app.engines import superlink
from flower_desloc.app.engines.simulation import federation_config
from flower_desloc.app.sites.deployment import environment as flower
from flower_desloc.app.sites.supervisor import ProcessError, Supervised, supervised


@pytest.mark.parametrize(
    ("clients", "cpus", "workers", "cores", "ray_cpus"),
    [
        (4, 1, None, 2, None),  # Ray's own choice: an actor for every core
        (4, 1, None, 64, 4),  # no more actors than clients
        (4, 2, None, 64, 8),
        (4, 8, None, 2, 8),  # a client wants more cores than there are: one at a time
        (4, 2, 3, 2, 6),
    ],
)
def test_ray_starts_no_more_workers_than_clients_need(clients, cpus, workers, cores, ray_cpus):
    config = Config()
    config = with_values(
        config, {"simulation.num_clients": clients, "simulation.client_cpus": cpus}
    )
    settings = federation_config(config, workers=workers, cores=cores)
    assert settings.pop("init-args-num-cpus", None) == ray_cpus
    assert settings == {
        "num-supernodes": clients,
        "client-resources-num-cpus": cpus,
        "client-resources-num-gpus": 0.0,
    }


def test_flower_gets_our_environment_without_variables_that_would_misdirect_it(monkeypatch):
    for name in ("FLWR_HOME", "FLWR_LOCAL_CONTROL_API_PORT", "FLWR_DATABASE", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "stale")
    monkeypatch.setenv("NO_PROXY", "intra.net")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    environment = flower.flower_environment(Path("/home/of/ours"))
    assert "stale" not in environment.values()
    assert environment["FLWR_HOME"] == "/home/of/ours"
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["no_proxy"] == "intra.net,127.0.0.1,localhost"
    assert environment["HF_HOME"] == "/models"
    assert environment["RAY_worker_niceness"] == "0"
    assert environment["PATH"].startswith(f"{Path(sys.executable).parent}:")


def test_the_home_of_flower_is_in_a_long_temporary_folder_by_a_path_that_rays_sockets_fit_in(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with flower.private_home() as home:
        assert len(str(home)) < 40
        assert home.resolve().parent == tmp_path
        assert (home / "cwd").is_dir()
    assert not any(tmp_path.iterdir())


@pytest.fixture
def temp(monkeypatch):
    """Return the folder that temporary folders are made in."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_superlink_that_does_not_start_says_why_and_is_cleaned_up(temp, monkeypatch):
    broken = ["sh", "-c", "echo the port is taken; exit 3"]
    monkeypatch.setattr(superlink, "superlink_command", lambda *_: broken)
    with (
        pytest.raises(ProcessError, match="the port is taken"),
        superlink.private_superlink(),
    ):
        pass
    assert not any(temp.iterdir())


def test_a_supervisor_imports_from_pythonpath_and_not_from_the_current_folder(
    tmp_path, monkeypatch
):
    bare, packages, current = (tmp_path / name for name in ("bare", "packages", "current"))
    venv.create(bare, symlinks=True)  # without psutil
    packages.mkdir()
    (packages / "psutil").symlink_to(Path(psutil.__file__).parent)
    current.mkdir()
    (current / "psutil.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(current)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(packages), ""]))
    with flower.private_home() as home:
        environment = flower.flower_environment(home)
        command = ["sh", "-c", "echo it runs; sleep 1000"]
        with supervised(home, command, environment) as process:
            process.wait_for_log("it runs", "the supervisor did not start")


def test_a_process_that_ignores_sigterm_in_another_session_is_ended_too(temp, monkeypatch):
    deaf = ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    parent = (
        "import subprocess, time\n"
        f"subprocess.Popen({deaf}, start_new_session=True)\n"  # as Flower starts its SuperExec
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", parent]
    monkeypatch.setattr(superlink, "superlink_command", lambda *_: command)
    monkeypatch.setattr(Supervised, "wait_for_log", lambda *_: None)

    def started():
        return [command_line(p) for p in processes_with("FLWR_HOME", str(link.home))]

    with superlink.private_superlink() as link:
        wait_until(lambda: any(name.startswith("sh -c trap") for name in started()), started)
        assert len(started()) >= 3  # the supervisor, the parent, the child
    assert started() == []
    assert not any(temp.iterdir())
