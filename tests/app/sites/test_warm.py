"""Warm clients: the same replies as cold ones, one trainer for a run and node, no leftovers.

A process that forks once per message stands in for a SuperNode.
"""

import json
import os
import pickle
import runpy
import stat
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from processes import has_ended, output_of, wait_until
from scripts import ROOT

from flower_desloc.app.sites import supervisor
from flower_desloc.app.sites.warm import WarmClientApp
from flower_desloc.app.sites.warm.framing import receive, send
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.messages import WindowRequest

NODE = """\
import json, os, pickle, sys, traceback
from pathlib import Path
from flwr.supercore.task_identity import TaskIdentity
from flower_desloc.app.sites.warm import WarmClientApp

def answer(reference, folder):
    sys.argv = ["/somewhere/flwr-clientapp"]
    message, context = pickle.loads(Path(folder, "request").read_bytes())
    TaskIdentity.run_id, TaskIdentity.task_id = context.run_id, 7
    TaskIdentity.node_id = context.node_id
    try:
        reply = WarmClientApp(reference)(message, context)
    except Exception as error:  # in the words of flwr-clientapp
        with open(f"{folder}/error", "w") as file:
            file.write(str(type(error)) + ":<'" + str(error) + "'>")
        traceback.print_exc()
        return
    Path(folder, "reply").write_bytes(pickle.dumps((reply, context.state)))

for line in sys.stdin:
    child = os.fork()
    if not child:
        answer(*json.loads(line))
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("answered", flush=True)
"""

TOY = """\
import os, signal, sys, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
answered = 0
class Refusal(Exception): pass
@app.train()
def train(message, context):
    global answered
    answered += 1
    context.state["count"] = ConfigRecord({"count": answered})
    about = {"pid": os.getpid(), "parent": os.getppid(), "answered": answered}
    return Message(RecordDict({"about": ConfigRecord(about)}), reply_to=message)
@app.train("refuse")
def refuse(message, context):
    raise Refusal("no 'data' here;\\nset data-path")
@app.train("die")
def die(message, context):
    os.kill(os.getpid(), signal.SIGKILL)
@app.train("sleep")
def sleep(message, context):
    with open(message.content["where"]["path"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
@app.train("save")
def save(message, context):
    app.path = message.content["where"]["path"]
    return train(message, context)
def write_state():
    for word in ("", "whole") if hasattr(app, "path") else ():
        with open(app.path, "w") as file:
            file.write(word)
        time.sleep(2)
app.write_state = write_state
@app.query("goodbye")
def goodbye(message, context):
    return train(message, context)
"""

REAL = """\
import torch
from flower_desloc.flower.client import client_app
from flower_desloc.core.worker import Worker
from flower_desloc.optim import ADOPT
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
optimizer = ADOPT(module.parameters(), lr=0.1)
def loss_at(step):
    with open(__file__ + ".batches", "a") as batches:
        print(step, file=batches)
    torch.manual_seed(step)
    return (module(torch.randn(5, 3)) - torch.randn(5, 4)).square().mean()
worker = Worker(module=module, optimizer=optimizer, loss_at=loss_at, num_examples=3,
                evaluate=lambda: {"loss": float(loss_at(99).detach())})
app = client_app(lambda config, context: worker)
"""


