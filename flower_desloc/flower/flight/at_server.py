"""The server's end: arrays out of requests, and those of replies back into them."""

import hmac
import ipaddress
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flower_desloc.flower import internals
from flower_desloc.flower.arrays import records_of
from flower_desloc.flower.checkpoint import Checkpoints
from flower_desloc.flower.failures import printable, shortened
from flower_desloc.flower.flight import FLIGHT, body
from flower_desloc.flower.flight.body import BY_MESSAGE, Row
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import CONFIG, HELLO
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.server_state import ServerState
from flower_desloc.flower.system import temporary_folder

if TYPE_CHECKING:
    from flower_desloc.flower.flight.transfer import Credentials, TensorServer

_ADDRESS = "federation.data_address"


class Carries(Protocol):
    """What the arrays of a run are carried for: the strategy."""

    policy: Policy
    state: ServerState
    checkpoints: Checkpoints | None
    sync_delay: int


@dataclass
class _Upload:
    """What a node may send beside its reply."""

    rows: list[Row]
    key: bytes
    data: list[memoryview] = field(default_factory=list)


@dataclass
class _Open:
    """The tickets of a node's request, until its reply is there."""

    tickets: list[str] = field(default_factory=list)
    upload: _Upload | None = None


class Carrier:
    """Carries the arrays of messages beside them, for the nodes that can be reached.

    Parameters
    ----------
    server : TensorServer
        What gives and takes their bytes.
    address : str
        Host and port of the server, as the nodes reach it.
    folder : Path
        Where the arrays of replies wait for their turn.
    expected : Callable
        Returns the arrays of a reply with the due streams; None where they are not known.

    """

    def __init__(
        self,
        server: "TensorServer",
        address: str,
        folder: Path,
        expected: Callable[[Iterable[str]], list[Row] | None],
    ) -> None:
        self._server, self._address, self._folder = server, address, folder
        self._expected = expected
        self._credentials: dict[int, Credentials] = {}
        self._reached: set[int] = set()
        self._open: dict[int, _Open] = {}
        self._digests: dict[tuple[int, ...], tuple[bytes, bytes, list[ArrayRecord]]] = {}
        self._news: list[tuple[int, str]] = []

    def attach(self, message: Message) -> int:
        """Take the arrays out of a request, for tickets; return their bytes.

        A greeting is only given what a node needs to try the connection.
        """
        node = message.metadata.dst_node_id
        if message.metadata.message_type != HELLO and node not in self._reached:
            return 0
        config = records_of(ConfigRecord, message.content)[CONFIG]
        arrays = records_of(ArrayRecord, message.content)
        due = config.get("streams-due")
        rows = self._expected(map(str, due)) if isinstance(due, list) and due else None
        if message.metadata.message_type == HELLO:
            self._reached.discard(node)
        elif not arrays and rows is None:
            return 0
        opened = self._open[node] = _Open()
        record = self._connection(node)
        key, tag = self._digest(arrays)
        down = body.rows_of(arrays)
        data = [memoryview(a.data) for record in arrays.values() for a in record.values()]
        size = self._give(record, opened, node, data)
        record.update({"arrays": body.rows_to_json(down), "key": key, "digest": tag})
        record["bundles"] = config.get("bundles") is True
        if rows is not None:
            self._take(record, opened, node, _Upload(rows, body.new_key()))
            config["by-flight"], config["bundles"] = True, False
        for name in arrays:
            del message.content[name]
        message.content[FLIGHT] = record
        return size

    def sent(self) -> None:
        """Forget the digests of records, once a window's requests are sent."""
        self._digests.clear()

    def arrival(self, node: int) -> threading.Event | None:
        """Return what is set when the arrays of a node's reply have come; None: it sends none."""
        opened = self._open.get(node)
        if opened is None or opened.upload is None:
            return None
        return self._server.arrival(opened.tickets[-1])

    def collect(self, reply: Message, node: int) -> int:
        """Put the arrays that came beside a reply into it; return their bytes.

        A reply that says that its request's arrays did not reach the node keeps the record that
        says so (``has_missed_arrays``).

        Raises ``ValueError`` for arrays that did not come whole, or with another digest.
        """
        record = records_of(ConfigRecord, reply.content).get(FLIGHT)
        opened = self._open.get(node)
        if record is None or opened is None:
            return 0
        why = record.get(BY_MESSAGE)
        if isinstance(why, str):
            self._heard(node, why)
        if has_missed_arrays(reply):
            return 0
        del reply.content[FLIGHT]
        tag, upload = record.get("digest"), opened.upload
        if not isinstance(tag, bytes):
            return 0
        parts = self._server.taken(opened.tickets[-1]) if upload is not None else None
        if upload is None or parts is None:
            raise ValueError("the tensors that it announced did not come whole")
        if records_of(ArrayRecord, reply.content):
            raise ValueError("it sent tensors both in its reply and beside it")
        if not hmac.compare_digest(parts.digest(), tag):
            raise ValueError("the tensors that came beside its reply have another digest")
        for name, arrays in body.records(upload.rows, upload.data).items():
            reply.content[name] = arrays
        return parts.size

    def release(self, node: int) -> None:
        """Make the tickets of a node's request worthless."""
        if (opened := self._open.pop(node, None)) is not None:
            self._server.revoke(opened.tickets)

    def news(self) -> list[tuple[int, str]]:
        """Return the nodes whose arrays travel in messages since the last call, and why."""
        news, self._news = self._news, []
        return news

    def _connection(self, node: int) -> ConfigRecord:
        if node not in self._credentials:
            self._credentials[node] = self._server.credentials(node)
        own = self._credentials[node]
        return ConfigRecord(
            {
                "address": self._address,
                "authority": own.authority,
                "certificate": own.certificate,
                "private-key": own.key,
            }
        )

    def _give(
        self, record: ConfigRecord, opened: _Open, node: int, data: Iterable[memoryview]
    ) -> int:
        from flower_desloc.flower.flight.transfer import Parts

        parts = Parts(data)
        record["get"] = self._server.give(node, parts)
        opened.tickets.append(str(record["get"]))
        return parts.size

    def _take(self, record: ConfigRecord, opened: _Open, node: int, upload: _Upload) -> None:
        from flower_desloc.flower.flight.transfer import Parts

        def memory() -> Parts:
            upload.data = body.mapped(upload.rows, self._folder)
            return Parts(upload.data, body.tag_of(upload.key))

        size = sum(row[-1] for row in upload.rows)
        record["put"] = self._server.take(node, size, memory)
        opened.tickets.append(str(record["put"]))
        opened.upload = upload
        record.update({"put-arrays": body.rows_to_json(upload.rows), "put-key": upload.key})

    def _digest(self, arrays: Mapping[str, ArrayRecord]) -> tuple[bytes, bytes]:
        """Return a key and the digest under it, the same for all requests with these records."""
        records = list(arrays.values())
        same = tuple(map(id, records))
        if same not in self._digests:
            key = body.new_key()
            tag = body.digest(key, (a.data for record in records for a in record.values()))
            self._digests[same] = key, tag, records  # kept, so that the ids stay theirs
        key, tag, _ = self._digests[same]
        return key, tag

    def _heard(self, node: int, why: str) -> None:
        if not why:
            self._reached.add(node)
            return
        self._reached.discard(node)
        self._news.append((node, shortened(printable(why))))


