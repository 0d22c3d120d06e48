"""The streams of a configured run: which there are, of what kind, and when they are averaged."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.imports import is_path
from flower_desloc.app.setup import whole_windows
from flower_desloc.app.setup.build import build_flower_strategy, build_optimizer, build_parts
from flower_desloc.app.setup.param_groups import (
    OPTIMIZER,
    described_optimizer,
    group_settings,
    param_groups,
    param_places,
    trial_groups,
)
from flower_desloc.app.tasks import find_task
from flower_desloc.core.kinds import Kinds, kind_of
from flower_desloc.core.multi import MultiOptimizer
from flower_desloc.core.schedule import BUFFERS, NEVER, PARAMS, RESET, Period, SyncSchedule
from flower_desloc.core.states import kinds_of, state_decays
from flower_desloc.core.streams import (
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
from flower_desloc.core.traffic import compressed_bytes
from flower_desloc.core.types import Stream
from flower_desloc.optim import Description


class RunStreams:
    """The streams of a configuration, found once, by its optimizers of small tensors.

    No model is built. If the states of an optimizer depend on the shape of a tensor, some streams
    are known with a model only.

    Every attribute raises ``ConfigError`` if an optimizer cannot be imported or made.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    @cached_property
    def parts(self) -> list[tuple[Description, Optimizer]]:
        """Every optimizer with its description, each of a small matrix for each group."""
        return build_parts(self.config, self._groups)

    @cached_property
    def kinds(self) -> Kinds:
        """The kinds of the optimizer's states, where its class describes them.

        Raises ``ConfigError`` where several optimizers give one of them different kinds.
        """
        try:
            return kinds_of(self._optimizer)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"optimizer.groups: {error}") from error

    @cached_property
    def schedule(self) -> SyncSchedule:
        """When each stream is averaged that a model may have; buffers if they have a period."""
        return self._schedule(self.config.sync)

    def schedule_of(self, streams: Iterable[str]) -> SyncSchedule:
        """Return when each of a model's streams is averaged; buffers without a period stay local.

        Raises ``ConfigError`` unless ``sync`` states a period for every stream and no other.
        """
        streams, periods = [*streams], self.config.sync
        if BUFFERS in streams:
            periods = {**periods, BUFFERS: periods.get(BUFFERS, NEVER)}
        schedule = self._schedule(periods, streams)
        try:
            schedule.require(streams, self.config.optimizer.title)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return schedule

    def check(self) -> None:
        """Raise ``ConfigError`` unless ``sync`` states a period for every stream and no other.

        Also if an import path in the configuration cannot be imported, and for settings that the
        optimizer's states exclude.
        """
        config = self.config
        if not config.is_desloc:
            build_flower_strategy(config)
        if is_path(config.task):  # the project's own take seconds to import
            find_task(config)
        described = (description for description, _ in self.parts)
        for problem in whole_windows.problems(config, described):
            raise ConfigError(problem)
        always, sometimes = self._known
        _ = self.kinds  # which may be refused
        prime(self._optimizer)
        params = nn.ParameterList(p for group in self._groups for p in group["params"])
        names = stream_names(params, self._optimizer)
        states = [name for name in names if name in config.sync and name != PARAMS]
        least = config.federation.min_steps
        if config.sync_delay:
            with _otherwise(f"sync_delay={config.sync_delay}", "sync_delay=0"):
                state_decays(self._optimizer, states)
        if least < 1:
            with _otherwise(f"federation.min_steps={least}", "federation.min_steps=1"):
                state_decays(self._optimizer, states)
        periods = self.schedule.periods
        self.schedule_of([*always, *(n for n in (*sometimes, BUFFERS) if n in periods)])

    def params_of(self, model: nn.Module) -> dict[str, Stream]:
        """Return by stream the parameters of ``model`` that have it; it may be on the meta device.

        Raises ``ConfigError`` as ``param_groups``.
        """
        config = self.config

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

    def initial(self, model: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Return the initial streams of a run: the model's own tensors, and states as meta tensors.

        Raises ``ConfigError`` for parameters that cannot be trained or that the optimizer leaves
        out, and if the optimizer has states that cannot be kept.
        """
        _ = self._known  # which may be refused
        optimizer = build_optimizer(self.config, param_groups(self.config, model))
        _check_model(self.config, model, optimizer)
        prime(optimizer)
        streams = take(model, optimizer, stream_names(model, optimizer))
        return {
            name: {k: t.to("meta") for k, t in stream.items()} if starts_at_zero(name) else stream
            for name, stream in streams.items()
        }

    def sent_bytes(self, streams: Mapping[str, Stream]) -> dict[str, int]:
        """Return the bytes of each of ``streams``, which may be meta tensors, in a reply."""
        if not self.config.privacy.secure_aggregation:
            return compressed_bytes(streams, self.config.compression, self.kinds)
        from flower_desloc.secure.codes import width_of  # few runs need it

        return {
            name: width_of(kind_of(name, self.kinds)) * sum(t.numel() for t in stream.values())
            for name, stream in streams.items()
        }

    @cached_property
    def _groups(self) -> list[dict[str, Any]]:
        return trial_groups(self.config)

    @cached_property
    def _optimizer(self) -> Optimizer:
        parts = [optimizer for _, optimizer in self.parts]
        return parts[0] if len(parts) == 1 else MultiOptimizer(parts)

    @cached_property
    def _known(self) -> tuple[list[str], list[str]]:
        """The optimizer's streams for any model, and those for some models only.

        Some optimizers have states for tensors of some shapes only. One of several parts may have
        no parameter, nor may that of the section where entries name others.
        """
        o = self.config.optimizer
        always, every = [PARAMS], []
        named = any(entry.name for entry in o.groups)
        described = map(described_optimizer, o.names)
        several = {part.name for each in described if each.others for part in each.parts}
        for group in self._groups:
            found = self._by_shape(group)
            names = list(dict.fromkeys(name for each in found for name in each))
            every += names
            own = group[OPTIMIZER]
            if own not in several and not (named and own == o.name):
                always += [name for name in names if all(name in each for each in found)]
        always = list(dict.fromkeys(always))
        return always, [name for name in dict.fromkeys(every) if name not in always]

    def _by_shape(self, group: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Return the streams of a group's optimizer for a matrix, and for a vector if it can."""

        def make(params: list[nn.Parameter]) -> Optimizer:
            return build_optimizer(self.config, [{**group, "params": params}])

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

    def _schedule(
        self, periods: Mapping[str, Period], streams: Iterable[str] | None = None
    ) -> SyncSchedule:
        config = self.config
        if not config.is_desloc:  # its clients keep no state between windows
            streams = chain.from_iterable(self._known) if streams is None else streams
            periods = {**dict.fromkeys(streams, RESET), **periods}
        coins = config.run.seed if config.sync_mode == "probabilistic" else None
        once_at = frozenset(config.sync_once_at)
        return SyncSchedule(periods, coin_seed=coins, once_at=once_at, phases=config.sync_phase)


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


@contextmanager
def _otherwise(stated: str, otherwise: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{stated}: {error}; otherwise set {otherwise}") from error
