"""What a site accepts, and what it records of what it sent."""

import hashlib
import json
import math
import re
import resource
import stat
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from processes import output_of
from scripts import ROOT
from tiny import TINY, train

from flower_desloc.app.engines import in_process
from flower_desloc.app.sites.audit import AuditedClientApp, audited
from flower_desloc.app.sites.deployment.accepted import accepting
from flower_desloc.app.sites.required import PROTECTING
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.internals import set_task, start_client_internal

SHORT = [*TINY, "run.steps=4", "run.eval_every=4", "sync.params=2", "sync.exp_avg=4"]


@pytest.fixture
def site(monkeypatch):
    """Let client-1 have more in its node config."""

    def have(**own):
        def grid(app, nodes, **options):
            return InProcessGrid(app, [nodes[0], nodes[1] | own, *nodes[2:]], **options)

        monkeypatch.setattr(in_process, "InProcessGrid", grid)

    return have


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# The app


class Site:
    """A SuperNode's own function that takes a message in, with its real stores."""

    def __init__(self, app: bytes) -> None:
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supernode.nodestate import NodeStateFactory

        stores = ObjectStoreFactory()
        self.store, self.state = stores.store(), NodeStateFactory(stores).state()
        self.state.set_node_id(7)
        self.fab = SimpleNamespace(hash_str="h", content=app, verifications={})
        self.asked = 0

    def pull(self, accepted: str, **node: str) -> int | None:
        set_task(run_id=3, node_id=1, task_id=1)
        message = Message(RecordDict(), dst_node_id=7, message_type="query.hello")
        message.metadata.__dict__.update(_message_id=f"m{self.asked}")

        def nothing_runs(*_: object) -> None:
            self.asked += 1
            raise AssertionError("the message was taken in")

        return accepting(start_client_internal._pull_and_store_message)(
            state=self.state,
            object_store=self.store,
            node_config={"accept-app": accepted, **node},
            receive=lambda: (message, None),
            get_run=lambda run_id: SimpleNamespace(run_id=run_id, fab_hash="h"),
            get_fab=lambda fab_hash, run_id: self.fab,
            pull_object=nothing_runs,
            confirm_message_received=nothing_runs,
            trusted_entities=None,
        )


def test_another_app_than_the_accepted_ones_is_answered_by_an_error(tmp_path):
    site, other = Site(b"an app"), hashlib.sha256(b"another").hexdigest()
    log = tmp_path / "site.jsonl"
    nowhere = {"audit-log": str(tmp_path / "file" / "site.jsonl")}
    (tmp_path / "file").write_text("")
    assert site.pull(other, **nowhere) == 3
    site.state.get_messages_legacy(is_reply=True)
    for stated in (other, "", other):  # also when the server asks again
        assert site.pull(stated, **{"audit-log": str(log)}) == 3
        assert "does not accept the app" in lines(log)[-1]["error"]
        (reply,) = site.state.get_messages_legacy(is_reply=True)
        assert reply.has_error()
        digest = hashlib.sha256(b"an app").hexdigest()
        assert f"does not accept the app with the SHA-256 {digest}" in str(reply.error.reason)
    assert site.state.get_run(3) is None
    assert site.asked == 0


@pytest.mark.parametrize("accepted", ["{other}, {own}", "{own}"])
def test_an_accepted_app_is_taken_in(accepted, monkeypatch):
    site = Site(b"an app")
    digests = {"own": hashlib.sha256(b"an app").hexdigest(), "other": "0" * 64}
    taken = []

    def config_of(content, run):
        taken.append(content)
        return {}

    monkeypatch.setattr(start_client_internal, "get_fused_config_from_fab", config_of)
    with pytest.raises(AttributeError):  # from the run, which stands for Flower's
        site.pull(accepted.format(**digests))
    assert taken == [b"an app"]


def test_a_supernode_that_compares_apps_tells_its_client_apps_and_has_no_pytorch():
    """By an environment variable, which they inherit."""
    code = (
        "import os, sys\n"
        "from flower_desloc.flower import internals\n"
        "from flower_desloc.flower.protection import APPS_COMPARED\n"
        "internals.flower_supernode = lambda: print(\n"
        "    os.environ[APPS_COMPARED], 'torch' in sys.modules)\n"
        "from flower_desloc.app.sites.deployment.node import main\n"
        "main()\n"
    )
    output = output_of([sys.executable, "-c", code])
    assert output.split() == ["1", "False"]


# The settings


