"""Build the algorithm's objects from the configuration."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.errors import suggestion
from flower_desloc.app.config.imports import is_path
from flower_desloc.app.setup.param_groups import (
    OPTIMIZER,
    described_optimizer,
    group_settings,
    param_groups,
    param_places,
    trial_groups,
    tuples,
)
from flower_desloc.app.tasks import find_task
from flower_desloc.app.tasks.compute import Compiled
from flower_desloc.core import lr_schedule
from flower_desloc.core.kinds import Kinds
from flower_desloc.core.multi import MultiOptimizer
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, NEVER, PARAMS, RESET, SyncSchedule
from flower_desloc.core.states import kinds_of, state_decays
from flower_desloc.core.streams import (
    BUFFERS,
    check_optimizer,
    check_trainable,
    parameters,
    prime,
    some,
    starts_at_zero,
    stream_names,
    take,
    untrained,
)
from flower_desloc.core.types import Stream
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
        optimizer = described.make(
            groups[0]["params"] if alone else groups, lr=o.lr, **own, **options
        )
    except (Exception, SystemExit) as error:
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


def stream_kinds(config: Config) -> Kinds:
    """Return the kinds of the optimizer's states, where its class describes them.

    Raises ``ConfigError`` where several optimizers give one of them different kinds.
    """
    try:
        return kinds_of(build_optimizer(config, trial_groups(config)))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"optimizer.groups: {error}") from error


def stream_params(config: Config, model: nn.Module) -> dict[str, Stream]:
    """Return by stream the parameters that have it, of a model that may be on the meta device.

    Raises ``ConfigError`` as ``param_groups``.
    """

    @cache
    def state_names(index: int, name: str, ndim: int) -> tuple[str, ...]:
        p = nn.Parameter(torch.zeros((3, 2, 2, 2, 2, 2)[:ndim]))
        group = {"params": [p], OPTIMIZER: name, **group_settings(config, index, name)}
        optimizer = build_optimizer(config, [group])
        prime(optimizer)
        return stream_names(nn.ParameterList([p]), optimizer)

    trained = parameters(model)
    streams: dict[str, dict[str, Tensor]] = {}
    for key, place in param_places(config, model).items():
        for name in state_names(*place, trained[key].ndim):
            streams.setdefault(name, {})[key] = trained[key]
    return dict(streams)


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
    if config.strategy != "desloc":
        build_flower_strategy(config)
    if is_path(config.task):  # the project's own take seconds to import
        find_task(config)
    always, sometimes = _known_streams(config)
    groups = trial_groups(config)
    optimizer = build_optimizer(config, groups)
    stream_kinds(config)
    prime(optimizer)
    params = nn.ParameterList(p for group in groups for p in group["params"])
    stated = [name for name in stream_names(params, optimizer) if name in config.sync]
    states = [name for name in stated if name != PARAMS]
    least = config.federation.min_steps
    if config.sync_delay:
        with _otherwise(f"sync_delay={config.sync_delay}", "sync_delay=0"):
            state_decays(optimizer, states)
    if least < 1:
        with _otherwise(f"federation.min_steps={least}", "federation.min_steps=1"):
            state_decays(optimizer, states)
    periods = build_schedule(config).periods
    require_periods(config, [*always, *(n for n in (*sometimes, BUFFERS) if n in periods)])


def require_periods(config: Config, streams: list[str]) -> None:
    """Raise ``ConfigError`` unless ``sync`` states a period for all of ``streams`` and no other."""
    try:
        build_schedule(config, streams).require(streams, config.optimizer.title)
    except ValueError as error:
        raise ConfigError(str(error)) from error


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


@contextmanager
def _otherwise(stated: str, otherwise: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{stated}: {error}; otherwise set {otherwise}") from error


def build_schedule(config: Config, streams: Iterable[str] | None = None) -> SyncSchedule:
    """Return the schedule of the averages; ``streams`` are the model's, by default all known.

    Buffers without a period stay local.
    """
    coins = config.run.seed if config.sync_mode == "probabilistic" else None
    periods = config.sync
    if streams is not None and BUFFERS in (streams := [*streams]):
        periods = {**periods, BUFFERS: periods.get(BUFFERS, NEVER)}
    if config.strategy != "desloc":
        known = chain.from_iterable(_known_streams(config)) if streams is None else streams
        periods = dict.fromkeys(known, RESET) | periods
    once_at = frozenset(config.sync_once_at)
    return SyncSchedule(periods, coin_seed=coins, once_at=once_at, phases=config.sync_phase)


def _known_streams(config: Config) -> tuple[list[str], list[str]]:
    """Return the optimizer's streams for any model, and those for some models only.

    Some optimizers have states for tensors of some shapes only. One of several parts may have no
    parameter, nor may that of the section where entries name others.
    """
    always, every = [PARAMS], []
    section = config.optimizer.name
    named = any(entry.name for entry in config.optimizer.groups)
    described = map(described_optimizer, config.optimizer.names)
    several = {part.name for each in described if each.others for part in each.parts}
    for group in trial_groups(config):
        found = _streams_by_shape(config, group)
        names = list(dict.fromkeys(name for each in found for name in each))
        every += names
        own = group[OPTIMIZER]
        if own not in several and not (named and own == section):
            always += [name for name in names if all(name in each for each in found)]
    always = list(dict.fromkeys(always))
    return always, [name for name in dict.fromkeys(every) if name not in always]


def _streams_by_shape(config: Config, group: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the streams of a group's optimizer for a matrix, and for a vector if it takes one."""

    def make(params: list[nn.Parameter]) -> Optimizer:
        return build_optimizer(config, [{**group, "params": params}])

    if not is_path(group[OPTIMIZER]):
        optimizer = make(group["params"])
        prime(optimizer)
        return [stream_names(nn.ParameterList(group["params"]), optimizer)]
    found: list[tuple[str, ...]] = []
    try:
        found.append(check_optimizer(make, 3, 2))
        with suppress(ConfigError):  # Muon, for example, is for matrices only
            found.append(check_optimizer(make, 3))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"optimizer.name={group[OPTIMIZER]}: {error}") from error
    return found


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