class Node:
    """A node, and the request, reply and log of its last message."""

    def __init__(self, folder):
        self.folder, self.config, self.run = folder, {}, 1
        (folder / "toy.py").write_text(TOY)
        (folder / "real.py").write_text(REAL)
        path = os.pathsep.join([str(folder), str(ROOT)])
        self.log = folder / "log"
        place = {"PYTHONPATH": path, "TMPDIR": str(folder), "FLWR_HOME": str(folder)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", NODE],
                env=os.environ | place | {"OMP_NUM_THREADS": "1"},
                cwd=folder,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def ask(self, kind="train", content=None, reference="toy:app"):
        """Return the reply to a message; raises ``RuntimeError`` with the client's error."""
        self.begin(kind, content, reference)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "answered\n", self.log.read_text()
        if (error := self.folder / "error").exists():
            raise RuntimeError(error.read_text())
        reply, self.state = pickle.loads((self.folder / "reply").read_bytes())
        return reply

    def about(self, *args):
        return SimpleNamespace(**self.ask(*args).content["about"])

    def begin(self, kind, content=None, reference="toy:app"):
        """Send a message; return the id of the process that Flower would have started for it."""
        for name in ("reply", "error"):
            (self.folder / name).unlink(missing_ok=True)
        request = message(kind, content), context(self.config, self.run)
        (self.folder / "request").write_bytes(pickle.dumps(request))
        print(json.dumps([reference, str(self.folder)]), file=self.process.stdin, flush=True)
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def begin_to_sleep(self):
        """Return the trainer, which sleeps in a message, and the process that waits for it."""
        path = self.folder / "asleep"
        waiting = psutil.Process(self.begin("train.sleep", at(path)))
        wait_until(lambda: path.exists() and path.read_text(), self.log.read_text)
        pid = int(path.read_text())
        path.unlink()
        return psutil.Process(pid), waiting

    def sockets(self):
        return list(self.folder.glob("desloc-*/*"))

    def wait_until_ended(self, process):
        wait_until(lambda: has_ended(process), self.log.read_text)


@contextmanager
def started(folder):
    node = Node(folder)
    with node.process:
        yield node
        node.process.kill()


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory):
    with started(tmp_path_factory.mktemp("n")) as node:
        yield node


@pytest.fixture
def node(shared_node):
    """A node in a run of its own."""
    shared_node.run += 1
    shared_node.config = {}
    return shared_node


def at(path):
    return RecordDict({"where": ConfigRecord({"path": str(path)})})


def message(kind, content=None):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    made = Message(content or RecordDict(), dst_node_id=5, message_type=kind)
    made.metadata.__dict__["_message_id"] = "asked"
    return made


def context(config, run=1):
    return Context(run, 5, config, RecordDict(), {})


# --- Framing -------------------------------------------------------------------------------------


def test_a_message_is_the_same_after_framing():
    tensors = {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
    }
    records: dict[str, Any] = {
        "params": to_record(tensors),
        "none": ArrayRecord(),
        "config": ConfigRecord({"text": "é", "raw": b"\0", "many": [1, 2]}),
        "metrics": MetricRecord({"loss": 0.1}),
    }
    sent = message("train", RecordDict(records))
    one, other = Pipe()
    there = context({"name": "é", "share": 0.5, "warm": True})
    there.state["kept"] = MetricRecord({"many": [1, -2]})
    send(one, sent, there, ["more", None])
    received, at, more = receive(other)
    assert received is not None
    assert received.content == sent.content == RecordDict(records)
    assert list(received.content) == list(records)
    assert (vars(received.metadata), more) == (vars(sent.metadata), ["more", None])
    assert at == there
    send(one, Message(Error(3, "why"), reply_to=sent), there, release=True)
    failed, *_ = receive(other)
    assert failed is not None
    assert failed.error.reason == "why"
    one.close()
    with pytest.raises(EOFError):
        receive(other)


# --- The real client -----------------------------------------------------------------------------


def test_the_process_of_one_message_does_not_import_pytorch():
    code = "import client_app, sys; assert 'torch' not in sys.modules"
    output_of([sys.executable, "-c", code], cwd=ROOT)


def timeless(reply):
    """Return the content of a reply without its times."""
    reply.content["metrics"].pop("seconds", None)
    return reply.content


def cold_reply(state_dir, node, kind, request):
    """Return the reply of a client that keeps only its state file between messages."""
    client = runpy.run_path(str(node.folder / "real.py"))["app"]
    asked = message(kind, request.to_content(1))
    return timeless(client(asked, context({"state-dir": str(state_dir)})))


def replies_as_cold(node, folder, *asked, after=lambda number: None):
    """Return a trainer's replies, those of a cold client; ``after`` is called after each."""
    node.config = {"state-dir": str(folder)}
    replies = []
    for number, (kind, request) in enumerate(asked):
        replies.append(timeless(node.ask(kind, request.to_content(1), "real:app")))
        after(number)
    node.ask("query.goodbye", WindowRequest(run_key="r").to_content(0), "real:app")
    assert replies == [cold_reply(folder / "cold", node, *each) for each in asked]
    return replies


