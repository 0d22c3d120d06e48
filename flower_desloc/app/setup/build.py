"""Build the algorithm's objects from the configuration."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.errors import suggestion
from flower_desloc.app.config.imports import imported, is_path
from flower_desloc.app.setup.param_groups import group_settings, groups_of, param_groups, tuples
from flower_desloc.app.tasks import find_task
from flower_desloc.app.tasks.compute import Compiled
from flower_desloc.core import lr_schedule
from flower_desloc.core.kinds import Kinds
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, PARAMS, RESET, SyncSchedule
from flower_desloc.core.states import kinds_of, state_decays, states_of
from flower_desloc.core.streams import (
    BUFFERS,
    check_optimizer,
    check_trainable,
    prime,
    some,
    starts_at_zero,
    stream_names,
    take,
    untrained,
)
from flower_desloc.core.worker import Clipping
from flower_desloc.optim import OPTIMIZERS, Description


def build_optimizer(config: Config, params: ParamsT) -> Optimizer:
    """Return the optimizer of ``params`` or groups of them (``param_groups``).

    Raises ``ConfigError`` if it cannot be imported or made.
    """
    o, options = config.optimizer, tuples(config.optimizer.options)
    described = described_optimizer(config)
    own = {key: getattr(o, key) for key in described.settings if key not in options}
    try:
        optimizer = described.make(params, lr=o.lr, **own, **options)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"optimizer.name={o.name}: it cannot be constructed with optimizer.lr={o.lr}"
            f"{', optimizer.groups' if o.groups else ''} and optimizer.options={o.options} "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer.name={o.name}: returns a {type(optimizer).__name__}, not a "
            "torch.optim.Optimizer"
        )
    for index, entry in enumerate(o.groups):
        for key in entry.options.keys() - optimizer.defaults:  # PyTorch would ignore it
            raise ConfigError(
                f"optimizer.groups[{index}].options.{key}: optimizer.name={o.name} has no such "
                f"setting of a group{suggestion(key, sorted(optimizer.defaults))}"
            )
    return optimizer


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


def described_optimizer(config: Config) -> Description:
    """Return the description of the optimizer: the project's, or what its own class says.

    Raises ``ConfigError`` if it cannot be imported.
    """
    name = config.optimizer.name
    if not is_path(name):
        return OPTIMIZERS[name]
    make = imported(name, "optimizer.name")
    return Description(
        name=name,
        make=make,
        settings={},
        states=tuple(states_of(make).values()) if isinstance(make, type) else (),
        weight_decay="unknown",
        elementwise=getattr(make, "elementwise", False),
    )


def stream_kinds(config: Config) -> Kinds:
    """Return the kinds of the optimizer's states, where its class describes them."""
    return kinds_of(build_optimizer(config, [nn.Parameter(torch.zeros(3, 2))]))


def build_streams(config: Config, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the initial streams of a run: the model's own tensors, and states as meta tensors.

    Raises ``ConfigError`` for parameters that cannot be trained or that the optimizer leaves out,
    and if the optimizer has states that cannot be kept.
    """
    _known_streams(config)
    optimizer = build_optimizer(config, param_groups(config, model))
    _check_model(config, model, optimizer)
    prime(optimizer)
    streams = take(model, optimizer, stream_names(model, optimizer))
    return {
        name: {k: t.to("meta") for k, t in stream.items()} if starts_at_zero(name) else stream
        for name, stream in streams.items()
    }


def _check_model(config: Config, model: nn.Module, optimizer: Optimizer) -> None:
    try:
        check_trainable(model, optimizer)
    except ValueError as error:
        raise ConfigError(f"task={config.task}: {error}") from error
    if left := untrained(model, optimizer):
        raise ConfigError(
            f"optimizer.name={config.optimizer.name}: it does not hold {some(left)}, which would "
            "keep the values of each site; let it hold all parameters it is given, or set "
            f"requires_grad=False for these in build_model of task={config.task}"
        )


def check_streams(config: Config) -> None:
    """Raise ``ConfigError`` unless ``sync`` states a period for every stream and no other.

    Also if an import path in the configuration cannot be imported. No model is built; if the
    states of an optimizer depend on the shape of a tensor, some streams are known in the run only.
    """
    if is_path(config.task):  # the project's own take seconds to import
        find_task(config)
    always, sometimes = _known_streams(config)
    states = [name for name in always if name != PARAMS]
    optimizer = build_optimizer(config, [nn.Parameter(torch.zeros(3, 2))])
    least = config.federation.min_steps
    if config.sync_delay:
        with _otherwise(f"sync_delay={config.sync_delay}", "sync_delay=0"):
            state_decays(optimizer, states)
    if least < 1:
        with _otherwise(f"federation.min_steps={least}", "federation.min_steps=1"):
            state_decays(optimizer, states)
    names = [*always, *(name for name in (*sometimes, BUFFERS) if name in config.sync)]
    try:
        build_schedule(config).require(names, config.optimizer.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _otherwise(stated: str, otherwise: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{stated}: {error}; otherwise set {otherwise}") from error


def build_schedule(config: Config) -> SyncSchedule:
    """Return the schedule of the averages."""
    coins = config.run.seed if config.sync_mode == "probabilistic" else None
    periods = config.sync
    if config.strategy != "desloc":
        periods = dict.fromkeys(_known_streams(config)[0], RESET) | periods
    once_at = frozenset(config.sync_once_at)
    return SyncSchedule(periods, coin_seed=coins, once_at=once_at, phases=config.sync_phase)


def _known_streams(config: Config) -> tuple[list[str], list[str]]:
    """Return the optimizer's streams for tensors of any shape, and those for some shapes only."""
    if not is_path(config.optimizer.name):
        module = nn.Linear(1, 1)
        optimizer = build_optimizer(config, list(module.parameters()))
        prime(optimizer)
        return list(stream_names(module, optimizer)), []
    try:
        found: list[tuple[str, ...]] = []
        for own in group_settings(config):

            def make(params: list[nn.Parameter], own: dict[str, Any] = own) -> Optimizer:
                return build_optimizer(config, groups_of([(params, own)]))

            found.append(check_optimizer(make, 3, 2))
            with suppress(ConfigError):  # Muon, for example, is for matrices only
                found.append(check_optimizer(make, 3))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"optimizer.name={config.optimizer.name}: {error}") from error
    names = list(dict.fromkeys(name for each in found for name in each))
    always = [name for name in names if all(name in each for each in found)]
    return always, [name for name in names if name not in always]


def build_outer(config: Config, model: nn.Module) -> OuterOptimizer | None:
    """Return the server's optimizer of the parameters of ``model``, if there is one."""
    o = config.outer
    if GRADIENTS in config.sync:
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
    warmup = steps // 12 if s.warmup_steps is None else s.warmup_steps
    match s.name:
        case "wsd":
            decay = steps // 10 if s.decay_steps is None else s.decay_steps
            return lr_schedule.wsd(steps, warmup, decay)
        case "cosine":
            return lr_schedule.cosine(steps, warmup, s.final)
        case "constant":
            return lr_schedule.constant(warmup)
    raise AssertionError(s.name)


def build_clipping(config: Config) -> Clipping:
    """Return how gradients are clipped."""
    return Clipping(norm=config.optimizer.clip_norm, value=config.optimizer.clip_value)
