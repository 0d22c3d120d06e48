"""What travels: streams and requests as Flower records. The only file that knows record keys.

Down: an ArrayRecord for each stream that travels, named after it, and one ConfigRecord,
``config``. Up: an ArrayRecord for each due stream and one MetricRecord, ``metrics``.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    MetricRecordValues,
    RecordDict,
)

from flower_desloc.core.averaging import Stream
from flower_desloc.core.formats import EXACT, NEVER_NEGATIVE, Format, lossy
from flower_desloc.core.schedule import Window
from flower_desloc.core.streams import check_like, finite_ends
from flower_desloc.flower.arrays import (
    from_array,
    hand_over,
    is_in_room,
    room,
    to_array,
    values_bytes,
)
from flower_desloc.flower.bundles import bundled, unbundled
from flower_desloc.flower.content import records_of

CONFIG = "config"
METRICS = "metrics"
ABOUT = "about"
STATE_LOST = "state-lost"
STATE_NEW = "state-new"
_OWN_KEYS = {
    *("server-round", "run-key", "start-step", "stop-step"),
    *("streams-due", "streams", "stream-versions", "streams-reset"),
    *("attempt", "checkpoint-step", "stream-formats", "differences", "former-version", "bundles"),
}
TOTALS = "totals/"  # prefix of totals among the metrics of an evaluation
HELLO = "query.hello"
ARE_YOU_THERE = "query.there"
GOODBYE = "query.goodbye"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the server asks of one client; an evaluation is a request with no steps."""

    run_key: str
    """Names the run for the client's own files, over restarts."""
    attempt: str = ""
    """Names this start of the server: another one after every resume."""
    checkpoint: int = -1
    """Step of the server's last checkpoint, which it may go back to; -1: there is none."""
    start: int = 0
    stop: int = 0
    due: frozenset[str] = frozenset()
    versions: Mapping[str, int] = field(default_factory=dict)
    """Of every stream, the step of its last average or reset; 0 before the first."""
    resets: frozenset[str] = frozenset()
    """Streams that are never averaged, and began anew with zeros at their version."""
    formats: Mapping[str, Format] = field(default_factory=dict)
    """Of the streams that travel coded, in both directions."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Those the client lacks, as they travel: coded, but for parameters that are sent whole."""
    differences: frozenset[str] = frozenset()
    """Of ``streams``, those that are a difference to ``former``."""
    former: int = -1
    """Version of the parameters before the last average of them; -1: there was none."""
    bundles: bool = False
    """Whether the reply may have its small arrays in bundles."""
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """The app's own settings."""

    def to_content(self, server_round: int) -> RecordDict:
        """Return new records: in simulation, Flower hands over references."""
        config = ConfigRecord({**self.config})
        config["server-round"] = server_round
        config["run-key"] = self.run_key
        config["attempt"] = self.attempt
        config["checkpoint-step"] = self.checkpoint
        config["start-step"] = self.start
        config["stop-step"] = self.stop
        config["streams-due"] = sorted(self.due)
        config["streams"] = list(self.versions)
        config["stream-versions"] = list(self.versions.values())
        config["streams-reset"] = sorted(self.resets)
        config["stream-formats"] = [str(self.formats.get(n, EXACT)) for n in self.versions]
        config["differences"] = sorted(self.differences)
        config["former-version"] = self.former
        config["bundles"] = self.bundles
        content = RecordDict({CONFIG: config})
        for name, stream in self.streams.items():
            content[name] = to_record(stream)
        return content

    @classmethod
    def from_content(cls, content: RecordDict) -> "Request":
        """Read what :meth:`to_content` wrote; raises ``ValueError`` for anything else."""
        try:
            config = dict(records_of(ConfigRecord, content)[CONFIG])
            names, versions = config.pop("streams"), config.pop("stream-versions")
            assert isinstance(names, list)
            assert isinstance(versions, list)
            due, resets = config.pop("streams-due"), config.pop("streams-reset")
            assert isinstance(due, list)
            assert isinstance(resets, list)
            formats, differences = config.pop("stream-formats"), config.pop("differences")
            assert isinstance(formats, list)
            assert isinstance(differences, list)
            config.pop("server-round")
            return cls(
                run_key=str(config.pop("run-key")),
                attempt=str(config.pop("attempt")),
                checkpoint=_integer(config.pop("checkpoint-step")),
                start=_integer(config.pop("start-step")),
                stop=_integer(config.pop("stop-step")),
                due=frozenset(str(name) for name in due),
                versions={str(k): _integer(v) for k, v in zip(names, versions, strict=True)},
                resets=frozenset(str(name) for name in resets),
                formats=lossy({str(k): str(v) for k, v in zip(names, formats, strict=True)}),
                differences=frozenset(str(name) for name in differences),
                former=_integer(config.pop("former-version")),
                bundles=config.pop("bundles") is True,
                streams=_streams(content),
                config={k: v for k, v in config.items() if isinstance(v, (str, int, float, bool))},
            )
        except (KeyError, AssertionError) as error:
            raise ValueError(f"not a request of the DesLoc strategy: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a client answers: its due streams and its metrics."""

    metrics: Mapping[str, int | float | list[int] | list[float]]
    streams: Mapping[str, Stream] = field(default_factory=dict)

    def to_content(self, *, bundles: bool = False) -> RecordDict:
        """Return the records of the reply, with ``bundles`` or without.

        Streams are handed over: nobody may write to them as long as the records are there.
        """
        content = RecordDict({METRICS: MetricRecord({**self.metrics})})
        for name, stream in self.streams.items():
            record = handed_over({**stream})
            content[name] = bundled(record) if bundles else record
        return content

    @classmethod
    def from_content(cls, content: RecordDict) -> "Reply":
        """Read a reply; raises ``ValueError``, saying what is wrong, for anything else."""
        metrics = records_of(MetricRecord, content).get(METRICS)
        if metrics is None:
            raise ValueError(f"it has no MetricRecord {METRICS!r}")
        for name, value in metrics.items():
            if not _travels(value):
                raise ValueError(f"its metric {name!r} is an integer of more than 64 bits")
        return cls(metrics=dict(metrics), streams=_streams(content))

    def check(self, window: Window, due: frozenset[str], like: Mapping[str, Stream]) -> None:
        """Raise ``ValueError`` unless this answers for the window with exactly the due streams.

        ``like`` gives names, shapes and types, but of a stream it lacks. Values are not looked at:
        see :meth:`check_values`.
        """
        steps = (window.start, window.stop)
        answered = (
            self.metrics.get("start-step", steps[0]),
            self.metrics.get("stop-step", steps[1]),
        )
        if answered != steps:
            raise ValueError(f"it answers for the steps {answered}, asked were {steps}")
        if due:
            self._check_metrics()
        if self.streams.keys() != due:
            raise ValueError(f"it holds the streams {sorted(self.streams)}, due are {sorted(due)}")
        for name, stream in self.streams.items():
            if name in like:
                check_like(name, stream, like[name])
                for key, tensor in stream.items():
                    if tensor.dtype != like[name][key].dtype:
                        raise ValueError(
                            f"{key!r} of stream {name!r} is of type {tensor.dtype}, "
                            f"expected {like[name][key].dtype}"
                        )
            for key, tensor in stream.items():
                if not tensor.is_floating_point():
                    raise ValueError(
                        f"{key!r} of stream {name!r} is of type {tensor.dtype}, which has no mean"
                    )

    def check_values(self) -> None:
        """Raise ``ValueError`` for values of which there is no mean that one can go on with."""
        for name, stream in self.streams.items():
            for key, (low, high) in finite_ends(name, stream).items():
                what = f"{key!r} of stream {name!r}"
                least, greatest = limits(name, stream[key].dtype)
                if max(-low, high) > greatest:
                    raise ValueError(
                        f"{what} holds values beyond {greatest:.3g}, too large to be averaged"
                    )
                if low < least:
                    raise ValueError(f"{what} has values below zero; a mean of squares has none")

    def _check_metrics(self) -> None:
        for name in ("num-examples", "train-loss"):
            if not isinstance(self.metrics.get(name), (int, float)):
                raise ValueError(f"its metrics have no number {name!r}")
        examples = self.metrics["num-examples"]
        assert isinstance(examples, (int, float))
        if not 0 < examples < 2**63:
            raise ValueError(f"its num-examples is {examples}; it must be a positive number")


def limits(name: str, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Return the least and the greatest value of a stream of which there is a mean to go on with.

    Half of all there is, or the difference of two would not be finite.
    """
    most = torch.finfo(torch.promote_types(dtype, torch.float32)).max / 2
    return 0.0 if name in NEVER_NEGATIVE else -most, most


def to_record(stream: Stream) -> ArrayRecord:
    """Return a stream as an ArrayRecord of its own bytes: later changes do not reach it."""
    return ArrayRecord({key: to_array(tensor) for key, tensor in stream.items()})


def handed_over(stream: dict[str, torch.Tensor]) -> ArrayRecord:
    """Return a stream that nobody writes to any more as an ArrayRecord, without a copy if it can.

    It is empty then: where it cannot, tensors are let go one by one. Flower sends and reads such a
    record as any; to make another of its arrays takes bytes, as :func:`to_record` has.
    """
    if not all(is_in_room(tensor) for tensor in stream.values() if tensor.nbytes > 0):
        places = room([(tensor.dtype, tensor.shape) for tensor in stream.values()])
        for key, place in zip(list(stream), places, strict=True):
            stream[key] = place.copy_(stream[key].detach())
    record = ArrayRecord()
    for key in list(stream):
        record[key] = hand_over(stream.pop(key))
    return record


def from_record(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """Return the tensors of an ArrayRecord, which are views of it: clone what is to be changed.

    Raises ``ValueError`` when they cannot be read.
    """
    arrays = unbundled(record)
    stream = {key: from_array(array) for key, array in arrays.items()}
    for key, tensor in stream.items():
        # NumPy reads what it needs and leaves the rest, which has travelled all the same.
        if (came := values_bytes(arrays[key])) != tensor.nbytes:
            raise ValueError(f"{key!r} came with {came} bytes for {tensor.nbytes} bytes of values")
    return stream


def plain(config: ConfigRecord) -> dict[str, str | int | float | bool]:
    """Return an app's settings; raises ``ValueError`` for one that cannot travel with a request."""
    settings: dict[str, str | int | float | bool] = {}
    for key, value in config.items():
        if key in _OWN_KEYS:
            raise ValueError(f"the setting {key!r} is the strategy's own; give yours another name")
        if not isinstance(value, (str, int, float, bool)):
            raise ValueError(f"the setting {key!r} is a {type(value).__name__}, not a single value")
        settings[key] = value
    return settings


def payload_bytes(message: Message) -> dict[str, int]:
    """Return the bytes of tensor values a message carries, by stream."""
    if not message.has_content():
        return {}
    records = records_of(ArrayRecord, message.content)
    return {name: sum(map(values_bytes, _arrays(record))) for name, record in records.items()}


def _arrays(record: ArrayRecord) -> Iterable[Array]:
    try:
        return unbundled(record).values()
    except ValueError:
        return record.values()


def framed_bytes(message: Message) -> int:
    """Return the size of a message as Flower stores and sends it, with names, shapes and headers.

    Flower cuts a message into objects named by their hashes. The hashes of the payload are not
    computed for a count; the names of a large array's further 5 MB chunks, 64 bytes each, are
    left out.
    """
    if not message.has_content():
        return len(message.deflate())
    payload = 0
    bare = RecordDict()
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord):
            bare[name] = record
            continue
        bare[name] = stripped = ArrayRecord()
        for index, (key, array) in enumerate(record.items()):
            # Different one from another, or Flower would send equal ones once.
            data = f"{name}/{index}".encode()
            stripped[key] = Array(array.dtype, array.shape, array.stype, data)
            payload += len(array.data) - len(data)
    skeleton = copy.copy(message)
    skeleton.content = bare
    framing = len(skeleton.deflate()) + len(bare.deflate())
    for record in bare.values():
        framing += len(record.deflate())
        if isinstance(record, ArrayRecord):
            for array in record.values():
                framing += len(array.deflate())
                framing += sum(len(chunk.deflate()) for _, chunk in array.slice_array())
    return framing + payload


def _streams(content: RecordDict) -> dict[str, Stream]:
    return {name: from_record(r) for name, r in records_of(ArrayRecord, content).items()}


def _travels(value: MetricRecordValues) -> bool:
    # Flower's records take any integer, and its wire format raises; in simulation there is none.
    each = value if isinstance(value, list) else [value]
    return all(isinstance(v, float) or -(2**63) <= v < 2**64 for v in each)


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"expected an integer, got {value!r}")
    return value
