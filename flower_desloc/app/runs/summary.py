"""``summary.json``: one object about a whole run, computed from its configuration and windows."""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from importlib.metadata import version
from statistics import fmean, median, pstdev
from typing import Any, Literal

from flower_desloc import __version__
from flower_desloc.app.config import Config
from flower_desloc.app.config.check import why_not_evaluated
from flower_desloc.app.config.metric import DIRECTIONS, chooser, ordered
from flower_desloc.app.runs.folder import Line, evaluations
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.client_info import OF_DATA, ClientInfo
from flower_desloc.core.schedule import PARAMS, SyncSchedule
from flower_desloc.core.traffic import Uploads, download_bytes
from flower_desloc.flower.observer import RunInfo, client_data

Status = Literal["completed", "failed", "unfinished"]

OTHER_METHODS = {"local_adam": "Local Adam", "ddp": "DDP"}
"""The methods that a run's bytes are compared with, and their names."""


def versions() -> dict[str, str]:
    """Return the versions that a run's weights depend on."""
    packages = {name: version(name) for name in ("torch", "flwr", "transformers")}
    return {"python": platform.python_version(), **packages, "flower-desloc": __version__}


def known_from(config: Config, steps: int = 0, sizes: Mapping[str, int] | None = None) -> RunInfo:
    """Return the ``RunInfo`` of a run that has not started, from its configuration."""
    schedule = RunStreams(config).schedule
    return RunInfo(
        schedule=schedule, num_steps=steps, num_windows=0, stream_bytes=sizes or {}, clients={}
    )


def schedule_of(summary: Mapping[str, Any]) -> SyncSchedule:
    """Return the schedule of a run from its summary."""
    stated = summary["config"]
    return SyncSchedule(**{each.name: stated[each.name] for each in fields(SyncSchedule)})


def build(
    lines: Iterable[Line],
    *,
    config: Config,
    run: RunInfo | None,
    status: Status,
    error: str | None = None,
    weights_sha256: str | None = None,
) -> dict[str, Any]:
    """Return the summary of the run with these lines of ``metrics.jsonl``.

    ``run`` is None for a run that failed before it had one. Byte counts are of all clients
    together. Those of the other methods are for the same steps, and for the clients that took part
    in each window. The analytic download is that of clients that took part in all of them.
    """
    lines, run = list(lines), run or known_from(config)
    schedule = run.schedule
    windows = [line for line in lines if line["round"] > 0]
    names = set(run.clients).union(*(line["clients"] for line in windows))
    streams = [*dict.fromkeys([*schedule.periods, PARAMS])]
    sizes = {stream: run.stream_bytes.get(stream, 0) for stream in streams}
    compressed = sizes | {
        stream: size for stream, size in run.compressed_bytes.items() if stream in sizes
    }
    counts = _bytes(lines, config, schedule, run.num_steps, sizes, compressed, len(names), status)
    measured = counts["measured"]
    sent = measured["up"]["total"]
    payload = sent + measured["down"]["total"]
    framed = measured["framed_up"] + measured["framed_down"]
    others = {name: counts[name]["up"]["total"] for name in OTHER_METHODS}
    seen = {where for line in lines for where in line["evaluation"]}
    return {
        "status": status,
        "error": error,
        "config": {
            "name": config.run.name,
            "seed": config.run.seed,
            "steps": config.run.steps,
            "task": config.task,
            "strategy": config.strategy,
            "optimizer": config.optimizer.name,
            "lr": config.optimizer.lr,
            "sync_mode": config.sync_mode,
            **schedule.to_dict(),
            "sync_delay": config.sync_delay,
            "sync_bound": config.sync_bound,
            "compression": dict(config.compression),
        },
        "steps": windows[-1]["step"] if windows else 0,
        "windows": len(windows),
        "clients": len(names),
        "syncs": {
            stream: sum(stream in line["streams"] for line in windows)
            for stream in schedule.periods
        },
        "evaluation": {where: _evaluation(lines, where) for where in sorted(seen)},
        "fairness": fairness(lines),
        "client_data": client_data(run),
        "devices": {name: _device(info) for name, info in run.clients.items()},
        "train_loss": _course((line["step"], line["train_loss"]) for line in windows),
        "stream_bytes": sizes,
        "compressed_bytes": compressed,
        "bytes": counts,
        "ratio": {name: other / sent if sent and other else None for name, other in others.items()},
        "framing_overhead": framed / payload - 1 if payload else None,
        "seconds": _add_up(line["seconds_split"] for line in lines),
        "weights_sha256": weights_sha256,
    }


