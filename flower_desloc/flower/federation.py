"""The conversation with the clients: greeting, asking, listening, and counting its bytes."""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

from flower_desloc.flower.bundles import bundled
from flower_desloc.flower.content import records_of
from flower_desloc.flower.exchange import Question, exchange, kind, time_to_live
from flower_desloc.flower.fingerprint import fingerprint
from flower_desloc.flower.members import Member, in_order
from flower_desloc.flower.observer import Event, EventKind, Traffic
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import (
    ABOUT,
    ARE_YOU_THERE,
    GOODBYE,
    HELLO,
    WindowRequest,
    framed_bytes,
    payload_bytes,
)

_LOOK_AGAIN = 0.1  # seconds
_GOODBYE_PATIENCE = 60.0


class FederationError(RuntimeError):
    """The federation cannot go on; the message names who, when and the setting to change."""


class Federation:
    """The clients of one run, over one grid."""

    def __init__(self, grid: Grid, policy: Policy, run_key: str) -> None:
        self.traffic = Traffic()
        """Bytes sent and received so far."""
        self.attempt = secrets.token_hex(4)
        """Tells this start of the server from those before it, for the clients' own files."""
        self.checkpoint = -1
        """Step of the last checkpoint; -1: none."""
        self._grid = grid
        self._is_deployment = isinstance(grid, HttpGrid)
        # A SuperNode serves one message after the other; a simulation several, and loses none.
        self._question = (
            Question(lambda node_id: self._message(RecordDict(), node_id, ARE_YOU_THERE, 0))
            if self._is_deployment
            else None
        )
        self._bundles: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}  # by the first one's id
        self._policy = policy
        self._run_key = run_key
        self._members: dict[str, Member] = {}
        self._left: set[int] = set()  # nodes whose client is elsewhere by now
        self._here: set[str] = set()  # who was online when last looked
        self._events: list[Event] = []

    def wait_for_quorum(self) -> None:
        """Wait until ``min_clients`` nodes are online, and no more are just coming.

        A simulation registers its nodes one after the other while the server app already runs.
        Raises :class:`FederationError` after the policy's timeout.
        """
        quorum, timeout = self._policy.min_clients, self._policy.timeout
        began = time.monotonic()
        before = -1
        while (online := len(list(self._grid.get_node_ids()))) < quorum or online != before:
            if online != before and online < quorum:
                log(INFO, "waiting for clients: %d of %d online", online, quorum)
            before = online
            if online < quorum and time.monotonic() - began > timeout:
                raise FederationError(
                    f"only {online} of federation.min_clients={quorum} clients are online after "
                    f"federation.timeout={timeout:g} s"
                )
            time.sleep(_LOOK_AGAIN)

    def welcome(
        self, config: Mapping[str, str | int | float | bool], step: int
    ) -> Iterator[Member]:
        """Greet the nodes not known yet and yield the new clients, for the window after ``step``.

        A client that comes back at another node takes its old place. Raises
        :class:`FederationError` for a node that fails, unless the policy is to continue.
        """
        known = {member.node_id for member in self._members.values()} | self._left
        new = [node_id for node_id in sorted(self._grid.get_node_ids()) if node_id not in known]
        hello = WindowRequest(
            run_key=self._run_key,
            attempt=self.attempt,
            checkpoint=self.checkpoint,
            start=step,
            config={**config, "code": fingerprint()},
        )
        greeted: dict[str, int] = {}
        begins = not self._members
        for reply in self.ask(
            self._message(hello.to_content(0), node_id, HELLO, 0) for node_id in new
        ):
            node_id = reply.metadata.src_node_id
            try:
                member = Member.from_hello(node_id, _about(reply))
                if member.name in greeted:
                    self._left.add(node_id)  # or it would take the place at the next window
                    raise ValueError(
                        f"it calls itself {member.name}, as node {greeted[member.name]} does; "
                        "give each SuperNode its own partition-id or name in its node config"
                    )
            except ValueError as error:
                self.note(kind(reply), f"node {node_id}", str(error))
                self.fail(f"node {node_id} cannot take part: {error}")
                continue
            greeted[member.name] = node_id
            if (old := self._members.get(member.name)) is not None:
                log(WARNING, "%s is now node %d, not %d", member.name, node_id, old.node_id)
                self._left.add(old.node_id)
                self.note("moved", member.name, f"from node {old.node_id} to node {node_id}")
            elif not begins:
                self.note("joined", member.name, f"at node {node_id}")
            self._here.add(member.name)
            self._members[member.name] = member
            yield member

    def online(self) -> list[Member]:
        """Return the clients that are online, in the fixed order of summation."""
        nodes = set(self._grid.get_node_ids())
        members = in_order(m for m in self._members.values() if m.node_id in nodes)
        here = {member.name for member in members}
        for name in (name for name in self._members if (name in here) != (name in self._here)):
            node = f"node {self._members[name].node_id}"
            if name in here:
                self.note("returned", name, f"{node} is online again")
            else:
                self.note("left", name, f"{node} is not online")
        self._here = here
        return members

    def request(
        self,
        member: Member,
        message_type: str,
        server_round: int,
        request: WindowRequest,
        averages: Mapping[str, ArrayRecord],
    ) -> Message:
        """Return the message of a request, with the records that it brings along.

        The records are shared between messages: they are never changed.
        """
        bundles = self._is_deployment and member.reads_bundles
        content = replace(request, bundles=bundles).to_content(server_round)
        for name, record in averages.items():
            content[name] = self._bundled(record) if bundles else record
        return self._message(content, member.node_id, message_type, server_round)

    def ask(self, requests: Iterable[Message]) -> Iterator[Message]:
        """Send ``requests`` and yield one reply to each, in their order."""
        for reply in exchange(
            self._grid,
            self._each_counted(requests),
            patience=self._policy.timeout,
            question=self._question,
        ):
            self.traffic += self._counted_up(reply)
            yield reply
            del reply  # or it would live on beside the next

    def member(self, reply: Message) -> Member:
        """Return the client that sent a reply."""
        node_id = reply.metadata.src_node_id
        return next(m for m in self._members.values() if m.node_id == node_id)

    def note(self, kind: EventKind, client: str, what: str) -> None:
        """Remember what happened, for the record of the window."""
        self._events.append(Event(kind=kind, client=client, what=what))

    def news(self) -> list[Event]:
        """Return what has happened since this was last asked."""
        events, self._events = self._events, []
        return events

    def fail(self, what: str) -> None:
        """Log a failure, or raise :class:`FederationError` if the policy is to stop."""
        if self._policy.on_failure == "stop":
            raise FederationError(f"{what} (federation.on_failure=continue would go on without)")
        log(WARNING, "%s", what)

    def farewell(self) -> None:
        """Tell the clients that the run is over, so that they delete what they kept of it."""
        content = WindowRequest(run_key=self._run_key).to_content(0)
        requests = [self._message(content, m.node_id, GOODBYE, 0) for m in self.online()]
        # The run is over: nobody's silence may hold its result back for long.
        patience = min(self._policy.timeout, _GOODBYE_PATIENCE)
        for reply in exchange(self._grid, requests, patience=patience):
            if reply.has_error():
                log(WARNING, "a client keeps its files of this run: %s", reply.error.reason)

    def _message(
        self, content: RecordDict, node_id: int, message_type: str, server_round: int
    ) -> Message:
        ttl = time_to_live(self._policy.timeout)
        return Message(content, node_id, message_type, group_id=str(server_round), ttl=ttl)

    def _counted_up(self, reply: Message) -> Traffic:
        with suppress(ValueError):  # of what could not have travelled; it is left out for that
            return Traffic(up=payload_bytes(reply), framed_up=framed_bytes(reply))
        return Traffic(up=payload_bytes(reply))

    def _each_counted(self, requests: Iterable[Message]) -> Iterator[Message]:
        try:
            yield from map(self._counted_down, requests)
        finally:
            self._bundles.clear()

    def _counted_down(self, message: Message) -> Message:
        self.traffic += Traffic(down=payload_bytes(message), framed_down=framed_bytes(message))
        return message

    def _bundled(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record in bundles, the same for all requests that are sent one after another."""
        if id(record) not in self._bundles:
            self._bundles[id(record)] = record, bundled(record)
        return self._bundles[id(record)][1]


def _about(reply: Message) -> ConfigRecord:
    if reply.has_error():
        raise ValueError(reply.error.reason)
    found = records_of(ConfigRecord, reply.content)
    if ABOUT not in found:
        raise ValueError(f"its reply has no ConfigRecord {ABOUT!r}")
    return found[ABOUT]
