"""What the server keeps of a run: the averages, their versions, and what lossy formats need."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord
from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.compression import decode_stream, encode_stream
from flower_desloc.core.formats import Format
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import check_like
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
    versions: dict[str, int] = field(default_factory=dict)
    """Step of the last average or reset of every stream; 0 before the first."""
    formats: Mapping[str, Format] = field(default_factory=dict)
    """Of the streams that are sent in a lossy format."""
    like: dict[str, Stream] = field(default_factory=dict)
    """Meta tensors with the names, shapes and types of each stream, as far as known."""
    difference: ArrayRecord | None = None
    """With params in a lossy format: the encoded difference of their last two averages."""
    former: int = -1
    """Version of params that it is a difference to."""
    residuals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Quantisation residuals of the last averages; they are added to the next."""

    def average(self, name: str) -> dict[str, Tensor]:
        """Return the last average of a stream, decoded."""
        stream = from_record(self.averages[name])
        if name in self.formats and name != PARAMS:
            return decode_stream(name, stream, self.formats[name], self.like[name])
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
        self.step = step

    def _encode(self, name: str, stream: Stream) -> None:
        format_ = self.formats.get(name)
        if format_ is None:
            self.averages[name] = to_record(stream)
            return
        before = self.average(PARAMS) if name == PARAMS else None
        residual = self.residuals.get(name)
        sent = encode_stream(name, stream, format_, reference=before, residual=residual)
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

    def restore(
        self, step: int, versions: Mapping[str, int], former: int, tensors: Mapping[str, Stream]
    ) -> None:
        """Restore what ``to_checkpoint`` gave; raises ``ValueError`` for another model's."""
        if (theirs := set(versions)) != (ours := set(self.versions)):
            raise ValueError(
                f"the checkpoint has the streams {sorted(theirs)}, this run {sorted(ours)}"
            )
        self.residuals, self.averages, self.difference = {}, {}, None
        for name, stream in tensors.items():
            if name.startswith(_RESIDUAL):
                self.residuals[name.removeprefix(_RESIDUAL)] = dict(stream)
            elif name.startswith(_DIFFERENCE):
                self.difference = to_record(stream)
            else:
                if name in self.like and (name == PARAMS or name not in self.formats):
                    check_like(name, stream, self.like[name])
                self.averages[name] = to_record(stream)
        self.step, self.versions, self.former = step, dict(versions), former


def meta(stream: Stream) -> dict[str, Tensor]:
    """Return meta tensors of the same names, shapes and types."""
    return {key: tensor.to("meta") for key, tensor in stream.items()}