def test_a_run_with_other_settings_than_a_site_requires_is_refused(site, tmp_path):
    lists = "data.domains=[] optimizer.betas=[0.9, 0.95]"
    site(require=f"task=causal_lm data.seq_len=32 optimizer.clip_norm=1 {lists}")
    train(tmp_path, *SHORT)
    with pytest.raises(
        FederationError, match=r"requires data.seq_len=32, and the run has data.seq_len=16"
    ):
        train(tmp_path, *SHORT, "data.seq_len=16")


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ("task", "task is not a setting with its value"),
        ("no.such=1", "no.such=1 is not a setting"),
        ("", "name settings, or leave it out"),
    ],
)
def test_a_requirement_that_is_no_setting_is_refused(site, stated, says, tmp_path):
    site(require=stated)
    with pytest.raises(FederationError, match=says):
        train(tmp_path, *SHORT)


@pytest.mark.parametrize(
    "stated", ["sync.exp_avg=never", "federation.min_clients=1", "privacy.secure_aggregation=true"]
)
def test_what_a_site_cannot_check_cannot_be_required(site, stated, tmp_path):
    site(require=stated)
    key = stated.partition("=")[0]
    with pytest.raises(FederationError, match=f"{key} is carried out by the server"):
        train(tmp_path, *SHORT)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        *(("secure_keys", "secure-keys"), ("audit_log", "audit-log"), ("accept_app", "accept-app")),
        *(("requires", "require"), ("eps", "epsilon"), ("Epsilon", "epsilon")),
    ],
)
def test_a_misspelt_key_protects_nothing_and_is_refused(site, key, meant, tmp_path):
    site(**{key: "any"})
    with pytest.raises(FederationError, match=f"{key} in the node config .* {meant} is one"):
        train(tmp_path, *SHORT)


def test_a_key_of_another_app_is_left_to_it(site, tmp_path):
    others = ("dataset-path", "device-id", "partition", "processor", "warmup", "secret-key")
    site(hospital="north", dataset="scans", **dict.fromkeys(others, "any"))
    train(tmp_path, *SHORT)


def test_the_page_has_every_key_that_protects():
    page = (ROOT / "docs" / "how-to" / "deployment.md").read_text()
    table = page.partition("| key | meaning |")[2].partition("\n\n")[0]
    assert {*PROTECTING} <= {*re.findall("`([a-z-]+)`", table)}


# The record


def test_a_site_records_what_it_was_asked_and_what_it_sent(site, tmp_path):
    log = tmp_path / "log" / "site.jsonl"
    site(**{"audit-log": str(log)})
    folder = train(tmp_path, *SHORT)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    received = [line["id"] for line in lines(log) if line["event"] == "received"]
    found = [line for line in lines(log) if line["event"] == "answered"]
    assert [line["id"] for line in found] == received
    kinds = [line["message"] for line in found]
    assert kinds[0] == "query.hello"
    assert kinds.count("train") == 2
    assert found[0]["sent"]["client-info"]["client"] == "client-1"
    assert "seq_len: 32" in found[0]["asked"]["config"]["settings"]
    windows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    trained = [line for line in found if line["message"] == "train"]
    for window, line in zip(windows, trained, strict=True):
        streams = {name: each for name, each in line["sent"].items() if "bytes" in each}
        assert sorted(streams) == sorted(window["bytes_up"])
        losses = window["clients"]["client-1"]["losses"]
        assert line["sent"]["metrics"]["losses"] == pytest.approx(losses)


def test_a_site_records_also_what_it_gives_to_secure_sums(site, tmp_path):
    log = tmp_path / "site.jsonl"
    site(**{"audit-log": str(log)})
    train(tmp_path, *SHORT, "privacy.secure_aggregation=true", clients=3)
    found = [line for line in lines(log) if line["event"] != "received"]
    assert {line["event"] for line in found} == {"answered"}
    questions = [line for line in found if line["message"] == "query.secure"]
    for start in (0, 4):  # of each window's four questions
        asked = [line["asked"]["secure"] for line in questions[start : start + 4]]
        assert [each["phase"] for each in asked] == ["keys", "shares", "confirm", "unmask"]
        keys = dict(zip(asked[1]["names"], asked[1]["data"], strict=True))
        assert keys["client-1"] == questions[start]["sent"]["secure"]["data"][0]
        assert all(bytes.fromhex(each) for each in keys.values())


