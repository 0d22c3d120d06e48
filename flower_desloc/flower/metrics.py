"""From what clients report to what a run tells of itself."""

import math
from collections.abc import Callable, Mapping

from flwr.app import MetricRecord, MetricRecordValues

from flower_desloc.flower.observer import ClientRecord, EvaluationRecord
from flower_desloc.flower.records import TOTALS, WindowReply

FromTotals = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Metrics from totals added over clients."""


def number(value: MetricRecordValues) -> float:
    """Return a metric that is one number; NaN if it is a list."""
    return math.nan if isinstance(value, list) else float(value)


def numbers(value: MetricRecordValues) -> list[float]:
    """Return a metric as a list, of one number where it is one."""
    return [float(each) for each in (value if isinstance(value, list) else [value])]


def _duration(value: MetricRecordValues) -> float:
    """Return seconds as a client tells them; 0, as if it did not, where they cannot be."""
    seconds = number(value)
    return seconds if 0 <= seconds < math.inf else 0.0


def client_record(reply: WindowReply) -> ClientRecord:
    """Read what a client tells of its window; an app of one's own may tell only the first two."""
    told = reply.metrics
    return ClientRecord(
        num_examples=int(number(told["num-examples"])),
        train_loss=number(told["train-loss"]),
        losses=numbers(told.get("losses", [])),
        grad_norms=numbers(told.get("grad-norms", [])),
        learning_rates=numbers(told.get("learning-rates", [])),
        update_norm=number(told.get("update-norm", 0.0)),
        param_norm=number(told.get("param-norm", 0.0)),
        seconds=_duration(told.get("seconds", 0.0)),
    )


def weighted(
    parts: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return each metric's mean over the clients that have it, weighted."""
    means: dict[str, float] = {}
    for name in sorted({name for part in parts.values() for name in part}):
        having = {client: part[name] for client, part in parts.items() if name in part}
        total = sum(weights[client] for client in having)
        if total > 0:
            means[name] = sum(weights[c] * value for c, value in having.items()) / total
    return means


def check_evaluation(reply: WindowReply, metrics: FromTotals | None) -> None:
    """Raise ``ValueError`` unless an evaluation can be added to those of other clients.

    One that says nothing, of a client without held-out data, can.
    """
    told = {name: number(value) for name, value in reply.metrics.items()}
    examples = told.get("num-examples", 0.0)
    if not 0 <= examples < 2**63:
        raise ValueError(f"its num-examples is {examples}; it must be a number at least 0")
    totals = {k.removeprefix(TOTALS): v for k, v in told.items() if k.startswith(TOTALS)}
    for name, total in totals.items():
        if not 0 <= total < math.inf:
            raise ValueError(f"its total of {name} is {total}; it must be a number at least 0")
    if metrics is None or not told.keys() - {"num-examples", "start-step", "stop-step"}:
        return
    try:
        metrics(totals)
    except Exception as error:  # whatever the app's own function raises for what a client sent
        raise ValueError(
            f"there are no metrics of its totals {totals}: {type(error).__name__}: {error}"
        ) from error


def pooled(replies: Mapping[str, WindowReply], metrics: FromTotals | None) -> MetricRecord | None:
    """Return what clients' evaluations say together, and each one's as ``client/metric``.

    Together they are the ``metrics`` of the added totals, or else the clients' metrics weighted
    by their examples; None where there is nothing.
    """
    totals: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for client, reply in replies.items():
        figures = {k: float(v) for k, v in reply.metrics.items() if not isinstance(v, list)}
        weights[client] = figures.pop("num-examples", 0.0)
        for name in [name for name in figures if name.startswith(TOTALS)]:
            key = name.removeprefix(TOTALS)
            totals[key] = totals.get(key, 0.0) + figures.pop(name)
        parts[client] = figures
    if not any(parts.values()):
        return None
    overall = metrics(totals) if metrics else weighted(parts, weights)
    named = {f"{client}/{k}": v for client, part in parts.items() for k, v in part.items()}
    return MetricRecord({**overall, **named})


def evaluation_record(metrics: MetricRecord | None) -> EvaluationRecord | None:
    """Take metrics apart into those of everything and those of a part, named ``part/metric``."""
    if metrics is None:
        return None
    overall: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for full, value in metrics.items():
        part, slash, name = full.rpartition("/")
        figure = number(value)
        if slash:
            parts.setdefault(part, {})[name] = figure
        else:
            overall[name] = figure
    return EvaluationRecord(overall=overall, parts=parts)
