"""A command that ends early says how to resume its run, and no other command's."""

import shlex
import time
from pathlib import Path

import pytest
import typer
from files import write

from flower_desloc.app.cli import run
from flower_desloc.app.config import Config, load
from flower_desloc.app.runs import RunFolder
from flower_desloc.app.runs.resume import cut_off_since


@pytest.mark.parametrize("end", [typer.Exit(1), SystemExit(143)], ids=["failed", "SIGTERM"])
def test_a_command_that_ends_early_prints_how_to_resume_its_own_run(tmp_path, capsys, end):
    here = tmp_path / "my own folder"

    def ended(*names):
        def work():
            time.sleep(0.05)  # a file's clock ticks less often
            for name in names:
                write(here / name / "checkpoints" / "step-1.safetensors", "")
            raise end

        with pytest.raises(type(end)), run.resume_hint(["desloc"], Config(), here):
            work()
        return capsys.readouterr().err

    assert ended() == ""
    what, _, command = ended("desloc").strip().partition(": ")
    assert what == "resume from its last checkpoint"
    go, where, then, _, resume, _, folder = shlex.split(command)
    assert (go, Path(where), then) == ("cd", Path.cwd(), "&&")  # what is imported from there
    assert load("quickstart", resume).run.resume == str(here / "desloc")
    assert folder == str(here)
    assert ended() == ""  # that one was another command's


def test_the_run_of_another_command_is_not_offered_while_it_runs(tmp_path):
    for name in ("desloc", "desloc-2"):
        write(tmp_path / name / "checkpoints" / "step-1.safetensors", "")
    with RunFolder(tmp_path / "desloc-2").claimed():
        assert cut_off_since(Config(), tmp_path, 0.0) == tmp_path / "desloc"
    assert cut_off_since(Config(), tmp_path, 0.0) == tmp_path / "desloc-2"
    # A resumed run is the one that run.resume names, whatever its folder is called.
    other = (tmp_path / "desloc").rename(tmp_path / "other")
    for began in (0.0, time.time() + 60):  # though it has written no checkpoint of its own yet
        config = load("quickstart", f"run.resume={other}")
        assert cut_off_since(config, tmp_path, began) == other
