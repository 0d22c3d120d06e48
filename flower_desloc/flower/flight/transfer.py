"""Bytes over Arrow Flight: a server that gives and takes them for tickets, and its client.

A ticket is random, for one node, one direction and a number of bytes. It is good for one transfer:
a broken one continues where it stopped. Both ends have certificates of an authority that lives as
long as the server, so that only nodes that were given one can connect.
"""

import os
import resource
import secrets
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from flower_desloc.core.extras import to_install
from flower_desloc.flower.internals import log

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.poly1305 import Poly1305

try:
    import pyarrow as pa
    import trustme
    from pyarrow import flight
except ImportError as error:
    raise ImportError(f"{error}; {to_install('flight')}", name=error.name) from error

Buffer = bytes | bytearray | memoryview

_SCHEMA: Final = pa.schema([("bytes", pa.uint8())])
_TICKET, _OFFSET = "desloc-ticket", "desloc-offset"  # headers
_RECEIVED, _DONE = "received", "done"  # actions
_SERVER = "server.desloc"
"""Name in the server's certificate; a node's has its number."""
_PIECE = 1 << 20
"""Bytes in a message of Arrow Flight."""
_SMALL = 1 << 16
"""Smaller parts are sent together."""
IDLE: Final = 60.0
"""Seconds in which a transfer must move by a piece; the server closes a connection without any."""
_LEAST_RATE = 32_000
"""Bytes per second that a client expects of a transfer, after the first ``IDLE`` seconds."""
_PATIENCE = 30.0
"""Seconds after an error in which a transfer must continue: the server waits at least a minute."""
_CALLS = 6
"""Calls of one transfer that may be open at a time: the server may not know that one is broken."""
_CONNECT = 10.0
"""Seconds for the first contact."""
_LEAVE = 10.0
"""Seconds that the end of a server may take."""


class TransferError(Exception):
    """A transfer did not take place; the text says why."""


class Parts:
    """Pieces of memory, read and written as one.

    What is written is also added to ``tag``, which is cheap while it is in the processor's cache.
    """

    def __init__(self, parts: Iterable[Buffer], tag: "Poly1305 | None" = None) -> None:
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        self._parts = views
        self._starts = list(accumulate((len(view) for view in views), initial=0))
        self.size = self._starts[-1]
        self._tag = tag

    def pieces(self, offset: int = 0) -> Iterator[Buffer]:
        """Yield the bytes from ``offset`` on: views, but small parts are joined."""
        joined = bytearray()
        for start, part in zip(self._starts, self._parts, strict=False):
            rest = part[max(0, offset - start) :]
            if len(rest) < _SMALL:
                joined += rest
                if len(joined) < _PIECE:
                    continue
                rest = memoryview(b"")
            if joined:
                yield joined
                joined = bytearray()
            for begin in range(0, len(rest), _PIECE):
                yield rest[begin : begin + _PIECE]
        if joined:
            yield joined

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``, where the last write ended; there must be room."""
        if self._tag is not None:
            self._tag.update(data)
        index = bisect_right(self._starts, offset) - 1
        while data:
            begin = offset - self._starts[index]
            taken = data[: len(self._parts[index]) - begin]
            self._parts[index][begin : begin + len(taken)] = taken
            data, offset, index = data[len(taken) :], offset + len(taken), index + 1

    def digest(self) -> bytes:
        """Return the digest of what was written, once."""
        assert self._tag is not None
        return self._tag.finalize()


@dataclass(frozen=True)
class Credentials:
    """What a node needs to connect, in PEM format."""

    authority: bytes
    certificate: bytes
    key: bytes


@dataclass
class _Transfer:
    """The transfer that one ticket is good for."""

    node: int
    method: flight.FlightMethod
    size: int
    memory: Callable[[], Parts]
    """The bytes to give, or where to put those that come; called once, with the first call."""
    connections: "_Connections"
    received: int = 0
    is_spent: bool = False
    whole: threading.Event = field(default_factory=threading.Event)
    """Set when all bytes have come."""
    open: "set[_Call]" = field(default_factory=set)
    """The calls that have begun and not ended, whether or not they move bytes."""
    peer: str = ""
    """The address at the other end of the call that moves bytes."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: Parts | None = None

    @contextmanager
    def call(self, peer: str) -> Iterator[Parts]:
        """A call that moves bytes, the only one at a time: it takes the place of a broken one."""
        if (other := self.peer) not in ("", peer):
            self.connections.cut(lambda connection: connection == _address(other))
        if not self.lock.acquire(timeout=_LEAVE / 2):
            raise flight.FlightUnavailableError("another call has this ticket")
        try:
            if self.is_spent:  # since the call began
                raise flight.FlightUnauthorizedError("the ticket has been used")
            self.peer = peer
            self.moves()
            self.parts = self.parts or self.memory()
            yield self.parts
        finally:
            self.peer = ""
            self.lock.release()

    def moves(self) -> None:
        """Note that bytes of the call have moved."""
        self.connections.moves(self.peer, self.node)


