"""Replies, and the one place where what a client sends is validated.

Up: one MetricRecord ``metrics``, and an ArrayRecord for each due stream.

A reply is not trusted. Its sizes are checked before any of it is decoded (``Limits``), then names,
shapes, types, finiteness and ranges, and what comes out is a ``Contribution`` or a
``ClientEvaluation``: nothing that has one of these checks it again, or reads the metrics of the
reply.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import WARNING
from types import MappingProxyType
from typing import Any, Self

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, MetricRecordValues, RecordDict

from flower_desloc.core.averaging import update_lengths
from flower_desloc.core.kinds import Kind, Kinds, kind_of
from flower_desloc.core.schedule import PARAMS, Window
from flower_desloc.core.streams import check_like, finite_ends
from flower_desloc.core.types import MOST, FromTotals, Shares, Streams
from flower_desloc.flower.arrays import arrays_of, plain_numbers, records_of, streams_of, to_record
from flower_desloc.flower.bundles import bundled
from flower_desloc.flower.failures import client_error, printable
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import METRICS, STATE_LOST, STATE_NEW, TENSOR_NAMES, TOTALS
from flower_desloc.flower.observer import ClientRecord

# What a reply may hold. The streams and their sizes follow from the request; a client without
# faults comes near none of the others.

RECORDS = 8
"""Records besides the due streams."""
VALUES = 4096
"""Numbers and texts in all records; a list counts as many as it has."""
VALUES_PER_STEP = 8
"""More of them for each step of the window, and one for each due tensor: its weight."""
KEY = 256
"""Characters of the name of a record, metric or text."""
TEXT = 4096
"""Characters or bytes of one text."""
TEXTS = 1 << 20
"""Of all texts and names together."""
ARRAY_KEY = 1024
"""Characters of a tensor's name."""
NAMES = 1 << 15
"""Names of tensors in each list of them, in the reply to the greeting."""
DIMENSIONS = 64
"""Of an array, and characters of its types."""
PER_ARRAY = 4096
"""Bytes that an array may have besides its values: its header, or its place in a bundle."""
UNKNOWN = 16
"""How many times the bytes of the parameters a stream of unknown shapes may have."""
OBJECTS = 1000
"""Objects that Flower cuts a reply into, besides two for each array and MiB of its streams."""

# In which ranges its metrics are used.

_LARGEST = 1e30
"""Magnitude up to which a metric or a total is used, so that sums of some are finite."""
_SECONDS = (1e-6, 1e8)
"""Range of the time of a window."""

Metrics = Mapping[str, int | float | list[int] | list[float]]


@dataclass(frozen=True, kw_only=True)
class WindowReply:
    """A client's answer, before it is validated: its due streams and its metrics."""

    metrics: Metrics
    streams: Streams = field(default_factory=dict)

    def to_content(self, *, bundles: bool = False, copy: bool = True) -> RecordDict:
        """Return the records of the reply, its small arrays in ``bundles`` or one by one."""
        records = {name: to_record(stream, copy=copy) for name, stream in self.streams.items()}
        if bundles:
            records = {name: bundled(record) for name, record in records.items()}
        return RecordDict({METRICS: MetricRecord(plain_numbers(self.metrics)), **records})

    @classmethod
    def of(cls, message: Message) -> Self:
        """Read a client's message; raises ``ValueError`` for an error or anything else.

        It has the type that ``client_error`` reads from the code of the client's error.
        """
        if message.has_error():
            raise client_error(message.error.code, message.error.reason)
        content = message.content
        metrics = records_of(MetricRecord, content).get(METRICS)
        if metrics is None:
            raise ValueError(f"it has no MetricRecord {METRICS!r}")
        for name, value in metrics.items():
            if not _is_serializable(value):
                raise ValueError(f"its metric {name!r} is an integer of more than 64 bits")
        return cls(metrics=dict(metrics), streams=streams_of(content))


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What one client adds to the averages of a window."""

    streams: Streams
    """The due streams, decoded: finite, of the model's names, shapes and types."""
    examples: float
    shares: Shares | None
    """By stream its weight in the average of each tensor, from the steps that it took; None: it
    counts as having taken all."""
    record: ClientRecord
    is_new: bool
    """Whether it had no state of an earlier window."""
    lengths: Mapping[str, float] = field(default_factory=dict)
    """By stream, how long its update is (``update_lengths``)."""

    def measured(self, last: Streams, kinds: Kinds) -> Self:
        """Return it with the lengths of its updates since the ``last`` averages."""
        lengths = update_lengths(self.streams, last, kinds)
        norm = in_range(lengths.get(PARAMS, 0.0))
        return replace(self, lengths=lengths, record=replace(self.record, update_norm=norm))

    @classmethod
    def of(
        cls,
        reply: WindowReply,
        window: Window,
        templates: Streams,
        decode: Callable[[Streams], Streams] = dict,
        *,
        kinds: Kinds = MappingProxyType({}),
        partial_steps: bool = False,
    ) -> Self:
        """Validate the reply to the request for a window, and decode it.

        Args:
            reply: What the client sent.
            window: Must be the reply's, and its streams exactly those that are due.
            templates: Names, shapes and types of the streams known so far.
            decode: Decodes streams of the right names; raises ``ValueError`` where it cannot.
            kinds: The kinds of streams that PyTorch's names do not give.
            partial_steps: Whether clients may take fewer steps, and state weights.

        Raises ``ValueError`` saying what is wrong with the reply.

        """
        metrics, steps = reply.metrics, window.stop - window.start
        if STATE_LOST in metrics:
            raise ValueError("it has lost its state, also after it was sent everything")
        check_window(metrics, window)
        examples = examples_of(metrics)
        require_number(metrics, "train-loss")
        if reply.streams.keys() != window.due:
            raise ValueError(
                f"its reply has the streams {sorted(reply.streams)}, expected {sorted(window.due)}"
            )
        streams = decode(reply.streams)
        check_streams(streams, templates, kinds)
        return cls(
            streams=streams,
            examples=examples,
            shares=shares(metrics, streams) if partial_steps else None,
            record=client_record(metrics, steps),
            is_new=STATE_NEW in metrics,
        )


