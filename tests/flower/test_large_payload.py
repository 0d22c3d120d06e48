"""Laws of large payloads: nothing is held twice, and files beyond 4 GB are read."""

import gc
import json
import socket
import threading
import tracemalloc
import weakref
from multiprocessing.connection import Connection

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc.app.sites.warm.framing import receive, send
from flower_desloc.flower import tensor_file

MB = 1 << 20


def message(sizes):
    """Return a message with an array of so many random bytes for each size."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    random = np.random.default_rng(0)
    arrays = {str(i): Array("uint8", (n,), "raw", random.bytes(n)) for i, n in enumerate(sizes)}
    content = RecordDict({"params": ArrayRecord(arrays), "metrics": MetricRecord({"loss": 0.1})})
    return Message(content, dst_node_id=5, message_type="train")


def transferred(sent, **options):
    """Return the message received over a socket with small buffers."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is
    here, there = (Connection(end.detach()) for end in ends)
    context = Context(1, 5, {}, RecordDict(), {})
    with here, there:
        sender = threading.Thread(target=send, args=(here, sent, context), kwargs=options)
        sender.start()
        received, _, _ = receive(there)
        sender.join()
    return received


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(8190, 8194), st.just(70_000)), max_size=5))
def test_a_message_of_any_sizes_is_transferred_whole(sizes):
    sent, same = message(sizes), message(sizes)
    received = transferred(sent, release=True)
    assert received.content == same.content
    assert not sent.content


def test_a_released_message_is_never_held_twice():
    sizes = [MB] * 16
    sent = message(sizes)  # NumPy's bytes are not traced, the copies are
    sent.content["params"] = ArrayRecord()
    tracemalloc.start()
    try:
        for i, size in enumerate(sizes):
            sent.content["params"][str(i)] = Array("uint8", (size,), "raw", bytes(bytearray(size)))
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        received = transferred(sent, release=True)
        more = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(received.content["params"]) == 16
    assert before > 16 * MB
    assert more < 3 * MB


def test_the_arrays_of_a_message_are_freed_with_it():
    gc.disable()
    try:
        sent = message([1, 2])
        received = transferred(sent)
        arrays = [weakref.ref(m.content["params"]["1"]) for m in (sent, received)]
        del sent, received
        assert [array() for array in arrays] == [None, None]
    finally:
        gc.enable()


def test_a_stream_beyond_four_gigabytes_of_a_file_is_read(tmp_path):
    small, path = tmp_path / "small", tmp_path / "large"
    tail = {"a": torch.arange(5.0), "b": torch.ones(2, 2)}
    tensor_file.write(small, {"step": 3}, {"front": {"x": torch.zeros(1).double()}, "tail": tail})
    data = small.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header, more = json.loads(data[8:begin]), 5 << 30
    for name, about in header.items():
        if name == "front/x":
            about["data_offsets"][1] += more
            about["shape"] = [1 + more // 8]
        elif name != "__metadata__":
            about["data_offsets"] = [offset + more for offset in about["data_offsets"]]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(more, 1)  # a hole: no disk
        file.write(data[begin:])
    assert tensor_file.metadata(path) == {"step": 3}
    read = tensor_file.read(path, ["tail"])["tail"]
    assert all(torch.equal(read[key], tail[key]) for key in tail)
