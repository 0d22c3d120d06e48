"""The ConfigRecord of secure aggregation in messages: a question of a sum, or its answer."""

import hashlib
import json
from collections.abc import Iterable, Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app import ConfigRecordValues as Values

from flower_desloc.flower.arrays import records_of
from flower_desloc.flower.messages import CONFIG

SECURE = "secure"
"""Name of the ConfigRecord of secure aggregation in a message."""
ASK = "query.secure"
KEYS, SHARES, CONFIRM, UNMASK = "keys", "shares", "confirm", "unmask"
"""The questions of a sum, under ``phase``."""
_OF_THE_WAY = {"bundles", "by-flight"}
"""Keys of a request's config that say how arrays travel; set for each site when it is sent."""


def by_name(values: Mapping[str, bytes]) -> dict[str, Values]:
    """Return bytes by name as what a ConfigRecord can hold."""
    return {"names": list(values), "data": list(values.values())}


def read_by_name(record: ConfigRecord) -> dict[str, bytes]:
    """Read ``by_name``; raises ``ValueError`` for anything else."""
    names, data = record.get("names"), record.get("data")
    if not isinstance(names, list) or not isinstance(data, list) or len(names) != len(data):
        raise ValueError(f"the record {SECURE!r} has no names with data")
    found = {n: d for n, d in zip(names, data, strict=True) if isinstance(d, bytes)}
    if len(found) != len(names) or not _are_texts(found):
        raise ValueError(f"the record {SECURE!r} has a name twice, or other data than bytes")
    return {str(name): each for name, each in found.items()}


def record_of(message: Message) -> ConfigRecord:
    """Return the record of a message; raises ``ValueError`` for an error, or without one."""
    if message.has_error():
        raise ValueError(message.error.reason)
    record = records_of(ConfigRecord, message.content).get(SECURE)
    if record is None:
        raise ValueError(f"its reply has no ConfigRecord {SECURE!r}")
    return record


def request_digest(content: RecordDict) -> str:
    """Return a digest of what a request's config asks for, which is the same for all sites."""
    config = records_of(ConfigRecord, content)[CONFIG]
    values = {key: value for key, value in config.items() if key not in _OF_THE_WAY}
    text = json.dumps(values, sort_keys=True, default=lambda data: {"bytes": data.hex()})
    return hashlib.sha256(text.encode()).hexdigest()


def _are_texts(names: Iterable[object]) -> bool:
    return all(isinstance(name, str) for name in names)