def fairness(lines: Iterable[Line]) -> dict[str, Any] | None:
    """Return how the clients compare in the last federated evaluation, each on its own data.

    The best client has the highest accuracy or, for text, the lowest loss; ``std`` is the
    population standard deviation over the clients. A client that states nonsense can move
    ``mean`` and ``std`` far, but not ``median``. Clients whose loss or accuracy is not finite
    are left out, and so is a metric that not all clients have. None without an evaluation on
    clients.
    """
    seen = evaluations(lines, "federated")
    if not seen:
        return None
    step, last = seen[-1]
    clients = {
        client: known
        for client, metrics in last["parts"].items()
        if (known := {name: metrics[name] for name in ordered(metrics)})
        and all(known[name] is not None for name in DIRECTIONS if name in known)
    }
    if not clients:
        return None

    def rank(client: str) -> tuple[float, float]:
        # Many clients may have the same accuracy; then the loss decides.
        return -clients[client].get("accuracy", 0.0), clients[client].get("loss", 0.0)

    ranked = sorted(clients, key=rank)
    columns: dict[str, list[float]] = {
        name: [metrics[name] for metrics in clients.values()]
        for name in clients[ranked[0]]
        if all(metrics.get(name) is not None for metrics in clients.values())
    }
    return {
        "step": step,
        "clients": len(clients),
        "worst": {"client": ranked[-1], **clients[ranked[-1]]},
        "best": {"client": ranked[0], **clients[ranked[0]]},
        "mean": {name: fmean(values) for name, values in columns.items()},
        "median": {name: median(values) for name, values in columns.items()},
        "std": {name: pstdev(values) for name, values in columns.items()},
    }


def _device(info: ClientInfo) -> dict[str, str]:
    left_out = (*OF_DATA, "memory-free")  # which changes all the time
    return {key: str(value) for key, value in info.stated().items() if key not in left_out}


def _bytes(
    lines: Sequence[Line],
    config: Config,
    schedule: SyncSchedule,
    num_steps: int,
    sizes: Mapping[str, int],
    compressed: Mapping[str, int],
    num_clients: int,
    status: Status,
) -> dict[str, Any]:
    windows = [line for line in lines if line["round"] > 0]
    none = dict.fromkeys(sizes, 0)
    uploads = Uploads(schedule, sizes, compressed, num_steps)
    for line in windows:
        uploads.add(line["start"], line["step"], len(line["clients"]))
    if config.is_desloc:
        step = windows[-1]["step"] if windows else 0
        is_evaluated = why_not_evaluated(config, "federated") is None
        federated = status == "completed" and is_evaluated
        coded = sizes if config.privacy.secure_aggregation else compressed  # whose codes go up only
        down = download_bytes(schedule, sizes, coded, step, federated=federated)
    else:  # clients keep no state: params are sent for every window and every evaluation
        times = len(windows) + len(evaluations(lines, "federated"))
        down = {**none, PARAMS: times * sizes[PARAMS]}
    return {
        "measured": {
            "up": _with_total(_add_up([none, *(line["bytes_up"] for line in lines)])),
            "down": _with_total(_add_up([none, *(line["bytes_down"] for line in lines)])),
            "framed_up": sum(line["framed_bytes_up"] for line in lines),
            "framed_down": sum(line["framed_bytes_down"] for line in lines),
        },
        "analytic": {
            "up": _with_total({**none, **uploads.desloc}),
            "down": _with_total({stream: num_clients * size for stream, size in down.items()}),
        },
        "local_adam": {"up": _with_total(uploads.local_adam)},
        "ddp": {"up": {"total": uploads.ddp}},
    }


def _evaluation(lines: Iterable[Line], where: str) -> dict[str, Any]:
    seen = [(step, each["overall"]) for step, each in evaluations(lines, where)]
    return {
        metric: _course(
            ((step, overall[metric]) for step, overall in seen if metric in overall),
            chooser(DIRECTIONS.get(metric)),
        )
        for metric in ordered(name for _, overall in seen for name in overall)
    }


def _course(
    values: Iterable[tuple[int, float | None]],
    better: Callable[[float, float], float] | None = min,
) -> dict[str, Any]:
    """Return the first, last and best of the values by step; without ``better`` no best."""
    seen = list(values)
    numbers = [value for _, value in seen if value is not None]
    best = reduce(better, numbers) if numbers and better else None
    best_step = None if best is None else next(step for step, value in seen if value == best)
    return {
        "first": seen[0][1] if seen else None,
        "final": seen[-1][1] if seen else None,
        "final_step": seen[-1][0] if seen else None,
        "best": best,
        "best_step": best_step,
    }


def _add_up(maps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for each in maps:
        total.update(each)
    return dict(total)


def _with_total(by_stream: Mapping[str, int]) -> dict[str, int]:
    return {**by_stream, "total": sum(by_stream.values())}
