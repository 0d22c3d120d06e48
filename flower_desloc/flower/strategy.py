"""DesLoc: a Flower strategy with a clock for every stream.

Algorithm 1 of "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
Models" (Iacob et al.), with the average taken after the step. One round is one window: ask every
client for its local steps, average what is due.
"""

import math
import secrets
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from typing import cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_desloc.core.averaging import Drift, Mean, Stream
from flower_desloc.core.compression import wire_bytes
from flower_desloc.core.formats import lossy
from flower_desloc.core.outer import Outer
from flower_desloc.core.robust import Average, Gathered
from flower_desloc.core.schedule import GRADIENTS, PARAMS, SyncSchedule, Window
from flower_desloc.core.streams import BUFFERS, check_finite, starts_at_zero
from flower_desloc.core.traffic import stream_bytes
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.content import records_of
from flower_desloc.flower.exchange import kind
from flower_desloc.flower.federation import Federation, FederationError
from flower_desloc.flower.members import Member, drawn, in_order, present
from flower_desloc.flower.metrics import (
    check_evaluation,
    client_record,
    evaluation_record,
    number,
    pooled,
)
from flower_desloc.flower.observer import (
    ClientRecord,
    EventKind,
    Observer,
    Plan,
    Traffic,
    WindowRecord,
)
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import (
    STATE_LOST,
    STATE_NEW,
    WindowReply,
    WindowRequest,
    from_record,
    plain,
    to_record,
)
from flower_desloc.flower.server_state import Globals
from flower_desloc.flower.together import add_all, enough

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_TRAIN, _EVALUATE = "train", "evaluate"


@dataclass
class _Tally:
    """What is told of one window once it is over."""

    clients: dict[str, ClientRecord] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    drift: dict[str, Drift] = field(default_factory=dict)
    averaging: float = 0.0
    evaluation: float = 0.0


