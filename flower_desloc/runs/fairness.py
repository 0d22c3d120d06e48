"""How unlike the clients fare: the best, the worst, and the spread between them."""

from collections.abc import Iterable, Mapping
from statistics import fmean, pstdev
from typing import Any

from flower_desloc.runs.metrics import Line

BETTER = {
    "loss": min,
    "accuracy": max,
    "perplexity": min,
    "bits_per_byte": min,
    "nats_per_byte": min,
}
"""Of an evaluation, and which of two values is the better."""


def fairness(lines: Iterable[Line]) -> dict[str, Any] | None:
    """Return how the clients fared in the last federated evaluation, each on its own data.

    The best client is that of the highest accuracy, or where there is none, of the lowest loss;
    ``std`` is the standard deviation over the clients (of all of them, not of a sample). Clients
    whose numbers are not finite are left out. None where nothing was evaluated on clients.
    """
    seen = [line for line in lines if "federated" in line.get("evaluation", {})]
    if not seen:
        return None
    clients = {
        client: known
        for client, metrics in seen[-1]["evaluation"]["federated"]["parts"].items()
        if (known := {name: metrics[name] for name in BETTER if name in metrics})
        and None not in known.values()
    }
    if not clients:
        return None
    names = [name for name in BETTER if all(name in metrics for metrics in clients.values())]
    ranked = sorted(clients, key=lambda client: _rank(clients[client]))
    courses = {name: [metrics[name] for metrics in clients.values()] for name in names}
    return {
        "step": seen[-1]["step"],
        "clients": len(clients),
        "worst": {"client": ranked[-1], **clients[ranked[-1]]},
        "best": {"client": ranked[0], **clients[ranked[0]]},
        "mean": {name: fmean(values) for name, values in courses.items()},
        "std": {name: pstdev(values) for name, values in courses.items()},
    }


def _rank(metrics: Mapping[str, float]) -> tuple[float, float]:
    # By accuracy many clients are equal; the loss tells them apart.
    return -metrics.get("accuracy", 0.0), metrics.get("loss", 0.0)
