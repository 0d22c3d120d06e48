"""What the server keeps of a run: the averages, their versions, and what lossy formats need."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flower_desloc.core.averaging import Drift
from flower_desloc.core.compression import decode_stream, encode_stream
from flower_desloc.core.formats import Format, lossy
from flower_desloc.core.kinds import Kind, Kinds, kind_of
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import BUFFERS, GRADIENTS, PARAMS, SyncSchedule, Window
from flower_desloc.core.streams import check_finite, check_like, plain_name, starts_at_zero
from flower_desloc.core.types import Stream, Streams
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.flower.failures import DivergedError

_RESIDUAL, _DIFFERENCE = "residual.", "difference."


@dataclass
class ServerState:
    """The step and the last average of every stream.

    In a lossy format the average is what every client can decode, on the server as well.
    """

    step: int = 0
    averages: dict[str, ArrayRecord] = field(default_factory=dict)
    """The last average of every stream that had one, and the initial params. Kept encoded: every
    client that lacks a stream is sent the same record."""
    evaluated: int = 0
    """Step of the last evaluation."""
    versions: dict[str, int] = field(default_factory=dict)
    """Step of the last average or reset of every stream; 0 before the first."""
    compression: Mapping[str, Format] = field(default_factory=dict)
    """Of the streams that are sent in a lossy format."""
    kinds: Kinds = field(default_factory=dict)
    """Of the states for which PyTorch's names do not give it (``kind_of``)."""
    lengths: dict[str, float] = field(default_factory=dict)
    """The median length of the clients' last updates of every stream (``core/robust.py``)."""
    templates: dict[str, Stream] = field(default_factory=dict)
    """Meta tensors with the names, shapes and types of each stream, as far as known."""
    difference: ArrayRecord | None = None
    """With params in a lossy format: the encoded difference of their last two averages."""
    previous_version: int = -1
    """Version of params that it is a difference to."""
    given: dict[str, str] = field(default_factory=dict)
    """The names of the model's tensors in the app's initial arrays."""
    residuals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Quantisation residuals of the last averages; they are added to the next."""
    outer: OuterOptimizer | None = None
    """The server's own optimizer."""
    averages_gradients: bool = False
    """Whether the clients send gradients, and the outer optimizer takes every step."""
    sends_codes: bool = False
    """Whether the clients send masked codes (``flower_desloc.secure.codes``)."""

    @classmethod
    def of(
        cls,
        schedule: SyncSchedule,
        initial: Streams | None,
        compression: Mapping[str, str] | None,
        kinds: Kinds | None,
        outer: OuterOptimizer | None,
    ) -> Self:
        """Return the state before a run, from the streams of a new worker.

        Raises ``ValueError`` for a lossy format of a stream that it does not have.
        """
        initial, of_gradients = initial or {}, GRADIENTS in schedule.periods
        state = cls(
            versions=dict.fromkeys([PARAMS] if of_gradients else schedule.periods, 0),
            compression=lossy(compression or {}),
            kinds=kinds or {},
            templates={name: meta(stream) for name, stream in initial.items()},
            outer=outer,
            averages_gradients=of_gradients,
        )
        if unknown := state.compression.keys() - {PARAMS, *initial}:
            raise ValueError(
                f"compression of {sorted(unknown)} needs templates={{...}} that have them"
            )
        for name, stream in initial.items():
            if not starts_at_zero(name):
                state.averages[name] = to_record(stream)
        return state

    @property
    def reply_templates(self) -> dict[str, Stream]:
        """Meta tensors like those that a client sends."""
        if not self.sends_codes:
            return self.templates
        from flower_desloc.secure.codes import width_of  # few runs need it

        bytes_: Any = {"dtype": torch.uint8, "device": "meta"}
        return {
            name: {
                key: torch.empty(width_of(self.kind(name)) * tensor.numel(), **bytes_)
                for key, tensor in stream.items()
            }
            for name, stream in self.templates.items()
        }

    @property
    def lacks_buffers(self) -> bool:
        """Whether buffers are averaged and their initial values are not known."""
        return BUFFERS in self.versions and BUFFERS not in self.averages

    @property
    def model_streams(self) -> list[str]:
        """The streams that a model is made of: params, and buffers if the schedule has them."""
        return [name for name in (PARAMS, BUFFERS) if name in self.versions]

    def model(self) -> ArrayRecord:
        """Return a copy of the averaged model, with the tensors' names in the app's arrays."""
        streams = [from_record(self.averages[n]) for n in self.model_streams if n in self.averages]
        model = {key: tensor for stream in streams for key, tensor in stream.items()}
        return to_record({self.given.get(key, key): tensor for key, tensor in model.items()})

    def begin(
        self,
        arrays: ArrayRecord,
        names: Mapping[str, Mapping[str, str]],
        resume: Checkpoint | None,
    ) -> None:
        """Start from an app's initial ``arrays``, or from a checkpoint of streams like these.

        ``names`` has by stream the names of its tensors, each with that of the array.
        """
        for name, given in names.items():
            self.averages[name] = ArrayRecord({key: arrays[full] for key, full in given.items()})
            self.templates[name] = meta(from_record(self.averages[name]))
            self.given |= given
        if self.averages_gradients:
            self.templates[GRADIENTS] = self.templates[PARAMS]
        if resume is not None:
            self._restore(resume)
        if self.outer is not None:
            self.outer.begin(self.average(PARAMS))
            self.outer.restore(resume.outer if resume else {})

    def kind(self, name: str) -> Kind:
        """Return what a stream holds."""
        return kind_of(name, self.kinds)

    def average(self, name: str) -> dict[str, Tensor]:
        """Return the last average of a stream, decoded."""
        stream = from_record(self.averages[name])
        if name in self.compression and name != PARAMS:
            return decode_stream(
                name, stream, self.compression[name], self.templates[name], kind=self.kind(name)
            )
        return stream

    def last_averages(self, names: Iterable[str]) -> dict[str, Stream]:
        """Return the last averages of those of the named streams that had one, decoded."""
        return {name: self.average(name) for name in names if name in self.averages}

    def publish(
        self,
        streams: dict[str, dict[str, Tensor]],
        window: Window,
        drift: Mapping[str, Drift],
        resets: Iterable[str],
    ) -> None:
        """Make ``streams`` the averages after a window; empties it as it encodes them.

        Before that the outer optimizer takes its step, along the average of params or of
        gradients. An average of params is also a new version of the streams in ``resets``.

        Raises ``DivergedError`` for values that are not finite.
        """
        for name, stream in streams.items():
            if not math.isfinite(drift[name].norm):
                _require_finite(name, stream, window, "optimizer.lr")
        self._step_outer(streams, window)
        has_params = PARAMS in streams
        for name in list(streams):
            self.templates.setdefault(name, meta(streams[name]))
            self._encode(name, streams.pop(name))
            self.versions[name] = window.stop
        if has_params:
            self.versions |= dict.fromkeys(resets, window.stop)
            if self.outer is not None and PARAMS in self.compression:
                self.outer.set_params(self.average(PARAMS))
        self.step = window.stop

    def _step_outer(self, streams: dict[str, dict[str, Tensor]], window: Window) -> None:
        """Replace the average of params or of gradients by the outer optimizer's params."""
        if self.outer is None:
            return
        if GRADIENTS in streams:
            streams[PARAMS] = self.outer.step(streams.pop(GRADIENTS), window.start)
            _require_finite(PARAMS, streams[PARAMS], window, "optimizer.lr")
        elif PARAMS in streams:
            streams[PARAMS] = self.outer.towards(streams[PARAMS], window.start)
            _require_finite(PARAMS, streams[PARAMS], window, "outer.lr")

    def _encode(self, name: str, stream: Stream) -> None:
        format_ = self.compression.get(name)
        if format_ is None:
            self.averages.pop(name, None)  # free its memory first
            self.averages[name] = to_record(stream)
            return
        before = self.average(PARAMS) if name == PARAMS else None
        residual = self.residuals.get(name)
        sent = encode_stream(self.kind(name), stream, format_, reference=before, residual=residual)
        if sent.residual:
            self.residuals[name] = sent.residual
        if name == PARAMS:
            self.averages[name] = to_record(sent.received)
            self.difference = to_record(sent.coded)
            self.previous_version = self.versions[PARAMS]
        else:
            self.averages[name] = to_record(sent.coded)

    def to_send(self, name: str, version: int | None) -> tuple[ArrayRecord, bool]:
        """Return the record for a client that has this version; and if it is a difference."""
        if name == PARAMS and self.difference is not None and version == self.previous_version:
            return self.difference, True
        return self.averages[name], False

    def decoded(self, streams: Streams) -> dict[str, Stream]:
        """Decode a client's streams; raises ``ValueError`` where that is impossible."""
        return {
            name: decode_stream(
                name,
                stream,
                self.compression[name],
                self.templates[name],
                kind=self.kind(name),
                reference=self.average(PARAMS) if name == PARAMS else None,
            )
            if name in self.compression
            else stream
            for name, stream in streams.items()
        }

    def to_checkpoint(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint."""
        tensors = {name: from_record(record) for name, record in self.averages.items()}
        tensors |= {f"{_RESIDUAL}{name}": stream for name, stream in self.residuals.items()}
        if self.difference is not None:
            tensors[f"{_DIFFERENCE}{PARAMS}"] = from_record(self.difference)
        return tensors

    def require_like(self, checkpoint: Checkpoint, given: Stream) -> None:
        """Raise ``ValueError`` unless a checkpoint has this run's streams and parameters.

        ``given`` are the app's initial tensors, of which some may not be trained.
        """
        if (theirs := set(checkpoint.versions)) != (ours := set(self.versions)):
            raise ValueError(
                f"the checkpoint has the streams {sorted(theirs)}, this run {sorted(ours)}"
            )
        params = checkpoint.averages[PARAMS]
        here = {plain_name(key): tensor for key, tensor in given.items()}
        check_like(PARAMS, params, {key: t for key, t in here.items() if key in params})

    def _restore(self, to: Checkpoint) -> None:
        """Restore a checkpoint's averages; raises ``ValueError`` for one of another model."""
        self.residuals, self.averages, self.difference = {}, {}, None
        for name, stream in to.averages.items():
            if name.startswith(_RESIDUAL):
                self.residuals[name.removeprefix(_RESIDUAL)] = dict(stream)
            elif name.startswith(_DIFFERENCE):
                self.difference = to_record(stream)
            else:
                if name in self.templates and (name == PARAMS or name not in self.compression):
                    check_like(name, stream, self.templates[name])
                self.averages[name] = to_record(stream)
        self.step, self.evaluated = to.step, to.evaluated
        self.versions, self.previous_version = dict(to.versions), to.previous_version
        self.lengths = dict(to.lengths)


def _require_finite(name: str, stream: Stream, window: Window, rate: str) -> None:
    try:
        check_finite(name, stream)
    except ValueError as error:
        raise DivergedError(
            f"the average after the window of steps {window.start + 1} to {window.stop}: {error}, "
            f"though every client's were; the training diverges, so lower {rate}"
        ) from error


def meta(stream: Stream) -> dict[str, Tensor]:
    """Return meta tensors of the same names, shapes and types."""
    return {key: tensor.to("meta") for key, tensor in stream.items()}
