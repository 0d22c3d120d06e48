"""From a run's configuration to what theory needs of it."""

from pathlib import Path
from typing import Final

import torch

from flower_desloc.config import Config, ConfigError
from flower_desloc.config.imports import is_path
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import BUFFERS
from flower_desloc.optim.adopt import fourth_root
from flower_desloc.plan.setting import Stream
from flower_desloc.setup.build import build_schedule, check_streams
from flower_desloc.setup.initial import settled
from flower_desloc.setup.preflight.sketch import offline_task

PAPER: Final = {"135m": 135e6, "1.7b": 1.7e9}
"""The models of the paper and their parameters, as it states them."""

PAPER_SETTINGS: Final = Path(__file__).with_name("paper")
"""Where their configurations are."""

_BETA1: Final = ("exp_avg",)
_MOMENTUM: Final = ("momentum_buffer",)
_DECAYED_IN_THE_GRADIENT: Final = ("adam", "amsgrad", "sgdm")
"""Optimizers that add weight decay to the clipped gradient, which is then bounded no longer."""


def model_size(config: Config) -> int:
    """Return the number of trained parameters of the configured model, without memory for them.

    Raises ``ValueError`` when the model cannot be built.
    """
    with torch.device("meta"):
        model = offline_task(settled(config)).build_model()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def streams(
    config: Config, num_params: float, *, value_bytes: float, rho: float | None
) -> tuple[Stream, ...]:
    """Return the streams of a run, each as large as the parameters.

    ``rho`` bounds every coordinate of a gradient; None where gradients are not clipped.

    Raises :class:`ConfigError` unless ``config.sync`` states a period for each stream, or when a
    stream is of another size.
    """
    check_streams(config)
    if PARAMS not in config.sync:
        raise ConfigError(
            f"sync.{PARAMS} is not stated: a plan is of DES-LOC's clocks, and compares them with "
            "data parallelism by itself; choose a preset that has them"
        )
    if BUFFERS in config.sync:
        raise ConfigError(f"sync.{BUFFERS}: a plan knows nothing of their size; leave it out")
    return tuple(
        Stream(
            name=name,
            period=period,
            num_bytes=num_params * value_bytes,
            beta=_beta(config, name),
            ceiling=_ceiling(config, name, rho),
        )
        for name, period in build_schedule(config).periods.items()
    )


def gradient_bound(config: Config) -> float | None:
    """Return rho: what no coordinate of a clipped gradient exceeds, or None."""
    # A coordinate is at most the norm.
    clips = (config.optimizer.clip_norm, config.optimizer.clip_value)
    return min((clip for clip in clips if clip is not None), default=None)


def value_bytes(config: Config) -> int:
    """Return the bytes of one value of a stream."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype.itemsize


def workers(config: Config) -> int:
    """Return how many clients train in a window, when all are online."""
    federation = config.federation
    number = max(federation.min_clients, round(federation.fraction_train * federation.num_clients))
    return min(number, federation.num_clients)


def _beta(config: Config, name: str) -> float | None:
    if name == PARAMS or is_path(config.optimizer.name):
        return None
    if name in _MOMENTUM:
        return config.optimizer.momentum
    return config.optimizer.betas[0 if name in _BETA1 else 1]


def _ceiling(config: Config, name: str, rho: float | None) -> float | None:
    optimizer = config.optimizer
    if name == PARAMS or is_path(optimizer.name):
        return None
    if optimizer.name == "adopt" and name in _BETA1:
        # ADOPT's first moment is of g / sqrt(v), clipped at step^(1/4) whatever g is.
        return fourth_root(config.run.steps)
    if rho is None or (optimizer.weight_decay and optimizer.name in _DECAYED_IN_THE_GRADIENT):
        return None
    return rho if name in (*_BETA1, *_MOMENTUM) else rho**2