@dataclass(frozen=True, kw_only=True)
class ClientEvaluation:
    """What one client adds to an evaluation."""

    examples: float
    totals: Mapping[str, float]
    metrics: Mapping[str, float]
    """Its own: those of its totals, or without a function for that those that it states."""

    def scaled(self, factor: float) -> Self:
        """Return what counts as ``factor`` of it; its own metrics stay the same."""
        totals = {name: factor * total for name, total in self.totals.items()}
        return replace(self, examples=factor * self.examples, totals=totals)

    @classmethod
    def of(cls, reply: WindowReply, step: int, metrics: FromTotals | None) -> Self:
        """Validate the reply to the request for an evaluation after ``step`` steps.

        The empty evaluation of a client without held-out data is valid.

        Raises ``ValueError`` saying what is wrong with the reply.
        """
        if STATE_LOST in reply.metrics:
            raise ValueError("it has lost its state, also after it was sent everything")
        check_window(reply.metrics, Window(step, step, frozenset()))
        if reply.streams:
            raise ValueError(f"its reply has the streams {sorted(reply.streams)}, expected []")
        return cls.measured(reply.metrics, metrics)

    @classmethod
    def measured(cls, reported: Metrics, metrics: FromTotals | None) -> Self:
        """Return what the metrics of a reply say; raises ``ValueError`` for one out of range."""
        figures = {
            name: number(value)
            for name, value in reported.items()
            if name not in ("start-step", "stop-step")
            and (not isinstance(value, list) or name == "num-examples" or name.startswith(TOTALS))
        }
        examples = figures.pop("num-examples", 0.0)
        if not 0 <= examples <= MOST:
            raise ValueError(f"its num-examples is {examples}; it must be a number at least 0")
        totals = {k.removeprefix(TOTALS): v for k, v in figures.items() if k.startswith(TOTALS)}
        least = 0.0 if metrics else -_LARGEST
        for name, total in totals.items():
            if not least <= total <= _LARGEST:
                wanted = f"it must be at least {least:g} and at most {_LARGEST:g}"
                if math.isnan(total):
                    wanted = "look for NaN in the parameters, the held-out data and the evaluation"
                raise ValueError(f"its total of {name} is {total}; {wanted}")
        own = {printable(k): v for k, v in figures.items() if not k.startswith(TOTALS)}
        if metrics is not None:
            own = _computed(metrics, totals) if figures else {}
        finite = {name: value for name, value in own.items() if math.isfinite(in_range(value))}
        return cls(examples=examples, totals=totals, metrics=finite)


def number(value: MetricRecordValues) -> float:
    """Return a metric that is one number; NaN for a list."""
    return math.nan if isinstance(value, list) else float(value)


def require_number(metrics: Metrics, name: str) -> float:
    """Return a metric; raises ``ValueError`` unless it is there and is one number."""
    value = metrics.get(name)
    if not isinstance(value, (int, float)):
        raise ValueError(f"its metrics have no number {name!r}")
    return float(value)


