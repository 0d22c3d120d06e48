"""``sys.exit`` in the user's code, or a panic, is an error; a signal ends the program."""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import tiny
from flwr.app import Context, Message, RecordDict

from flower_desloc.app.cli.terminal import exit_on_signals
from flower_desloc.app.tasks.image_classification import ImageClassification
from flower_desloc.core.exits import exits_as_errors
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid

SMALL = ("run.steps=4", "sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=4")
CONTINUE = ("federation.on_failure=continue", "federation.min_clients=1")


def leaves(*_: object, **__: object) -> NoReturn:
    sys.exit(0)


def trained(folder: Path, task: str) -> Path:
    return tiny.train(
        folder, *SMALL, f"task={__name__}:{task}", *CONTINUE, config="digits", clients=3
    )


class AtOneSite(ImageClassification):
    def client_data(self, site):
        if site.partition == 1:
            leaves()
        return super().client_data(site)


class InTheEvaluation(ImageClassification):
    heldout = leaves


class WhenSaved(ImageClassification):
    save = leaves


class WhenBuilt(ImageClassification):
    build_model = leaves


def test_a_site_that_exits_has_failed(tmp_path):
    folder = trained(tmp_path, "AtOneSite")
    assert tiny.summary(folder)["status"] == "completed"
    assert tiny.summary(folder)["clients"] == 2


class AtEverySite(ImageClassification):
    client_data = leaves


def test_a_run_that_no_site_can_join_ends_with_the_reasons(tmp_path):
    with pytest.raises(FederationError, match=r"node 3': .*it called sys\.exit\(0\)"):
        trained(tmp_path, "AtEverySite")


EXITED = "RuntimeError: it called sys.exit(0)"
SAVE = (
    f"ValueError: all steps are done, but the save of task={__name__}:WhenSaved failed ({EXITED})"
)


@pytest.mark.parametrize(
    ("task", "error"),
    [("InTheEvaluation", EXITED), ("WhenSaved", SAVE), ("WhenBuilt", EXITED)],
)
def test_a_server_app_that_exits_has_failed(tmp_path, task, error):
    kind = ValueError if task == "WhenSaved" else RuntimeError
    with pytest.raises(kind, match=r"it called sys\.exit\(0\)"):
        trained(tmp_path, task)
    for written in tmp_path.glob("*/summary.json"):
        found = tiny.summary(written.parent)
        assert (found["status"], found["error"]) == ("failed", error)


def test_any_client_app_that_exits_has_failed():
    grid = InProcessGrid(leaves, [{}])
    [reply] = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    assert reply.error.reason == "RuntimeError: it called sys.exit(0)"


def test_a_client_app_with_a_panic_in_a_library_has_failed():
    class PanicException(BaseException):
        """As those of libraries in Rust, such as tokenizers."""

    def panics(message: Message, context: Context) -> Message:
        raise PanicException("index out of bounds")

    grid = InProcessGrid(panics, [{}])
    [reply] = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    assert reply.error.reason == "RuntimeError: PanicException: index out of bounds"


def test_ctrl_c_is_no_failure_of_a_client():
    def interrupted(message: Message, context: Context) -> Message:
        raise KeyboardInterrupt

    grid = InProcessGrid(interrupted, [{}])
    with pytest.raises(KeyboardInterrupt):
        grid.send_and_receive([Message(RecordDict(), 1, "train")])


def test_a_signal_ends_the_program_also_in_a_client():
    with pytest.raises(SystemExit) as ended, exit_on_signals(), exits_as_errors():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
