"""Requests as Flower's records, and the names in messages.

One ConfigRecord ``config``, and an ArrayRecord for each stream that is sent, named after it. The
replies are in ``flower_desloc.flower.replies``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ConfigRecord, RecordDict

from flower_desloc.core.formats import EXACT, Format, lossy
from flower_desloc.core.kinds import Kind, Kinds, kind_of
from flower_desloc.core.types import Stream
from flower_desloc.flower.arrays import records_of, streams_of, to_record

T = TypeVar("T")

Settings = Mapping[str, str | int | float | bool]
"""The app's own settings, sent with every request."""

CONFIG = "config"
RUN_KEY = "run-key"
METRICS = "metrics"
CLIENT_INFO = "client-info"
STATE_LOST = "state-lost"
TENSOR_NAMES = ("trained", "buffers", "untrained", "other-tensors")
"""Lists of tensors' names in the reply to the greeting (``model_names``)."""
STATE_NEW = "state-new"
AFRESH = "afresh"
"""Key of a request's config that a site sets itself (``WindowRequest.afresh``)."""
TOTALS = "totals/"  # prefix of totals among the metrics of an evaluation
PROXIMAL_MU = "proximal-mu"
"""FedProx's mu, under Flower's name, in the config of a request."""
HELLO = "query.hello"
ARE_YOU_THERE = "query.there"
GOODBYE = "query.goodbye"