def has_missed_arrays(reply: Message) -> bool:
    """Return whether a reply says that the arrays of its request did not reach the node."""
    if not reply.has_content() or len(reply.content) != 1:
        return False
    record = records_of(ConfigRecord, reply.content).get(FLIGHT)
    return record is not None and bool(record.get(BY_MESSAGE))


@contextmanager
def carrier(run: Carries, grid: Grid) -> Iterator[Carrier | None]:
    """Open the carrier of a run, and close it; None where arrays travel in messages.

    Raises ``ValueError`` for an address that cannot be used.
    """
    address = run.policy.data_address
    if not internals.is_grid(grid, "HttpGrid"):
        address = None  # a simulation has no network
    elif address is None:
        log(INFO, "tensors travel in Flower's messages: %s is not set", _ADDRESS)
    elif run.sync_delay:
        log(INFO, "tensors travel in Flower's messages, while clients train: sync_delay is set")
        address = None
    if address is None:
        yield None
        return
    server = _listening(address)
    folder = run.checkpoints.folder if run.checkpoints else temporary_folder()
    state = run.state
    try:
        yield Carrier(
            server,
            address,
            folder,
            lambda due: body.expected_rows(
                due, state.reply_templates, state.compression, state.kinds
            ),
        )
    finally:
        server.close()


def _listening(address: str) -> "TensorServer":
    host, _, port = address.rpartition(":")
    try:
        from flower_desloc.flower.flight.transfer import TensorServer
    except ImportError as error:
        raise ValueError(
            f"{_ADDRESS}={address}: {error}; or leave it out: tensors then travel in Flower's "
            "messages"
        ) from error
    try:
        return TensorServer(_interface(host.strip("[]")), int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{_ADDRESS}={address}: the server cannot listen at port {port}: {error}; give another "
            "port"
        ) from error


def _interface(host: str) -> str:
    """Return where to listen so that ``host``, which may be a router's address, leads here."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "127.0.0.1" if host == "localhost" else "0.0.0.0"  # noqa: S104
    if address.is_loopback:
        return host
    return "::" if address.version == 6 else "0.0.0.0"  # noqa: S104
