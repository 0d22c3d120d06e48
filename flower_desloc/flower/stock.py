"""Flower's own strategies beside DES-LOC: the same clients, data, evaluation and record of the run.

The strategy is Flower's, run by its own ``start``; nothing of it is replaced. Around it:

- the grid it talks over, :class:`~flower_desloc.flower.stock_link.Link`, says who takes part, tells
  the clients how many local steps a round has, and returns their replies in a fixed order;
- the function it calls after every round evaluates and records;
- the clients are those of :mod:`flower_desloc.flower.stock_client`.
"""

import secrets
import time
from collections.abc import Callable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import PARAMS, SyncSchedule, Window
from flower_desloc.core.streams import BUFFERS, check_finite
from flower_desloc.core.traffic import stream_bytes
from flower_desloc.flower.federation import FederationError
from flower_desloc.flower.metrics import evaluation_record, pooled
from flower_desloc.flower.observer import Observer, Plan, Traffic, WindowRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import CONFIG, from_record, plain, to_record
from flower_desloc.flower.server_state import Globals
from flower_desloc.flower.stock_client import WEIGHTED_BY
from flower_desloc.flower.stock_link import Link, Round
from flower_desloc.flower.strategy import EvaluateFn


class Stock:
    """Run one of Flower's strategies over the clients of DES-LOC.

    Parameters
    ----------
    make : Callable
        Makes the strategy, as ``FedAvg`` does, or ``functools.partial(FedAdam, eta=0.01)``. It is
        called with what is not to be chosen here: the names of records, and that whoever the grid
        shows takes part.
    schedule : SyncSchedule
        The clock of ``params`` cuts the steps into rounds.
    num_steps : int
        Local steps of every client; the last round may be shorter.
    policy : Policy, optional
        Who takes part, and what happens when somebody does not.
    eval_every, metrics, evaluate_clients, run_key, seed
        As in :class:`~flower_desloc.flower.strategy.DesLoc`.
    states : Mapping[str, Stream], optional
        Tensors like those of the optimizer's states. They stay with the clients: the observer is
        told their sizes.

    """

    def __init__(
        self,
        make: Callable[..., FedAvg],
        schedule: SyncSchedule,
        num_steps: int,
        *,
        policy: Policy | None = None,
        eval_every: int = 0,
        states: Mapping[str, Stream] | None = None,
        metrics: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None,
        evaluate_clients: bool = True,
        run_key: str | None = None,
        seed: int = 0,
    ) -> None:
        self.policy = policy or Policy()
        self.strategy = make(
            min_train_nodes=1,
            min_available_nodes=1,
            weighted_by_key=WEIGHTED_BY[self.policy.weighting],
            arrayrecord_key=PARAMS,
            configrecord_key=CONFIG,
        )
        # Set here, as the constructor warns: the clients do evaluate, when and as under DES-LOC.
        self.strategy.fraction_evaluate = 0.0
        self.num_steps = num_steps
        self.windows = list(schedule.windows(num_steps))
        self.eval_every = eval_every
        self.metrics = metrics
        self.evaluate_clients = evaluate_clients
        self.run_key = run_key or secrets.token_hex(8)
        self.seed = seed
        self.globals = Globals()
        self._sizes = stream_bytes(states or {})
        if BUFFERS in self._sizes:
            raise ValueError(
                "the model has buffers (such as BatchNorm's statistics), which the rounds of "
                "strategy=fedavg and fedadam do not carry; set strategy=desloc"
            )
        self._evaluate_fn: EvaluateFn | None = None
        self._observer: Observer | None = None
        self._evaluations: dict[int, MetricRecord] = {}
        self._evaluated = 0
        self._sent = Traffic()
        self._link: Link

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        train_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        observer: Observer | None = None,
    ) -> Result:
        """Train to the end; return the parameters and the metrics by round.

        Takes and raises what :meth:`~flower_desloc.flower.strategy.DesLoc.start` does.
        """
        if PARAMS in self.globals.averages:
            raise ValueError("a Stock runs once; construct another one for another run")
        self._evaluate_fn, self._observer = evaluate_fn, observer
        settings = plain(train_config or ConfigRecord())
        self._link = Link(grid, self.policy, self.run_key, settings, initial_arrays, self.seed)
        members = self._link.open()
        if observer is not None:
            observer.started(
                Plan(
                    num_steps=self.num_steps,
                    num_windows=len(self.windows),
                    stream_bytes={**stream_bytes({PARAMS: self._link.like}), **self._sizes},
                    clients={member.name: member.about for member in members},
                )
            )
        result = self.strategy.start(
            self._link,
            initial_arrays,
            num_rounds=len(self.windows),
            train_config=ConfigRecord({**settings}),  # its own: Flower writes into it
            evaluate_fn=self._over,
        )
        result.arrays = self.globals.averages[PARAMS]
        result.evaluate_metrics_clientapp = self._evaluations
        self._link.federation.farewell()
        return result

    def _over(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate and record a round that is over, and begin the next: Flower's evaluate_fn."""
        link, window = self._link, self._link.round.window
        made = time.perf_counter()
        link.params = self.globals.averages[PARAMS] = self._usable(arrays)
        self.globals.step = self.globals.versions[PARAMS] = window.stop
        central = self._evaluate() if server_round == 0 or self._evaluates(window) else None
        if self._observer is not None:
            self._observer.window(self._record(link.round, central, made))
        if server_round < len(self.windows):
            for member in link.begin(Round(server_round + 1, self.windows[server_round])):
                if self._observer is not None:
                    self._observer.joined(member.name, member.about)
        return central

    def _usable(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return what the strategy made, in the model's own types."""
        like, made = self._link.like, from_record(arrays)
        # FedAdam's arrays are float64 under NumPy 2, whatever they were made of.
        params = {key: tensor.to(like[key].dtype) for key, tensor in made.items()}
        try:
            check_finite(PARAMS, params)
        except ValueError as error:
            name, stop = type(self.strategy).__name__, self._link.round.window.stop
            raise FederationError(
                f"what {name} made of the clients' parameters after step {stop}: {error}; the "
                f"training diverges, so lower optimizer.lr, or the learning rate of {name}"
            ) from error
        is_typed = all(tensor is made[key] for key, tensor in params.items())
        return arrays if is_typed else to_record(params)

    def _evaluates(self, window: Window) -> bool:
        every, stop = self.eval_every, window.stop
        return stop == self.num_steps or (every > 0 and stop // every > self._evaluated // every)

    def _evaluate(self) -> MetricRecord | None:
        began = time.perf_counter()
        now = self._link.round
        self._evaluated = now.window.stop
        if self.evaluate_clients:
            federated = pooled(self._link.evaluate(self.metrics), self.metrics)
            if federated is not None:
                self._evaluations[now.number] = federated
        central = None
        if self._evaluate_fn is not None:
            central = self._evaluate_fn(now.number, self.globals.averages[PARAMS])
        now.evaluation = time.perf_counter() - began
        return central

    def _record(self, now: Round, central: MetricRecord | None, made: float) -> WindowRecord:
        traffic = self._link.federation.traffic
        news, self._sent = traffic - self._sent, traffic
        clients = now.clients.values()
        losses = [client.train_loss for client in clients]
        return WindowRecord(
            round=now.number,
            start=now.window.start,
            step=now.window.stop,
            streams=[PARAMS] if now.number > 0 else [],
            train_loss=sum(losses) / len(losses) if losses else None,
            clients=now.clients,
            left_out=now.left_out,
            traffic=news,
            drift=now.drift,
            seconds={
                "total": time.perf_counter() - now.began,
                "clients": max((client.seconds for client in clients), default=0.0),
                "averaging": made - now.heard,
                "evaluation": now.evaluation,
            },
            central=evaluation_record(central),
            federated=evaluation_record(self._evaluations.get(now.number)),
            events=self._link.federation.news(),
        )
