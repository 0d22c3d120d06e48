"""The record of a run that was never trained, for tests of what is written and drawn of a run."""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from configurations import with_values

from flower_desloc.app.config import Config
from flower_desloc.app.runs import RunFolder, RunRecorder
from flower_desloc.core.averaging import Drift
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.schedule import PARAMS, SyncSchedule, Window
from flower_desloc.flower.observer import (
    ClientRecord,
    EvaluationRecord,
    RunInfo,
    Traffic,
    WindowRecord,
)

PERIODS = {"params": 16, "exp_avg": 48, "exp_avg_sq": 96}
SIZE = 275_200
"""Bytes of a stream."""
DOMAINS = ("library", "docstrings", "reference", "descriptions")


def a_config(periods: Mapping[str, Any] = PERIODS, steps: int = 192) -> Config:
    config = Config(sync=dict(periods))
    return with_values(config, {"run.steps": steps})


def a_run_info(periods: Mapping[str, Any] = PERIODS, steps: int = 192, clients: int = 4) -> RunInfo:
    schedule = SyncSchedule(periods)
    return RunInfo(
        schedule=schedule,
        num_steps=steps,
        num_windows=len(list(schedule.windows(steps))),
        stream_bytes=dict.fromkeys(periods, SIZE),
        clients={
            f"client-{i}": ClientInfo(device="cpu", data={DOMAINS[i % 4]: 1000})
            for i in range(clients)
        },
    )


def windows_of(
    periods: Mapping[str, Any] = PERIODS, steps: int = 192, clients: int = 4
) -> Iterator[WindowRecord]:
    """Yield windows with the formula's bytes and a small model's losses, evaluated every 48."""
    names = [f"client-{i}" for i in range(clients)]

    def loss(step: int, part: int) -> float:
        return 1.9 + 0.12 * (part - 1) + 3.65 * math.exp(-6 * step / steps)

    def metrics(nats: float) -> dict[str, float]:
        bits = nats / math.log(2)
        return {
            "loss": nats, "perplexity": math.exp(nats), "bits_per_byte": bits, "nats_per_byte": nats
        }  # fmt: skip

    def evaluation(step: int, names: list[str], bias: float) -> EvaluationRecord:
        losses = {name: loss(step, i) + bias for i, name in enumerate(names)}
        parts = {name: metrics(nats) for name, nats in losses.items()}
        return EvaluationRecord(overall=metrics(fmean(losses.values())), parts=parts)

    def client(window: Window, part: int) -> ClientRecord:
        span = range(window.start + 1, window.stop + 1)
        return ClientRecord(
            num_examples=8 * len(span), train_loss=loss(window.stop, part),
            losses=[loss(step, part) for step in span], grad_norms=[1 + 1 / step for step in span],
            learning_rates=[0.002 * min(1, step / 16) for step in span],
            update_norm=0.4, param_norm=20 + window.stop / 50, seconds=3.1,
        )  # fmt: skip

    lacking: set[str] = set()
    before = Window(start=0, stop=0, due=frozenset())
    for number, window in enumerate([before, *SyncSchedule(periods).windows(steps)]):
        evaluates = window is before or (
            PARAMS in window.due
            and (window.stop == steps or window.stop // 48 > window.start // 48)
        )
        # Training sends what the clients lack, and evaluation the params, which is one thing less.
        down = [*sorted(lacking), *([PARAMS] if evaluates else [])]
        lacking = set(window.due) - ({PARAMS} if evaluates else set())
        records = {name: client(window, i) for i, name in enumerate(names) if number}
        yield WindowRecord(
            round=number,
            start=window.start,
            step=window.stop,
            streams=[stream for stream in periods if stream in window.due],
            train_loss=fmean(r.train_loss for r in records.values()) if records else None,
            clients=records,
            left_out={},
            traffic=Traffic(
                up=dict.fromkeys(window.due, clients * SIZE),
                down={stream: clients * SIZE * down.count(stream) for stream in down},
                framed_up=clients * (SIZE + 900) * len(window.due) + 4000,
                framed_down=clients * (SIZE + 900) * len(down) + 4000,
            ),
            drift={
                stream: Drift(spread=1 + math.exp(-6 * window.stop / steps), moved=2.0, norm=20.0)
                for stream in periods
                if stream in window.due
            },
            seconds={"total": 4.0, "clients": 2.8, "averaging": 0.05, "evaluation": 0.2},
            central=evaluation(window.stop, [*DOMAINS], 0.0) if evaluates else None,
            federated=evaluation(window.stop, names, 0.02) if evaluates else None,
        )


def record(
    folder: Path,
    periods: Mapping[str, Any] = PERIODS,
    steps: int = 192,
    *,
    clients: int = 4,
    change: Callable[[WindowRecord], WindowRecord] = lambda window: window,
    stream: io.StringIO | None = None,
    finish: bool = True,
) -> RunFolder:
    """Record the windows of ``windows_of``, each changed by ``change``."""
    run = RunFolder.create(folder, "a-run")
    recorder = RunRecorder(a_config(periods, steps), run, stream=stream or io.StringIO())
    recorder.started(a_run_info(periods, steps, clients))
    for window in windows_of(periods, steps, clients):
        recorder.window(change(window))
    if finish:
        recorder.finish("completed", "5ha256")
    return run
