"""A window as one line of ``metrics.jsonl``, and the lines read back."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flower_desloc.flower.observer import WindowRecord

Line = dict[str, Any]
"""One window, as JSON holds it: where a number was not finite there is ``None``."""


def to_line(record: WindowRecord) -> Line:
    """Return the window as a JSON object; an evaluation is in it only when there was one."""
    evaluations = {"central": record.central, "federated": record.federated}
    line: Line = {
        "round": record.round,
        "start": record.start,
        "step": record.step,
        "streams": list(record.streams),
        "bytes_up": dict(record.traffic.up),
        "bytes_down": dict(record.traffic.down),
        "framed_bytes_up": record.traffic.framed_up,
        "framed_bytes_down": record.traffic.framed_down,
        "train_loss": record.train_loss,
        "seconds": record.seconds.get("total", 0.0),
        "seconds_split": _split(record),
        "clients": {name: asdict(client) for name, client in record.clients.items()},
        "left_out": dict(record.left_out),
        "events": [asdict(event) for event in record.events],
        "drift": {stream: asdict(drift) for stream, drift in record.drift.items()},
    }
    if any(evaluations.values()):
        line["evaluation"] = {where: asdict(e) for where, e in evaluations.items() if e}
    return line


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of ``metrics.jsonl``; none where there is no file yet."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if text.endswith("\n"):  # the last line of a run that is going on may be half there
                try:
                    line = json.loads(text)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: is damaged ({error})") from error
                yield line


def _split(record: WindowRecord) -> dict[str, float]:
    known = {part: record.seconds.get(part, 0.0) for part in ("clients", "averaging", "evaluation")}
    total = record.seconds.get("total", 0.0)
    # The parts come from different clocks, and the clients' from whatever these tell.
    known["clients"] = min(known["clients"], total)
    return {"total": total, **known, "exchange": max(0.0, total - sum(known.values()))}
