"""A site's own record: what it was asked and what it sent, a line of JSON for each message."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict

from flower_desloc.app.runs.folder import append
from flower_desloc.flower.arrays import arrays_of, num_bytes

AUDIT_LOG = "audit-log"
"""Key of the node config: the file."""


def audited(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Flower mod: record a message and its reply in the site's ``audit-log``, if it has one.

    The line is on disk before the reply leaves. Raises ``OSError`` naming the file where it cannot
    be written: the reply is then not sent.
    """
    named = context.node_config.get(AUDIT_LOG)
    if named is None:
        return call(message, context)
    path = Path(str(named)).expanduser()
    line: dict[str, Any] = {
        "received": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": message.metadata.run_id,
        "message": message.metadata.message_type,
        # Before the call, which frees the message.
        "asked": _content(message.content) if message.has_content() else {},
    }
    try:
        reply = call(message, context)
    except BaseException as error:  # an exit is answered by an error too
        _append(path, line | {"error": f"{type(error).__name__}: {error}"})
        raise
    sent = _content(reply.content) if reply.has_content() else {"error": str(reply.error)}
    _append(path, line | {"sent": sent})
    return reply


def _content(content: RecordDict) -> dict[str, Any]:
    """Return what a message has: of arrays their number and bytes, of the rest all values."""
    told: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            size = sum(map(num_bytes, record.values()))
            told[name] = {"tensors": len(arrays_of(record)), "bytes": size}
        else:
            told[name] = {key: _plain(value) for key, value in record.items()}
    return told


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        append(path, line)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"{AUDIT_LOG}={path}: cannot be written ({error.strerror})") from error
