"""A site's end: the arrays of a request into it, and those of the reply out of it."""

from collections.abc import Callable
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flower_desloc.flower.arrays import plain, records_of
from flower_desloc.flower.bundles import bundled
from flower_desloc.flower.client_state import state_folder
from flower_desloc.flower.flight import FLIGHT, body
from flower_desloc.flower.flight.body import BY_MESSAGE
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import HELLO

if TYPE_CHECKING:
    from flower_desloc.flower.flight.transfer import TensorClient

T = TypeVar("T")

_LARGE = 256 << 20
"""Bytes of a request's arrays above which they are in a file, and memory of the kernel's: they are
kept to the end of the window, to tell a batch that is not finite from training that diverges."""


def arrays_by_flight(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Flower mod: get the arrays of a request before ``call``, and send those of the reply after.

    If they cannot be had, the reply says so and nothing is called: the server then sends them in a
    message. A reply whose arrays cannot be sent beside it keeps them.
    """
    record = records_of(ConfigRecord, message.content).get(FLIGHT)
    if record is None:
        return call(message, context)
    del message.content[FLIGHT]
    is_greeting = message.metadata.message_type == HELLO
    why = ""
    try:
        message.content.update(_fetched(record, state_folder(context), tries=is_greeting))
    except (ImportError, RuntimeError) as error:
        why = _reason(record, error)
        if not is_greeting:
            missed = RecordDict({FLIGHT: ConfigRecord({BY_MESSAGE: why})})
            return Message(missed, reply_to=message)
    bundles, put = record["bundles"] is True, "put" in record
    reply = call(message, context)
    if not reply.has_content():
        return reply
    if is_greeting:
        reply.content[FLIGHT] = ConfigRecord({BY_MESSAGE: why})
    elif put and (arrays := records_of(ArrayRecord, reply.content)):
        _send(record, reply, arrays, bundles=bundles)
    return reply


def _fetched(record: ConfigRecord, folder: Path, *, tries: bool) -> dict[str, ArrayRecord]:
    """Return the arrays of a request; where there are none, only connect if it ``tries`` to."""
    from flower_desloc.flower.flight.transfer import Parts, TransferError

    rows = body.rows_from_json(_value(record, "arrays", bytes))
    if not (rows or tries):
        return {}
    is_large = sum(row[-1] for row in rows) > _LARGE
    data = body.mapped(rows, folder) if is_large else body.memory(rows)
    parts = Parts(data, body.tag_of(_value(record, "key", bytes)))
    try:
        _client(record).get(_value(record, "get", str), parts)
        if parts.digest() != record["digest"]:
            raise TransferError("what came has another digest")
    except TransferError as error:
        _forget_client()
        raise RuntimeError(str(error)) from error
    return body.records(rows, data)


def _send(
    record: ConfigRecord, reply: Message, arrays: dict[str, ArrayRecord], *, bundles: bool
) -> None:
    """Send the arrays of a reply beside it; leave them in it where that is not possible."""
    from flower_desloc.flower.flight.transfer import Parts, TransferError

    data = body.views(body.rows_from_json(_value(record, "put-arrays", bytes)), arrays)
    answer = ConfigRecord()
    if data is not None:  # otherwise the server will say what is wrong with them
        try:
            _client(record).put(_value(record, "put", str), Parts(data))
        except TransferError as error:
            _forget_client()
            answer[BY_MESSAGE] = _reason(record, error)
        else:
            answer["digest"] = body.digest(_value(record, "put-key", bytes), data)
            for name in arrays:
                del reply.content[name]
    if "digest" not in answer:
        for name, each in arrays.items():
            reply.content[name] = bundled(plain(each)) if bundles else plain(each)
    reply.content[FLIGHT] = answer


def _client(record: ConfigRecord) -> "TensorClient":
    names = ("authority", "certificate", "private-key")
    return _connected(
        _value(record, "address", str), *(_value(record, name, bytes) for name in names)
    )


@lru_cache(maxsize=1)
def _connected(address: str, authority: bytes, certificate: bytes, key: bytes) -> "TensorClient":
    from flower_desloc.flower.flight.transfer import Credentials, TensorClient

    return TensorClient(address, Credentials(authority, certificate, key))


def _forget_client() -> None:
    """Connect anew the next time."""
    _connected.cache_clear()


def _reason(record: ConfigRecord, error: Exception) -> str:
    why = f"{_value(record, 'address', str)}: {error}"
    log(WARNING, "tensors travel in Flower's messages: %s", why)
    return why[:1000]


def _value(record: ConfigRecord, name: str, kind: type[T]) -> T:
    value = record[name]
    assert isinstance(value, kind), f"{name} of a request is a {type(value).__name__}"
    return value
