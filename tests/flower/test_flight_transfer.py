"""What a server gives and takes: whole or not at all, and only by a ticket of one's own."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import pyarrow as pa
import pytest
import torch
from pyarrow import flight
from scripts import ROOT

from flower_desloc.flower.flight import at_server, transfer
from flower_desloc.flower.flight.body import digest, new_key, tag_of
from flower_desloc.flower.flight.transfer import Parts, TensorClient, TensorServer, TransferError

BODY = torch.randint(0, 256, (3_000_000,), generator=torch.Generator().manual_seed(0)).byte()
DATA = BODY.numpy().tobytes()
NODE, OTHER = 7, 8
KEY = new_key()
DIGEST = digest(KEY, [DATA])


class Peers:
    """A server, and connections of its nodes."""

    def __init__(self, interface: str = "127.0.0.1", host: str = "127.0.0.1") -> None:
        self.server, self.host = TensorServer(interface, 0), host
        self.memory = bytearray(len(DATA))

    def client(self, node: int = NODE) -> TensorClient:
        return TensorClient(f"{self.host}:{self.server.port}", self.server.credentials(node))

    def give(self) -> str:
        return self.server.give(NODE, Parts([DATA[:1000], DATA[1000:]]))

    def take(self) -> str:
        return self.server.take(NODE, len(DATA), lambda: Parts([self.memory], tag_of(KEY)))


@pytest.fixture
def peers(monkeypatch) -> Iterator[Peers]:
    monkeypatch.setattr(transfer, "_PIECE", 1 << 18)
    found = Peers()
    yield found
    found.server.close()


def got(client: TensorClient, ticket: str) -> bytes:
    memory = bytearray(len(DATA))
    parts = Parts([memory], tag_of(KEY))
    client.get(ticket, parts)
    assert parts.digest() == DIGEST
    return bytes(memory)


def test_what_is_given_and_taken_comes_whole(peers):
    assert got(peers.client(), peers.give()) == DATA
    ticket = peers.take()
    assert peers.server.taken(ticket) is None
    arrival = peers.server.arrival(ticket)
    assert not arrival.is_set()
    peers.client().put(ticket, Parts([DATA[:5], b"", DATA[5:70_005], DATA[70_005:]]))
    assert peers.server.taken(ticket).digest() == DIGEST
    assert arrival.is_set()
    assert peers.memory == DATA


@pytest.mark.parametrize("direction", ["give", "take"])
def test_a_ticket_is_for_one_node_one_direction_and_once(peers, direction):
    ticket = getattr(peers, direction)()
    use: Callable[[TensorClient, str], object] = (
        got if direction == "give" else lambda client, t: client.put(t, Parts([DATA]))
    )
    with pytest.raises(TransferError, match="another node's"):
        use(peers.client(OTHER), ticket)
    with pytest.raises(TransferError, match="other direction"):
        use(peers.client(), peers.take() if direction == "give" else peers.give())
    use(peers.client(), ticket)
    if direction == "give":
        with pytest.raises(TransferError, match="has been used"):
            got(peers.client(), ticket)
    else:  # it is whole already, and is not sent again
        options = TensorClient._options(ticket, 0, 1)
        with pytest.raises(flight.FlightUnauthorizedError, match="has been used"):
            put_pieces(peers.client(), options, [DATA[:9]])
    with pytest.raises(TransferError, match="unknown"):
        use(peers.client(), "0" * 64)
    late = getattr(peers, direction)()
    peers.server.revoke([late])
    with pytest.raises(TransferError, match="its window is over"):
        use(peers.client(), late)


def put_pieces(client: TensorClient, options, pieces, schema=transfer._SCHEMA) -> None:
    descriptor = flight.FlightDescriptor.for_command(b"")
    writer, _ = client._client.do_put(descriptor, schema, options)
    try:
        for piece in pieces:
            batch = transfer._batch(piece) if isinstance(piece, bytes) else piece
            writer.write_batch(batch)
        writer.done_writing()
    finally:
        writer.close()


def test_a_byte_more_than_announced_ends_the_transfer(peers):
    ticket = peers.take()
    options = TensorClient._options(ticket, 0, len(DATA))
    with pytest.raises(flight.FlightUnauthorizedError, match="more than the 3000000 bytes"):
        put_pieces(peers.client(), options, [DATA, b"!"])
    assert peers.server.taken(ticket) is None
    with pytest.raises(TransferError, match="has been used"):
        peers.client().put(ticket, Parts([DATA]))


def test_fewer_bytes_than_announced_are_not_whole(peers):
    ticket = peers.take()
    options = TensorClient._options(ticket, 0, len(DATA))
    with pytest.raises(flight.FlightUnavailableError, match="ended after 1000 of 3000000"):
        put_pieces(peers.client(), options, [DATA[:1000]])
    assert peers.server.taken(ticket) is None


def test_another_column_is_refused(peers):
    schema = pa.schema([("values", pa.float32())])
    batch = pa.RecordBatch.from_arrays([pa.array([1.0], pa.float32())], schema=schema)
    options = TensorClient._options(peers.take(), 0, len(DATA))
    with pytest.raises(flight.FlightServerError, match="one column of bytes"):
        put_pieces(peers.client(), options, [batch], schema)


def test_nobody_connects_without_a_certificate(peers):
    own = peers.server.credentials(NODE)
    for certificate in ({}, strangers_certificate()):
        stranger = flight.FlightClient(
            f"grpc+tls://127.0.0.1:{peers.server.port}",
            tls_root_certs=own.authority,
            override_hostname=transfer._SERVER,
            **certificate,
        )
        with pytest.raises(flight.FlightUnavailableError):
            list(stranger.list_actions(flight.FlightCallOptions(timeout=2)))


def strangers_certificate() -> dict[str, bytes]:
    import trustme

    made = trustme.CA().issue_cert(transfer._name(NODE))
    chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
    return {"cert_chain": chain, "private_key": made.private_key_pem.bytes()}


class FalseServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Gives bytes for any ticket."""

    def do_get(self, context, ticket):
        batches = iter([transfer._batch(DATA)])
        return flight.GeneratorStream(transfer._SCHEMA, batches)


