"""Laws of the warm trainer: the same replies, one run, one node, and nothing left behind.

A node stands in for a SuperNode: a process that forks a process of its own for every message.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from flower_desloc.flower.records import Request, from_record, to_record
from flower_desloc.sites.warm import WarmClientApp
from flower_desloc.sites.warm.wire import read_context, read_message, write_context, write_message

ROOT = Path(__file__).resolve().parents[1]

NODE = """\
import json, os, sys, traceback
from flwr.supercore.task_identity import TaskIdentity
from flower_desloc.sites.warm import WarmClientApp
from flower_desloc.sites.warm.wire import read_context, read_message, write_context, write_message

def answer(reference, folder):
    sys.argv = ["/somewhere/flwr-clientapp"]
    with open(f"{folder}/request", "rb") as file:
        message, context = read_message(file), read_context(file)
    TaskIdentity.run_id, TaskIdentity.task_id = context.run_id, 7
    TaskIdentity.node_id = context.node_id
    try:
        reply = WarmClientApp(reference)(message, context)
    except Exception as error:  # as flwr-clientapp words it
        with open(f"{folder}/error", "w") as file:
            file.write(str(type(error)) + ":<'" + str(error) + "'>")
        traceback.print_exc()
        return
    with open(f"{folder}/reply", "wb") as file:
        write_message(file, reply)
        write_context(file, context)

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
    said = {"pid": os.getpid(), "parent": os.getppid(), "answered": answered}
    return Message(RecordDict({"said": ConfigRecord(said)}), reply_to=message)
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
@app.query("goodbye")
def goodbye(message, context):
    return train(message, context)
"""


OURS = """\
import torch
from flower_desloc.flower.client import Worker, client_app
from flower_desloc.optim import ADOPT
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
optimizer = ADOPT(module.parameters(), lr=0.1)
def loss_at(step):
    torch.manual_seed(step)
    return (module(torch.randn(5, 3)) - torch.randn(5, 4)).square().mean()
worker = Worker(module=module, optimizer=optimizer, loss_at=loss_at, num_examples=3,
                evaluate=lambda: {"loss": float(loss_at(99).detach())})
