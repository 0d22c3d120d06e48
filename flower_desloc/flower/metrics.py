"""From what clients report to the record of a window: means, outliers, parts."""

import math
from collections.abc import Collection, Mapping
from logging import WARNING
from statistics import median

from flwr.app import MetricRecord

from flower_desloc.core.types import FromTotals
from flower_desloc.flower.arrays import plain_numbers
from flower_desloc.flower.failures import printable
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import TOTALS
from flower_desloc.flower.observer import ClientRecord, EvaluationRecord
from flower_desloc.flower.replies import ClientEvaluation, number

_FAR = 1e6
"""How many medians are far beyond what most clients report."""


def usual(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values by client that are finite and not far beyond those of most clients.

    With at least three values above zero in magnitude, that is at most ``_FAR`` times their median.
    """
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    sizes = [abs(value) for value in finite.values() if value]
    most = _FAR * median(sizes) if len(sizes) >= 3 else math.inf
    return {name: value for name, value in finite.items() if abs(value) <= most}


def trained(clients: Mapping[str, ClientRecord]) -> MetricRecord:
    """Return the metrics of a window: the examples of its clients, and their mean loss.

    Losses that are not finite, or far beyond those of most clients, are not in the mean.
    """
    losses = usual({name: client.train_loss for name, client in clients.items()})
    return MetricRecord(
        {
            "num-examples": sum(client.num_examples for client in clients.values()),
            "train-loss": sum(losses.values()) / len(losses) if losses else math.nan,
        }
    )


def unusual(evaluations: Mapping[str, ClientEvaluation]) -> dict[str, str]:
    """Return the clients whose evaluation would outweigh all others, each with the reason.

    That is one with a total, or a number of examples, far beyond those of most clients.
    """
    figures = {
        client: {"num-examples": each.examples}
        | {f"{TOTALS}{name}": total for name, total in each.totals.items()}
        for client, each in evaluations.items()
    }
    names = {name for each in figures.values() for name in each} - {"num-examples"}
    found: dict[str, str] = {}
    for name in ("num-examples", *sorted(names)):
        values = {client: each[name] for client, each in figures.items() if name in each}
        for client in sorted(values.keys() - usual(values).keys()):
            what = f"its {printable(name)} is {values[client]:g}"
            found.setdefault(client, f"{what}, more than {_FAR:g} times the median of all clients")
    return found


def pooled(
    evaluations: Mapping[str, ClientEvaluation], metrics: FromTotals | None
) -> MetricRecord | None:
    """Return the metrics of all clients together, and each one's as ``client/metric``.

    Together they are the ``metrics`` of the added totals; without that function each is the mean
    of the clients' own, weighted by their examples. Without names of a metric of a part, such as
    another client. None if there are none.
    """
    totals: dict[str, float] = {}
    for each in evaluations.values():
        for name, total in each.totals.items():
            totals[name] = totals.get(name, 0.0) + total
    parts = {client: each.metrics for client, each in evaluations.items()}
    known = {name for part in parts.values() for name in part}
    parts = {
        client: {k: v for k, v in part.items() if not part_of(k, known)[0]}
        for client, part in parts.items()
    }
    if not any(parts.values()):
        return None
    weights = {client: each.examples for client, each in evaluations.items()}
    overall = _weighted(parts, weights) if metrics is None else _computed(metrics, totals)
    named = {f"{client}/{k}": v for client, part in parts.items() for k, v in part.items()}
    return MetricRecord({**overall, **named})


def _computed(metrics: FromTotals, totals: Mapping[str, float]) -> dict[str, float]:
    try:
        return plain_numbers(metrics(totals))
    except Exception as error:  # each client's own totals passed
        log(WARNING, "no metrics can be computed from the clients' totals together: %r", error)
        return {}


def _weighted(
    parts: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return each metric's weighted mean over the clients that have it."""
    means: dict[str, float] = {}
    for name in sorted({name for part in parts.values() for name in part}):
        having = {client: part[name] for client, part in parts.items() if name in part}
        total = sum(weights[client] for client in having)
        mean = sum(weights[c] * value for c, value in having.items())
        means[name] = mean / total if total > 0 else math.nan
    return means


def evaluation_record(metrics: MetricRecord | None) -> EvaluationRecord | None:
    """Split metrics into the overall ones and those of a part, named ``part/metric``.

    A part has a metric of the whole: where there is ``top/1`` but no ``1``, the whole name is an
    overall metric, and ``wiki/top/1`` is that metric of the part ``wiki``.
    """
    if metrics is None:
        return None
    overall: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for full, value in metrics.items():
        part, name = part_of(full, metrics)
        (parts.setdefault(part, {}) if part else overall)[name] = number(value)
    return EvaluationRecord(overall=overall, parts=parts)


def part_of(full: str, names: Collection[str]) -> tuple[str, str]:
    """Return the part and the metric of a name among ``names``; an overall metric has no part."""
    pieces = full.split("/")
    for i in reversed(range(1, len(pieces))):  # the shortest metric: a part's name has no rule
        if (metric := "/".join(pieces[i:])) in names:
            return "/".join(pieces[:i]), metric
    return "", full
