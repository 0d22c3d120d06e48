"""Runs whose tensors travel beside the messages: the same weights as in messages."""

import itertools
import socket
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from federation import OPTIMIZERS
from flower_path import Run, free_address
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, SyncSchedule
from flower_desloc.flower.arrays import from_record, stated, to_array
from flower_desloc.flower.client import DesLocClient
from flower_desloc.flower.flight import FLIGHT, at_site, body
from flower_desloc.flower.flight.transfer import TensorClient, TransferError
from flower_desloc.flower.policy import Policy

pytestmark = pytest.mark.usefixtures("by_flight")


def trained(folder, address: str | None, periods=(2, 4, 8), **options) -> Run:
    options = {"num_steps": 8, "policy": Policy(data_address=address), **options}
    run = Run("adam", periods, folder, **options)
    run.start()
    return run


def equal(a: Run, b: Run) -> bool:
    ours, theirs = from_record(a.result.arrays), from_record(b.result.arrays)
    return all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


def has_arrays(messages: Sequence[Message]) -> list[bool]:
    trains = [m for m in messages if m.metadata.message_type == "train"]
    return [any(isinstance(r, ArrayRecord) for r in m.content.values()) for m in trains]


# The runs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": {"params": "int8", "exp_avg": "bf16", "exp_avg_sq": "int4"}},
        {"outer": OuterOptimizer(partial(torch.optim.SGD, lr=0.7))},
    ],
    ids=["exact", "coded", "outer"],
)
def test_weights_are_the_same_over_either(tmp_path, options):
    beside = trained(tmp_path / "a", free_address(), **options)
    inside = trained(tmp_path / "b", None, **options)
    assert not any(has_arrays(beside.grid.sent))
    assert equal(beside, inside)
    for ours, theirs in zip(beside.watch.records, inside.watch.records, strict=True):
        assert ours.traffic.up == theirs.traffic.up
        assert ours.traffic.down == theirs.traffic.down
        assert ours.events == theirs.events == []


def test_weights_are_the_same_where_large_requests_are_files(tmp_path, monkeypatch):
    monkeypatch.setattr(at_site, "_LARGE", 0)
    folders = []
    mapped = body.mapped

    def noting(rows, folder):
        folders.append(folder)
        return mapped(rows, folder)

    monkeypatch.setattr(body, "mapped", noting)
    beside = trained(tmp_path / "a", free_address())
    assert len({*folders}) == 2  # the clients' and the server's
    assert equal(beside, trained(tmp_path / "b", None))


def test_a_site_that_cannot_reach_the_server_is_sent_messages(tmp_path, monkeypatch):
    connected = at_site._connected

    def unreachable_for_one(address, authority, certificate, key):
        if next(asked) == 1:  # the second client's greeting
            address = free_address()
        return connected.__wrapped__(address, authority, certificate, key)

    asked = itertools.count()
    unreachable_for_one.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(at_site, "_connected", unreachable_for_one)
    mixed = trained(tmp_path / "a", free_address())
    monkeypatch.setattr(at_site, "_connected", connected)
    assert has_arrays(mixed.grid.sent)[:3] == [False, True, False]
    assert equal(mixed, trained(tmp_path / "b", None))
    (event,) = [e for record in mixed.watch.records for e in record.events]
    assert (event.kind, event.client) == ("by message", "client-1")


def test_a_reply_that_stays_in_its_message_may_have_bundles(tmp_path, monkeypatch):
    monkeypatch.setattr(body, "expected_rows", lambda *_: None)
    run = trained(tmp_path / "a", free_address())
    trains = [m for m in run.grid.sent if m.metadata.message_type == "train"]
    assert all(
        FLIGHT in m.content and m.content.config_records["config"]["bundles"] for m in trains
    )
    assert equal(run, trained(tmp_path / "b", None))


@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_transfer_that_fails_is_repeated_by_message(tmp_path, monkeypatch, direction):
    works = getattr(TensorClient, direction)

    def fails_once(self, ticket, parts):
        if parts.size and next(calls) == 2:
            raise TransferError("it was unplugged")
        works(self, ticket, parts)

    calls = itertools.count()
    monkeypatch.setattr(TensorClient, direction, fails_once)
    run = trained(tmp_path / "a", free_address())
    assert equal(run, trained(tmp_path / "b", None))
    (event,) = [e for record in run.watch.records for e in record.events]
    assert event.kind == "by message"
    assert "unplugged" in event.what