app = client_app(lambda config, context: worker)
"""


class Node:
    """A node, and what it was told last."""

    def __init__(self, folder, **config):
        self.folder, self.config, self.run = folder, config, 1
        folder.mkdir(exist_ok=True)
        (folder / "toy.py").write_text(TOY)
        (folder / "ours.py").write_text(OURS)
        path = os.pathsep.join([str(folder), str(ROOT)])
        self.log = (folder / "log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )

    def ask(self, kind="train", content=None, reference="toy:app"):
        """Return the reply to a message; raises ``RuntimeError`` with the client's error."""
        self.begin(kind, content, reference)
        assert self.process.stdout.readline() == "answered\n"
        if (error := self.folder / "error").exists():
            raise RuntimeError(error.read_text())
        with (self.folder / "reply").open("rb") as file:
            reply, self.state = read_message(file), read_context(file).state
        return reply

    def begin(self, kind, content=None, reference="toy:app"):
        """Hand out a message; return the pid of the process that Flower would have started."""
        for name in ("reply", "error"):
            (self.folder / name).unlink(missing_ok=True)
        with (self.folder / "request").open("wb") as file:
            write_message(file, message(kind, content))
            write_context(file, context(self.config, self.run))
        print(json.dumps([reference, str(self.folder)]), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def said(self, *args, **kwargs):
        return SimpleNamespace(**self.ask(*args, **kwargs).content["said"])

    def sockets(self):
        return list(self.folder.glob("desloc-*/*"))

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def living(tmp_path_factory):
    """Return a node that is killed in the end."""
    with started(tmp_path_factory.mktemp("n")) as node:
        yield node


@pytest.fixture
def node(living):
    """Return the node, in a run of its own."""
    living.run += 1
    living.config = {}
    return living


@pytest.fixture
def doomed(tmp_path_factory):
    """Return a node for one test to kill."""
    with started(tmp_path_factory.mktemp("d")) as node:
        yield node


@contextlib.contextmanager
def started(folder):
    node = Node(folder)
    yield node
    node.kill()
    for stream in (node.process.stdin, node.process.stdout, node.log):
        stream.close()


def message(kind, content=None):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    made = Message(content or RecordDict(), dst_node_id=5, message_type=kind)
    made.metadata.__dict__["_message_id"] = "asked"
    return made


def context(config, run=1):
    return Context(run, 5, config, RecordDict(), {})


def ends(pid, within=8.0):
    """Return whether a process ends."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if status == "Z":  # nobody has asked for its status yet
            return True
        time.sleep(0.05)
    return False


def wait_for(path):
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return path.read_text()


def asleep(node):
    """Return the pids of a trainer at work and of the process it works for."""
    path = node.folder / "asleep"
    waiting = node.begin("train.sleep", RecordDict({"where": ConfigRecord({"path": str(path)})}))
    return int(wait_for(path)), waiting


# --- What travels --------------------------------------------------------------------------------


def test_a_message_is_the_same_on_the_other_side():
    tensors = {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
    }
    content = RecordDict(
        {
            "params": to_record(tensors),
            "none": ArrayRecord(),
            "config": ConfigRecord({"text": "é", "raw": b"\0", "many": [1, 2]}),
            "metrics": MetricRecord({"loss": 0.1}),
        }
    )
    sent, stream = message("train", content), BytesIO()
    write_message(stream, sent)
    stream.seek(0)
    came = read_message(stream)
    assert came.content == sent.content == content
    assert list(came.content) == list(content)
    assert vars(came.metadata) == vars(sent.metadata)
    assert stream.read() == b""


def test_an_error_travels_too():
    stream = BytesIO()
    write_message(stream, Message(Error(3, "why"), reply_to=message("train")))
    stream.seek(0)
    assert read_message(stream).error.reason == "why"


def test_a_message_cut_short_is_an_end_of_file():
    stream = BytesIO()
    write_message(stream, message("train"))
    with pytest.raises(EOFError):
        read_message(BytesIO(stream.getvalue()[:-1]))


# --- The real client -----------------------------------------------------------------------------


def test_a_process_of_one_message_does_not_import_pytorch():
    code = "import client_app, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_warm_client_replies_as_a_cold_one_bit_for_bit(node, tmp_path):
    params = {
        "0.weight": torch.ones(4, 3),
        "0.bias": torch.zeros(4),
        **{"1.weight": torch.ones(4), "1.bias": torch.zeros(4)},
    }
    buffers = {"1.running_mean": torch.zeros(4), "1.running_var": torch.ones(4)}
    sent = {"params": params, "buffers": buffers}
    versions = dict.fromkeys([*sent, "exp_avg", "exp_avg_sq"], 0)

    def window(start, stop, due, streams):
        request = Request(
            run_key="r",
            start=start,
            stop=stop,
            due=frozenset(due),
            versions=versions,
            streams=streams,
        )
        return request.to_content(1)

    asked = [
        ("train", window(0, 2, {"params"}, sent)),
        # What was not due comes from the state file.
        ("train", window(2, 4, {"params", "exp_avg", "exp_avg_sq"}, {"params": params})),
    ]

    def replies(**config):
        node.config = {"state-dir": str(tmp_path / str(config)), **config}
        for kind, content in asked:
            reply = node.ask(kind, content, reference="ours:app").content
            reply["metrics"].pop("seconds", None)
            yield reply

    warm = list(replies())
    node.ask("query.goodbye", Request(run_key="r").to_content(0), reference="ours:app")
    cold = list(replies(warm=False))
    assert warm == cold
    assert from_record(warm[0]["params"]).keys() == params.keys()
    assert not torch.equal(*(from_record(reply["params"])["0.bias"] for reply in warm[:2]))


# --- One run, one node ---------------------------------------------------------------------------


def test_one_process_answers_all_messages_of_a_run(node):
    first, second = node.said(), node.said()
    assert (first.answered, second.answered) == (1, 2)
    assert first.pid == second.pid != node.process.pid
    assert node.state["count"]["count"] == 2
    assert node.said("query.goodbye").answered == 3
    assert ends(first.pid)
    assert not node.sockets()


def test_another_run_is_answered_by_another_process(node):
    first = node.said()
    node.run += 1
    second = node.said()
    assert second.answered == 1
    assert second.pid != first.pid
    assert ends(first.pid)
    assert len(node.sockets()) == 1


def test_a_trainer_ends_with_its_node(doomed):
    trainer = doomed.said().pid
    doomed.kill()
    assert ends(trainer)
    assert not doomed.sockets()


def test_a_trainer_at_work_ends_with_its_node(doomed):
    trainer, waiting = asleep(doomed)
    os.kill(waiting, signal.SIGSTOP)  # the line stays open: the node's end alone must do
    doomed.kill()
    assert ends(trainer)
    os.kill(waiting, signal.SIGKILL)


def test_a_trainer_ends_with_the_process_it_works_for(node):
    trainer, waiting = asleep(node)
    os.kill(waiting, signal.SIGKILL)
    assert ends(trainer)
    assert node.process.stdout.readline() == "answered\n"
    assert node.said().answered == 1


def test_a_killed_trainer_is_replaced(node):
    trainer = node.said().pid
    os.kill(trainer, signal.SIGKILL)
    assert ends(trainer)
    replaced = node.said()
    assert (replaced.answered, replaced.pid != trainer) == (1, True)


def test_a_trainer_that_dies_of_a_message_is_an_error_that_says_so(node):
    with pytest.raises(RuntimeError, match=r"was ended by SIGKILL .* while .* train\.die message"):
        node.ask("train.die")
    assert node.said().answered == 1


# --- What the server hears, and what the site decides --------------------------------------------


def test_an_exception_reaches_the_server_as_it_would_without_a_trainer(node):
    with pytest.raises(RuntimeError) as warm:
        node.ask("train.refuse")
    assert "In the trainer" in (node.folder / "log").read_text()
    assert node.said().answered == 1  # by another: it may have been the process that was broken
    node.config = {"warm": False}
    with pytest.raises(RuntimeError) as cold:
        node.ask("train.refuse")
    expected = "<class 'toy.Refusal'>:<'no 'data' here;\nset data-path'>"
    assert str(warm.value) == str(cold.value) == expected


def test_a_site_can_turn_it_off(node):
    node.config = {"warm": False}
    assert node.said().parent == node.process.pid
    node.config = {"warm": "no"}
    with pytest.raises(RuntimeError, match="warm='no' in the node config: must be true or false"):
        node.ask()


def test_a_process_that_lives_on_answers_itself(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    said = WarmClientApp("toy:app")(message("train"), context({})).content["said"]
    assert said["pid"] == os.getpid()


def test_the_socket_is_in_a_folder_that_the_user_alone_may_enter(node):
    node.said()
    (socket,) = node.sockets()
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    socket.parent.chmod(0o755)
    assert node.said().parent == node.process.pid
    assert "is not a folder that this user alone may enter" in (node.folder / "log").read_text()
    socket.parent.chmod(0o700)