@dataclass(frozen=True, kw_only=True)
class WindowRequest:
    """What the server asks of one client; an evaluation is a request without steps."""

    run_key: str
    """Names the run in the client's own files, over restarts."""
    attempt: str = ""
    """Names this start of the server; every resume has another one."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """In a greeting: the starts of the server that led to this one, in order and with this one,
    each with the step from which it resumed; -1 for a start without a checkpoint."""
    code: Mapping[str, str] = field(default_factory=dict)
    """In a greeting: digests of the server's code, of ``PACKAGE`` and of the files of ``code_of``
    (``flower_desloc.flower.fingerprint``); the client must run the same."""
    checkpoint: int = -1
    """Step of the server's last checkpoint, which it may resume from; -1: none."""
    for_resume: bool = False
    """Whether a resume looks for the state after this window, which is then on disk before the
    reply."""
    start: int = 0
    stop: int = 0
    steps: int = 0
    """How many of the window's local steps to take, with weights for it in the reply; 0: all, and
    equal weights."""
    before_merge: int = 0
    """Local steps of this window before the averages of the last one are merged; 0: in time."""
    ahead: int = 0
    """Local steps of the next window that the client may take while its streams travel."""
    sync_bound: bool = False
    """Whether Adam's first moment is bounded by the second after an average of either."""
    due: frozenset[str] = frozenset()
    versions: Mapping[str, int] = field(default_factory=dict)
    """Of every stream, the step of its last average or reset; 0 before the first."""
    resets: frozenset[str] = frozenset()
    """Streams that are never averaged and restarted from zeros at their version."""
    compression: Mapping[str, Format] = field(default_factory=dict)
    """Of the streams that are compressed, in both directions."""
    kinds: Kinds = field(default_factory=dict)
    """Of every stream; those of the server, so that both ends code alike."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Streams the client lacks, as sent: compressed, except for parameters sent whole."""
    differences: frozenset[str] = frozenset()
    """Of ``streams``, those that are a difference to version ``previous_version``."""
    previous_version: int = -1
    """Version of the parameters before their last average; -1: none."""
    bundles: bool = False
    """Whether the reply may pack its small arrays into bundles."""
    by_flight: bool = False
    """Whether the reply's arrays travel by Arrow Flight; they are sent before the next message."""
    afresh: bool = False
    """Whether the client leaves its state alone, and begins like one that has none. No server asks
    for it: a site with secure sums does, so that a resume still finds the state."""
    config: Settings = field(default_factory=dict)

    @property
    def is_delayed(self) -> bool:
        """Whether averages come late, those of this window or of the last one (``sync_delay``)."""
        return self.before_merge > 0 or self.ahead > 0

    def to_content(self, server_round: int) -> RecordDict:
        """Return new records: in simulation, Flower passes references."""
        config = ConfigRecord(
            {
                **self.config,
                "server-round": server_round,
                RUN_KEY: self.run_key,
                "attempt": self.attempt,
                "attempts": list(self.attempts),
                "attempt-starts": list(self.attempts.values()),
                "code": list(self.code),
                "code-digests": list(self.code.values()),
                "checkpoint-step": self.checkpoint,
                "for-resume": self.for_resume,
                "start-step": self.start,
                "stop-step": self.stop,
                "steps": self.steps,
                "steps-before-merge": self.before_merge,
                "steps-ahead": self.ahead,
                "sync-bound": self.sync_bound,
                "streams-due": sorted(self.due),
                "streams": list(self.versions),
                "stream-versions": list(self.versions.values()),
                "streams-reset": sorted(self.resets),
                "stream-formats": [str(self.compression.get(n, EXACT)) for n in self.versions],
                "stream-kinds": [str(kind_of(n, self.kinds)) for n in self.versions],
                "differences": sorted(self.differences),
                "previous-version": self.previous_version,
                "bundles": self.bundles,
                "by-flight": self.by_flight,
                **({AFRESH: True} if self.afresh else {}),
            }
        )
        streams = {name: to_record(stream) for name, stream in self.streams.items()}
        return RecordDict({CONFIG: config, **streams})

    @classmethod
    def from_content(cls, content: RecordDict) -> "WindowRequest":
        """Read what ``to_content`` wrote; raises ``ValueError`` for anything else."""
        config = records_of(ConfigRecord, content).get(CONFIG)
        if config is None:
            raise ValueError(f"not a request of the DesLoc strategy: no ConfigRecord {CONFIG!r}")
        names = _values(config, "streams", str)
        versions = _values(config, "stream-versions", int)
        formats = _values(config, "stream-formats", str)
        kinds = map(Kind, _values(config, "stream-kinds", str))
        attempts = _values(config, "attempts", str)
        starts = _values(config, "attempt-starts", int)
        code, digests = _values(config, "code", str), _values(config, "code-digests", str)
        return cls(
            run_key=_value(config, RUN_KEY, str),
            attempt=_value(config, "attempt", str),
            attempts=dict(zip(attempts, starts, strict=True)),
            code=dict(zip(code, digests, strict=True)),
            checkpoint=_value(config, "checkpoint-step", int),
            for_resume=_value(config, "for-resume", bool),
            start=_value(config, "start-step", int),
            stop=_value(config, "stop-step", int),
            steps=_value(config, "steps", int),
            before_merge=_value(config, "steps-before-merge", int),
            ahead=_value(config, "steps-ahead", int),
            sync_bound=_value(config, "sync-bound", bool),
            due=frozenset(_values(config, "streams-due", str)),
            versions=dict(zip(names, versions, strict=True)),
            resets=frozenset(_values(config, "streams-reset", str)),
            compression=lossy(dict(zip(names, formats, strict=True))),
            kinds=dict(zip(names, kinds, strict=True)),
            differences=frozenset(_values(config, "differences", str)),
            previous_version=_value(config, "previous-version", int),
            bundles=_value(config, "bundles", bool),
            by_flight=_value(config, "by-flight", bool),
            afresh=_typed(config.get(AFRESH, False), AFRESH, bool),
            streams=streams_of(content),
            config={
                key: value
                for key, value in config.items()
                if key not in _OWN_KEYS and isinstance(value, (str, int, float, bool))
            },
        )


_OWN_KEYS = frozenset(WindowRequest(run_key="", afresh=True).to_content(0)[CONFIG])
"""Keys of a request's config that are not the app's settings."""


def settings_of(config: ConfigRecord) -> dict[str, str | int | float | bool]:
    """Return an app's settings; raises ``ValueError`` for one that no request can hold."""
    settings: dict[str, str | int | float | bool] = {}
    for key, value in config.items():
        if key in _OWN_KEYS:
            raise ValueError(f"the setting {key!r} is the strategy's own; give yours another name")
        if not isinstance(value, (str, int, float, bool)):
            raise ValueError(f"the setting {key!r} is a {type(value).__name__}, not a single value")
        settings[key] = value
    return settings


def is_name(text: str) -> bool:
    """Return whether ``text`` may name a run or a client; both name files."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", text) is not None


def _value(config: ConfigRecord, key: str, kind: type[T]) -> T:
    return _typed(config.get(key), key, kind)


def _values(config: ConfigRecord, key: str, kind: type[T]) -> list[T]:
    return [_typed(value, key, kind) for value in _value(config, key, list)]


def _typed(value: object, key: str, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ValueError(
            f"not a request of the DesLoc strategy: its config has {key}={value!r}, "
            f"expected {kind.__name__}"
        )
    return value
