"""What a run leaves behind is whole, valid, and adds up."""

import errno
import io
import json
import math
import os
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flower_desloc.averaging import Drift
from flower_desloc.config import Config, ConfigError, parse
from flower_desloc.ledger import ddp_bytes, desloc_bytes, local_adam_bytes
from flower_desloc.outputs import RunFolder, RunRecorder
from flower_desloc.outputs.methods import Uploads
from flower_desloc.outputs.metrics import read_lines
from flower_desloc.outputs.picture import draw
from flower_desloc.outputs.progress import Progress
from flower_desloc.outputs.summary import download_bytes
from flower_desloc.outputs.units import bytes_text
from flower_desloc.record import ClientRecord, EvaluationRecord, Plan, Traffic, WindowRecord
from flower_desloc.schedule import PARAMS, SyncSchedule, Window

PERIODS = {"params": 16, "exp_avg": 48, "exp_avg_sq": 96}
SIZES = dict.fromkeys(PERIODS, 275_200)
DOMAINS = ("library", "docstrings", "reference", "descriptions")


def a_config(periods: Mapping[str, Any] = PERIODS, steps: int = 192, **federation: Any) -> Config:
    config = Config(sync=dict(periods))
    config.run.steps = steps
    for key, value in federation.items():
        setattr(config.federation, key, value)
    return config


def a_plan(schedule: SyncSchedule, steps: int, sizes: Mapping[str, int], clients: int = 4) -> Plan:
    return Plan(
        num_steps=steps,
        num_windows=len(list(schedule.windows(steps))),
        stream_bytes=sizes,
        clients={f"client-{i}": {"device": "cpu", "data": DOMAINS[i % 4]} for i in range(clients)},
    )


def windows_of(
    schedule: SyncSchedule,
    steps: int,
    sizes: Mapping[str, int],
    clients: int = 4,
    eval_every: int = 48,
    loss_at_end: float = 1.9,
) -> Iterator[WindowRecord]:
    """A run whose measured bytes are the formula's and whose losses look like a small model's."""
    rng = random.Random(7)
    names = [f"client-{i}" for i in range(clients)]
    decay = steps / 6

    def loss(step: int, part: int = 0) -> float:
        return loss_at_end + 0.12 * (part - 1) + (5.55 - loss_at_end) * math.exp(-step / decay)

    def evaluation(step: int, parts: tuple[str, ...] | list[str], bias: float) -> EvaluationRecord:
        values = [loss(step, i) + bias for i in range(len(parts))]
        return EvaluationRecord(
            overall=metrics(sum(values) / len(values)),
            parts={part: metrics(value) for part, value in zip(parts, values, strict=True)},
        )

    def metrics(nats: float) -> dict[str, float]:
        return {
            "loss": nats,
            "perplexity": math.exp(nats),
            "bits_per_byte": nats / math.log(2),
            "nats_per_byte": nats,
        }

    def seconds(total: float) -> dict[str, float]:
        return {"total": total, "clients": total * 0.7, "averaging": 0.05, "evaluation": 0.2}

    def traffic(up: frozenset[str], down: list[str]) -> Traffic:
        return Traffic(
            up={s: clients * sizes[s] for s in up},
            down={s: clients * sizes[s] * down.count(s) for s in down},
            framed_up=sum(clients * (sizes[s] + 900) for s in up) + 4000,
            framed_down=sum(clients * (sizes[s] + 900) for s in down) + 4000,
        )

    yield WindowRecord(
        round=0, start=0, step=0, streams=[], train_loss=None, clients={}, left_out={},
        traffic=traffic(frozenset(), [PARAMS]), drift={}, seconds=seconds(0.9),
        central=evaluation(0, DOMAINS, 0.0), federated=evaluation(0, names, 0.02),
    )  # fmt: skip
    lacking: set[str] = set()
    for number, window in enumerate(schedule.windows(steps), start=1):
        span = range(window.start + 1, window.stop + 1)
        records = {
            name: ClientRecord(
                num_examples=8 * len(span),
                train_loss=loss(window.stop, i),
                losses=[loss(step, i) + rng.gauss(0, 0.05) for step in span],
                grad_norms=[1 + rng.random() for _ in span],
                learning_rates=[0.002 * min(1, step / 16) for step in span],
                update_norm=0.4,
                param_norm=20 + window.stop / 50,
                seconds=3.1,
            )
            for i, name in enumerate(names)
        }
        evaluates = PARAMS in window.due and (
            window.stop == steps or window.stop // eval_every > window.start // eval_every
        )
        # Training sends what the clients lack, and evaluation the params, which is one thing less.
        down = [*sorted(lacking), *([PARAMS] if evaluates else [])]
        lacking = set(window.due) - ({PARAMS} if evaluates else set())
        yield WindowRecord(
            round=number, start=window.start, step=window.stop, streams=order(schedule, window),
            train_loss=sum(r.train_loss for r in records.values()) / clients,
            clients=records, left_out={}, traffic=traffic(window.due, down),
            drift={
                s: Drift(
                    spread=scale * (0.6 + math.exp(-window.stop / decay)) * rng.uniform(0.9, 1.1),
                    moved=2 * scale, norm=20.0,
                )
                for s, scale in zip(PERIODS, (0.35, 6.0, 2.2), strict=False) if s in window.due
            },
            seconds=seconds(4.0),
            central=evaluation(window.stop, DOMAINS, 0.0) if evaluates else None,
            federated=evaluation(window.stop, names, 0.02) if evaluates else None,
        )  # fmt: skip


def order(schedule: SyncSchedule, window: Window) -> list[str]:
    return [stream for stream in schedule.periods if stream in window.due]