@pytest.mark.parametrize("name", [transfer._SERVER, transfer._name(OTHER)])
def test_a_site_cannot_stand_in_for_the_server(peers, name):
    made = peers.server._authority.issue_cert(name)
    chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
    certificates = [(chain, made.private_key_pem.bytes())]
    with FalseServer("grpc+tls://127.0.0.1:0", tls_certificates=certificates) as false:
        client = TensorClient(f"127.0.0.1:{false.port}", peers.server.credentials(NODE))
        if name == transfer._SERVER:
            assert got(client, "") == DATA
        else:
            with pytest.raises(TransferError, match="not in peer certificate"):
                client.get("", Parts([]))


# Broken and stalled transfers


class Relay:
    """A TCP relay in front of the server that cuts its connections after so many bytes.

    With ``silently`` it carries nothing more and keeps them open, as when the power is gone.
    """

    def __init__(self, port: int, breaks: list[int], *, silently: bool = False) -> None:
        self.silently, self.ended = silently, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.port, self.breaks = port, breaks
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.port))
                self.sockets += [here, there]
                left = [self.breaks.pop(0) if self.breaks else 1 << 40]
                for pair in ((here, there), (there, here)):
                    self.threads.append(threading.Thread(target=self._copy, args=(*pair, left)))
                    self.threads[-1].start()

    def _copy(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with suppress(OSError):
            while (data := source.recv(1 << 16)) and left[0] > len(data):
                left[0] -= len(data)
                sink.sendall(data)
            if data and self.silently:
                left[0] = 0
                self.ended.wait()
        cut(source, sink)

    def close(self) -> None:
        self.ended.set()
        cut(self.listener, *self.sockets)
        for thread in self.threads:
            thread.join()
        for each in (self.listener, *self.sockets):
            each.close()


def cut(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("direction", ["give", "take"])
def test_a_broken_transfer_continues_where_it_stopped(peers, direction, share):
    with closing(Relay(peers.server.port, [int(share * len(DATA)), len(DATA) // 3])) as relay:
        client = TensorClient(relay.address, peers.server.credentials(NODE))
        if direction == "give":
            assert got(client, peers.give()) == DATA
        else:
            ticket = peers.take()
            client.put(ticket, Parts([DATA]))
            assert peers.server.taken(ticket).digest() == DIGEST
            assert peers.memory == DATA
        assert len(relay.sockets) >= 4  # two connections
        client.close()


@pytest.mark.parametrize("direction", ["give", "take"])
def test_a_transfer_that_moves_may_break_often(peers, direction):
    with closing(Relay(peers.server.port, [500_000] * 10)) as relay:
        client = TensorClient(relay.address, peers.server.credentials(NODE))
        if direction == "give":
            assert got(client, peers.give()) == DATA
        else:
            client.put(peers.take(), Parts([DATA]))
            assert peers.memory == DATA
        assert len(relay.sockets) >= 14  # seven connections
        client.close()


@pytest.mark.parametrize("direction", ["give", "take"])
def test_a_silent_connection_is_left_for_a_new_one(peers, monkeypatch, direction):
    monkeypatch.setattr(transfer, "IDLE", 1.5)
    relay = Relay(peers.server.port, [len(DATA) // 2], silently=True)
    with closing(relay), closing(TensorClient(relay.address, peers.server.credentials(NODE))) as c:
        if direction == "give":
            assert got(c, peers.give()) == DATA
        else:
            c.put(peers.take(), Parts([DATA]))
            assert peers.memory == DATA


def test_a_server_that_is_gone_ends_the_transfer(peers, monkeypatch):
    monkeypatch.setattr(transfer, "_PATIENCE", 0.5)
    ticket, client = peers.give(), peers.client()
    client.get(peers.server.give(NODE, Parts([])), Parts([]))
    peers.server.close()
    with pytest.raises(TransferError):
        got(client, ticket)


SERVER = """
import json, sys, time
from flower_desloc.flower.flight.transfer import Parts, TensorServer
size = int(sys.argv[1])
server = TensorServer("127.0.0.1", 0)
own = server.credentials(7)
memory = Parts([bytearray(size)])
tickets = [server.give(7, Parts([bytes(size)])), server.take(7, size, lambda: memory)]
pems = [pem.decode() for pem in (own.authority, own.certificate, own.key)]
print(json.dumps([server.port, pems, tickets]), flush=True)
time.sleep(600)
"""


class Deadly(Parts):
    """Calls ``kill`` when a third of it is read or written."""

    def __init__(self, size: int, kill: Callable[[], None]) -> None:
        super().__init__([bytearray(size)])
        self.kill = kill

    def write(self, offset: int, data: memoryview) -> None:
        super().write(offset, data)
        self.kill_after(offset)

    def pieces(self, offset: int = 0) -> Iterator[transfer.Buffer]:
        for piece in super().pieces(offset):
            yield piece
            offset += len(piece)
            self.kill_after(offset)

    def kill_after(self, offset: int) -> None:
        if offset > self.size / 3:
            self.kill()


@pytest.mark.soak
@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_server_that_is_killed_ends_the_transfer(direction):
    size = 200_000_000
    command = [sys.executable, "-c", SERVER, str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port, pems, tickets = json.loads(process.stdout.readline())
        client = TensorClient(
            f"127.0.0.1:{port}", transfer.Credentials(*(p.encode() for p in pems))
        )
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"refused|reset|closed|connect"):
            getattr(client, direction)(tickets[direction == "put"], Deadly(size, process.kill))
        assert process.wait() == -signal.SIGKILL
        assert time.monotonic() - began < transfer.IDLE  # its patience is half of that


SITE = """
import os, signal, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from test_flight_transfer import DATA, Deadly
from flower_desloc.flower.flight.transfer import Credentials, TensorClient
port, direction, ticket, *pems = sys.argv[2:]
client = TensorClient(f"127.0.0.1:{port}", Credentials(*(pem.encode() for pem in pems)))
dies = Deadly(len(DATA), lambda: os.kill(os.getpid(), signal.SIGKILL))
getattr(client, direction)(ticket, dies)
"""


@pytest.mark.soak
@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_site_that_is_killed_may_begin_again(peers, direction):
    ticket = peers.give() if direction == "get" else peers.take()
    own = peers.server.credentials(NODE)
    pems = [pem.decode() for pem in (own.authority, own.certificate, own.key)]
    folders = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests")])
    words = [folders, str(peers.server.port), direction, ticket, *pems]
    done = subprocess.run([sys.executable, "-c", SITE, *words], check=False)
    assert done.returncode == -signal.SIGKILL
    if direction == "get":
        assert got(peers.client(), ticket) == DATA
    else:
        peers.client().put(ticket, Parts([DATA]))
        assert peers.server.taken(ticket).digest() == digest(KEY, [peers.memory])
        assert peers.memory[len(DATA) // 2 :] == DATA[len(DATA) // 2 :]


def stalled(peers, direction: str) -> TensorClient:
    """Return a connection that holds a transfer open and does not move."""
    ticket = peers.take() if direction == "put" else peers.server.give(NODE, Parts([DATA] * 20))
    client = peers.client()
    if direction == "put":
        descriptor = flight.FlightDescriptor.for_command(b"")
        writer, _ = client._client.do_put(
            descriptor, transfer._SCHEMA, TensorClient._options(ticket, 0, len(DATA))
        )
        writer.write_batch(transfer._batch(DATA[:1000]))
        client.kept = writer
    else:
        reader = client._client.do_get(
            flight.Ticket(b""), TensorClient._options(ticket, 0, 20 * len(DATA))
        )
        reader.read_chunk()
        client.kept = reader
    deadline = time.monotonic() + 20
    while not any(t.peer for t in peers.server._transfers.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return client


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return socket.has_dualstack_ipv6()
    return False


@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_stalled_site_holds_nobody_up(peers, monkeypatch, direction):
    client = stalled(peers, direction)
    assert got(peers.client(), peers.give()) == DATA  # meanwhile
    monkeypatch.setattr(transfer, "IDLE", 0.5)
    deadline = time.monotonic() + 20
    while any(t.peer for t in peers.server._transfers.values()):
        assert time.monotonic() < deadline, "its transfer has a thread"
        time.sleep(0.05)
    del client


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_server_with_a_name_is_reached_by_either_address(host):
    # gRPC listens at addresses of both kinds: one has the other kind's form in the kernel.
    peers = Peers(at_server._interface("fed.example.org"), host)
    with closing(peers.server):
        assert got(peers.client(), peers.give()) == DATA
        client = stalled(peers, "get")
        transfers = dict(peers.server._transfers)
        peers.server.revoke(transfers)
        wait_until(lambda: not any(each.open for each in transfers.values()))
    del client


@pytest.mark.parametrize("direction", ["get", "put"])
def test_the_end_of_a_run_leaves_no_thread(direction):
    before = set(threading.enumerate())
    peers = Peers()
    client = stalled(peers, direction)
    began, port = time.monotonic(), peers.server.port
    transfers = list(peers.server._transfers.values())
    # A process has sockets that have no port.
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_UNIX):
        peers.server.close()
    assert time.monotonic() - began < transfer._LEAVE
    left = set(threading.enumerate()) - before
    assert not [
        t.name for t in left if not isinstance(t, threading._DummyThread)
    ]  # these are C++'s
    assert not any(each.open for each in transfers)
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    del client


HELD = """
import json, sys
from flower_desloc.flower.flight import transfer
from flower_desloc.flower.flight.transfer import Parts, TensorServer
transfer.IDLE = float(sys.argv[1])
server = TensorServer("127.0.0.1", 0)
own = server.credentials(7)
memory = Parts([bytearray(9)])
tickets = [server.give(7, Parts([bytes(50_000_000)]))]
tickets += [server.take(7, 9, lambda: memory) for _ in range(3)]
pems = [pem.decode() for pem in (own.authority, own.certificate, own.key)]
print(json.dumps([server.port, pems, tickets]), flush=True)
for line in sys.stdin:
    server.revoke(tickets)
server.close()
"""


class Holding:
    """A site that opens calls and neither sends nor reads, which pyarrow cannot do."""

    def __init__(self, port: int, authority: str, certificate: str, key: str) -> None:
        pems = [pem.encode() for pem in (authority, key, certificate)]
        name = [("grpc.ssl_target_name_override", transfer._SERVER)]
        credentials = grpc.ssl_channel_credentials(*pems)
        self.channel = grpc.secure_channel(f"127.0.0.1:{port}", credentials, name)
        self.calls: list[object] = []
        self.ended = threading.Event()

    def put(self, ticket: str) -> None:
        call = self.channel.stream_stream("/arrow.flight.protocol.FlightService/DoPut")
        nothing = iter(self.ended.wait, True)
        self.calls.append(call(nothing, metadata=[(transfer._TICKET, ticket)]))

    def get(self, ticket: str) -> None:
        call = self.channel.unary_stream("/arrow.flight.protocol.FlightService/DoGet")
        self.calls.append(got := call(b"", metadata=[(transfer._TICKET, ticket)]))
        next(got)

    def give_back(self, ticket: str) -> None:
        call = self.channel.unary_stream("/arrow.flight.protocol.FlightService/DoAction")
        list(call(b"\n\4done", metadata=[(transfer._TICKET, ticket)]))

    def close(self) -> None:
        self.ended.set()
        self.channel.close()


@pytest.mark.parametrize("ended_by", ["revoke", "idle", "close"])
def test_calls_that_a_site_holds_open_end(ended_by):
    idle = "1" if ended_by == "idle" else "600"
    command = [sys.executable, "-c", HELD, idle]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port, pems, (get, *puts) = json.loads(process.stdout.readline())
        site = Holding(port, *pems)
        try:
            if ended_by != "idle":
                site.get(get)
                site.give_back(get)
            before = num_threads(process)
            for ticket in puts * 6:
                site.put(ticket)
            wait_until(lambda: num_threads(process) >= before + 15)
            if ended_by == "revoke":
                process.stdin.write("revoke\n")
                process.stdin.flush()
            if ended_by != "close":
                wait_until(lambda: num_threads(process) <= before + 4)
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()
            site.close()


def num_threads(process: subprocess.Popen[str]) -> int:
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60  # a busy machine
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from flower_desloc.flower.flight.transfer import TensorServer
server = TensorServer("127.0.0.1", 0)
print(server.port, flush=True)
sys.stdin.readline()
open("/dev/null").close()
server.close()
"""


def test_strangers_connections_leave_files_to_the_run():
    command, pipe = [sys.executable, "-c", FEW_FILES], subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process,
        ExitStack() as strangers,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        for _ in range(200):
            strangers.enter_context(socket.create_connection(address))
        # Those that it cannot have are not accepted, and wait.
        files = Path(f"/proc/{process.pid}/fd")
        wait_until(lambda: len(list(files.iterdir())) >= 120)
        process.communicate("open\n", timeout=10)
        assert process.returncode == 0


def test_a_stranger_s_connection_is_closed(monkeypatch):
    monkeypatch.setattr(transfer, "IDLE", 0.5)
    with closing(Peers().server) as server:
        stranger = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        with stranger:
            assert stranger.recv(1) == b""


def test_a_server_without_a_descriptor_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(transfer, "IDLE", 0.5)
    peers = Peers()

    def none_left(_):
        raise OSError(24, "Too many open files")

    with closing(peers.server), monkeypatch.context() as patch:
        client = stalled(peers, "get")
        patch.setattr(Path, "iterdir", none_left)
        peers.server.revoke(list(peers.server._transfers))
        time.sleep(0.1)  # four looks of the watch
        assert peers.server._watch.is_alive()
        assert "cannot be closed: [Errno 24]" in caplog.text
    del client