@pytest.mark.parametrize("message_type", ["query.hello", "train"])
def test_only_a_greeting_connects_for_nothing(tmp_path, monkeypatch, message_type):
    monkeypatch.setattr(at_site, "state_folder", lambda _: tmp_path)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    pems: dict[str, bytes] = dict.fromkeys(
        ("authority", "certificate", "private-key", "digest"), b""
    )
    pems["key"] = body.new_key()
    beside = ConfigRecord(
        {"address": free_address(), **pems, "arrays": b"[]", "get": "", "bundles": False}
    )
    message = Message(RecordDict({FLIGHT: beside}), 1, message_type)
    empty = partial(Message, RecordDict())
    reply = at_site.arrays_by_flight(
        message, Context(1, 1, {}, RecordDict(), {}), lambda m, _: empty(reply_to=m)
    )
    record = reply.content.config_records.get(FLIGHT)
    assert (record is not None and bool(record["by-message"])) == (message_type == "query.hello")


def test_a_reply_is_left_out_if_its_digest_is_another(tmp_path):
    policy = Policy(data_address=free_address(), on_failure="continue")
    run = Run("adam", (2, 4, 8), tmp_path, num_steps=2, policy=policy)

    def other_digest(reply: Message) -> None:
        reply.content.config_records[FLIGHT]["digest"] = bytes(16)

    run.grid.on_training(other_digest, node=2)
    run.start()
    left_out = run.watch.records[1].left_out
    assert "another digest" in left_out["client-1"]
    assert left_out.keys() == {"client-1"}


def test_a_reply_cannot_name_tensors_that_did_not_come(tmp_path, monkeypatch):
    policy = Policy(data_address=free_address(), on_failure="continue")
    run = Run("adam", (2, 4, 8), tmp_path, num_steps=2, policy=policy)
    works = TensorClient.put
    calls = itertools.count()

    def half(self, ticket, parts):
        if next(calls) != 1:
            works(self, ticket, parts)

    monkeypatch.setattr(TensorClient, "put", half)
    run.start()
    assert run.watch.records[1].left_out == {
        "client-1": "the tensors that it announced did not come whole"
    }


@pytest.mark.parametrize("wrong", ["names", "shapes", "types"])
def test_other_tensors_than_the_model_s_are_refused_as_in_a_message(tmp_path, monkeypatch, wrong):
    train = DesLocClient._train

    def other_tensors(self, message, context):
        reply = train(self, message, context)
        if context.node_id == 2:
            arrays = reply.content.array_records["params"]
            key = next(iter(arrays))
            tensor = from_record(arrays)[key]
            if wrong == "names":
                arrays["other"] = arrays.pop(key)
            else:
                arrays[key] = to_array(tensor.half() if wrong == "types" else tensor[:1])
        return reply

    def left_out(folder, address):
        policy = Policy(data_address=address, on_failure="continue")
        return trained(folder, address, num_steps=2, policy=policy).watch.records[1].left_out

    monkeypatch.setattr(DesLocClient, "_train", other_tensors)
    beside = left_out(tmp_path / "a", free_address())
    monkeypatch.setattr("flower_desloc.flower.internals.is_grid", lambda *_: False)  # no bundles
    inside = left_out(tmp_path / "b", None)
    assert beside == inside
    assert beside.keys() == {"client-1"}


def test_gradients_travel_beside_messages(tmp_path):
    def run(folder, address):
        outer = OuterOptimizer(OPTIMIZERS["adam"].make)
        schedule = SyncSchedule({GRADIENTS: 1})
        return trained(folder, address, schedule, num_steps=3, outer=outer)

    beside = run(tmp_path / "a", free_address())
    assert not any(has_arrays(beside.grid.sent))
    assert equal(beside, run(tmp_path / "b", None))


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"federation.data_address={address}: .*another port"):
            trained(tmp_path, address)


@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5), (1000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_size_of_an_array_is_known_before_it_is_there(shape, dtype):
    array = to_array(torch.zeros(shape, dtype=dtype))
    assert stated(dtype, shape) == (array.dtype, array.shape, array.stype, len(array.data))


@pytest.mark.parametrize("system", ["full", "macOS"])
def test_memory_that_is_short_on_the_disk_is_ordinary(tmp_path, monkeypatch, system):
    def full(*_):
        raise OSError(28, "No space left on device")

    if system == "full":
        monkeypatch.setattr("os.posix_fallocate", full)
    else:
        monkeypatch.delattr("os.posix_fallocate")
    rows = [("params", "x", "float32", (2,), "numpy.ndarray", 136)]
    (view,) = body.mapped(rows, tmp_path)
    view[:] = bytes(range(136))
    arrays = body.records(rows, [view])["params"]
    assert bytes(arrays["x"].data) == bytes(range(136))
    assert list(tmp_path.iterdir()) == []