def test_whatever_a_record_may_hold_is_written_as_json(tmp_path):
    log = tmp_path / "site.jsonl"
    set_task(run_id=3, node_id=1, task_id=1)
    values: dict[str, Any] = {
        "int": 2**62,
        "float": 0.5,
        "str": "é\n",
        "bool": True,
        "bytes": b"\0\xff",
    }
    lists = {f"{kind}s": [value, value] for kind, value in values.items()}
    numbers: dict[str, Any] = {"nan": math.nan, "most": [math.inf, -math.inf, 1.0]}
    config = ConfigRecord({**values, **lists, **numbers, "none": []})
    records = RecordDict({"config": config, "metrics": MetricRecord({"loss": 1, **numbers})})
    message = Message(records, dst_node_id=7, message_type="query.hello")
    context = Context(1, 7, {"audit-log": str(log)}, RecordDict(), {})
    audited(message, context, lambda message, _: Message(message.content, reply_to=message))
    (line,) = lines(log)
    assert line["asked"] == line["sent"]
    nothing = {"nan": None, "most": [None, None, 1.0]}
    assert line["sent"]["metrics"] == {"loss": 1, **nothing}
    told = values | lists | {"bytes": "00ff", "bytess": ["00ff", "00ff"]}
    assert line["sent"]["config"] == {**told, **nothing, "none": []}


def test_where_it_is_not_known_what_is_spent_the_window_is_not_lost(tmp_path):
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    context = Context(1, 7, {"audit-log": str(tmp_path / "log")}, RecordDict(), {})
    reply = Message(RecordDict(), reply_to=message)
    assert audited(message, context, lambda *_: reply, lambda _: {"epsilon": 1 / 0}) is reply
    (line,) = lines(tmp_path / "log")
    assert line["spent"] == {"error": "ZeroDivisionError"}


def test_an_error_is_recorded_and_a_record_that_cannot_be_written_lets_nothing_leave(
    site, tmp_path
):
    log = tmp_path / "site.jsonl"
    site(**{"audit-log": str(log), "require": "data.seq_len=31"})
    with pytest.raises(FederationError):
        train(tmp_path, *SHORT)
    received, failed, error = lines(log)[:3]
    assert [received["event"], failed["event"], error["event"]] == ["received", "failed", "error"]
    assert "requires data.seq_len=31" in failed["error"]
    assert "seq_len: 32" in failed["asked"]["config"]["settings"]
    assert "requires data.seq_len=31" in error["error"]
    (tmp_path / "file").write_text("")
    site(**{"audit-log": str(tmp_path / "file" / "site.jsonl")})
    with pytest.raises(FederationError, match="audit-log in the node config cannot be written"):
        train(tmp_path, *SHORT)


def test_a_message_whose_process_dies_is_recorded(tmp_path):
    log, message = (
        tmp_path / "site.jsonl",
        Message(RecordDict(), dst_node_id=7, message_type="train"),
    )
    set_task(run_id=3, node_id=1, task_id=1)
    context = Context(1, 7, {"audit-log": str(log)}, RecordDict(), {})

    class Dying(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            assert lines(log)[-1]["event"] == "received"
            raise RuntimeError("the process that trains for this node was killed")

    with pytest.raises(RuntimeError):
        AuditedClientApp(Dying())(message, context)
    assert lines(log)[-1]["error"].endswith("was killed")


def test_tensors_that_do_not_come_are_recorded_without_their_keys(tmp_path):
    log = tmp_path / "site.jsonl"
    set_task(run_id=3, node_id=1, task_id=1)
    record = ConfigRecord({"address": "elsewhere:1", "private-key": b"secret"})
    message = Message(RecordDict({"flight": record}), dst_node_id=7, message_type="train")
    context = Context(1, 7, {"audit-log": str(log)}, RecordDict(), {})

    class Missing(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            missed = RecordDict({"flight": ConfigRecord({"by-message": "no route"})})
            return Message(missed, reply_to=message)

    AuditedClientApp(Missing())(message, context)
    first, last = lines(log)
    assert (first["tensors_from"], last["event"]) == ("elsewhere:1", "error")
    assert b"secret".hex() not in log.read_text()


def test_a_full_disk_lets_nothing_leave_and_no_half_line_stays(tmp_path):
    log = tmp_path / "site.jsonl"
    set_task(run_id=3, node_id=1, task_id=1)
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    context = Context(1, 7, {"audit-log": str(log)}, RecordDict(), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    audited(message, context, lambda *_: message)
    before = log.read_text()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="audit-log in the node config cannot be written"):
            audited(message, context, lambda *_: message)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.read_text() == before
