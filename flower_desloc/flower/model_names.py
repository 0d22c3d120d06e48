"""Names of the tensors of the clients' model, and which of an app's arrays a run starts from.

The server has no model. A client states in its reply to the greeting which tensors it trains, so
that an app may start from ``ArrayRecord(model.state_dict())``, as Flower's own strategies do, and
that arrays which do not fit are refused before training.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Self

from flwr.app import ConfigRecord

from flower_desloc.core.schedule import BUFFERS, GRADIENTS, PARAMS, SyncSchedule
from flower_desloc.core.streams import buffers, plain_name, some, trained, untrained
from flower_desloc.core.worker import Worker
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import TENSOR_NAMES


@dataclass(frozen=True)
class ModelNames:
    """The names of a model's tensors, by what the client does with them."""

    trained: tuple[str, ...]
    buffers: tuple[str, ...]
    """Those that a stream has: persistent and floating-point."""
    untrained: tuple[str, ...]
    """Parameters that require a gradient and are not in the optimizer."""
    others: tuple[str, ...]
    """The rest of the state dict: frozen parameters, other names of tied weights, integers."""

    @classmethod
    def of(cls, worker: Worker) -> Self:
        """Return the names of a worker's model."""
        module, optimizer = worker.module, worker.optimizer
        params, saved = tuple(trained(module, optimizer)), tuple(buffers(module))
        left = tuple(untrained(module, optimizer))
        every = map(plain_name, module.state_dict())
        others = tuple(name for name in every if name not in {*params, *saved, *left})
        return cls(params, saved, left, others)

    @classmethod
    def from_config(cls, hello: ConfigRecord) -> Self | None:
        """Read what ``to_config`` wrote; None if a client does not state it."""
        lists = [hello.get(key) for key in TENSOR_NAMES]
        groups = [
            tuple(sys.intern(str(name)) for name in names)
            for names in lists
            if isinstance(names, list)
        ]
        return cls(*groups) if len(groups) == len(lists) else None

    def to_config(self) -> dict[str, list[str]]:
        """Return what ``from_config`` reads."""
        groups = self.trained, self.buffers, self.untrained, self.others
        return dict(zip(TENSOR_NAMES, map(list, groups), strict=True))


def initial_names(
    given: Iterable[str],
    stated: Iterable[ModelNames | None],
    schedule: SyncSchedule,
    with_buffers: bool,
) -> dict[str, dict[str, str]]:
    """Return by stream the names of its initial tensors, each with its name among ``given``.

    The streams are params, and buffers if ``with_buffers``. ``stated`` are the names of every
    client, the most frequent ones count; of equally frequent ones those that fit, so that one
    client of two, with another model, cannot end the run. A line of the log says what is left out.

    Raises ``ValueError`` for arrays that lack a tensor or have one that the model does not have,
    and for a model with buffers that the ``schedule`` does not know.
    """
    arrays = {plain_name(key): key for key in given}
    counted = Counter(stated)
    error = None
    for names in (n for n, number in counted.items() if number == max(counted.values())):
        if names is None:
            break
        try:
            return _fitting(arrays, names, schedule, with_buffers)
        except ValueError as misfit:
            error = error or misfit
    else:
        if error is not None:
            raise error
    return {PARAMS: arrays}


def _fitting(
    arrays: Mapping[str, str], names: ModelNames, schedule: SyncSchedule, with_buffers: bool
) -> dict[str, dict[str, str]]:
    """Return what ``initial_names`` does, of a model with these ``names``."""
    _check_buffers(names, schedule)
    known = {*names.trained, *names.buffers, *names.untrained, *names.others}
    if foreign := arrays.keys() - known:
        raise ValueError(
            f"the initial arrays have {some(foreign)}, which the clients' model does not have"
        )
    wanted = {PARAMS: names.trained} | ({BUFFERS: names.buffers} if with_buffers else {})
    for name, keys in wanted.items():
        if missing := set(keys) - arrays.keys():
            raise ValueError(
                f"the initial arrays lack {some(missing)} of the clients' {name}; start with "
                "to_record(model.state_dict()) of their model"
            )
    _say_what_is_left(arrays, wanted, names)
    return {
        name: {key: given for key, given in arrays.items() if key in set(keys)}
        for name, keys in wanted.items()
    }


def _check_buffers(names: ModelNames, schedule: SyncSchedule) -> None:
    if not names.buffers or BUFFERS in schedule.periods:
        return
    what = f"the clients' model has buffers ({some(names.buffers)}, such as BatchNorm's statistics)"
    if GRADIENTS in schedule.periods:
        raise ValueError(f"{what}, which are not sent with gradients; average params, or take none")
    period = schedule.periods[PARAMS]
    raise ValueError(
        f"{what}, and the schedule states no period for them; average them as often as params, "
        f'SyncSchedule({{..., "buffers": {period!r}}}), or leave them local, "buffers": "never"'
    )


def _say_what_is_left(
    arrays: Iterable[str], wanted: Mapping[str, Iterable[str]], names: ModelNames
) -> None:
    taken = {key for keys in wanted.values() for key in keys}
    if left := [key for key in arrays if key not in taken]:
        log(
            INFO,
            "the run starts without %s of the initial arrays, which no client trains or averages "
            "(frozen, tied to another name, an integer, or a local buffer); load its result with "
            "strict=False",
            some(left),
        )
    if names.untrained:
        log(
            WARNING,
            "the clients' optimizer does not hold %s, which require a gradient: they keep the "
            "values that each client builds them with, and are not in the norm that is clipped",
            some(names.untrained),
        )
