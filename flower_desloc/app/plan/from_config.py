"""A planned run from a configuration."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.units import TEXT, precision_text
from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.wall_clock import H100, Link, compute_seconds
from flower_desloc.app.setup.initial import with_init_from
from flower_desloc.app.setup.meta_model import meta_model
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.formats import lossy
from flower_desloc.core.kinds import Kind, kind_of
from flower_desloc.core.schedule import BUFFERS, GRADIENTS, PARAMS
from flower_desloc.core.states import state_decays, states_of
from flower_desloc.core.streams import buffers
from flower_desloc.optim import Description
from flower_desloc.optim.description import Family

PAPER: Final = {"135m": 135e6, "1.7b": 1.7e9}
"""The paper's models and their numbers of parameters, as it states them."""

PAPER_CONFIGS: Final = Path(__file__).with_name("paper")
"""Folder of their configurations."""


def planned_run(
    config: Config,
    link: Link,
    *,
    num_params: float | None = None,
    workers: int | None = None,
    tokens: float | None = None,
    value_bytes: float | None = None,
    rho: float | None = None,
    step_seconds: float | None = None,
    flops: float | None = None,
    mfu: float,
) -> PlannedRun:
    """Return the planned run of ``config``; what is None is taken from the configuration.

    ``tokens`` are those of one step of all workers together. ``rho`` bounds every coordinate of a
    gradient. Without ``step_seconds`` the compute of a step follows from ``mfu`` and ``flops``, by
    default the peak of an H100 in the run's precision; for a task that is not text it is not known
    then.

    Raises ``ValueError`` if the configuration lacks something that a plan needs.
    """
    model = cache(lambda: meta_model(with_init_from(config)))
    configured = RunStreams(config)
    num_params = num_params or model_size(model())
    if workers is None:  # the clients of a window when all are online
        workers = config.federation.number_drawn(config.simulation.num_clients)
    if config.task == TEXT:
        tokens = tokens or workers * config.data.batch_size * config.data.seq_len
    elif tokens is not None:
        raise ConfigError(f"--tokens-per-step: task={config.task} is not text; leave it out")
    peak = ""
    if step_seconds is None and tokens is None:
        step_seconds = math.nan
    elif step_seconds is None:
        assert tokens is not None
        precision = precision_text(config.model)
        peak = f"an H100's peak in {precision}" if flops is None else f"--flops={flops:g}"
        peak = f"{mfu:.0%} of {peak}"
        flops = flops or H100[precision]
        step_seconds = compute_seconds(num_params, tokens, workers=workers, flops=flops, mfu=mfu)
    streams = planned_streams(configured, rho)
    shares = dict.fromkeys((stream.name for stream in streams), 1.0)
    if len(configured.parts) > 1:
        shares = _shares(configured, model(), shares)
    values = {name: num_params * share for name, share in shares.items()}
    sizes = {n: values[n] * (value_bytes or dtype_bytes(config)) for n in values}
    if BUFFERS in sizes:
        sizes[BUFFERS] = _buffer_bytes(model())
    # Exact streams are sent as they are, if need be in value_bytes.
    coded = values if config.privacy.secure_aggregation else lossy(config.compression)
    compressed = configured.sent_bytes(
        {name: {"": torch.empty(round(values[name]), device="meta")} for name in coded}
    )
    return PlannedRun(
        name=config.run.name,
        optimizer=config.optimizer.title,
        family=_family(configured),
        num_params=num_params,
        streams=tuple(
            replace(
                stream, num_bytes=sizes[stream.name], compressed_bytes=compressed.get(stream.name)
            )
            for stream in streams
        ),
        steps=config.run.steps,
        workers=workers,
        tokens=tokens,
        compute=step_seconds,
        peak=peak,
        link=link,
        schedule=configured.schedule,
        sync_bound=config.sync_bound,
        partition=config.data.partition,
        delay=config.sync_delay,
    )


