"""The curves of a run: numbers by name and global step, the same for every tool that draws them."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from statistics import fmean

from flower_desloc.app.config.metric import ordered
from flower_desloc.app.runs.folder import Line

Point = tuple[str, int, float]
"""Name, global step, value."""


class Scalars:
    """The points of each window in turn.

    At every step: ``loss/mean``, ``loss/CLIENT``, ``grad_norm/CLIENT``, ``learning_rate``.
    At the end of a window: ``update_norm/CLIENT``, ``param_norm/CLIENT``; ``seconds/PHASE``;
    ``clients/averaged``, ``clients/left_out``; ``bytes_{up,down}/STREAM`` since the start;
    ``heldout_METRIC/{central,federated}``, also followed by a domain, label or client;
    ``drift/STREAM`` (spread / norm) and ``change/STREAM`` (moved / last norm) of what was averaged.
    """

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._norms: dict[str, float | None] = {}

    def replay(self, line: Line) -> None:
        """Count a window whose points are not needed."""
        for way in ("up", "down"):
            for stream, count in line[f"bytes_{way}"].items():
                self._sent[f"bytes_{way}/{stream}"] += count
                self._sent[f"bytes_{way}/total"] += count
        self._norms |= {stream: drift["norm"] for stream, drift in line["drift"].items()}

    def window(self, line: Line) -> Iterator[Point]:
        """Yield the points of a window; NaN for a number that was not finite."""
        step, clients = line["step"], line["clients"]
        for name, client in clients.items():
            yield from _curve(f"loss/{name}", client["losses"], line)
            yield from _curve(f"grad_norm/{name}", client["grad_norms"], line)
            yield f"update_norm/{name}", step, number(client["update_norm"])
            yield f"param_norm/{name}", step, number(client["param_norm"])
        # A site may have sent fewer, or none that is finite.
        columns = zip_longest(*(c["losses"] for c in clients.values()))
        finite = ([loss for loss in each if math.isfinite(number(loss))] for each in columns)
        yield from _curve("loss/mean", [fmean(each) if each else None for each in finite], line)
        for client in list(clients.values())[:1]:  # all clients have the same learning rate
            yield from _curve("learning_rate", client["learning_rates"], line)
        for where, evaluation in line["evaluation"].items():
            parts = {f"{where}/{part}": values for part, values in evaluation["parts"].items()}
            for tag, metrics in {where: evaluation["overall"], **parts}.items():
                for metric in ordered(metrics):
                    yield f"heldout_{metric}/{tag}", step, number(metrics[metric])
        for phase, seconds in line["seconds_split"].items():
            yield f"seconds/{phase}", step, seconds
        yield "clients/averaged", step, len(clients)
        yield "clients/left_out", step, len(line["left_out"])
        for stream, drift in line["drift"].items():
            if drift["norm"]:
                yield f"drift/{stream}", step, number(drift["spread"]) / drift["norm"]
            if last := self._norms.get(stream):
                yield f"change/{stream}", step, number(drift["moved"]) / last
        self.replay(line)
        for tag, count in self._sent.items():
            yield tag, step, count


def _curve(tag: str, values: list[float | None], line: Line) -> Iterator[Point]:
    for step, value in enumerate(values, line["start"] + 1):
        yield tag, step, number(value)


def number(value: float | None) -> float:
    """Return a value of ``metrics.jsonl``: NaN for one that was not finite."""
    return math.nan if value is None else value
