"""What the federation has in common, and how it travels."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord
from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.compression import receive, send
from flower_desloc.core.formats import Format
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import check_like
from flower_desloc.flower.records import from_record, to_record

_RESIDUAL, _DIFFERENCE = "residual.", "difference."


@dataclass
class Globals:
    """The step, and every stream's last average.

    Of a stream with a format that loses something, what everybody can decode is the average, on
    the server too.
    """

    step: int = 0
    averages: dict[str, ArrayRecord] = field(default_factory=dict)
    """The last average of every stream that had one, and where params began. Kept as they travel:
    all clients that lack one are sent the same record."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of every stream, the step of its last average or reset; 0 before the first."""
    formats: Mapping[str, Format] = field(default_factory=dict)
    """Of the streams that travel coded."""
    like: dict[str, Stream] = field(default_factory=dict)
    """Tensors like those of the streams, as far as known."""
    difference: ArrayRecord | None = None
    """Of coded parameters, the last average's difference to the one before."""
    former: int = -1
    """Version of the parameters that it is a difference to."""
    residuals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """What the code of the last averages could not say."""

    def average(self, name: str) -> dict[str, Tensor]:
        """Return the last average of a stream, as everybody has it."""
        stream = from_record(self.averages[name])
        if name in self.formats and name != PARAMS:
            return receive(name, stream, self.formats[name], self.like[name])
        return stream

    def publish(self, name: str, stream: dict[str, Tensor], version: int) -> None:
        """Make ``stream`` the average of all; what travels as it is is taken out of it."""
        format_ = self.formats.get(name)
        if format_ is None:
            self.averages[name] = to_record(stream)
        else:
            before = self.average(PARAMS) if name == PARAMS else None
            residual = self.residuals.get(name)
            sent = send(name, stream, format_, reference=before, residual=residual)
            if sent.residual:
                self.residuals[name] = sent.residual
            if name == PARAMS:
                self.averages[name] = to_record(sent.received)
                self.difference, self.former = to_record(sent.coded), self.versions[PARAMS]
            else:
                self.averages[name] = to_record(sent.coded)
        self.versions[name] = version

    def record(self, name: str, held: int | None) -> tuple[ArrayRecord, bool]:
        """Return what to send of a stream to who holds that version; and if it is a difference."""
        if name == PARAMS and self.difference is not None and held == self.former:
            return self.difference, True
        return self.averages[name], False

    def decoded(self, streams: Mapping[str, Stream]) -> dict[str, Stream]:
        """Return a client's streams as they are averaged; raises ``ValueError`` for bad codes."""
        return {
            name: receive(
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
        """Return every tensor that it takes to go on."""
        kept = {name: from_record(record) for name, record in self.averages.items()}
        kept |= {f"{_RESIDUAL}{name}": stream for name, stream in self.residuals.items()}
        if self.difference is not None:
            kept[f"{_DIFFERENCE}{PARAMS}"] = from_record(self.difference)
        return kept

    def go_back(
        self, step: int, versions: Mapping[str, int], former: int, kept: Mapping[str, Stream]
    ) -> None:
        """Take over what :meth:`to_checkpoint` gave; raises ``ValueError`` for another model's."""
        if (theirs := set(versions)) != (ours := set(self.versions)):
            raise ValueError(
                f"the checkpoint has the streams {sorted(theirs)}, this run {sorted(ours)}"
            )
        self.residuals, self.averages, self.difference = {}, {}, None
        for name, stream in kept.items():
            if name.startswith(_RESIDUAL):
                self.residuals[name.removeprefix(_RESIDUAL)] = dict(stream)
            elif name.startswith(_DIFFERENCE):
                self.difference = to_record(stream)
            else:
                if name in self.like and (name == PARAMS or name not in self.formats):
                    check_like(name, stream, self.like[name])
                self.averages[name] = to_record(stream)
        self.step, self.versions, self.former = step, dict(versions), former
