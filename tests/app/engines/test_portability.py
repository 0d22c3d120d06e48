"""The engine in one process needs nothing that only Linux has; on Windows the others say so.

This cannot show that another system runs it: what is hidden here are the modules, functions and
signals that Windows and macOS do not have, and Linux's files.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from scripts import ROOT
from tiny import TINY
from typer.testing import CliRunner

from flower_desloc.app.cli import app
from flower_desloc.app.sites import supervisor

SCRIPT = """\
import builtins, os, signal, sys
# Other packages have their own ways on other systems.
import datasets, filelock, flwr.serverapp, flwr.supercore.run, flwr.superlink.grid, flwr.clientapp
import flwr_datasets.partitioner, matplotlib.figure, pandas, psutil, rich.progress, yaml
import torch.utils.tensorboard, transformers.models.llama.modeling_llama, typer.testing

class Hidden:
    names = {"fcntl", "resource", "pwd", "grp", "termios"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
for name in Hidden.names:
    sys.modules.pop(name, None)
for name in ("fork", "sched_getaffinity", "getuid", "killpg", "setsid", "uname"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGCHLD"):
    delattr(signal, name)
opened = builtins.open

def without_linux(file, *args, **kwargs):
    if str(file).startswith(("/proc", "/sys")):
        assert "flower_desloc" not in sys._getframe(1).f_code.co_filename, file
    return opened(file, *args, **kwargs)

builtins.open = without_linux
from flower_desloc.app.cli import app
words = ["run", "quickstart", "--engine", "inprocess", *sys.argv[1:]]
print(typer.testing.CliRunner().invoke(app, words, catch_exceptions=False).output)
"""


@pytest.mark.soak
def test_a_run_in_one_process_does_without_linux(tmp_path):
    settings = ["run.steps=4", "sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=4", *TINY]
    command = [sys.executable, "-c", SCRIPT, *settings, "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "completed after 4 steps" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["run quickstart", "federate quickstart", "supernode"])
def test_where_flowers_processes_cannot_run_the_command_says_so(command, tmp_path, monkeypatch):
    folder = [] if command == "supernode" else ["--output-dir", str(tmp_path)]
    monkeypatch.setattr(supervisor, "sys", SimpleNamespace(platform="win32"))
    result = CliRunner().invoke(app, [*command.split(), *folder])
    assert result.exit_code == 1, result.output
    assert "this needs Linux or macOS" in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())
