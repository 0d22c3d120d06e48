"""``summary.json``: a run in one object, made from its configuration and its windows."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, Literal

from flower_desloc.config import Config
from flower_desloc.runs.fairness import BETTER, fairness
from flower_desloc.runs.methods import Uploads
from flower_desloc.runs.metrics import Line
from flower_desloc.flower.observer import Plan, client_data, devices
from flower_desloc.core.schedule import GRADIENTS, PARAMS, SyncSchedule

Status = Literal["completed", "failed"]

_NO_PLAN = Plan(num_steps=0, num_windows=0, stream_bytes={}, clients={})


def build(
    lines: Iterable[Line],
    *,
    config: Config,
    schedule: SyncSchedule,
    plan: Plan | None,
    status: Status,
    error: str | None = None,
    weights_sha256: str | None = None,
) -> dict[str, Any]:
    """Return the summary of the run whose ``metrics.jsonl`` holds ``lines``.

    ``plan`` is None for a run that failed before it had one. Byte counts are of all clients
    together. Those of the other methods are for the same steps and the clients that took part in
    each window: with all of them from start to end, :mod:`flower_desloc.core.traffic` times their
    number. The analytic download is that of clients which are there from start to end.
    """
    lines = list(lines)
    plan = plan or _NO_PLAN
    windows = [line for line in lines if line["round"] > 0]
    step = windows[-1]["step"] if windows else 0
    names = set(plan.clients).union(*(line["clients"] for line in windows))
    streams = list(dict.fromkeys([*schedule.periods, PARAMS]))
    none = dict.fromkeys(streams, 0)
    measured = {
        "up": _with_total(_add_up([none, *(line["bytes_up"] for line in lines)])),
        "down": _with_total(_add_up([none, *(line["bytes_down"] for line in lines)])),
        "framed_up": sum(line["framed_bytes_up"] for line in lines),
        "framed_down": sum(line["framed_bytes_down"] for line in lines),
    }
    sizes = {stream: plan.stream_bytes.get(stream, 0) for stream in streams}
    wire = sizes | {stream: size for stream, size in plan.wire_bytes.items() if stream in sizes}
    uploads = Uploads(schedule, sizes, wire, plan.num_steps)
    uploads.add_lines(lines)
    completed = status == "completed"
    if config.strategy == "desloc":
        federated = completed and config.evaluation.federated
        down = download_bytes(schedule, sizes, wire, step, federated=federated)
    else:  # clients keep nothing: params are sent for every round and every evaluation
        evaluations = sum("federated" in line.get("evaluation", {}) for line in lines)
        down = {**none, PARAMS: (len(windows) + evaluations) * sizes[PARAMS]}
    counts = {
        "measured": measured,
        "analytic": {
            "up": _with_total({**none, **uploads.desloc}),
            "down": _with_total({stream: len(names) * size for stream, size in down.items()}),
        },
        "local_adam": {"up": _with_total(uploads.local_adam)},
        "ddp": {"up": {"total": uploads.ddp}},
    }
    sent = measured["up"]["total"]
    payload = sent + measured["down"]["total"]
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
            "sync_mode": config.sync_mode,
            "periods": dict(schedule.periods),
            "coin_seed": schedule.coin_seed,
            "once_at": sorted(schedule.once_at),
            "wire": dict(config.wire),
        },
        "steps": step,
        "windows": len(windows),
        "clients": len(names),
        "syncs": {
            stream: sum(stream in line["streams"] for line in windows)
            for stream in schedule.periods
        },
        "evaluation": {
            where: _evaluation(lines, where)
            for where in ("central", "federated")
            if any(where in line.get("evaluation", {}) for line in lines)
        },
        "fairness": fairness(lines),
        "client_data": client_data(plan),
        "devices": devices(plan),
        "train_loss": _course((line["step"], line["train_loss"]) for line in windows),
        "stream_bytes": sizes,
        "wire_bytes": wire,
        "bytes": counts,
        "ratio": {
            "local_adam": _ratio(counts["local_adam"]["up"]["total"], sent),
            "ddp": _ratio(uploads.ddp, sent),
        },
        "framing_overhead": (
            (measured["framed_up"] + measured["framed_down"]) / payload - 1 if payload else None
        ),
        "seconds": _add_up(line["seconds_split"] for line in lines),
        "weights_sha256": weights_sha256,
    }


def download_bytes(
    schedule: SyncSchedule,
    sizes: Mapping[str, int],
    wire: Mapping[str, int],
    num_steps: int,
    *,
    federated: bool,
) -> dict[str, int]:
    """Return the bytes of each stream that one client is sent in ``num_steps`` steps.

    The client takes part in every window, so that it is sent

    - x_0 at the start, whole; the states are zero there and are not sent;
    - every average, with the next message after it; so none of those at the end of training;
    - with ``federated`` evaluation, ``params`` at the end: the final model is evaluated there.
    """
    down = dict.fromkeys(sizes, 0)
    down[PARAMS] = sizes[PARAMS]
    for window in schedule.windows(num_steps):
        if window.stop < num_steps:
            for stream in window.due:
                # What became of the mean gradient is sent as new parameters.
                sent = PARAMS if stream == GRADIENTS else stream
                down[sent] += wire[sent]
    if federated and num_steps > 0:
        down[PARAMS] += wire[PARAMS]
    return down


def _evaluation(lines: Iterable[Line], where: str) -> dict[str, Any]:
    seen = [
        (line["step"], line["evaluation"][where]["overall"])
        for line in lines
        if where in line.get("evaluation", {})
    ]
    return {
        metric: _course(
            ((step, overall[metric]) for step, overall in seen if metric in overall), better
        )
        for metric, better in BETTER.items()
        if any(metric in overall for _, overall in seen)
    }


def _course(
    values: Iterable[tuple[int, float | None]], better: Callable[[float, float], float] = min
) -> dict[str, Any]:
    seen = list(values)
    numbers = [value for _, value in seen if value is not None]
    best = reduce(better, numbers) if numbers else None
    best_step = None if best is None else next(step for step, value in seen if value == best)
    return {
        "first": seen[0][1] if seen else None,
        "final": seen[-1][1] if seen else None,
        "final_step": seen[-1][0] if seen else None,
        "best": best,
        "best_step": best_step,
    }


def _add_up(maps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for each in maps:
        for key, value in each.items():
            total[key] = total.get(key, 0) + value
    return total


def _with_total(by_stream: Mapping[str, int]) -> dict[str, int]:
    return {**by_stream, "total": sum(by_stream.values())}


def _ratio(other: int, ours: int) -> float | None:
    return other / ours if ours and other else None