_Address = tuple[str, int]


class _Connections:
    """The connections at a port: to close them is the only way to end a call from outside.

    Flight does not show a call that waits for its first message, or one without a ticket.
    """

    def __init__(self) -> None:
        self.port = 0
        self._moved: dict[_Address, float] = {}
        self._nodes: dict[_Address, int] = {}

    def moves(self, peer: str, node: int) -> None:
        """Note that bytes of a node's call have moved."""
        self._nodes[_address(peer)] = node
        self._moved[_address(peer)] = time.monotonic()

    def cut(self, which: Callable[[_Address], bool]) -> None:
        """Close the connections to some addresses."""
        try:
            for address, connection in self._found():
                if which(address):
                    with suppress(OSError):  # it has just ended
                        connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:  # neither the run nor the watch ends for want of a descriptor
            log(WARNING, "connections at port %d cannot be closed: %s", self.port, error)

    def cut_node(self, node: int) -> None:
        """Close the connections on which a node has moved bytes."""
        self.cut(lambda address: self._nodes.get(address) == node)

    def cut_idle(self) -> None:
        """Close the connections on which nothing has moved for too long."""
        now, found = time.monotonic(), set()

        def is_idle(address: _Address) -> bool:
            found.add(address)
            return now - self._moved.setdefault(address, now) > IDLE

        self.cut(is_idle)
        for address in set(self._moved) - found:
            self._moved.pop(address, None)
            self._nodes.pop(address, None)

    def _found(self) -> Iterator[tuple[_Address, socket.socket]]:
        for file in list(Path("/dev/fd").iterdir()):
            with suppress(OSError), _same_socket(int(file.name)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    theirs, ours = found.getpeername(), found.getsockname()
                    if ours[1] == self.port:
                        yield _plain(theirs[0], theirs[1]), found


def _raise_limit_of_files() -> None:
    """Raise the soft limit of open files to the hard one: each connection takes a descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS states more than it allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _same_socket(number: int) -> socket.socket:
    """Return another descriptor of a socket; raises ``OSError`` if it is none."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _address(peer: str) -> _Address:
    """Return the address in gRPC's name of a peer, such as ipv6:%5B::1%5D:50000."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]"), int(port))


def _plain(host: str, port: int) -> _Address:
    return host.removeprefix("::ffff:").partition("%")[0], port


class TensorServer:
    """Gives bytes to nodes and takes theirs, for tickets.

    Parameters
    ----------
    host, port : str and int
        Where it listens; port 0: any.

    Raises
    ------
    OSError
        When the port is taken, or cannot be listened at.

    """

    def __init__(self, host: str, port: int) -> None:
        self._authority = trustme.CA(organization_name="flower-desloc")
        self._transfers: dict[str, _Transfer] = {}
        self._connections = _Connections()
        _raise_limit_of_files()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            # gRPC would share the port with another process of this user. Connections that have
            # just ended do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        own = self._authority.issue_cert(_SERVER)
        chain = b"".join(pem.bytes() for pem in own.cert_chain_pems)
        try:
            self._flight = _Server(
                f"grpc+tls://{f'[{host}]' if ':' in host else host}:{port}",
                tls_certificates=[(chain, own.private_key_pem.bytes())],
                verify_client=True,
                root_certificates=self._authority.cert_pem.bytes(),
                middleware={_TICKET: _Tickets(self._transfers)},
            )
        except pa.ArrowException as error:
            raise OSError(str(error)) from error
        self.port = self._connections.port = self._flight.port
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._cut_idle, daemon=True)
        self._watch.start()

    def credentials(self, node: int) -> Credentials:
        """Return new credentials for a node."""
        own = self._authority.issue_cert(_name(node))
        chain = b"".join(pem.bytes() for pem in own.cert_chain_pems)
        return Credentials(self._authority.cert_pem.bytes(), chain, own.private_key_pem.bytes())

    def give(self, node: int, parts: Parts) -> str:
        """Return a ticket for which the node is given these bytes."""
        return self._ticket(node, flight.FlightMethod.DO_GET, parts.size, lambda: parts)

    def take(self, node: int, size: int, memory: Callable[[], Parts]) -> str:
        """Return a ticket for which the node may send so many bytes, into ``memory``."""
        return self._ticket(node, flight.FlightMethod.DO_PUT, size, memory)

    def arrival(self, ticket: str) -> threading.Event:
        """Return what is set when all bytes have come for a ticket."""
        return self._transfers[ticket].whole

    def taken(self, ticket: str) -> Parts | None:
        """Return the bytes that came for a ticket; None unless all did."""
        transfer = self._transfers.get(ticket)
        is_whole = transfer is not None and transfer.received == transfer.size
        return transfer.parts if transfer is not None and is_whole else None

    def revoke(self, tickets: Iterable[str]) -> None:
        """Make tickets worthless, and end the transfers that are in progress."""
        for ticket in tickets:
            transfer = self._transfers.pop(ticket, None)
            if transfer is not None:
                transfer.is_spent = True
                if transfer.open:
                    self._connections.cut_node(transfer.node)

    def close(self) -> None:
        """End all transfers and stop listening; leaves no thread."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._transfers.clear()
        # Flight waits for calls in progress without end.
        ending = threading.Thread(target=self._flight.shutdown, daemon=True)
        ending.start()
        deadline = time.monotonic() + _LEAVE
        while ending.is_alive() and time.monotonic() < deadline:
            self._connections.cut(lambda _: True)
            ending.join(0.1)
        self._watch.join()

    def _ticket(self, node: int, method: Any, size: int, memory: Callable[[], Parts]) -> str:
        ticket = secrets.token_hex(32)
        self._transfers[ticket] = _Transfer(node, method, size, memory, self._connections)
        return ticket

    def _cut_idle(self) -> None:
        while not self._ended.wait(IDLE / 20):
            self._connections.cut_idle()


class TensorClient:
    """A node's connection to a ``TensorServer`` at ``address``, its host and port."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        # A connection on which pings are not answered is broken: without them, a call on it would
        # wait for its whole time. The server closes it before pings are too many for gRPC.
        idle = int(1000 * IDLE)
        self._client = flight.FlightClient(
            f"grpc+tls://{address}",
            tls_root_certs=credentials.authority,
            cert_chain=credentials.certificate,
            private_key=credentials.key,
            override_hostname=_SERVER,  # the authority is the server's own
            generic_options=[
                (b"grpc.use_local_subchannel_pool", 1),  # no other's backoff
                (b"grpc.keepalive_time_ms", idle // 3),
                (b"grpc.keepalive_timeout_ms", idle // 3),
                (b"grpc.http2.ping_timeout_ms", idle),  # of pings that measure a link
            ],
        )

    def get(self, ticket: str, parts: Parts) -> None:
        """Fill ``parts`` with the bytes of a ticket; raises ``TransferError``."""
        received = 0

        def once() -> None:
            nonlocal received
            options = self._options(ticket, received, parts.size)
            for chunk in self._client.do_get(flight.Ticket(b""), options):
                data = _bytes_of(chunk)
                if received + len(data) > parts.size:
                    raise TransferError(f"more than the {parts.size} bytes that were announced")
                parts.write(received, data)
                received += len(data)
            if received < parts.size:
                raise flight.FlightUnavailableError(f"ended after {received} of {parts.size} bytes")

        self._persist(once, lambda: received, _PATIENCE if parts.size else 0.0)
        with suppress(flight.FlightError, pa.ArrowException):
            self._act(_DONE, ticket)

    def put(self, ticket: str, parts: Parts) -> None:
        """Send the bytes of ``parts`` for a ticket; raises ``TransferError``."""
        sent = -1  # before the first call

        def once() -> None:
            nonlocal sent
            sent = int(self._act(_RECEIVED, ticket)) if sent >= 0 else 0
            if sent == parts.size > 0:
                return  # only the answer was lost
            writer, answers = self._client.do_put(
                flight.FlightDescriptor.for_command(b""),
                _SCHEMA,
                self._options(ticket, sent, parts.size),
            )
            try:
                for piece in parts.pieces(sent):
                    writer.write_batch(_batch(piece))
                writer.done_writing()
                answer = answers.read()
            finally:
                writer.close()  # raises what the server raised
            if answer is None:
                raise flight.FlightUnavailableError("ended without an answer")

        self._persist(once, lambda: sent, _PATIENCE)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _act(self, action: str, ticket: str) -> bytes:
        options = self._options(ticket, 0, 0)
        (result,) = self._client.do_action(flight.Action(action, b""), options)
        answer: bytes = result.body.to_pybytes()
        return answer

    @staticmethod
    def _options(ticket: str, offset: int, size: int) -> Any:
        headers = {_TICKET: ticket, _OFFSET: str(offset)}
        seconds = IDLE + (size - offset) / _LEAST_RATE if size else _CONNECT
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        return flight.FlightCallOptions(timeout=seconds, headers=pairs)

    @staticmethod
    def _persist(once: Callable[[], None], moved: Callable[[], int], seconds: float) -> None:
        """Call ``once``, and again after an error, until for ``seconds`` no bytes have moved."""
        since: float | None = None
        before, pause = 0, 0.0
        while True:
            try:
                return once()
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                now = time.monotonic()
                if since is None or moved() > before:
                    since, before, pause = now, moved(), 0.2
                is_refused = isinstance(error, flight.FlightUnauthorizedError)
                if is_refused or now - since >= seconds:
                    raise TransferError(_first_line(error)) from error
            time.sleep(pause)
            pause = min(2 * pause, 3.0)


class _Tickets(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Refuses a call without a ticket that is good for it, before Flight reads any piece of a put.

    gRPC has read the one message of a get or of an action by then.
    """

    def __init__(self, transfers: dict[str, _Transfer]) -> None:
        self._transfers = transfers

    def start_call(self, info: Any, headers: dict[str, Sequence[str]]) -> "_Call":
        (ticket,) = headers.get(_TICKET, [""])[:1]
        transfer = self._transfers.get(ticket)
        if transfer is None:
            raise flight.FlightUnauthorizedError("the ticket is unknown, or its window is over")
        if info.method != flight.FlightMethod.DO_ACTION:
            if info.method != transfer.method:
                raise flight.FlightUnauthorizedError("the ticket is for the other direction")
            if transfer.is_spent:
                raise flight.FlightUnauthorizedError("the ticket has been used")
        if len(transfer.open) == _CALLS:
            raise flight.FlightUnavailableError("too many calls have this ticket")
        offset = headers.get(_OFFSET, [""])[0]
        return _Call(transfer, int(offset) if offset.isdecimal() and len(offset) < 20 else 0)


class _Call(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """A call from its headers to its end."""

    def __init__(self, transfer: _Transfer, offset: int) -> None:
        self.transfer, self.offset = transfer, offset
        transfer.open.add(self)

    def call_completed(self, exception: Exception | None) -> None:
        del exception
        self.transfer.open.discard(self)


class _Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Flight's side of a ``TensorServer``."""

    def do_get(self, context: Any, ticket: Any) -> Any:
        del ticket  # it is in a header, so that it is seen first
        transfer, offset = _claimed(context)
        return flight.GeneratorStream(_SCHEMA, _given(transfer, offset, context.peer()))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        del descriptor
        transfer, offset = _claimed(context)
        with transfer.call(context.peer()) as parts:
            if reader.schema != _SCHEMA:
                raise flight.FlightServerError("expected one column of bytes")
            if offset != transfer.received:
                raise flight.FlightUnavailableError(f"received {transfer.received} bytes so far")
            for chunk in reader:
                data = _bytes_of(chunk)
                if transfer.received + len(data) > transfer.size:
                    transfer.received, transfer.is_spent = -1, True
                    raise flight.FlightUnauthorizedError(
                        f"more than the {transfer.size} bytes that were announced"
                    )
                parts.write(transfer.received, data)
                transfer.received += len(data)
                transfer.moves()
            if transfer.received < transfer.size:
                raise flight.FlightUnavailableError(
                    f"ended after {transfer.received} of {transfer.size} bytes"
                )
            transfer.is_spent = True
            transfer.whole.set()
        writer.write(b"whole")

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        transfer, _ = _claimed(context)
        if action.type == _DONE:
            transfer.is_spent = True
        return [str(transfer.received).encode()]


def _claimed(context: Any) -> tuple[_Transfer, int]:
    """Return the transfer that a call may take up, and where; raises for another node's ticket."""
    call = context.get_middleware(_TICKET)
    transfer: _Transfer = call.transfer
    if context.peer_identity() != _name(transfer.node).encode():
        raise flight.FlightUnauthorizedError("the ticket is another node's")
    return transfer, call.offset


def _given(transfer: _Transfer, offset: int, peer: str) -> Iterator[Any]:
    with transfer.call(peer) as parts:
        for piece in parts.pieces(offset):
            yield _batch(piece)
            transfer.moves()


def _name(node: int) -> str:
    return f"node-{node}.desloc"


def _batch(data: Buffer) -> Any:
    size = memoryview(data).nbytes
    column = pa.Array.from_buffers(pa.uint8(), size, [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([column], schema=_SCHEMA)


def _bytes_of(chunk: Any) -> memoryview:
    """Return the bytes of a piece: at most as many as it states, and those that there are."""
    if chunk.data is None:
        return memoryview(b"")
    column = chunk.data.column(0)
    buffer = column.buffers()[1]
    if buffer is None:
        return memoryview(b"")
    return memoryview(buffer).cast("B")[column.offset : column.offset + len(column)]


def _first_line(error: Exception) -> str:
    """Return what went wrong, without what gRPC adds."""
    text = str(error).partition(". Detail:")[0].partition(". gRPC client debug")[0]
    return " ".join(text.split())[:200]
