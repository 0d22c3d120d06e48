"""From the metrics that clients report to the record of a window."""

import math
from collections.abc import Callable, Collection, Mapping
from logging import WARNING
from statistics import median

from flwr.app import MetricRecord, MetricRecordValues

from flower_desloc.core.averaging import Weight
from flower_desloc.core.noise import noise_scale
from flower_desloc.flower.exchange import printable
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import MOST_EXAMPLES, TOTALS, Metrics, WindowReply
from flower_desloc.flower.observer import ClientRecord, EvaluationRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import plain_numbers

NOISE_SCALE = "noise_scale"
"""Metric of an evaluation on clients: the gradient noise scale in batches of one client."""

_LARGEST = 1e30
"""Magnitude up to which a metric or a total is used, so that sums of some are finite."""
_FAR = 1e6
"""How many medians are far beyond what most clients report."""
_SECONDS = (1e-6, 1e8)
"""Range of the time of a window."""

FromTotals = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Returns metrics from totals added over clients."""


def number(value: MetricRecordValues) -> float:
    """Return a metric that is one number; NaN for a list."""
    return math.nan if isinstance(value, list) else float(value)


def usual(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values by client that are finite and not far beyond those of most clients.

    With at least three values above zero in magnitude, that is at most ``_FAR`` times their median.
    """
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    sizes = [abs(value) for value in finite.values() if value]
    most = _FAR * median(sizes) if len(sizes) >= 3 else math.inf
    return {name: value for name, value in finite.items() if abs(value) <= most}


def client_record(metrics: Metrics, steps: int) -> ClientRecord:
    """Return the record of a reply with these metrics, of a window of so many ``steps``.

    Only the first two metrics are required. A number that cannot be used is NaN, or where 0 says
    that the client did not state it, 0.
    """

    def one(name: str) -> float:
        return _in_range(number(metrics.get(name, 0.0)))

    def several(name: str) -> list[float]:
        value = metrics.get(name, [])
        return [_in_range(each) for each in (value if isinstance(value, list) else [value])]

    seconds, taken = one("seconds"), one("steps")
    least, most = _SECONDS
    return ClientRecord(
        num_examples=int(number(metrics["num-examples"])),
        train_loss=one("train-loss"),
        losses=several("losses"),
        grad_norms=several("grad-norms"),
        learning_rates=several("learning-rates"),
        update_norm=one("update-norm"),
        param_norm=one("param-norm"),
        seconds=seconds if least <= seconds <= most else 0.0,
        steps=int(taken) if 1 <= taken <= steps else 0,
    )


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


def weight_of(reply: WindowReply, due: Collection[str], policy: Policy, most: float) -> Weight:
    """Return a client's weight in the averages; raises ``ValueError`` if it states none.

    ``most`` is the greatest number of examples that is counted.
    """
    examples = min(number(reply.metrics["num-examples"]), most)
    whole = examples if policy.weighting == "examples" else 1.0
    if policy.min_steps == 1:
        return whole
    return {name: whole * weight for name, weight in reply.weights(due).items()}


def check_evaluation(reply: WindowReply, metrics: FromTotals | None) -> None:
    """Raise ``ValueError`` unless an evaluation can be added to those of other clients.

    The empty evaluation of a client without held-out data can be added.
    """
    figures = _figures(reply)
    examples = figures.pop("num-examples", 0.0)
    if not 0 <= examples <= MOST_EXAMPLES:
        raise ValueError(f"its num-examples is {examples}; it must be a number at least 0")
    totals = _totals(figures)
    least = 0.0 if metrics else -_LARGEST
    for name, total in totals.items():
        if not least <= total <= _LARGEST:
            wanted = "at least 0" if metrics else f"at least {least:g}"
            raise ValueError(
                f"its total of {name} is {total}; it must be {wanted} and at most {_LARGEST:g}"
            )
    if metrics is None or not figures:
        return
    try:
        metrics(totals)
    except Exception as error:  # the app's own function, on what a client sent
        raise ValueError(
            f"no metrics can be computed from its totals {totals}: {type(error).__name__}: {error}"
        ) from error


def unusual(replies: Mapping[str, WindowReply]) -> dict[str, str]:
    """Return the clients whose evaluation would outweigh all others, each with the reason.

    That is one with a total, or a number of examples, far beyond those of most clients.
    """
    figures = {client: _figures(reply) for client, reply in replies.items()}
    names = {n for each in figures.values() for n in each if n.startswith(TOTALS)}
    found: dict[str, str] = {}
    for name in ("num-examples", *sorted(names)):
        values = {client: each[name] for client, each in figures.items() if name in each}
        for client in sorted(values.keys() - usual(values).keys()):
            what = f"its {printable(name)} is {values[client]:g}"
            found.setdefault(client, f"{what}, more than {_FAR:g} times the median of all clients")
    return found


def pooled(replies: Mapping[str, WindowReply], metrics: FromTotals | None) -> MetricRecord | None:
    """Return the metrics of all clients together, and each one's as ``client/metric``.

    Each one's are the ``metrics`` of its totals, and together of the added totals; without that
    function they are what the clients state, weighted by their examples. Without those that are not
    finite, and without names of a metric of a part, such as another client. None if there are none.
    """
    totals: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for client, reply in replies.items():
        figures = _figures(reply)
        weights[client] = figures.pop("num-examples", 0.0)
        for name, total in (own_totals := _totals(figures)).items():
            totals[name] = totals.get(name, 0.0) + total
        own = {printable(k): v for k, v in figures.items() if not k.startswith(TOTALS)}
        if metrics is not None:
            own = _computed(metrics, own_totals) if figures else {}
        parts[client] = {k: v for k, v in own.items() if math.isfinite(_in_range(v))}
    known = {name for part in parts.values() for name in part}
    parts = {
        client: {k: v for k, v in part.items() if not part_of(k, known)[0]}
        for client, part in parts.items()
    }
    if not any(parts.values()):
        return None
    overall = _weighted(parts, weights) if metrics is None else _computed(metrics, totals)
    if (noise := noise_scale(totals)) is not None:
        overall[NOISE_SCALE] = noise
    named = {f"{client}/{k}": v for client, part in parts.items() for k, v in part.items()}
    return MetricRecord({**overall, **named})


def _computed(metrics: FromTotals, totals: Mapping[str, float]) -> dict[str, float]:
    try:
        return plain_numbers(metrics(totals))
    except Exception as error:  # each client's own totals passed
        log(WARNING, "no metrics can be computed from the clients' totals together: %r", error)
        return {}


def _figures(reply: WindowReply) -> dict[str, float]:
    """Return the metrics of an evaluation that are one number, without its window."""
    return {
        name: number(value)
        for name, value in reply.metrics.items()
        if name not in ("start-step", "stop-step")
        and (not isinstance(value, list) or name == "num-examples" or name.startswith(TOTALS))
    }


def _totals(figures: Mapping[str, float]) -> dict[str, float]:
    return {k.removeprefix(TOTALS): v for k, v in figures.items() if k.startswith(TOTALS)}


def _in_range(value: float) -> float:
    return float(value) if abs(value) <= _LARGEST else math.nan


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
