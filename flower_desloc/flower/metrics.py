"""From the metrics that clients report to the record of a window."""

import math
from collections.abc import Callable, Collection, Mapping

from flwr.app import MetricRecord, MetricRecordValues

from flower_desloc.core.averaging import Weight
from flower_desloc.core.noise import noise_scale
from flower_desloc.flower.messages import TOTALS, Metrics, WindowReply
from flower_desloc.flower.observer import ClientRecord, EvaluationRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import plain_numbers

NOISE_SCALE = "noise_scale"
"""Metric of an evaluation on clients: the gradient noise scale in batches of one client."""

FromTotals = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Returns metrics from totals added over clients."""


def number(value: MetricRecordValues) -> float:
    """Return a metric that is one number; NaN for a list."""
    return math.nan if isinstance(value, list) else float(value)


def client_record(metrics: Metrics) -> ClientRecord:
    """Return the record of a reply with these metrics; only the first two are required."""

    def one(name: str) -> float:
        return number(metrics.get(name, 0.0))

    def several(name: str) -> list[float]:
        value = metrics.get(name, [])
        return [float(each) for each in (value if isinstance(value, list) else [value])]

    seconds = one("seconds")
    return ClientRecord(
        num_examples=int(number(metrics["num-examples"])),
        train_loss=number(metrics["train-loss"]),
        losses=several("losses"),
        grad_norms=several("grad-norms"),
        learning_rates=several("learning-rates"),
        update_norm=one("update-norm"),
        param_norm=one("param-norm"),
        seconds=seconds if 0 <= seconds < math.inf else 0.0,
        steps=int(steps) if 0 <= (steps := one("steps")) < 2**63 else 0,
    )


def weight_of(reply: WindowReply, due: Collection[str], policy: Policy) -> Weight:
    """Return a client's weight in the averages; raises ``ValueError`` if it states none."""
    whole = number(reply.metrics["num-examples"]) if policy.weighting == "examples" else 1.0
    if policy.min_steps == 1:
        return whole
    return {name: whole * weight for name, weight in reply.weights(due).items()}


def check_evaluation(reply: WindowReply, metrics: FromTotals | None) -> None:
    """Raise ``ValueError`` unless an evaluation can be added to those of other clients.

    The empty evaluation of a client without held-out data can be added.
    """
    figures = {name: number(value) for name, value in reply.metrics.items()}
    examples = figures.get("num-examples", 0.0)
    if not 0 <= examples < 2**63:
        raise ValueError(f"its num-examples is {examples}; it must be a number at least 0")
    totals = {k.removeprefix(TOTALS): v for k, v in figures.items() if k.startswith(TOTALS)}
    least = 0.0 if metrics else -math.inf
    for name, total in totals.items():
        if not (total >= least and math.isfinite(total)):
            wanted = "a number at least 0" if metrics else "finite"
            raise ValueError(f"its total of {name} is {total}; it must be {wanted}")
    if metrics is None or not figures.keys() - {"num-examples", "start-step", "stop-step"}:
        return
    try:
        metrics(totals)
    except Exception as error:  # the app's own function, on what a client sent
        raise ValueError(
            f"no metrics can be computed from its totals {totals}: {type(error).__name__}: {error}"
        ) from error


def pooled(replies: Mapping[str, WindowReply], metrics: FromTotals | None) -> MetricRecord | None:
    """Return the metrics of all clients together, and each one's as ``client/metric``.

    Together they are the ``metrics`` of the added totals, or without that function the clients'
    metrics weighted by their examples. None if there are no metrics.
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
    overall = plain_numbers(metrics(totals)) if metrics else _weighted(parts, weights)
    if (noise := noise_scale(totals)) is not None:
        overall[NOISE_SCALE] = noise
    named = {f"{client}/{k}": v for client, part in parts.items() for k, v in part.items()}
    return MetricRecord({**overall, **named})


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
