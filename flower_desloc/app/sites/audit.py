"""A site's audit log: each message received and each reply sent, in lines of JSON."""

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_desloc.flower.flight import FLIGHT
from flower_desloc.flower.json_lines import append

AUDIT_LOG = "audit-log"
"""Key of the node config: the file."""


class AuditedClientApp(ClientApp):
    """A ClientApp whose site notes each message before the app has it, and an error after it.

    So there is a line also of a message whose process dies, or whose tensors do not come. What was
    asked and sent is noted inside, by ``audited``.
    """

    def __init__(self, app: ClientApp) -> None:
        super().__init__()
        self._app = app

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply; raises ``OSError`` where the line cannot be written."""
        if AUDIT_LOG not in context.node_config:
            return self._app(message, context)
        flight = message.content.get(FLIGHT) if message.has_content() else None
        where = {}
        if isinstance(flight, ConfigRecord):  # of it only the address: it also has keys
            where = {"tensors_from": _plain(flight.get("address"))}
        note(context.node_config, message, "received", where)
        try:
            reply = self._app(message, context)
        except BaseException as error:  # an exit is answered by an error too
            note(context.node_config, message, "error", {"error": _text(error)})
            raise
        if reply.has_error():
            note(context.node_config, message, "error", {"error": str(reply.error)})
        elif {*reply.content} == {FLIGHT}:
            note(context.node_config, message, "error", {"error": "the tensors did not come"})
        return reply


def audited(
    message: Message,
    context: Context,
    call: Callable[[Message, Context], Message],
    spent: Callable[[Context], Mapping[str, float]] = lambda _: {},
) -> Message:
    """Flower mod: note what a message asked and what its reply has, where there is an audit log.

    After training it also notes the privacy cost so far, which ``spent`` returns. The line is on
    disk before the reply leaves. Raises ``OSError`` where it cannot be written: the reply is then
    not sent.
    """
    if AUDIT_LOG not in context.node_config:
        return call(message, context)
    # Before the call, which frees the message.
    asked = _content(message.content) if message.has_content() else {}
    try:
        reply = call(message, context)
    except BaseException as error:
        what = {"asked": asked, "error": _text(error), **_spent(message, context, spent)}
        note(context.node_config, message, "failed", what)
        raise
    sent = _content(reply.content) if reply.has_content() else {"error": str(reply.error)}
    what = {"asked": asked, "sent": sent, **_spent(message, context, spent)}
    note(context.node_config, message, "answered", what)
    return reply


def note(node: Mapping[str, Any], message: Message, event: str, what: Mapping[str, Any]) -> None:
    """Write a line about a message; raises ``OSError`` where that fails."""
    path = Path(str(node[AUDIT_LOG])).expanduser()
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": message.metadata.run_id,
        "message": message.metadata.message_type,
        "id": message.metadata.message_id,
        "event": event,
        **what,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        append(path, line)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raised = OSError(f"{AUDIT_LOG} in the node config cannot be written ({error.strerror})")
        raised.add_note(str(path))  # in this site's log alone
        raise raised from error


def _spent(
    message: Message, context: Context, spent: Callable[[Context], Mapping[str, float]]
) -> dict[str, Any]:
    """Return what the run has spent after training: only then is the accountant in memory.

    Its error must not lose a trained window, nor reach the server.
    """
    if not message.metadata.message_type.startswith("train"):
        return {}
    try:
        told = dict[str, Any](spent(context))
    except Exception as error:
        told = {"error": type(error).__name__}
    return {"spent": told} if told else {}


def _content(content: RecordDict) -> dict[str, Any]:
    """Return what a message has: of arrays their number and bytes, of the rest all values."""
    from flower_desloc.flower.arrays import arrays_of, num_bytes  # with PyTorch, which takes long

    told: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            size = sum(map(num_bytes, record.values()))
            told[name] = {"tensors": len(arrays_of(record)), "bytes": size}
        else:
            told[name] = {key: _plain(value) for key, value in record.items()}
    return told


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """Return a value of a record, or a list of such, as JSON can have it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value