def planned_streams(configured: RunStreams, rho: float | None = None) -> tuple[PlannedStream, ...]:
    """Return the streams of a run, without their sizes.

    ``rho`` bounds every coordinate of a gradient; by default it follows from the clipping.

    Raises ``ConfigError`` unless ``sync`` states a period for each stream.
    """
    configured.check()
    config, parts = configured.config, configured.parts
    if PARAMS not in config.sync:
        raise ConfigError(
            f"sync.{PARAMS} is not set; choose a preset that has it. A plan always compares with "
            "data parallelism"
        )
    clips = (config.optimizer.clip_norm, config.optimizer.clip_value)
    # A coordinate is at most the norm.
    rho = rho or min((clip for clip in clips if clip is not None), default=None)
    return tuple(
        PlannedStream(
            name=name,
            kind=kind_of(name, configured.kinds),
            num_bytes=0,
            beta=_beta(parts, name),
            ceiling=_ceiling(config, parts, name, rho),
            own_ceiling=_has_own_ceiling(parts, name),
        )
        for name in configured.schedule.periods
    )


def _shares(configured: RunStreams, model: nn.Module, names: Iterable[str]) -> dict[str, float]:
    """Return by stream the share of the model's parameters that has it."""
    streams = configured.params_of(model)
    counts = {name: sum(p.numel() for p in stream.values()) for name, stream in streams.items()}
    counts |= dict.fromkeys([BUFFERS, GRADIENTS], counts[PARAMS])
    return {name: counts.get(name, 0) / counts[PARAMS] for name in names}


def model_size(model: nn.Module) -> int:
    """Return the number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _buffer_bytes(model: nn.Module) -> int:
    found = buffers(model)
    if not found:
        raise ConfigError(f"sync.{BUFFERS}: the model has none; leave it out")
    return sum(tensor.nbytes for tensor in found.values())


def dtype_bytes(config: Config) -> int:
    """Return the bytes of one value of a stream."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype.itemsize


_Parts = Sequence[tuple[Description, Optimizer]]


def _family(configured: RunStreams) -> Family:
    """Return the family of the optimizer; of several ones the rules were not measured."""
    families = [described.family for described, _ in configured.parts]
    return families[0] if len(families) == 1 else "other"


def _beta(parts: _Parts, name: str) -> float | None:
    """Return the decay of a state: of groups with different ones, the slowest to forget."""
    found = [beta for _, optimizer in parts for beta in _betas(optimizer, name)]
    return max(found, default=None)


def _betas(optimizer: Optimizer, name: str) -> list[float]:
    states = states_of(optimizer)
    if name in states and states[name].kind is Kind.MAXIMUM:
        # It changes at most as fast as what it is taken of.
        name = next(n for n, state in states.items() if state.kind is Kind.SECOND_MOMENT)
    try:
        return [*state_decays(optimizer, [name])[name].values()]
    except ValueError:
        return []


def _ceiling(config: Config, parts: _Parts, name: str, rho: float | None) -> float | None:
    """Return the bound on a state's values; None if that of an optimizer has none."""
    found = [_part_ceiling(config, *part, name, rho) for part in parts if _may_have(part[1], name)]
    known = [ceiling for ceiling in found if ceiling is not None]
    return max(known) if known and len(known) == len(found) else None


def _may_have(optimizer: Optimizer, name: str) -> bool:
    states = states_of(optimizer)
    return not states or name in states


def _has_own_ceiling(parts: _Parts, name: str) -> bool:
    found = [states_of(optimizer).get(name) for _, optimizer in parts if _may_have(optimizer, name)]
    return bool(found) and all(state is not None and state.ceiling is not None for state in found)


def _part_ceiling(
    config: Config, described: Description, optimizer: Optimizer, name: str, rho: float | None
) -> float | None:
    state = states_of(optimizer).get(name)
    if state is None:
        return None
    if state.ceiling is not None:
        return state.ceiling(config.run.steps)
    match described.weight_decay:
        case "unknown":
            return None
        case "gradient" if any(group["weight_decay"] for group in optimizer.param_groups):
            return None
    if rho is None:
        return None
    squares = dict.fromkeys((Kind.SECOND_MOMENT, Kind.MAXIMUM), rho**2)
    return {Kind.FIRST_MOMENT: rho, **squares}.get(state.kind)