def examples_of(metrics: Metrics) -> float:
    """Return the examples of a reply to training; raises ``ValueError`` unless it can be used."""
    examples = require_number(metrics, "num-examples")
    if not 0 < examples <= MOST:
        raise ValueError(
            f"its num-examples is {metrics['num-examples']}; it must be above 0 and at most "
            f"{MOST:g}"
        )
    return examples


def client_record(metrics: Metrics, steps: int) -> ClientRecord:
    """Return the record of a reply with these metrics, of a window of so many ``steps``.

    Raises ``ValueError`` unless its examples can be used. No other metric is required: a number
    that cannot be used is NaN, or where 0 says that the client did not state it, 0.
    """

    def one(name: str) -> float:
        return in_range(number(metrics.get(name, 0.0)))

    def several(name: str) -> list[float]:
        value = metrics.get(name, [])
        return [in_range(each) for each in (value if isinstance(value, list) else [value])]

    seconds, taken = one("seconds"), one("steps")
    least, most = _SECONDS
    return ClientRecord(
        num_examples=int(examples_of(metrics)),
        train_loss=one("train-loss"),
        losses=several("losses"),
        grad_norms=several("grad-norms"),
        learning_rates=several("learning-rates"),
        param_norm=one("param-norm"),
        seconds=seconds if least <= seconds <= most else 0.0,
        steps=int(taken) if 1 <= taken <= steps else 0,
    )


def in_range(value: float) -> float:
    """Return a metric; NaN if its magnitude is so large that a sum of some might not be finite."""
    return float(value) if abs(value) <= _LARGEST else math.nan


def check_streams(streams: Streams, templates: Streams, kinds: Kinds) -> None:
    """Raise ``ValueError`` unless a mean of these streams can be used for training.

    ``templates`` have the names, shapes and types of the streams known so far, ``kinds`` the kinds
    that PyTorch's names do not give.
    """
    for name, stream in streams.items():
        if name in templates:
            check_like(name, stream, templates[name])
        for key, tensor in stream.items():
            what = f"{key!r} of stream {name!r} is of type {tensor.dtype}"
            if name in templates and tensor.dtype != templates[name][key].dtype:
                raise ValueError(f"{what}, expected {templates[name][key].dtype}")
            if not tensor.is_floating_point():
                raise ValueError(f"{what}, which has no mean")
    for name, stream in streams.items():
        for key, (low, high) in finite_ends(name, stream).items():
            what = f"{key!r} of stream {name!r}"
            least, greatest = value_range(kind_of(name, kinds), stream[key].dtype)
            if max(-low, high) > greatest:
                raise ValueError(
                    f"{what} holds values beyond {greatest:.3g}, too large to be averaged"
                )
            if low < least:
                raise ValueError(f"{what} has values below zero; a mean of squares has none")