PARAMS = {
    "0.weight": torch.ones(4, 3),
    "0.bias": torch.zeros(4),
    "1.weight": torch.ones(4),
    "1.bias": torch.zeros(4),
}
BUFFERS = {"1.running_mean": torch.zeros(4), "1.running_var": torch.ones(4)}
FIRST = WindowRequest(
    run_key="r",
    stop=2,
    due=frozenset({"params"}),
    versions=dict.fromkeys(("params", "buffers", "exp_avg", "exp_avg_sq"), 0),
    streams={"params": PARAMS, "buffers": BUFFERS},
)


def test_a_warm_client_replies_as_a_cold_one_bit_for_bit(node, tmp_path):
    # Streams that were not due come from the state file.
    due = frozenset({"params", "exp_avg", "exp_avg_sq"})
    second = replace(FIRST, start=2, stop=4, due=due, streams={"params": PARAMS})
    replies = replies_as_cold(node, tmp_path, ("train", FIRST), ("train", second))
    one, other = (from_record(reply["params"]) for reply in replies)
    assert one.keys() == PARAMS.keys()
    assert not torch.equal(one["0.bias"], other["0.bias"])


def test_a_warm_client_goes_on_while_its_streams_travel_to_the_same_bits(node, tmp_path):
    """With an evaluation on the way, whose parameters are not those that it trains."""
    first = replace(FIRST, ahead=2)
    moved = {"params": {name: tensor + 1 for name, tensor in PARAMS.items()}}
    versions = {**FIRST.versions, "params": 2}
    evaluation = WindowRequest(run_key="r", start=2, stop=2, versions=versions, streams=moved)
    due = frozenset(FIRST.versions)
    second = replace(evaluation, stop=5, before_merge=2, due=due, streams={})
    batches = node.folder / "real.py.batches"
    batches.unlink(missing_ok=True)

    def wait_for_the_steps(number):
        steps = {str(step) for step in range((4, 4, 5)[number])}
        wait_until(lambda: steps <= set(batches.read_text().split()), node.log.read_text)

    asked = [("train", first), ("evaluate", evaluation), ("train", second)]
    replies_as_cold(node, tmp_path, *asked, after=wait_for_the_steps)


# --- One trainer for a run and node --------------------------------------------------------------


def test_one_process_answers_all_messages_of_a_run_and_ends_with_it(node):
    first, second = node.about(), node.about()
    trainer = psutil.Process(first.pid)
    assert (first.answered, second.answered) == (1, 2)
    assert first.pid == second.pid != node.process.pid
    assert node.state["count"]["count"] == 2
    assert node.about("query.goodbye").answered == 3
    node.wait_until_ended(trainer)
    assert not node.sockets()


def test_a_trainer_keeps_no_descriptor_and_no_thread_of_a_message(node):
    trainer = psutil.Process(node.about().pid)

    def kept():
        return trainer.num_fds(), trainer.num_threads()

    before = kept()
    for _ in range(20):
        node.about()
    # The process of the last message may be ending.
    wait_until(lambda: sum(kept()) <= sum(before), kept, limit=10)


def test_another_run_is_answered_by_another_process(node):
    first = psutil.Process(node.about().pid)
    node.run += 1
    second = node.about()
    assert second.answered == 1
    assert second.pid != first.pid
    node.wait_until_ended(first)
    assert len(node.sockets()) == 1


def test_a_trainer_ends_with_its_node(tmp_path_factory):
    with started(tmp_path_factory.mktemp("d")) as node:
        trainer, waiting = node.begin_to_sleep()
        waiting.suspend()  # its connection stays open, so only the end of the node can be noticed
        node.process.kill()
        node.wait_until_ended(trainer)
        assert not node.sockets()
        waiting.kill()


def test_a_working_trainer_ends_with_the_process_it_works_for(node):
    trainer, waiting = node.begin_to_sleep()
    waiting.kill()
    node.wait_until_ended(trainer)
    assert node.process.stdout.readline() == "answered\n"
    assert node.about().answered == 1


