"""DesLoc: a Flower strategy that averages every stream on its own period.

Algorithm 1 of DES-LOC (Iacob et al.), with the average taken after the step. One round is one
window: ask the clients for their local steps, exchange messages, average what is due, record.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_desloc.core.averaging import Averager
from flower_desloc.core.exits import exits_as_errors
from flower_desloc.core.kinds import Kinds
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.robust import NormBound, averager
from flower_desloc.core.schedule import PARAMS, SyncSchedule, Window
from flower_desloc.core.types import FromTotals, Stream, Streams
from flower_desloc.flower import evaluation
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.failures import reason_of
from flower_desloc.flower.fields import Exclusion
from flower_desloc.flower.flight.at_server import Carrier, carrier
from flower_desloc.flower.log_lines import log_schedule
from flower_desloc.flower.members import Member
from flower_desloc.flower.metrics import trained
from flower_desloc.flower.observer import Observer
from flower_desloc.flower.opening import open_run
from flower_desloc.flower.options import check_options
from flower_desloc.flower.paces import Paces
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.recovery import require_window
from flower_desloc.flower.replies import Contribution, WindowReply
from flower_desloc.flower.requests import Requests
from flower_desloc.flower.rounds import BEFORE_TRAINING, RoundHook, RoundLoop
from flower_desloc.flower.server_state import ServerState
from flower_desloc.flower.weighting import Weighting

Usable = tuple[Member, Contribution, float]  # and its weight
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


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
    templates : Mapping[str, Stream], optional
        The streams of a new worker: ``take(model, optimizer, names)`` after ``prime(optimizer)``,
        also of meta tensors. Replies must have their names, shapes and types; by default those of
        the first usable reply. ``buffers`` need their initial values if ``start`` has none.
    metrics : Callable, optional
        Metrics from totals added over clients; by default theirs are averaged by their examples.
    evaluate_clients : bool (default: True)
        Whether the clients evaluate the averaged model on their own data (``Worker.evaluate``).
    compression : Mapping[str, str], optional
        ``bf16``, ``int8``, ``int4`` or ``int2`` by stream, in messages; of states with templates.
    kinds : Mapping[str, Kind], optional
        What the optimizer's states are (``kinds_of(optimizer)``), unless PyTorch's names tell.
        Second moments are coded, checked and merged as such.
    sync_delay : int (default: 0)
        Local steps that clients take before they merge an average, while the streams travel.
        Their optimizers must state their states' decays (``State.decay``).
    sync_bound : bool (default: True)
        Whether clients bound Adam's first moment by their second after an average of either
        (``flower_desloc.optim.bounds``). False is the paper's letter, under which a run can spike.
    run_key : str, optional
        Names the run in the clients' own files; random by default, so that runs share nothing.
    seed : int (default: 0)
        Draws the clients of a window when the policy's ``fraction_train`` is below 1.
    checkpoints : Checkpoints, optional
        Where to write checkpoints.
    resume : Checkpoint, optional
        Resume from this checkpoint (``Checkpoint.read(last_checkpoint(folder))``) under its
        ``run_key``; the parameters given to ``start`` then only set names and shapes.
    code : Mapping[str, str], optional
        Digests of the app's own source (``fingerprint.code_of``), which every client must have.

    Raises
    ------
    ValueError
        For options that cannot be used together, and a checkpoint of another schedule.

    """

    title = "DES-LOC"
    excludes: tuple[Exclusion, ...] = ()  # options
    has_bound = True  # whether policy.norm_bound is for the replies to this strategy
    must_average = PARAMS  # a stream that the schedule must have
    sent_always: Collection[str] = ()  # sent in every window, also to clients that have them

    def __init__(
        self,
        schedule: SyncSchedule,
        num_steps: int,
        *,
        policy: Policy | None = None,
        eval_every: int = 0,
        outer: OuterOptimizer | None = None,
        templates: Mapping[str, Stream] | None = None,
        metrics: FromTotals | None = None,
        evaluate_clients: bool = True,
        compression: Mapping[str, str] | None = None,
        kinds: Kinds | None = None,
        sync_delay: int = 0,
        sync_bound: bool = True,
        run_key: str | None = None,
        seed: int = 0,
        checkpoints: Checkpoints | None = None,
        resume: Checkpoint | None = None,
        code: Mapping[str, str] | None = None,
    ) -> None:
        self.schedule, self.num_steps, self.policy = schedule, num_steps, policy or Policy()
        self.sync_delay, self.sync_bound = sync_delay, sync_bound
        check_options(self, eval_every, compression, outer, resume)
        self.eval_every, self.evaluate_clients, self.metrics = eval_every, evaluate_clients, metrics
        self.run_key = resume.run_key if resume else run_key or secrets.token_hex(8)
        self.seed, self.code, self.checkpoints, self.resume = seed, code or {}, checkpoints, resume
        self.windows: Sequence[Window] = [BEFORE_TRAINING, *schedule.windows(num_steps)]
        require_window(resume, self.windows, schedule)
        self.state = ServerState.of(schedule, templates, compression, kinds, outer)
        self.paces = Paces(self.policy, resume.paces if resume else {})
        self.requests, self.weighting = Requests(self), Weighting(self)
        self.loop: RoundLoop  # from the opening of the run
        self.carrier: Carrier | None = None

    def summary(self) -> None:
        """Log what this strategy will do."""
        log_schedule(self.title, self.schedule, self.num_steps, self.run_key)

    def start(  # type: ignore[override]  # Flower's carries one set of arrays, averaged every round
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        observer: Observer | None = None,
        hooks: Sequence[RoundHook] = (),
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
            Looks at the start, at clients that join and at every window; by default ``LogLines``.
        hooks : Sequence[RoundHook], optional
            Called after the observer; they may change the run, or end it by an exception.

        Returns
        -------
        Result
            The averaged model, with averaged buffers; the metrics of the windows of this start.

        Raises
        ------
        FederationError
            When a client fails and the policy is to stop, or when the quorum is not reached.

        """
        train_config, result = train_config or ConfigRecord(), Result()
        self.summary()
        with exits_as_errors(), carrier(self, grid) as self.carrier:
            open_run(self, grid, initial_arrays, train_config, observer, hooks)
            del initial_arrays  # it would be kept for the whole run
            first = self.resume.round + 1 if self.resume else 0
            for number, window in enumerate(self.windows[first:], first):
                if self.loop.is_over:
                    break
                self.loop.begin(number, window)
                if number > 0:
                    result.train_metrics_clientapp[number] = self._train(train_config, grid)
                if evaluation.is_due(window, self.state, self.eval_every, self.num_steps):
                    self._evaluate(evaluate_config or train_config, grid, evaluate_fn, result)
                self.loop.end([s for s in self.schedule.periods if s in window.due], result)
            result.arrays = self.state.model()
            self.loop.farewell()
        return result

    # Who is asked for what

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients drawn for this window; each is sent the streams it lacks."""
        del server_round, arrays, grid  # the loop knows the round, the state all streams
        now = self.loop.round
        now.asked = self.loop.members.drawn(now.window.start, now.failures)
        return self.requests.train(now.asked, config)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client online to evaluate the averaged parameters, which it then holds."""
        del server_round, arrays, grid  # as in configure_train
        members = self.loop.members.present(self.loop.round.window.stop)
        return self.requests.evaluate(members if self.evaluate_clients else [], config)

    # What is averaged

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the due streams over the usable replies, one reply at a time.

        Returns the parameters if they were due, and the metrics. Below the quorum nothing is
        averaged, and there are no metrics.
        """
        del server_round
        now, state = self.loop.round, self.state
        last = state.last_averages(now.window.due)
        mean, bound = self._averager(last), self._norm_bound()
        added: list[Member] = []
        for message in replies:
            with self.loop.timed("averaging"), self.loop.leaving_out(message) as member:
                added += self._add(mean, bound.judge(self._usable(member, message, last)))
            del message  # free its memory before the next one is received
        with self.loop.timed("averaging"):
            added += self._add(mean, bound.rest())
            if mean.count < self.policy.min_clients:
                return None, None  # the clients will go back to what they held before
            for member in added:
                member.versions = dict(state.versions)
            averages = mean.result()
            state.lengths |= bound.medians()
            now.drift = mean.drift(averages)
            del mean, bound, last  # publish frees a stream's memory once it is encoded
            state.publish(averages, now.window, now.drift, self.schedule.resets)
        has_params = state.versions[PARAMS] == now.window.stop
        return state.averages[PARAMS] if has_params else None, trained(now.clients)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of all clients together, and each one's as ``client/metric``."""
        del server_round
        return evaluation.federated(replies, self.loop, self.state, self.metrics, self.weighting)

    def _averager(self, last: Streams) -> Averager:
        """Return what averages the replies of a window; ``last`` are the averages before it."""
        return averager(self.policy.average, last, trim=self.policy.trim)

    def _norm_bound(self) -> NormBound[Usable]:
        """Return what finds the replies with a much longer update than the others'."""
        is_used = self.has_bound and len(self.loop.round.asked) > 1
        bound = self.policy.bound_of_norms if is_used else None
        return NormBound(bound, lambda it: it[1].lengths, self.state.lengths)

    def _usable(self, member: Member, message: Message, last: Streams) -> Usable:
        """Read a reply; raises ``ValueError`` saying why it cannot be used."""
        reply = Contribution.of(
            WindowReply.of(message),
            self.loop.round.window,
            self.state.templates,
            self.state.decoded,
            kinds=self.state.kinds,
            partial_steps=self.policy.min_steps < 1,
        )
        if self.has_bound or PARAMS in last:
            reply = reply.measured(last, self.state.kinds)
        return member, reply, self.weighting.of(member, reply)

    def _add(self, mean: Averager, judged: Iterable[tuple[Usable, str]]) -> list[Member]:
        """Add replies to the average; return the clients of those that are not left out."""
        added = []
        for (member, reply, weight), why in judged:
            if why:
                reason = f"{why}; federation.norm_bound={self.policy.norm_bound:g}"
                self.loop.leave_out(member, reason, "outlier")
                continue
            try:
                mean.add(reply.streams, weight, reply.shares)
            except ValueError as error:  # not the tensors of the first client, in a new stream
                self.loop.leave_out(member, reason_of(error), "refused")
                continue
            self.loop.add(member, reply, self.state.versions)
            added.append(member)
        return added

    # The parts of a round

    def _train(self, config: ConfigRecord, grid: Grid) -> MetricRecord:
        """Run one window, repeating it until the quorum has been averaged."""

        def attempt() -> MetricRecord | None:
            number = self.loop.round.number
            requests = self.configure_train(number, self.state.averages[PARAMS], config, grid)
            return self.aggregate_train(number, self.requests.ask(requests))[1]

        return self.loop.until_quorum(attempt)

    def _evaluate(
        self, config: ConfigRecord, grid: Grid, evaluate_fn: EvaluateFn | None, result: Result
    ) -> None:
        """Evaluate the averaged parameters on the clients and on the server."""
        number, params = self.loop.round.number, self.state.averages[PARAMS]
        self.state.evaluated = self.loop.round.window.stop
        with self.loop.timed("evaluation"):
            requests = self.configure_evaluate(number, params, config, grid)
            federated = self.aggregate_evaluate(number, self.requests.ask(requests))
            if federated is not None:
                result.evaluate_metrics_clientapp[number] = federated
            if evaluate_fn and (central := evaluate_fn(number, self.state.model())) is not None:
                result.evaluate_metrics_serverapp[number] = central
