"""What the server keeps of a run: the averages, their versions, and what lossy formats need."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from flwr.app import ArrayRecord
from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.compression import decode_stream, encode_stream
from flower_desloc.core.formats import Format, lossy
from flower_desloc.core.kinds import Kind, Kinds, kind_of
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.streams import check_like, plain_name, starts_at_zero
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.flower.records import from_record, to_record

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
    formats: Mapping[str, Format] = field(default_factory=dict)
    """Of the streams that are sent in a lossy format."""
    kinds: Kinds = field(default_factory=dict)
    """Of the states that PyTorch's names do not give (``kind_of``)."""
    lengths: dict[str, float] = field(default_factory=dict)
    """The median length of the clients' last updates of every stream (``core/robust.py``)."""
    like: dict[str, Stream] = field(default_factory=dict)
    """Meta tensors with the names, shapes and types of each stream, as far as known."""
    difference: ArrayRecord | None = None
    """With params in a lossy format: the encoded difference of their last two averages."""
    former: int = -1
    """Version of params that it is a difference to."""
    residuals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Quantisation residuals of the last averages; they are added to the next."""
    outer: OuterOptimizer | None = None
    """The server's own optimizer."""

    @classmethod
    def of(
        cls,
        averaged: Iterable[str],
        states: Mapping[str, Stream],
        formats: Mapping[str, str],
        kinds: Kinds,
        outer: OuterOptimizer | None,
    ) -> Self:
        """Return the state before a run whose streams ``averaged`` have averages.

        Raises ``ValueError`` where ``states``, the initial ones, lack a stream.
        """
        state = cls(
            versions=dict.fromkeys(averaged, 0),
            formats=lossy(formats),
            kinds=kinds,
            like={name: meta(stream) for name, stream in states.items()},
            outer=outer,
        )
        if unknown := state.formats.keys() - {PARAMS, *states}:
            raise ValueError(f"formats of {sorted(unknown)} need states={{...}} that have them")
        for name, stream in states.items():
            if not starts_at_zero(name):
                state.averages[name] = to_record(stream)
        return state

    def kind(self, name: str) -> Kind:
        """Return what a stream holds."""
        return kind_of(name, self.kinds)

    @property
    def lacks_buffers(self) -> bool:
        """Whether buffers are averaged and their initial values are not known."""
        return BUFFERS in self.versions and BUFFERS not in self.averages

    def begin(self, initial: Mapping[str, ArrayRecord], resume: Checkpoint | None) -> None:
        """Start from ``initial`` streams, or from a checkpoint of streams like these."""
        for name, record in initial.items():
            self.like[name] = meta(from_record(record))
            self.averages[name] = record
        if resume is not None:
            self._restore(resume)
        if self.outer is not None:
            self.outer.begin(self.average(PARAMS))
            self.outer.restore(resume.outer if resume else {})

    def average(self, name: str) -> dict[str, Tensor]:
        """Return the last average of a stream, decoded."""
        stream = from_record(self.averages[name])
        if name in self.formats and name != PARAMS:
            return decode_stream(
                name, stream, self.formats[name], self.like[name], kind=self.kind(name)
            )
        return stream

    def publish(
        self, streams: dict[str, dict[str, Tensor]], step: int, resets: Iterable[str]
    ) -> None:
        """Make ``streams`` the averages after ``step`` steps; empties it as it encodes them.

        An average of params is also a new version of the streams in ``resets``.
        """
        has_params = PARAMS in streams
        for name in list(streams):
            self.like.setdefault(name, meta(streams[name]))
            self._encode(name, streams.pop(name))
            self.versions[name] = step
        if has_params:
            self.versions |= dict.fromkeys(resets, step)
            if self.outer is not None and PARAMS in self.formats:
                self.outer.set_params(self.average(PARAMS))
        self.step = step

    def _encode(self, name: str, stream: Stream) -> None:
        format_ = self.formats.get(name)
        if format_ is None:
            self.averages[name] = to_record(stream)
            return
        before = self.average(PARAMS) if name == PARAMS else None
        residual = self.residuals.get(name)
        sent = encode_stream(self.kind(name), stream, format_, reference=before, residual=residual)
        if sent.residual:
            self.residuals[name] = sent.residual
        if name == PARAMS:
            self.averages[name] = to_record(sent.received)
            self.difference, self.former = to_record(sent.coded), self.versions[PARAMS]
        else:
            self.averages[name] = to_record(sent.coded)

    def to_send(self, name: str, held: int | None) -> tuple[ArrayRecord, bool]:
        """Return the record for a client that holds version ``held``; and if it is a difference."""
        if name == PARAMS and self.difference is not None and held == self.former:
            return self.difference, True
        return self.averages[name], False

    def decoded(self, streams: Mapping[str, Stream]) -> dict[str, Stream]:
        """Decode a client's streams; raises ``ValueError`` where that is impossible."""
        return {
            name: decode_stream(
                name,
                stream,
                self.formats[name],
                self.like[name],
                kind=self.kind(name),
                reference=self.average(PARAMS) if name == PARAMS else None,
            )
            if name in self.formats
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
                if name in self.like and (name == PARAMS or name not in self.formats):
                    check_like(name, stream, self.like[name])
                self.averages[name] = to_record(stream)
        self.step, self.evaluated = to.step, to.evaluated
        self.versions, self.former = dict(to.versions), to.former
        self.lengths = dict(to.lengths)


def meta(stream: Stream) -> dict[str, Tensor]:
    """Return meta tensors of the same names, shapes and types."""
    return {key: tensor.to("meta") for key, tensor in stream.items()}