def test_a_trainer_that_is_asked_to_end_first_writes_the_state_it_has_replied_with(
    tmp_path_factory,
):
    with started(tmp_path_factory.mktemp("t")) as node:
        state = node.folder / "state"
        trainer = psutil.Process(node.about("train.save", at(state)).pid)
        wait_until(state.exists, node.log.read_text)
        supervisor.end_all(node.folder)  # in more time than others have between SIGTERM and SIGKILL
        assert has_ended(trainer)
        assert state.read_text() == "whole"


LATE = """\
import signal, subprocess, sys, time
saves = '''
import pathlib, signal, sys
def save(*_):
    pathlib.Path(sys.argv[2]).write_text("whole")
    sys.exit()
signal.signal(signal.SIGTERM, save)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
signal.pause()
'''
def start(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it has its handler
    subprocess.Popen([sys.executable, "-c", saves, "--saves-state", sys.argv[1]])
    sys.exit()
signal.signal(signal.SIGTERM, start)
print("ready", flush=True)
signal.pause()
"""


def test_a_trainer_that_is_started_while_the_others_are_ended_is_asked_to_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(supervisor, "SAVE_TIMEOUT", 5)
    command = [sys.executable, "-c", LATE, tmp_path / "state"]
    environment = {**os.environ, "FLWR_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        supervisor.end_all(tmp_path)
    assert (tmp_path / "state").read_text() == "whole"


def test_a_trainer_that_is_asked_to_end_leaves_its_window(node):
    trainer, _ = node.begin_to_sleep()
    trainer.terminate()
    wait_until(lambda: has_ended(trainer), node.log.read_text, limit=5)
    assert node.process.stdout.readline() == "answered\n"


ASYNCIO = """\
import asyncio, os, signal, time
from flower_desloc.app.sites.warm.trainer import _on_sigterm
async def handle():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
_on_sigterm(lambda: os._exit(7))
asyncio.run(handle())
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


def test_sigterm_is_noticed_also_after_an_app_has_used_asyncio():
    assert subprocess.run([sys.executable, "-c", ASYNCIO], check=False).returncode == 7


def test_a_killed_trainer_is_replaced(node):
    trainer = psutil.Process(node.about().pid)
    trainer.kill()
    node.wait_until_ended(trainer)
    replacement = node.about()
    assert (replacement.answered, replacement.pid != trainer.pid) == (1, True)


def test_a_trainer_that_dies_in_its_first_message_is_an_error_that_says_how(node):
    with pytest.raises(RuntimeError, match=r"was ended by SIGKILL .* while .* train\.die message"):
        node.ask("train.die")
    assert node.about().answered == 1


# --- Errors and options --------------------------------------------------------------------------


def test_the_server_gets_the_same_error_with_and_without_a_trainer(node):
    with pytest.raises(RuntimeError) as warm:
        node.ask("train.refuse")
    assert "In the trainer" in node.log.read_text()
    assert node.about().answered == 1  # by another trainer: the first may have been broken
    node.config = {"warm": False}
    with pytest.raises(RuntimeError) as cold:
        node.ask("train.refuse")
    expected = "<class 'toy.Refusal'>:<'no 'data' here;\nset data-path'>"
    assert str(warm.value) == str(cold.value) == expected


def test_a_site_can_turn_warm_clients_off(node):
    node.config = {"warm": False}
    assert node.about().parent == node.process.pid
    node.config = {"warm": "no"}
    with pytest.raises(RuntimeError, match="warm='no' in the node config: must be true or false"):
        node.ask()


def test_where_processes_cannot_be_watched_a_message_is_answered_without_a_trainer(
    tmp_path_factory,
):
    folder = tmp_path_factory.mktemp("w")
    (folder / "sitecustomize.py").write_text("import os\ndel os.pidfd_open\n")
    with started(folder) as node:
        assert node.about().parent == node.process.pid
        assert "os.pidfd_open does not work here; this message is" in node.log.read_text()


def test_a_process_that_serves_more_than_one_message_answers_itself(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    about = WarmClientApp("toy:app")(message("train"), context({})).content["about"]
    assert about["pid"] == os.getpid()


def test_only_the_user_can_enter_the_folder_of_the_socket(node):
    node.ask()
    (socket,) = node.sockets()
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    socket.parent.chmod(0o755)
    assert node.about().parent == node.process.pid
    assert "is not a folder that only this user can enter" in node.log.read_text()
    socket.parent.chmod(0o700)
