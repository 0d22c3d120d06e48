"""What is shown of the log of a simulation."""

import os
import re
from typing import Any

import pytest

from flower_desloc.app.engines import simulation, superlink
from flower_desloc.app.engines.simulation import brief, without_flower

LOG = """\
Using SuperLink: local (127.0.0.1:49291)
\x1b[92mINFO \x1b[0m:      Starting Flower Simulation
\x1b[93mWARNING \x1b[0m:   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.
\x1b[94mDEBUG 2026-11-21 09:12:22,791\x1b[0m:     Registered 2 nodes
Successfully installed tiny to /tmp/desloc-x/apps/tiny.
step 1/2
INFO: by a logger of the app's own
\x1b[36m(ClientAppActor pid=12)\x1b[0m \x1b[92mINFO \x1b[0m:      Flower in a client
\x1b[36m(ClientAppActor pid=12)\x1b[0m the client's print
\x1b[93mWARNING \x1b[0m:   a warning
\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
ValueError: boom
\x1b[91mERROR \x1b[0m:     Exit Code: 700

An unhandled exception occurred when running the simulation.
"""


def test_the_apps_lines_are_shown_and_flowers_warnings():
    shown = [re.sub(r"\x1b\[\d*m", "", line) for line in without_flower(LOG.splitlines())]
    assert shown == [
        "step 1/2",
        "INFO: by a logger of the app's own",
        "(ClientAppActor pid=12) the client's print",
        "WARNING :   a warning",
        "ERROR :     Simulation raised an exception",
        "Traceback (most recent call last):",
        "ValueError: boom",
    ]


RAY = """\
\x1b[91mERROR \x1b[0m:     ray::ClientAppActor.run() (pid=7, ip=192.0.2.2)
                  ^^^^^
  File "/app/client.py", line 50, in __call__
    reply = self.answer(message)
            ^^^^^^^^^^^
  File "/mine/task.py", line 8, in train_batch
    raise ValueError("the scanner gave no image")
ValueError: the scanner gave no image

The above exception was the direct cause of the following exception:

ray::ClientAppActor.run() (pid=7, ip=192.0.2.2)
  File "/flwr/ray_actor.py", line 65, in run
    raise ClientAppException(str(ex)) from ex
flwr.clientapp.client_app.ClientAppException:
Exception ClientAppException occurred. Message: the scanner gave no image
"""


def test_of_a_traceback_the_error_and_its_place_are_shown_once():
    again = RAY.replace(
        "     ray::",
        "     Traceback (most recent call last):\n  File\nray.exceptions.RayTaskError(X): ray::",
        1,
    )
    other = 'Traceback (most recent call last):\n  File "/a.py", line 1, in f\nKeyError: 3\n'
    in_an_actor = "".join(f"(ClientAppActor pid=7) {line}\n" for line in other.splitlines())
    log = f"step 1/2\n{RAY}step 2/2\n{again}\n{other}{in_an_actor}failed after 1 step"
    assert [*brief(log.splitlines())] == [
        "step 1/2",
        "ERROR: ValueError: the scanner gave no image "
        "(/mine/task.py, line 8, in train_batch; -v shows the traceback)",
        "step 2/2",
        "ERROR: KeyError: 3 (/a.py, line 1, in f; -v shows the traceback)",
        "failed after 1 step",
    ]


def test_the_log_of_a_run_is_without_the_words_of_the_command_that_reads_it(tmp_path):
    (tmp_path / "cwd").mkdir()
    says = ("sh", "-c", "echo of the run; echo check your network connection >&2")
    process: Any = None
    link = superlink.SuperLink(tmp_path, os.environ, process, "127.0.0.1:1", None, enter=says)
    assert [*link.log("1")] == ["of the run"]


def test_a_log_that_breaks_off_is_continued_without_repetition():
    class BrokenOnce:
        logs = iter([["one", "two"], ["one", "two", "three"]])
        states = iter(["running", "finished:completed"])

        def log(self, run_id):
            yield from next(self.logs)

        def status(self, run_id):
            return superlink.RunStatus(next(self.states), "")

    said: list[str] = []
    link: Any = BrokenOnce()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.echo", said.append)
        assert simulation.follow(link, "1", verbose=False).completed
    assert said == ["one", "two", "three"]