class DesLoc(Strategy):
    """Average every stream on a clock of its own.

    Parameters
    ----------
    schedule : SyncSchedule
        Period of every stream.
    num_steps : int
        Local steps of every client, the paper's T.
    policy : Policy, optional
        Who takes part, and what happens when somebody does not.
    eval_every : int (default: 0)
        Evaluate at the first average of params at or after each multiple of so many steps, and
        always before and after training; 0: only then.
    outer : Outer, optional
        The server's own optimizer: of the averaged parameters (DiLoCo), or, with a schedule of
        gradients, the only one there is (data parallelism).
    states : Mapping[str, Stream], optional
        Tensors like those of the optimizer's streams, which replies are checked against; meta
        tensors will do, but for ``buffers``, which begin with what is given here. Without it the
        first usable reply sets the names and shapes.
    metrics : Callable, optional
        Metrics from totals added over clients, for federated evaluation. Without it the clients'
        metrics are averaged by their number of examples.
    evaluate_clients : bool (default: True)
        Whether the clients evaluate the averaged parameters on their own held-out data.
    formats : Mapping[str, str], optional
        How a stream travels that is not sent as it is: ``bf16``, ``int8`` or ``int4``
        (:mod:`flower_desloc.core.compression`); of optimizer states, ``states`` must have them.
    run_key : str, optional
        Names the run for the clients' own files. Drawn at random: two runs share nothing.
    seed : int (default: 0)
        Draws the clients of a window where the policy's ``fraction_train`` is below 1.
    checkpoints : Checkpoints, optional
        Where to write what it takes to go on.
    resume : Checkpoint, optional
        Go on from there, under its ``run_key``. The clients go back to what they held then, and
        the parameters :meth:`start` is given only tell names and shapes.

    """

    def __init__(
        self,
        schedule: SyncSchedule,
        num_steps: int,
        *,
        policy: Policy | None = None,
        eval_every: int = 0,
        outer: Outer | None = None,
        states: Mapping[str, Stream] | None = None,
        metrics: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None,
        evaluate_clients: bool = True,
        formats: Mapping[str, str] | None = None,
        run_key: str | None = None,
        seed: int = 0,
        checkpoints: Checkpoints | None = None,
        resume: Checkpoint | None = None,
    ) -> None:
        self.schedule = schedule
        self.num_steps = num_steps
        self.policy = policy or Policy()
        self.eval_every = eval_every
        self.metrics = metrics
        self.evaluate_clients = evaluate_clients
        self.run_key = run_key or secrets.token_hex(8)
        self.seed = seed
        self.outer = outer
        self._averages_gradients = GRADIENTS in schedule.periods
        if self._averages_gradients and outer is None:
            raise ValueError(f"a schedule of {GRADIENTS!r} needs outer=..., to take the steps")
        names = [PARAMS] if self._averages_gradients else schedule.periods
        self.globals = Globals(
            versions=dict.fromkeys(names, 0),
            formats=lossy(formats or {}),
            like={name: _meta(stream) for name, stream in (states or {}).items()},
        )
        if unknown := self.globals.formats.keys() - {PARAMS, *self.globals.like}:
            raise ValueError(f"formats of {sorted(unknown)} need states={{...}} that have them")
        if BUFFERS in schedule.periods and BUFFERS not in self.globals.like:
            raise ValueError(f"a schedule with {BUFFERS!r} needs states={{{BUFFERS!r}: ...}}")
        for name, stream in (states or {}).items():
            if not starts_at_zero(name):
                self.globals.averages[name] = to_record(stream)
        self._checkpoints, self._resume = checkpoints, resume
        self._window = Window(0, 0, frozenset())
        self._evaluated = 0
        self._tally = _Tally()
        self._federation: Federation

    def summary(self) -> None:
        """Log what this strategy will do."""
        clocks = ", ".join(f"{name} {period}" for name, period in self.schedule.periods.items())
        mode = "periods" if self.schedule.coin_seed is None else "mean periods, by coins"
        log(INFO, "DES-LOC, %d local steps; %s: %s", self.num_steps, mode, clocks)
        log(INFO, "the clients keep their state of this run under %s", self.run_key)

    def start(  # type: ignore[override]  # Flower's carries one set of arrays, on one clock
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        observer: Observer | None = None,
    ) -> Result:
        """Train to the end; return the averaged parameters and the metrics by window.

        Parameters
        ----------
        grid : Grid
            The link to the clients.
        initial_arrays : ArrayRecord
            The parameters to begin with, under the names that ``named_parameters()`` gives.
        train_config : ConfigRecord, optional
            The app's own settings, sent with every request.
        evaluate_config : ConfigRecord, optional
            The same for evaluation; ``train_config`` unless given.
        evaluate_fn : Callable, optional
            Central evaluation: called with the window's number and the averaged parameters. A
            metric named ``part/metric`` is that of a part of the data.
        observer : Observer, optional
            Told of every window.

        Raises
        ------
        FederationError
            When a client fails and the policy is to stop, or when the quorum is not reached.

        """
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or train_config
        if PARAMS in self.globals.averages:
            raise ValueError("a DesLoc runs once; construct another one for another run")
        result = Result()
        self.summary()
        self.globals.like[PARAMS] = _meta(from_record(initial_arrays))
        if self._averages_gradients:
            self.globals.like[GRADIENTS] = self.globals.like[PARAMS]
        self.globals.averages[PARAMS] = initial_arrays
        del initial_arrays  # or they would live as long as the run
        if self._resume is not None:
            self._go_back(self._resume)
            if self._checkpoints:  # or who goes on from the last would meet clients of this course
                self._checkpoints.forget_after(self._resume.step)
        if self.outer is not None:
            self.outer.begin(self.globals.average(PARAMS))
            self.outer.restore(self._resume.outer if self._resume else {})
        self._federation = Federation(grid, self.policy, self.run_key)
        self._federation.checkpoint = self._resume.step if self._resume else -1
        self._federation.wait_for_quorum()
        members = in_order(self._federation.welcome(plain(train_config), self.globals.step))
        windows = list(self.schedule.windows(self.num_steps))
        if observer is not None:
            about = {member.name: member.about for member in members}
            observer.started(
                Plan(
                    num_steps=self.num_steps,
                    num_windows=len(windows),
                    stream_bytes=stream_bytes(self.globals.like),
                    wire_bytes=wire_bytes(self.globals.like, self.globals.formats),
                    clients=about,
                )
            )
        if self._resume is not None:
            self._tell_of_lost_states(self._resume.step)
        before = Window(0, 0, frozenset())
        sent = Traffic()  # the greetings are round 0's
        done = self._resume.round + 1 if self._resume else 0
        for server_round, self._window in list(enumerate([before, *windows]))[done:]:
            began = time.perf_counter()
            self._tally = _Tally()
            if server_round > 0:
                for member in self._federation.welcome(plain(train_config), self._window.start):
                    if observer is not None:
                        observer.joined(member.name, member.about)
                result.train_metrics_clientapp[server_round] = self._train(
                    grid, server_round, train_config
                )
            if server_round == 0 or self._evaluates():
                self._evaluate(grid, server_round, evaluate_config, evaluate_fn, result)
            if observer is not None:
                traffic, sent = self._federation.traffic - sent, self._federation.traffic
                observer.window(self._record(server_round, result, traffic, began))
            last = server_round == len(windows)
            if self._checkpoints and self._checkpoints.falls_due(server_round, last=last):
                self._checkpoints.write(self._checkpoint(server_round))
                self._federation.checkpoint = self._window.stop
        result.arrays = to_record(from_record(self.globals.averages[PARAMS]))
        self._federation.farewell()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients drawn for the current window; each is sent the streams it lacks."""
        del arrays, grid  # the federation has more than parameters: self.globals
        step = self._window.start
        members = drawn(self._present(step), self.policy, step, self.seed)
        return [self._request(member, _TRAIN, server_round, config) for member in members]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the due streams over the usable replies, a few replies at a time.

        Returns the parameters if they were due, and the metrics. Below the quorum nothing is
        averaged, and there are no metrics.
        """
        del server_round
        due = self._window.due
        mean = self._mean(due)
        clients = self._tally.clients
        added: list[Member] = []
        members: list[Member] = []
        waiting: list[WindowReply] = []
        for message in replies:
            began = time.perf_counter()
            reply = self._usable(message, due)
            if reply is not None:
                members.append(self._federation.member(message))
                waiting.append(reply)
            if enough(waiting, mean):
                added += self._add(mean, members, waiting)
                members, waiting = [], []
            self._tally.averaging += time.perf_counter() - began
            del message, reply  # or they would live on beside the next
        began = time.perf_counter()
        added += self._add(mean, members, waiting)
        self._tally.averaging += time.perf_counter() - began
        del waiting
        self._leave_out_outliers(mean, added)
        if mean.count < self.policy.min_clients:
            return None, None  # and who replied goes back to what it held before
        if due != {GRADIENTS}:  # of which nothing is kept
            for member in added:
                member.held = dict(self.globals.versions)
        began = time.perf_counter()
        averages = mean.result()
        self._tally.drift = mean.drift(averages)
        count = mean.count
        del mean  # a stream's tensors are let go one by one when it is published
        for name, stream in averages.items():
            if not math.isfinite(self._tally.drift[name].norm):
                self._require_finite(name, stream)
        self._step_outer(averages)
        averaged = list(averages)
        for name in averaged:
            self.globals.like.setdefault(name, _meta(averages[name]))
            self.globals.publish(name, averages.pop(name), self._window.stop)
        if self.outer is not None and PARAMS in averaged and PARAMS in self.globals.formats:
            self.outer.go_on_from(self.globals.average(PARAMS))
        if PARAMS in averaged:
            self.globals.versions |= dict.fromkeys(self.schedule.resets, self._window.stop)
        self.globals.step = self._window.stop
        self._tally.averaging += time.perf_counter() - began
        metrics = MetricRecord(
            {
                "num-examples": sum(client.num_examples for client in clients.values()),
                "train-loss": sum(client.train_loss for client in clients.values()) / count,
            }
        )
        return self.globals.averages[PARAMS] if PARAMS in averaged else None, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client online to evaluate the averaged parameters, which it then holds."""
        del arrays, grid  # as in configure_train
        members = self._present(self._window.stop) if self.evaluate_clients else []
        return [self._request(member, _EVALUATE, server_round, config) for member in members]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of all clients together, and each one's as ``client/metric``."""
        del server_round
        usable: dict[str, WindowReply] = {}
        for message in replies:
            reply = self._usable(message, frozenset())
            if reply is None:
                continue
            member = self._federation.member(message)
            for name in _model_streams(self.globals.versions):
                member.held[name] = self.globals.versions[name]
            usable[member.name] = reply
        return pooled(usable, self.metrics)

    def _train(self, grid: Grid, server_round: int, config: ConfigRecord) -> MetricRecord:
        """Run one window, again if need be, until the quorum has been averaged."""
        for attempt in range(1 + self.policy.repeats):
            if attempt > 0:  # who was away may be back, at another node
                self._federation.wait_for_quorum()
                list(self._federation.welcome(plain(config), self._window.start))
            requests = self.configure_train(
                server_round, self.globals.averages[PARAMS], config, grid
            )
            replies = self._replies(_TRAIN, server_round, requests, config)
            _, metrics = self.aggregate_train(server_round, replies)
            if metrics is not None:
                return metrics
            log(WARNING, "%s has too few usable replies: %s", self._where(), self._tally.left_out)
            self._federation.note("repeated", "", f"{len(self._tally.clients)} usable replies")
            self._tally.clients.clear()
        raise FederationError(
            f"{self._where()} stayed below federation.min_clients={self.policy.min_clients} "
            f"through federation.repeats={self.policy.repeats} repeats; "
            f"left out: {self._tally.left_out}"
        )

    def _checkpoint(self, server_round: int) -> Checkpoint:
        return Checkpoint(
            run_key=self.run_key,
            round=server_round,
            step=self._window.stop,
            evaluated=self._evaluated,
            versions=self.globals.versions,
            former=self.globals.former,
            averages=self.globals.to_checkpoint(),
            outer=self.outer.state if self.outer else {},
        )

    def _go_back(self, to: Checkpoint) -> None:
        """Take over what a checkpoint holds; raises ``ValueError`` for one of another model."""
        self.globals.go_back(to.step, to.versions, to.former, to.averages)
        self._evaluated = to.evaluated
        self.run_key = to.run_key
        log(INFO, "going on after step %d, with the clients' state under %s", to.step, to.run_key)

    def _tell_of_lost_states(self, step: int) -> None:
        """Tell of the clients that hold nothing of a run that is gone on with after ``step``."""
        averaged = all(version == step for version in self.globals.versions.values())
        if self._averages_gradients or (averaged and not self.globals.formats):
            return  # there was nothing to hold that the server does not have
        for member in self._present(step):
            if not member.held:
                what = "it holds nothing of this run any more, and begins anew"
                log(WARNING, "%s: %s", member.name, what)
                self._federation.note("state lost", member.name, what)

    def _present(self, step: int) -> list[Member]:
        return present(self._federation.online(), self.policy, step)

    def _step_outer(self, averages: dict[str, dict[str, torch.Tensor]]) -> None:
        """Let the server's own optimizer make the new parameters of what was averaged."""
        if self.outer is None:
            return
        if (gradients := averages.pop(GRADIENTS, None)) is not None:
            averages[PARAMS] = self.outer.step(gradients, self._window.start)
        elif (mean := averages.get(PARAMS)) is not None:
            averages[PARAMS] = self.outer.towards(mean, self._window.start)
        else:
            return
        self._require_finite(PARAMS, averages[PARAMS])

    def _replies(
        self,
        message_type: str,
        server_round: int,
        requests: Iterable[Message],
        config: ConfigRecord,
    ) -> Iterator[Message]:
        """Yield the replies; a client that has lost its state is asked again, with all of it."""
        for reply in self._federation.ask(requests):
            if not _has_lost_state(reply):
                yield reply
            else:
                member = self._federation.member(reply)
                log(INFO, "%s has lost its state and is sent everything", member.name)
                self._federation.note("state lost", member.name, "it is sent everything")
                member.held.clear()
                # At once, not at the end: sums have one order.
                yield from self._federation.ask(
                    [self._request(member, message_type, server_round, config)]
                )
            del reply  # or it would live on beside the next

    def _request(
        self, member: Member, message_type: str, server_round: int, config: ConfigRecord
    ) -> Message:
        evaluates = message_type == _EVALUATE
        versions = self.globals.versions
        request = WindowRequest(
            run_key=self.run_key,
            attempt=self._federation.attempt,
            checkpoint=self._federation.checkpoint,
            start=self._window.stop if evaluates else self._window.start,
            stop=self._window.stop,
            due=frozenset() if evaluates else self._window.due,
            versions=versions,
            resets=self.schedule.resets,
            formats=self.globals.formats,
            former=self.globals.former,
            config=plain(config),
        )
        # An evaluation follows an average of params: everybody lacks what a model is made of.
        resets = self.schedule.resets
        names = _model_streams(versions) if evaluates else member.lacks(versions, resets)
        averages = {}
        for name in names:
            averages[name], differs = self.globals.record(name, member.held.get(name))
            if differs:
                request = replace(request, differences=request.differences | {name})
        return self._federation.request(member, message_type, server_round, request, averages)

    def _usable(self, message: Message, due: frozenset[str]) -> WindowReply | None:
        """Return the reply if it can be averaged; else leave its client out, saying why."""
        try:
            if message.has_error():
                raise ValueError(message.error.reason)
            reply = WindowReply.from_content(message.content)
            if reply.streams.keys() == due:  # or the check says so
                reply = replace(reply, streams=self.globals.decoded(reply.streams))
            reply.check(self._window, due, self.globals.like)
            if not due:
                check_evaluation(reply, self.metrics)
        except ValueError as error:
            # As a string: an error that is kept keeps what was there when it was raised.
            reason = str(error) if due else f"evaluation: {error}"
            self._leave_out(self._federation.member(message), reason, kind(message))
            return None
        return reply

    def _mean(self, due: frozenset[str]) -> Mean | Gathered:
        """Return what averages the window's replies."""
        average = self.globals.average
        last = {name: average(name) for name in due if name in self.globals.averages}
        policy = self.policy
        if policy.average == "mean" and policy.norm_bound is None:
            return Mean(last)
        return Gathered(last, cast(Average, policy.average), policy.trim)

    def _leave_out_outliers(self, mean: Mean | Gathered, added: list[Member]) -> None:
        """Take clients whose updates are too long for the policy out again, saying so."""
        if not isinstance(mean, Gathered) or (bound := self.policy.norm_bound) is None:
            return
        outliers = mean.outliers(bound)
        mean.drop(outliers)
        for index, why in outliers.items():
            del self._tally.clients[added[index].name]
            reason = f"{why}; federation.norm_bound={bound:g}"
            self._leave_out(added[index], reason, "outlier")

    def _add(
        self, mean: Mean | Gathered, members: list[Member], replies: list[WindowReply]
    ) -> list[Member]:
        """Add the members' replies to the mean; return whose were added.

        Leave the others out, saying why.
        """
        by_examples = self.policy.weighting == "examples"
        weights = [number(r.metrics["num-examples"]) if by_examples else 1.0 for r in replies]
        added = []
        reasons = add_all(mean, replies, weights)
        for member, reply, reason in zip(members, replies, reasons, strict=True):
            if reason is not None:
                self._leave_out(member, reason)
                continue
            added.append(member)
            self._tally.clients[member.name] = client_record(reply)
            self._tally.left_out.pop(member.name, None)  # of an earlier repeat
            if member.held and STATE_NEW in reply.metrics and self._window.due != {GRADIENTS}:
                self._federation.note("state lost", member.name, "it began anew")
        return added

    def _leave_out(self, member: Member, reason: str, kind: EventKind = "refused") -> None:
        self._tally.left_out[member.name] = reason
        self._federation.note(kind, member.name, reason)
        self._federation.fail(f"{member.name} is left out of {self._where()}: {reason}")

    def _evaluates(self) -> bool:
        """Return whether the window just averaged is followed by an evaluation."""
        if not self._window.due & {PARAMS, GRADIENTS}:
            return False
        every, stop = self.eval_every, self._window.stop
        return stop == self.num_steps or (every > 0 and stop // every > self._evaluated // every)

    def _evaluate(
        self,
        grid: Grid,
        server_round: int,
        config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        result: Result,
    ) -> None:
        began = time.perf_counter()
        self._evaluated = self._window.stop
        params = self.globals.averages[PARAMS]
        requests = self.configure_evaluate(server_round, params, config, grid)
        replies = self._replies(_EVALUATE, server_round, requests, config)
        federated = self.aggregate_evaluate(server_round, replies)
        if federated is not None:
            result.evaluate_metrics_clientapp[server_round] = federated
        if evaluate_fn is not None:
            # A copy, of bytes: what is done with it is the app's own affair.
            central = evaluate_fn(server_round, to_record(from_record(params)))
            if central is not None:
                result.evaluate_metrics_serverapp[server_round] = central
        self._tally.evaluation = time.perf_counter() - began

    def _record(
        self, server_round: int, result: Result, traffic: Traffic, began: float
    ) -> WindowRecord:
        tally = self._tally
        metrics = result.train_metrics_clientapp.get(server_round)
        slowest = max((client.seconds for client in tally.clients.values()), default=0.0)
        return WindowRecord(
            round=server_round,
            start=self._window.start,
            step=self._window.stop,
            streams=[name for name in self.schedule.periods if name in self._window.due],
            train_loss=None if metrics is None else number(metrics["train-loss"]),
            clients=tally.clients,
            left_out=tally.left_out,
            traffic=traffic,
            drift=tally.drift,
            seconds={
                "total": time.perf_counter() - began,
                "clients": slowest,
                "averaging": tally.averaging,
                "evaluation": tally.evaluation,
            },
            central=evaluation_record(result.evaluate_metrics_serverapp.get(server_round)),
            federated=evaluation_record(result.evaluate_metrics_clientapp.get(server_round)),
            events=self._federation.news(),
        )

    def _require_finite(self, name: str, stream: Stream) -> None:
        try:
            check_finite(name, stream)
        except ValueError as error:
            raise FederationError(
                f"the average after {self._where()}: {error}, though every client's were; the "
                "training diverges, so lower optimizer.lr"
            ) from error

    def _where(self) -> str:
        if self._window.stop == 0:
            return "the evaluation before training"
        return f"the window of steps {self._window.start + 1} to {self._window.stop}"


def _has_lost_state(reply: Message) -> bool:
    return reply.has_content() and any(
        STATE_LOST in record for record in records_of(MetricRecord, reply.content).values()
    )


def _model_streams(names: Container[str]) -> list[str]:
    return [name for name in (PARAMS, BUFFERS) if name in names]


def _meta(stream: Stream) -> dict[str, torch.Tensor]:
    return {key: tensor.to("meta") for key, tensor in stream.items()}
