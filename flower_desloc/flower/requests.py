"""The requests of a window: to each client its steps, and the streams that it lacks."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from flwr.app import ConfigRecord, Message

from flower_desloc.core.schedule import BUFFERS, PARAMS, SyncSchedule, Window
from flower_desloc.core.unequal import fewest
from flower_desloc.flower.checkpoint import Checkpoints
from flower_desloc.flower.members import Member
from flower_desloc.flower.messages import WindowRequest, settings_of
from flower_desloc.flower.paces import Paces
from flower_desloc.flower.rounds import RoundLoop
from flower_desloc.flower.server_state import ServerState


class Asks(Protocol):
    """What the requests of a run are made from: the strategy."""

    loop: RoundLoop
    state: ServerState
    schedule: SyncSchedule
    paces: Paces
    run_key: str
    windows: Sequence[Window]
    sync_delay: int
    sync_bound: bool
    sent_always: Collection[str]
    checkpoints: Checkpoints | None


class Requests:
    """Makes requests from a strategy's state, sends them, and yields the replies."""

    def __init__(self, run: Asks) -> None:
        self._run = run
        self._kind, self._config = "train", ConfigRecord()  # of the last requests

    def train(self, members: Iterable[Member], config: ConfigRecord) -> list[Message]:
        """Return the requests for the window's local steps."""
        self._kind, self._config = "train", config
        return [self._train(member) for member in members]

    def evaluate(self, members: Iterable[Member], config: ConfigRecord) -> list[Message]:
        """Return the requests to evaluate the averaged parameters after the window."""
        self._kind, self._config = "evaluate", config
        return [self._evaluate(member) for member in members]

    def ask(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Send requests and yield the replies; a client that lost its state is asked again."""
        return self._run.loop.exchange.ask(messages, self._again)

    def _again(self, node_id: int, has_lost_state: bool) -> Message:
        loop = self._run.loop
        member = loop.without_state(node_id) if has_lost_state else loop.members.at(node_id)
        return self._train(member) if self._kind == "train" else self._evaluate(member)

    def _train(self, member: Member) -> Message:
        run, now = self._run, self._run.loop.round
        names = member.lacks(run.state.versions, run.schedule.resets, run.sent_always)
        return self._message(
            member,
            names,
            now.window,
            steps=run.paces.steps(member.name, [m.name for m in now.asked], now.window),
            before_merge=self._delay(now.window),
        )

    def _evaluate(self, member: Member) -> Message:
        # It follows an average of params: every client lacks what a model is made of.
        stop = self._run.loop.round.window.stop
        names = [name for name in (PARAMS, BUFFERS) if name in self._run.state.versions]
        return self._message(member, names, Window(stop, stop, frozenset()))

    def _message(
        self,
        member: Member,
        names: Iterable[str],
        window: Window,
        *,
        steps: int = 0,
        before_merge: int = 0,
    ) -> Message:
        """Return a request for a window, with the named streams."""
        run, loop = self._run, self._run.loop
        following = run.windows[loop.round.number + 1 :]
        sent = {name: run.state.to_send(name, member.versions.get(name)) for name in names}
        request = WindowRequest(
            run_key=run.run_key,
            attempt=loop.attempt,
            checkpoint=loop.checkpoint,
            for_resume=self._is_for_resume(is_last=not following),
            start=window.start,
            stop=window.stop,
            steps=steps,
            before_merge=before_merge,
            ahead=self._delay(following[0]) if following else 0,
            sync_bound=run.sync_bound,
            due=window.due,
            versions=run.state.versions,
            resets=run.schedule.resets,
            compression=run.state.compression,
            kinds=run.state.kinds,
            differences=frozenset(name for name, (_, differs) in sent.items() if differs),
            previous_version=run.state.previous_version,
            config=settings_of(self._config),
        )
        return loop.exchange.request(
            member.node_id,
            self._kind,
            request,
            {name: record for name, (record, _) in sent.items()},
            server_round=loop.round.number,
        )

    def _is_for_resume(self, *, is_last: bool) -> bool:
        """Return whether a resume may look for the clients' states after this window."""
        loop, checkpoints = self._run.loop, self._run.checkpoints
        if checkpoints is None or not checkpoints.every:
            return False
        # A site that is not drawn for the window before a checkpoint has its last state from here.
        some = loop.exchange.is_deployment and loop.policy.fraction_train < 1
        return some or checkpoints.is_due(loop.round.number, is_last=is_last)

    def _delay(self, window: Window) -> int:
        """Return how many of a window's steps come before the last averages are merged."""
        steps = fewest(window.stop - window.start, self._run.loop.policy.min_steps)
        return min(self._run.sync_delay, steps)
