"""A line of ``metrics.jsonl`` as the window it was, for views that go on with a run."""

import math
from collections.abc import Mapping
from typing import Any

from flower_desloc.core.averaging import Drift
from flower_desloc.runs.metrics import Line
from flower_desloc.flower.observer import ClientRecord, EvaluationRecord, Event, Traffic, WindowRecord


def from_line(line: Line) -> WindowRecord:
    """Return the window that :func:`~flower_desloc.runs.metrics.to_line` made ``line`` of."""
    evaluation = line.get("evaluation", {})
    return WindowRecord(
        round=line["round"],
        start=line["start"],
        step=line["step"],
        streams=line["streams"],
        train_loss=_number(line["train_loss"]) if line["round"] > 0 else None,
        clients={n: ClientRecord(**_numbers(c)) for n, c in line["clients"].items()},
        left_out=line["left_out"],
        traffic=Traffic(
            up=line["bytes_up"],
            down=line["bytes_down"],
            framed_up=line["framed_bytes_up"],
            framed_down=line["framed_bytes_down"],
        ),
        drift={name: Drift(**_numbers(drift)) for name, drift in line["drift"].items()},
        seconds=line["seconds_split"],
        central=_evaluation(evaluation.get("central")),
        federated=_evaluation(evaluation.get("federated")),
        events=[Event(**event) for event in line.get("events", [])],
    )


def _evaluation(record: Mapping[str, Any] | None) -> EvaluationRecord | None:
    if record is None:
        return None
    parts = {name: _numbers(part) for name, part in record["parts"].items()}
    return EvaluationRecord(overall=_numbers(record["overall"]), parts=parts)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [_number(v) for v in value] if isinstance(value, list) else _number(value)
        for name, value in values.items()
    }


def _number(value: float | None) -> float:
    # JSON knows neither NaN nor infinity; they were written as null.
    return math.nan if value is None else value