def value_range(kind: Kind, dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the greatest value of a stream that can be averaged.

    The greatest second moment is half of the type's greatest value, so that the difference of two
    is finite; any other's is the root of that, so that its square is finite too.
    """
    most = torch.finfo(torch.promote_types(dtype, torch.float32)).max / 2
    return (-math.sqrt(most), math.sqrt(most)) if kind.is_signed else (0.0, most)


def weight_list(weights: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Return weights by stream and tensor as a list, in the order of the names.

    It has one number for each stream, unless those of a stream's tensors differ.
    """
    by_name = [[own for _, own in sorted(weights[name].items())] for name in sorted(weights)]
    if all(len(set(each)) == 1 for each in by_name):
        return [each[0] for each in by_name]
    return [own for each in by_name for own in each]


def shares(metrics: Metrics, streams: Streams) -> dict[str, dict[str, float]]:
    """Return a client's weights by stream and tensor from the list that it states.

    Raises ``ValueError`` unless there is one, above 0 and at most 1, for every stream or for every
    tensor of the due ``streams``.
    """
    names, stated = sorted(streams), metrics.get("weights")
    keys = [(name, key) for name in names for key in sorted(streams[name])]
    values = stated if isinstance(stated, list) else []
    if len(values) not in (len(names), len(keys)) or not all(0 < value <= 1 for value in values):
        raise ValueError(f"its weights are {stated}, expected {len(names)} above 0 and at most 1")
    if len(values) == len(names):
        of = dict(zip(names, values, strict=True))
        return {name: dict.fromkeys(streams[name], own) for name, own in of.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for (name, key), own in zip(keys, values, strict=True):
        found[name][key] = own
    return found


@dataclass(frozen=True)
class Limits:
    """What the reply to one request may hold."""

    steps: int
    """Local steps of the window."""
    streams: Mapping[str, tuple[int, int]]
    """By due stream: the number of arrays, and of bytes."""

    @classmethod
    def of(cls, due: Iterable[str], steps: int, templates: Streams) -> Self:
        """Return the limits of a reply with the streams ``due``, given those known so far."""
        return cls(steps, {name: _size(name, templates) for name in due})

    def check(self, content: RecordDict) -> None:
        """Raise ``ValueError`` for what is beyond the limits."""
        _require("records", len(content), RECORDS + len(self.streams))
        most = VALUES + VALUES_PER_STEP * self.steps + sum(n for n, _ in self.streams.values())
        values = texts = 0
        for name, record in content.items():
            texts += _checked_key(name, KEY)
            if isinstance(record, ArrayRecord):
                self._check_stream(name, record)
                continue
            for key, value in record.items():
                each = value if isinstance(value, list) else [value]
                if key in TENSOR_NAMES:
                    _require(f"names in {key!r}", len(each), NAMES)
                    for tensor in each:
                        _checked_key(str(tensor), ARRAY_KEY)
                    continue
                values += len(each)
                _require("values", values, most)
                texts += _checked_key(key, KEY)
                texts += sum(_checked_text(key, it) for it in each if isinstance(it, str | bytes))
                _require("characters of text", texts, TEXTS)

    def open(self, content: RecordDict) -> None:
        """Replace bundles by the arrays in them, once, after ``check``.

        Raises ``ValueError`` for a bundle that cannot be read, or of too many arrays.
        """
        for name, record in records_of(ArrayRecord, content).items():
            most, _ = self.streams[name]
            if (arrays := arrays_of(record, most)) is not record:
                content[name] = ArrayRecord(dict(arrays))

    def _check_stream(self, name: str, record: ArrayRecord) -> None:
        if name not in self.streams:
            expected = sorted(self.streams) or "none"
            raise ValueError(f"its reply has the stream {name!r}, expected {expected}")
        arrays, size = self.streams[name]
        _require(f"arrays in stream {name!r}", len(record), arrays)
        for key, array in record.items():
            _checked_key(key, ARRAY_KEY)
            _check_types(key, array)
        _require(f"bytes in stream {name!r}", sum(len(a.data) for a in record.values()), size)


def most_objects(templates: Streams) -> int:
    """Return into how many objects Flower may cut a reply with all streams."""
    sizes = [_size(name, templates) for name in templates]
    return OBJECTS + sum(2 * arrays + (size >> 20) for arrays, size in sizes)


def _size(name: str, templates: Streams) -> tuple[int, int]:
    # Twice the values: a lossy format may be longer than a very small tensor.
    known = name in templates
    tensors = (templates[name] if known else templates[PARAMS]).values()
    values = (2 if known else UNKNOWN) * sum(tensor.nbytes for tensor in tensors)
    return len(tensors), values + PER_ARRAY * (1 + len(tensors))


def _require(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it has more than {most} {what}")


def _checked_key(key: str, most: int) -> int:
    if len(key) > most:
        raise ValueError(f"the name {key[:40]!r}... has more than {most} characters")
    return len(key)


def _checked_text(key: str, text: str | bytes) -> int:
    if len(text) > TEXT:
        raise ValueError(f"the text {key!r} has more than {TEXT} characters")
    return len(text)


def _check_types(key: str, array: Array) -> None:
    if max(len(array.dtype), len(array.shape), len(array.stype)) > DIMENSIONS:
        raise ValueError(f"{key!r} has a type or a shape of more than {DIMENSIONS} characters")


def check_window(metrics: Metrics, window: Window) -> None:
    """Raise ``ValueError`` unless a reply is for this window."""
    steps = (window.start, window.stop)
    answered = (metrics.get("start-step"), metrics.get("stop-step"))
    if answered != steps:
        raise ValueError(f"its reply is for the steps {answered}, expected {steps}")


def _computed(metrics: FromTotals, totals: Mapping[str, float]) -> dict[str, Any]:
    try:
        computed = metrics(totals)
    except Exception as error:  # the app's own function, on what a client sent
        raise ValueError(
            f"no metrics can be computed from its totals {totals}: {type(error).__name__}: {error}"
        ) from error
    try:
        return plain_numbers(computed)
    except TypeError as error:
        log(WARNING, "no metrics can be computed from a client's totals: %r", error)
        return {}


def _is_serializable(value: MetricRecordValues) -> bool:
    # Flower's records accept any integer, its protobuf does not; a simulation has no protobuf.
    each = value if isinstance(value, list) else [value]
    return all(isinstance(v, float) or -(2**63) <= v < 2**64 for v in each)
