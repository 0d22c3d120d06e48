"""DesLoc: a Flower strategy that averages every stream on its own period.

Algorithm 1 of "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
Models" (Iacob et al.), with the average taken after the step. One round is one window: ask the
clients for their local steps, exchange messages, average what is due, record.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from typing import cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_desloc.core.averaging import Mean, Stream, Weight
from flower_desloc.core.kinds import Kinds
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.robust import Average, Gathered, NormBound
from flower_desloc.core.schedule import PARAMS, SyncSchedule, Window
from flower_desloc.core.streams import BUFFERS, check_finite
from flower_desloc.core.traffic import stream_bytes, wire_bytes
from flower_desloc.core.unequal import fewest
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.engine import BEFORE_TRAINING, RoundEngine
from flower_desloc.flower.exchange import event_kind
from flower_desloc.flower.exits import exits_as_errors
from flower_desloc.flower.internals import log
from flower_desloc.flower.log_lines import LogLines
from flower_desloc.flower.members import Member
from flower_desloc.flower.messages import WindowReply, WindowRequest, settings_of
from flower_desloc.flower.metrics import (
    FromTotals,
    check_evaluation,
    number,
    pooled,
    trained,
    unusual,
    weight_of,
)
from flower_desloc.flower.model_names import initial_names
from flower_desloc.flower.observer import Observer, Plan, count
from flower_desloc.flower.paces import Paces
from flower_desloc.flower.policy import FederationError, Policy
from flower_desloc.flower.records import from_record, to_record
from flower_desloc.flower.recovery import Recovery
from flower_desloc.flower.server_state import ServerState

_Usable = tuple[Member, WindowReply, Weight]
_Judged = tuple[_Usable, str]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_TRAIN, _EVALUATE = "train", "evaluate"


class DesLoc(Strategy):
    """Average every stream on its own period.

    Parameters
    ----------
    schedule : SyncSchedule
        Period of every stream of the clients' optimizers (``flower_desloc.stream_names``).
    num_steps : int
        Local steps of every client, the paper's T.
    policy : Policy, optional
        Who takes part, and what a failed client does to the run.
    eval_every : int (default: 0)
        Evaluate at the first average of params at or after each multiple of this many steps, and
        always before and after training; 0: only then.
    outer : OuterOptimizer, optional
        The server's own optimizer of the averaged parameters (DiLoCo).
    states : Mapping[str, Stream], optional
        What a new worker's streams are, to validate replies against:
        ``take(model, optimizer, names)`` after ``prime(optimizer)``; only names, shapes and types
        matter, so ``.to("meta")`` saves memory. Without it the first usable reply sets names and
        shapes. ``buffers``, in a schedule with BatchNorm, with their initial values, if these are
        not in the arrays given to ``start``.
    metrics : Callable, optional
        Returns metrics from totals added over clients, for federated evaluation. Without it the
        clients' metrics are averaged by their number of examples.
    evaluate_clients : bool (default: True)
        Whether the clients evaluate the averaged parameters on their own held-out data
        (``Worker.evaluate``).
    formats : Mapping[str, str], optional
        Lossy format of a stream on the wire: ``bf16``, ``int8`` or ``int4``
        (``flower_desloc.core.compression``). Optimizer states in it must be in ``states``.
    kinds : Mapping[str, Kind], optional
        What the optimizer's states are, where they do not have PyTorch's names
        (``flower_desloc.kinds_of``): second moments are coded, bounded and checked as such.
    sync_delay : int (default: 0)
        Local steps that clients take before they merge an average
        (``flower_desloc.core.late``); a shorter window merges at its end. Clients that outlive a
        message take them while the streams travel. The clients' optimizers must state their states'
        decays (``flower_desloc.State``).
    sync_bound : bool (default: True)
        Whether clients bound Adam's first moment by their second after an average of either
        (``flower_desloc.optim.bounds``); ADOPT and SGD have no such bound. False is the paper's
        letter, under which a run can spike.
    run_key : str, optional
        Names the run in the clients' own files; random by default, so that runs share nothing.
    seed : int (default: 0)
        Draws the clients of a window when the policy's ``fraction_train`` is below 1.
    checkpoints : Checkpoints, optional
        Where to write checkpoints.
    resume : Checkpoint, optional
        Resume from this checkpoint (``Checkpoint.read(last_checkpoint(folder))``), under its
        ``run_key``. The clients go back to what they held then; the parameters given to ``start``
        only set names and shapes.
    code : Mapping[str, str], optional
        Digests of the app's own source files (``flower_desloc.flower.fingerprint.code_of``). A
        client where one of them differs cannot take part.

    Raises
    ------
    ValueError
        For options that cannot be used together, and for a checkpoint that is not of the end of
        one of this schedule's windows.

    """

    title = "DES-LOC"

    def __init__(
        self,
        schedule: SyncSchedule,
        num_steps: int,
        *,
        policy: Policy | None = None,
        eval_every: int = 0,
        outer: OuterOptimizer | None = None,
        states: Mapping[str, Stream] | None = None,
        metrics: FromTotals | None = None,
        evaluate_clients: bool = True,
        formats: Mapping[str, str] | None = None,
        kinds: Kinds | None = None,
        sync_delay: int = 0,
        sync_bound: bool = True,
        run_key: str | None = None,
        seed: int = 0,
        checkpoints: Checkpoints | None = None,
        resume: Checkpoint | None = None,
        code: Mapping[str, str] | None = None,
    ) -> None:
        if num_steps < 1 or eval_every < 0:
            raise ValueError(
                f"num_steps={num_steps}, eval_every={eval_every}: must be at least 1 and 0"
            )
        if sync_delay < 0 or (sync_delay and schedule.resets):
            raise ValueError(
                f"sync_delay={sync_delay}: must be at least 0, and 0 with states that are reset"
            )
        self.schedule = schedule
        self.sync_delay = sync_delay
        self.sync_bound = sync_bound
        self.num_steps = num_steps
        self.policy = policy or Policy()
        self.eval_every = eval_every
        self.metrics = metrics
        self.evaluate_clients = evaluate_clients
        self.run_key = resume.run_key if resume else run_key or secrets.token_hex(8)
        self.seed = seed
        self.state = ServerState.of(
            self._streams_held(schedule), states or {}, formats or {}, kinds or {}, outer
        )
        self.checkpoints, self.resume = checkpoints, resume
        self.code = code or {}
        self.engine: RoundEngine
        self._paces = Paces(self.policy, resume.paces if resume else {})
        self._asked: list[Member] = []  # for the window's local steps
        self._capped: set[str] = set()  # clients with more examples than count
        self._given: dict[str, str] = {}  # the names in the app's arrays
        self._windows = [BEFORE_TRAINING, *schedule.windows(num_steps)]
        if resume is not None:
            self._require_window(resume)

    def summary(self) -> None:
        """Log what this strategy will do."""
        periods = ", ".join(f"{name} {period}" for name, period in self.schedule.periods.items())
        mode = "periods" if self.schedule.coin_seed is None else "mean periods, drawn by coins"
        if phases := self.schedule.phases:
            periods += "; phases: " + ", ".join(f"{name} {p}" for name, p in phases.items())
        if once := self.schedule.once_at:
            periods += f"; all once after {', '.join(map(str, sorted(once)))}"
        log(INFO, "%s, %d local steps; %s: %s", self.title, self.num_steps, mode, periods)
        log(INFO, "the clients keep their state of this run under %s", self.run_key)

    @exits_as_errors()
    def start(  # type: ignore[override]  # Flower's carries one set of arrays, averaged every round
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        observer: Observer | None = None,
    ) -> Result:
        """Train to the end; return the averaged model and the metrics of every window.

        Parameters
        ----------
        grid : Grid
            Flower's connection to the clients.
        initial_arrays : ArrayRecord
            The initial model: ``to_record(model.state_dict())``, or its trained parameters alone.
            What is frozen, tied to another name or an integer is left out.
        train_config : ConfigRecord, optional
            The app's own settings, sent with every request.
        evaluate_config : ConfigRecord, optional
            The same for evaluation; ``train_config`` by default.
        evaluate_fn : Callable, optional
            Central evaluation: called with the window's number and the averaged model. A metric
            named ``part/metric`` is that of a part of the data.
        observer : Observer, optional
            Told of the start, the clients that join and every window; by default ``LogLines``,
            which writes a line of each into Flower's log.

        Returns
        -------
        Result
            The averaged model, which is params and, if the schedule has them, buffers; and the
            metrics of the windows of this start.

        Raises
        ------
        FederationError
            When a client fails and the policy is to stop, or when the quorum is not reached.

        """
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or train_config
        result = Result()
        self.summary()
        if observer is not None and not isinstance(observer, Observer):
            raise TypeError(f"observer={observer!r}: must be a flower_desloc.Observer")
        self._begin(grid, initial_arrays, train_config, observer)
        del initial_arrays  # it would be kept for the whole run
        first = self.resume.round + 1 if self.resume else 0
        for server_round, window in enumerate(self._windows[first:], first):
            self.engine.begin(server_round, window)
            if server_round > 0:
                metrics = self._train(server_round, train_config, grid)
                result.train_metrics_clientapp[server_round] = metrics
            if server_round == 0 or self._evaluation_is_due(window):
                self._evaluate(server_round, evaluate_config, grid, evaluate_fn, result)
            self.engine.end([n for n in self.schedule.periods if n in window.due], result)
        result.arrays = self._model()
        self.engine.farewell()
        return result

    # Ask

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients drawn for this window; each is sent the streams it lacks."""
        del server_round, arrays, grid  # the engine knows the round, the state all streams
        members = self._drawn()
        self._asked = members
        return [self._request(member, _TRAIN, config) for member in members]

    def _drawn(self) -> list[Member]:
        """Return the clients that train in this window."""
        now = self.engine.round
        return self.engine.members.drawn(now.window.start, now.failures)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client online to evaluate the averaged parameters, which it then holds."""
        del server_round, arrays, grid  # as in configure_train
        if not self.evaluate_clients:
            return []
        members = self.engine.members.present(self.engine.round.window.stop)
        return [self._request(member, _EVALUATE, config) for member in members]

    # Average

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the due streams over the usable replies, one reply at a time.

        Returns the parameters if they were due, and the metrics. Below the quorum nothing is
        averaged, and there are no metrics.
        """
        del server_round
        now = self.engine.round
        averager, bound = self._averager(now.window), self._norm_bound(now.window)
        added: list[Member] = []
        for message in replies:
            with self.engine.timed("averaging"):
                added += self._add(averager, self._judged(bound, message))
            del message  # free its memory before the next one is received
        with self.engine.timed("averaging"):
            added += self._add(averager, bound.rest() if bound else [])
            if averager.count < self.policy.min_clients:
                return None, None  # the clients will go back to what they held before
            for member in added:
                member.held = dict(self.state.versions)
            averages = averager.result()
            self.state.lengths |= bound.medians() if bound else {}
            now.drift = averager.drift(averages)
            del averager  # publish frees a stream's memory once it is encoded
            self._publish(averages, now.window)
        has_params = self.state.versions[PARAMS] == now.window.stop
        return self.state.averages[PARAMS] if has_params else None, trained(now.clients)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of all clients together, and each one's as ``client/metric``."""
        del server_round
        usable: dict[str, WindowReply] = {}
        members: dict[str, Member] = {}
        for message in replies:
            sender, kind = message.metadata.src_node_id, event_kind(message)
            with self.engine.leaving_out(sender, kind, "evaluation: ") as member:
                reply = self._read(message, _after(self.engine.round.window))
                check_evaluation(reply, self.metrics)
                member.held |= {name: self.state.versions[name] for name in self._model_streams()}
                usable[member.name] = reply
                members[member.name] = member
        for name, why in unusual(usable).items():
            del usable[name]
            self.engine.leave_out(members[name], f"evaluation: {why}", "outlier")
        return pooled(usable, self.metrics)

    def _judged(self, bound: NormBound[_Usable] | None, message: Message) -> list[_Judged]:
        """Read a reply; return the replies that can be decided now, each with why it is left out.

        A reply that cannot be used is left out at once.
        """
        sender, kind = message.metadata.src_node_id, event_kind(message)
        with self.engine.leaving_out(sender, kind) as member:
            window = self.engine.round.window
            reply = self._read(message, window)
            reply.check_values(self.state.kinds)
            usable = member, reply, self._weight(member, reply, window.due)
            return bound.judge(usable, reply.streams) if bound else [(usable, "")]
        return []

    def _add(self, averager: Mean | Gathered, judged: Iterable[_Judged]) -> list[Member]:
        """Add replies to the average; return the clients of those that are not left out."""
        added = []
        for (member, reply, weight), why in judged:
            if why:
                reason = f"{why}; federation.norm_bound={self.policy.norm_bound:g}"
                self.engine.leave_out(member, reason, "outlier")
                continue
            with self.engine.leaving_out(member.node_id, "refused"):
                averager.add(reply.streams, weight)
                self.engine.add(member, reply.metrics)
                added.append(member)
        return added

    def _weight(self, member: Member, reply: WindowReply, due: frozenset[str]) -> Weight:
        """Return a client's weight; with weighting by examples at most ``policy.max_share``."""
        policy, most = self.policy, math.inf
        if policy.weighting == "examples" and policy.max_share < 1:
            asked = [m for m in self._asked if m.name != member.name]
            others = sum(count(m.about.get("num-examples", "")) or 0 for m in asked)
            if others > 0:
                most = others * policy.max_share / (1 - policy.max_share)
        if (stated := number(reply.metrics["num-examples"])) > most:
            if member.name not in self._capped:
                what = f"its {stated:g} examples count as {most:g}; federation.max_share="
                what += f"{policy.max_share:g}"
                log(WARNING, "%s: %s", member.name, what)
                self.engine.note("capped", member.name, what)
            self._capped.add(member.name)
        return weight_of(reply, due, policy, most)

    def _read(self, message: Message, window: Window) -> WindowReply:
        """Decode and validate a reply; raises ``ValueError`` saying what is wrong with it."""
        if message.has_error():
            raise ValueError(message.error.reason)
        reply = WindowReply.from_content(message.content)
        if self.state.formats and reply.streams.keys() == window.due:  # if not, the check says so
            reply = replace(reply, streams=self.state.decoded(reply.streams))
        reply.check(window, self.state.like)
        return reply

    def _averager(self, window: Window) -> Mean | Gathered:
        """Return what averages the replies of a window."""
        last = self._last_averages(window)
        if self.policy.average == "mean":
            return Mean(last)
        return Gathered(last, cast(Average, self.policy.average), self.policy.trim)

    def _last_averages(self, window: Window) -> dict[str, Stream]:
        return {n: self.state.average(n) for n in window.due if n in self.state.averages}

    def _norm_bound(self, window: Window) -> NormBound[_Usable] | None:
        """Return what finds the replies with a much longer update than the others'."""
        if self.policy.norm_bound is None or len(self._asked) == 1:
            return None
        # A client of fewer steps has a shorter update.
        bound = self.policy.norm_bound / self.policy.min_steps
        return NormBound(bound, self._last_averages(window), self.state.lengths, self.state.kinds)

    def _publish(self, averages: dict[str, dict[str, torch.Tensor]], window: Window) -> None:
        for name, stream in averages.items():
            if not math.isfinite(self.engine.round.drift[name].norm):
                self._require_finite(name, stream)
        self._step_outer(averages, window)
        self.state.publish(averages, window.stop, self.schedule.resets)

    def _step_outer(self, averages: dict[str, dict[str, torch.Tensor]], window: Window) -> None:
        """Replace the average of params by the server optimizer's step towards it."""
        if self.state.outer is not None and PARAMS in averages:
            averages[PARAMS] = self.state.outer.towards(averages[PARAMS], window.start)
            self._require_finite(PARAMS, averages[PARAMS], "outer.lr")

    def _require_finite(self, name: str, stream: Stream, rate: str = "optimizer.lr") -> None:
        try:
            check_finite(name, stream)
        except ValueError as error:
            raise FederationError(
                f"the average after {self.engine.round}: {error}, though every client's were; the "
                f"training diverges, so lower {rate}"
            ) from error

    # The parts of a round

    def _train(self, server_round: int, config: ConfigRecord, grid: Grid) -> MetricRecord:
        """Run one window, repeating it until the quorum has been averaged."""

        def attempt() -> MetricRecord | None:
            params = self.state.averages[PARAMS]
            requests = self.configure_train(server_round, params, config, grid)
            replies = self._ask(requests, _TRAIN, config)
            return self.aggregate_train(server_round, replies)[1]

        return self.engine.until_quorum(attempt)

    def _evaluation_is_due(self, window: Window) -> bool:
        every, stop, last = self.eval_every, window.stop, self.state.evaluated
        is_due = stop == self.num_steps or (every > 0 and stop // every > last // every)
        return is_due and self.state.versions[PARAMS] == stop

    def _evaluate(
        self,
        server_round: int,
        config: ConfigRecord,
        grid: Grid,
        evaluate_fn: EvaluateFn | None,
        result: Result,
    ) -> None:
        """Evaluate the averaged parameters on the clients and on the server."""
        self.state.evaluated = self.engine.round.window.stop
        params = self.state.averages[PARAMS]
        with self.engine.timed("evaluation"):
            requests = self.configure_evaluate(server_round, params, config, grid)
            replies = self._ask(requests, _EVALUATE, config)
            federated = self.aggregate_evaluate(server_round, replies)
            if federated is not None:
                result.evaluate_metrics_clientapp[server_round] = federated
            if evaluate_fn is not None:
                central = evaluate_fn(server_round, self._model())
                if central is not None:
                    result.evaluate_metrics_serverapp[server_round] = central

    def _ask(
        self, requests: Iterable[Message], message_type: str, config: ConfigRecord
    ) -> Iterator[Message]:
        """Send requests and yield the replies; a client that lost its state is asked again."""

        def again(node_id: int) -> Message:
            return self._request(self.engine.without_state(node_id), message_type, config)

        return self.engine.exchange.ask(requests, again)

    def _request(self, member: Member, message_type: str, config: ConfigRecord) -> Message:
        """Return the request of this window, with the streams that the client lacks."""
        window, names = self.engine.round.window, self._lacks(member)
        if message_type == _EVALUATE:
            # It follows an average of params: every client lacks what a model is made of.
            window = _after(window)
            names = self._model_streams()
        sent = {name: self.state.to_send(name, member.held.get(name)) for name in names}
        request = WindowRequest(
            run_key=self.run_key,
            attempt=self.engine.attempt,
            checkpoint=self.engine.checkpoint,
            start=window.start,
            stop=window.stop,
            steps=self._paces.steps(member.name, [m.name for m in self._asked], window),
            before_merge=self._delay(window),
            ahead=self._steps_ahead(),
            bound=self.sync_bound,
            due=window.due,
            versions=self.state.versions,
            resets=self.schedule.resets,
            formats=self.state.formats,
            kinds=self.state.kinds,
            differences=frozenset(name for name, (_, differs) in sent.items() if differs),
            former=self.state.former,
            config=settings_of(config),
        )
        records = {name: record for name, (record, _) in sent.items()}
        return self.engine.exchange.request(
            member.node_id,
            message_type,
            request,
            records,
            server_round=self.engine.round.number,
            bundles=member.reads_bundles,
        )

    def _steps_ahead(self) -> int:
        """Return how many steps of the next window come before its averages are merged."""
        following = self._windows[self.engine.round.number + 1 :]
        return self._delay(following[0]) if following else 0

    def _delay(self, window: Window) -> int:
        """Return how many of a window's steps come before the last averages are merged."""
        return min(self.sync_delay, fewest(window.stop - window.start, self.policy.min_steps))

    def _lacks(self, member: Member) -> list[str]:
        return member.lacks(self.state.versions, self.schedule.resets)

    @staticmethod
    def _streams_held(schedule: SyncSchedule) -> Iterable[str]:
        """Return the streams that the server keeps an average of."""
        if PARAMS not in schedule.periods:
            raise ValueError("a schedule without params is for baselines.DataParallel")
        return schedule.periods

    def _model(self) -> ArrayRecord:
        """Return a copy of the averaged model, with which the app may do what it likes.

        Its tensors have the names under which the app gave the initial ones.
        """
        averages = self.state.averages
        streams = [from_record(averages[n]) for n in self._model_streams() if n in averages]
        model = {key: tensor for stream in streams for key, tensor in stream.items()}
        return to_record({self._given.get(key, key): tensor for key, tensor in model.items()})

    def _model_streams(self) -> list[str]:
        return [name for name in (PARAMS, BUFFERS) if name in self.state.versions]

    def _require_window(self, resume: Checkpoint) -> None:
        """Raise ``ValueError`` unless the checkpoint is of the end of one of the windows."""
        ends = [window.stop for window in self._windows]
        if resume.step not in ends or ends.index(resume.step) != resume.round:
            raise ValueError(
                f"the checkpoint was written after window {resume.round} and step {resume.step}; "
                f"no window of {self.schedule} over {self.num_steps} steps ends like this; "
                "resume with the schedule and steps of its run"
            )

    def _start_from(self, initial: Mapping[str, ArrayRecord]) -> None:
        self.state.begin(initial, self.resume)

    def _begin(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        config: ConfigRecord,
        observer: Observer | None,
    ) -> None:
        """Meet the clients, restore the state, and attach the observers."""
        if PARAMS in self.state.averages:
            raise ValueError("a strategy runs once; construct another one for another run")
        if self.resume is not None:  # before anything of the run is deleted
            self.state.require_like(self.resume, from_record(initial_arrays))
        self.engine = RoundEngine(
            grid,
            self.policy,
            self.run_key,
            settings_of(config),
            self.state.like,
            seed=self.seed,
            resume=self.resume,
            code=self.code,
        )
        recovery = Recovery(self.checkpoints, self.resume, self.engine, self.state, self._paces)
        self.engine.observers = [self._paces, observer or LogLines(), recovery]
        members = self.engine.open(self.resume.step if self.resume else 0)
        stated = (member.model for member in members)
        names = initial_names(list(initial_arrays), stated, self.schedule, self.state.lacks_buffers)
        self._given = {key: given for of in names.values() for key, given in of.items()}
        self._start_from(
            {
                name: ArrayRecord({key: initial_arrays[given] for key, given in of.items()})
                for name, of in names.items()
            }
        )
        plan = Plan(
            num_steps=self.num_steps,
            num_windows=len(self._windows) - 1,
            stream_bytes=stream_bytes(self.state.like),
            wire_bytes=wire_bytes(self.state.like, self.state.formats, self.state.kinds),
            clients={member.name: member.about for member in members},
        )
        for each in self.engine.observers:
            each.started(plan)


def _after(window: Window) -> Window:
    """Return the window of an evaluation after ``window``: no steps, and nothing due."""
    return Window(window.stop, window.stop, frozenset())
