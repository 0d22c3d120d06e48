"""SCAFFOLD, whose states are averaged with the parameters or never."""

import re

import pytest
from flwr.app import Context, RecordDict

from client_app import multiprocess
from client_app.client import app as client_app
from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.app.sites.multiprocess.parallelism import Parallelism
from flower_desloc.flower.inprocess import InProcessGrid
from server_app import app as server_app

ADVISED = [
    *("sync_mode=probabilistic", "sync_once_at=[4]", "sync_delay=1", "sync_phase.params=1"),
    *("federation.fraction_train=0.5", "federation.min_steps=0.5", "sync.own_control=16"),
    *("sync.params=2 sync.control=4", "sync.control=8", "sync.control=never", "sync.correction=16"),
]
ADAM_BESIDE = (
    "sync.exp_avg=8 sync.exp_avg_sq=32 optimizer.groups=[{kinds: [head], name: adam, lr: 1}]"
)


def check(words: str) -> None:
    RunStreams(load("scaffold", words)).check()


@pytest.mark.parametrize("words", ADVISED)
def test_what_a_refusal_says_to_set_can_be_set_and_helps(words):
    with pytest.raises(ConfigError) as error:
        check(words)
    advice = re.search(r"set ([\w.]+=[^\s;]*)$", str(error.value))
    assert advice, error.value
    check(f"{words} {advice[1]}")


def test_no_other_optimizer_may_end_a_window():
    with pytest.raises(ConfigError, match=r"^sync.exp_avg=8: .* a multiple of sync.params=16$"):
        check(ADAM_BESIDE)
    check(f"{ADAM_BESIDE} sync.exp_avg=32")


def test_the_server_refuses_what_no_command_has_checked(tmp_path):
    words = {"overrides": "sync.control=8", "output-dir": str(tmp_path)}
    context = Context(1, 0, {}, RecordDict(), {"config": "scaffold", **words})
    with pytest.raises(ConfigError, match=r"^sync.control=8: .*; set sync.control=16$"):
        server_app(InProcessGrid(client_app, []), context)


def test_a_client_of_several_processes_refuses_it():
    with pytest.raises(ValueError, match=r"^optimizer.name=\S+Scaffold is for clients of one"):
        multiprocess._check(load("scaffold"), Parallelism(2, "ddp"))


def test_flowers_own_strategies_are_refused():
    with pytest.raises(ConfigError, match=r"^strategy=fedavg: .*; set strategy=desloc$"):
        check("strategy=fedavg sync.control=null sync.own_control=null sync.correction=null")
