"""Build the algorithm's objects from the configuration."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.errors import suggestion
from flower_desloc.app.setup.param_groups import (
    OPTIMIZER,
    described_optimizer,
    param_groups,
    tuples,
)
from flower_desloc.app.tasks.compute import Compiled
from flower_desloc.core import lr_schedule
from flower_desloc.core.exits import exits_as_errors
from flower_desloc.core.multi import MultiOptimizer
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.worker import Clipping
from flower_desloc.optim import Description


def build_optimizer(config: Config, params: Iterable[Any]) -> Optimizer:
    """Return the optimizer of ``params`` or groups of them (``param_groups``).

    Groups of several optimizers make a ``MultiOptimizer``.

    Raises ``ConfigError`` if it cannot be imported or made.
    """
    parts = [optimizer for _, optimizer in build_parts(config, params)]
    return parts[0] if len(parts) == 1 else MultiOptimizer(parts)


def build_parts(config: Config, params: Iterable[Any]) -> list[tuple[Description, Optimizer]]:
    """Return every optimizer of ``params`` or groups of them, with its description."""
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        name = group.get(OPTIMIZER, config.optimizer.name)
        own = {key: value for key, value in group.items() if key != OPTIMIZER}
        by_name.setdefault(name, []).append(own)
    return [_part(config, described_optimizer(name), own) for name, own in by_name.items()]


def _part(
    config: Config, described: Description, groups: list[dict[str, Any]]
) -> tuple[Description, Optimizer]:
    o, name = config.optimizer, described.name
    main = described_optimizer(o.name)
    options = tuples(o.options) if name == o.name else {}
    own = {
        # Another optimizer than that of the section has its own defaults.
        key: getattr(o, key, default) if name in [part.name for part in main.parts] else default
        for key, default in described.settings.items()
        if key not in options
    }
    # A function that optimizer.name names need not know groups.
    alone = len(groups) == 1 and len(groups[0]) == 1
    try:
        with exits_as_errors():
            optimizer = described.make(
                groups[0]["params"] if alone else groups, lr=o.lr, **own, **options
            )
    except Exception as error:
        raise ConfigError(
            f"optimizer.name={name}: it cannot be constructed with optimizer.lr={o.lr}"
            f"{', optimizer.groups' if o.groups else ''} and optimizer.options={options} "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer.name={name}: returns a {type(optimizer).__name__}, not a "
            "torch.optim.Optimizer"
        )
    for index, entry in enumerate(o.groups):
        if (entry.name or o.name) != name:
            continue
        for key in entry.options.keys() - optimizer.defaults:  # PyTorch would ignore it
            raise ConfigError(
                f"optimizer.groups[{index}].options.{key}: optimizer.name={name} has no such "
                f"setting of a group{suggestion(key, sorted(optimizer.defaults))}"
            )
    return described, optimizer


def build_local_optimizer(
    config: Config, model: nn.Module, params: Mapping[str, nn.Parameter] | None = None
) -> Optimizer:
    """Return a client's optimizer, whose step is compiled under ``model.compile``.

    It is that of ``params``, by default the model's (``param_groups``). The steps of our own
    optimizers are compiled. PyTorch's own Adam already takes its step in one fused kernel.
    """
    optimizer = build_optimizer(config, param_groups(config, model, params))
    compile_step = getattr(optimizer, "compile", None)
    if config.model.compile and compile_step is not None:
        compile_step(Compiled)
    return optimizer


def build_flower_strategy(config: Config) -> Callable[..., Any]:
    """Return what makes the strategy of Flower's that the configuration names.

    Raises ``ConfigError`` for a setting that it does not have.
    """
    # Imported here: it takes a second.
    from flower_desloc.flower.baselines.flower_strategies import STRATEGIES, options_of

    make, options = STRATEGIES[config.strategy], config.strategy_options
    for key, value in options.items():
        stated, known = f"strategy_options.{key}", options_of(make)
        if key not in known:
            raise ConfigError(
                f"{stated}: {make.__name__} has no such setting{suggestion(key, known)}; it has "
                f"{', '.join(known) or 'none'}"
            )
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"{stated}={value}: must be a number, at least 0 and finite")
    return partial(make, **options)


def build_outer(config: Config, model: nn.Module) -> OuterOptimizer | None:
    """Return the server's optimizer of the parameters of ``model``, if there is one."""
    o = config.outer
    if config.averages_gradients:
        return OuterOptimizer(
            lambda params: build_optimizer(config, params),
            groups=lambda params: param_groups(config, model, params),
            lr_schedule=build_lr_schedule(config),
            clipping=build_clipping(config),
        )
    match o.name:
        case "sgd":
            return OuterOptimizer(
                lambda params: torch.optim.SGD(
                    params, o.lr, momentum=o.momentum, nesterov=o.nesterov
                )
            )
        case "adam":
            return OuterOptimizer(lambda params: torch.optim.Adam(params, o.lr, betas=(0.9, 0.95)))
    return None


def build_lr_schedule(config: Config) -> lr_schedule.LRSchedule:
    """Return the learning rate's factor as a function of the global step."""
    s, steps = config.lr_schedule, config.run.steps
    warmup = s.warmup_of(steps)
    match s.name:
        case "wsd":
            return lr_schedule.wsd(steps, warmup, s.decay_of(steps))
        case "cosine":
            return lr_schedule.cosine(steps, warmup, s.final)
        case "constant":
            return lr_schedule.constant(warmup)
    raise AssertionError(s.name)


def build_clipping(config: Config) -> Clipping:
    """Return how gradients are clipped."""
    return Clipping(norm=config.optimizer.clip_norm, value=config.optimizer.clip_value)
