"""Flower's own strategies over the clients of DES-LOC: the outside peers of a comparison.

The average is Flower's: its strategy's ``aggregate_train``, unchanged. The clients, their data, the
evaluation and the record of the run are those of DES-LOC, where every optimizer state is reset
after each average of the parameters: an optimizer that is new in every round.
"""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from flower_desloc.core.averaging import Drift
from flower_desloc.core.robust import Gathered
from flower_desloc.core.schedule import BUFFERS, PARAMS, SyncSchedule
from flower_desloc.core.streams import check_finite
from flower_desloc.core.types import Stream, Streams
from flower_desloc.flower.arrays import from_record, records_of, to_record
from flower_desloc.flower.failures import DivergedError
from flower_desloc.flower.messages import CONFIG
from flower_desloc.flower.options import BY_FLOWERS_OWN
from flower_desloc.flower.strategy import DesLoc

STRATEGIES: Final[Mapping[str, type[FedAvg]]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedprox": FedProx,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}
"""Flower's strategies, by the name that a configuration gives them."""
_WEIGHT = "weight"


def options_of(strategy: type[FedAvg]) -> list[str]:
    """Return the names of a strategy's own settings, which are numbers."""
    known = signature(strategy).parameters.keys() - signature(FedAvg).parameters.keys()
    return sorted(known - {"eta_l"})  # the clients' rate, which Flower does not use


class FlowerStrategy(DesLoc):
    """Run one of Flower's strategies, such as FedAvg or FedAdam.

    FedProx's term is in the clients' loss (``core.proximal``).

    Parameters
    ----------
    make : Callable
        Makes the strategy: ``FedAvg``, or ``functools.partial(FedAdam, eta=0.01)``. It is called
        with the names of records, and with the numbers of nodes that let the loop decide who
        takes part.
    schedule : SyncSchedule
        Period of ``params``; the optimizer's states must be ``reset``.
    num_steps : int
        Local steps of every client; the last round may be shorter.
    **options
        As in ``DesLoc``.

    """

    excludes = (BY_FLOWERS_OWN,)
    has_bound = False  # the strategy averages what it is given
    sent_always = (PARAMS,)  # in every round, as Flower sends them

    def __init__(
        self,
        make: Callable[..., FedAvg],
        schedule: SyncSchedule,
        num_steps: int,
        *,
        templates: Mapping[str, Stream] | None = None,
        **options: Any,
    ) -> None:
        if BUFFERS in {*schedule.periods, *(templates or {})}:
            raise ValueError(
                "the model has buffers (such as BatchNorm's statistics), which the rounds of "
                "Flower's own strategies do not carry; set strategy=desloc"
            )
        super().__init__(schedule, num_steps, templates=templates, **options)
        self.strategy = make(
            min_train_nodes=1,
            min_available_nodes=1,
            weighted_by_key=_WEIGHT,
            arrayrecord_key=PARAMS,
            configrecord_key=CONFIG,
        )
        self.title = type(self.strategy).__name__
        self.arrays = ArrayRecord()
        """What the strategy returned last: FedAdam's arrays are float64, the model's need not."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients drawn for this window, with the settings that the strategy adds."""
        if not self.arrays:
            self._require_arrays_of_numpy()
            self.arrays = arrays
        now = self.loop.round
        drawn = self.loop.members.drawn(now.window.start, now.failures)
        # All that FedAvg needs of a grid. Never zero nodes: it would wait for one for ever.
        nodes = range(max(1, len(drawn)))
        own = ConfigRecord({**config})
        for message in self.strategy.configure_train(
            server_round, self.arrays, own, cast(Grid, SimpleNamespace(get_node_ids=lambda: nodes))
        ):
            own = records_of(ConfigRecord, message.content)[CONFIG]
        own.pop("server-round", None)  # every request has it
        return super().configure_train(server_round, arrays, own, grid)

    def _require_arrays_of_numpy(self) -> None:
        for key, tensor in self.state.templates[PARAMS].items():
            if tensor.dtype == torch.bfloat16:
                raise ValueError(
                    f"{key!r} is of type {tensor.dtype}, which NumPy does not have, and Flower's "
                    "own strategies average NumPy arrays; set strategy=desloc, or a model in "
                    "float32"
                )

    def _averager(self, last: Streams) -> "FlowerAverage":
        return FlowerAverage(self, last)


class FlowerAverage(Gathered):
    """Gathers the replies of one round and lets the strategy aggregate them."""

    def __init__(self, peer: FlowerStrategy, last: Streams) -> None:
        super().__init__(last)
        self._peer = peer

    def result(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the strategy's parameters, in the model's own types."""
        strategy, now = self._peer.strategy, self._peer.loop.round
        # All tensors of a client have the same weight.
        replies = [_reply(each[PARAMS], min(w[PARAMS].values())) for each, w in self._held]
        arrays, _ = strategy.aggregate_train(now.number, replies)
        assert arrays is not None
        self._peer.arrays = arrays
        templates = self._peer.state.templates[PARAMS]
        params = {key: t.to(templates[key].dtype) for key, t in from_record(arrays).items()}
        try:
            check_finite(PARAMS, params)
        except ValueError as error:
            name, stop = type(strategy).__name__, now.window.stop
            raise DivergedError(
                f"what {name} made of the clients' parameters after step {stop}: {error}; the "
                f"training diverges, so lower optimizer.lr, or the learning rate of {name}"
            ) from error
        return {PARAMS: params}

    def drift(self, averages: Streams) -> dict[str, Drift]:
        """Return how far the clients were from their mean, which ``averages`` need not be."""
        del averages
        return super().drift(super().result())


def _reply(params: Stream, weight: float) -> Message:
    metrics = MetricRecord({_WEIGHT: weight})
    return Message(RecordDict({PARAMS: to_record(params), "metrics": metrics}), 0, "train")
