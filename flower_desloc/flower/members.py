"""The clients as the server knows them, and which of them take part in a window."""

import random
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.streams import starts_at_zero
from flower_desloc.flower.arrays import records_of
from flower_desloc.flower.client_info import Greeting
from flower_desloc.flower.exchange import Exchange, Late, event_kind
from flower_desloc.flower.failures import FederationError, client_error, failure_of, reason_of
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import CLIENT_INFO
from flower_desloc.flower.model_names import ModelNames
from flower_desloc.flower.observer import EventKind
from flower_desloc.flower.policy import Policy

_POLL_INTERVAL = 0.1  # seconds


@dataclass
class Member:
    """One client."""

    name: str
    """Its own name; unlike its node id it stays the same over restarts."""
    node_id: int
    info: ClientInfo
    versions: dict[str, int] = field(default_factory=dict)
    """Of every stream that the client has, the step of the average or reset it is from."""
    model: ModelNames | None = None
    """Names of its model's tensors, if it stated them."""

    @classmethod
    def from_greeting(cls, node_id: int, greeting: Greeting) -> "Member":
        """Return the client of a node that has replied."""
        return cls(greeting.name, node_id, greeting.info, {**greeting.versions}, greeting.model)

    def lacks(
        self, versions: Mapping[str, int], resets: Container[str], always: Container[str]
    ) -> list[str]:
        """Return the streams to send to this client, given everyone's current ``versions``.

        Those in ``always`` are sent whether the client has them or not.
        """
        return [
            name
            for name, version in versions.items()
            if (name in always or self.versions.get(name) != version)
            # Optimizer states are zero before their first average: nothing to send.
            and not (version == 0 and starts_at_zero(name))
            and name not in resets
        ]


class Members:
    """The clients that have answered the greeting of a run, by name.

    ``note`` records an event: its kind, the client, and what happened. ``data`` has the versions of
    the clients' data before this start of the server. ``refusal`` and ``joined`` are those of
    ``RoundHook``.
    """

    def __init__(
        self,
        grid: Grid,
        exchange: Exchange,
        policy: Policy,
        seed: int,
        note: Callable[[EventKind, str, str], None],
        *,
        data: Mapping[str, str],
        refusal: Callable[[str | None, int], str],
        joined: Callable[[str, int], None],
    ) -> None:
        self._grid, self._exchange = grid, exchange
        self._refusal_of, self._joined = refusal, joined
        self._policy, self._seed, self._note = policy, seed, note
        self.data = dict(data)
        self.failed_nodes: dict[str, str] = {}
        """Nodes that did not become clients in this round, and why."""
        """Version of each client's data, as it stated it last."""
        self._known: dict[str, Member] = {}
        self._moved_from: set[int] = set()  # nodes whose client is at another node now
        self._online: set[str] = set()  # when last asked
        self._refused: set[tuple[str, str]] = set()

    def wait_for_quorum(self, listen: Callable[[], None]) -> None:
        """Wait until ``min_clients`` nodes are online and their number has stopped growing.

        A simulation registers its nodes one after the other while the server app already runs.
        Silent nodes do not count; ``listen`` looks whether one has answered. After the policy's
        timeout it raises ``FederationError``, unless there are enough nodes with the silent ones:
        then the window is below the quorum.
        """
        quorum, timeout = self._policy.min_clients, self._policy.timeout
        began = time.monotonic()
        before = -1
        while (online := len(self._nodes())) < quorum or online != before:
            if online != before and online < quorum:
                log(INFO, "waiting for clients: %d of %d online%s", online, quorum, self.silent)
            before = online
            if online < quorum and time.monotonic() - began > timeout:
                if len(set(self._grid.get_node_ids())) >= quorum:
                    return
                raise FederationError(
                    f"only {online} of federation.min_clients={quorum} clients are online after "
                    f"federation.timeout={timeout:g} s{self.silent}"
                )
            time.sleep(_POLL_INTERVAL)
            listen()

    @property
    def silent(self) -> str:
        """The clients that do not answer, and those excluded, as the end of a sentence."""
        names = {member.node_id: member.name for member in self._known.values()}
        silent = [names.get(node_id, f"node {node_id}") for node_id in self._exchange.silent]
        excluded = filter(None, map(self._refusal, self._known.values()))
        said = [f"no answer from {', '.join(silent)}"] if silent else []
        return "".join(f"; {each}" for each in (*said, *excluded))

    def too_few(self) -> bool:
        """Return whether fewer than ``min_clients`` nodes are online and answer."""
        return len(self._nodes()) < self._policy.min_clients

    def new_nodes(self) -> list[int]:
        """Return the nodes online whose client is not known, and that may come."""
        # One that has gone since its client moved may be where the client returns.
        self._moved_from &= set(self._grid.get_node_ids())
        known = {member.node_id for member in self._known.values()} | self._moved_from
        new = (node_id for node_id in sorted(self._nodes()) if node_id not in known)
        return [node_id for node_id in new if not self._refusal_of(None, node_id)]

    def add(self, replies: Iterable[Message]) -> Iterator[Member]:
        """Add the clients that answered a greeting, and yield them.

        A client that returns at another node takes its old place. Raises
        ``FederationError`` for a node that fails, unless the policy is to continue.
        """
        greeted: dict[str, int] = {}
        is_start = not self._known
        for reply in replies:
            node_id = reply.metadata.src_node_id
            try:
                member = Member.from_greeting(node_id, _greeting(reply))
                if why := self._refusal(member):
                    self._refuse(member.name, why)
                    continue
                if member.name in greeted:
                    self._moved_from.add(node_id)  # or the next window would let it take the place
                    raise ValueError(
                        f"it calls itself {member.name}, as node {greeted[member.name]} does; "
                        "give each SuperNode its own partition-id or name in its node config"
                    )
            except ValueError as error:
                node, reason = f"node {node_id}", reason_of(error)
                if why := self._refusal_of("", node_id):
                    reason = f"{reason}; {why}"
                    self._refuse(node, reason)
                self.failed_nodes[node] = reason
                if not why:
                    self._note(event_kind(reply), node, reason)
                    self._policy.fail(f"{node} cannot take part", reason, failure_of(error))
                continue
            greeted[member.name] = node_id
            if (old := self._known.get(member.name)) is not None:
                log(WARNING, "%s is now node %d, not %d", member.name, node_id, old.node_id)
                self._moved_from.add(old.node_id)
                self._note("moved", member.name, f"from node {old.node_id} to node {node_id}")
            elif not is_start:
                self._note("joined", member.name, f"at node {node_id}")
            self._note_data(member)
            self._online.add(member.name)
            self._known[member.name] = member
            self._joined(member.name, node_id)
            yield member

    def _refusal(self, member: Member) -> str:
        return self._refusal_of(member.name, member.node_id)

    def _refuse(self, who: str, why: str) -> None:
        """Note once that somebody may not take part."""
        if (who, why) not in self._refused:
            log(WARNING, "%s does not take part: %s", who, why)
            self._note("refused", who, why)
            self._refused.add((who, why))

    def online(self) -> list[Member]:
        """Return the clients that are online and answer, in the fixed order of summation."""
        nodes = self._nodes()
        members = in_order(m for m in self._known.values() if m.node_id in nodes)
        online = {member.name for member in members}
        for name in [n for n in self._known if (n in online) != (n in self._online)]:
            node_id = self._known[name].node_id
            if name in online:
                self._note("returned", name, f"node {node_id} is online again")
            elif why := self._refusal(self._known[name]):
                log(WARNING, "%s does not take part: %s", name, why)
                self._note("left", name, why)
            elif node_id in self._exchange.silent:
                self._note("left", name, "it is not waited for until it answers its last request")
            else:
                self._exchange.forget(node_id)
                self._note("left", name, f"node {node_id} is not online")
        self._online = online
        return members

    def present(self, step: int) -> list[Member]:
        """Return the clients online that take part after ``step`` steps, by the attendance."""
        members, attendance = self.online(), self._policy.attendance
        begun = [begin for begin in attendance if begin <= step]
        return members[: attendance[max(begun)]] if begun else members

    def drawn(self, step: int, failures: Mapping[str, int]) -> list[Member]:
        """Return the clients that train in the window that starts at ``step``.

        ``failures`` counts how often each client was left out of this window: when it is repeated,
        others are drawn first.
        """
        members = self.present(step)
        number = self._policy.number_drawn(len(members))
        if number == len(members):
            return members
        names = [member.name for member in members]
        if failures:
            chosen = random.Random(f"{self._seed}/clients/{step}/{sum(failures.values())}")  # noqa: S311
            chosen.shuffle(names)
            names.sort(key=lambda name: failures.get(name, 0))
        else:
            names = random.Random(f"{self._seed}/clients/{step}").sample(names, number)  # noqa: S311
        return [member for member in members if member.name in names[:number]]

    def _note_data(self, member: Member) -> None:
        """Warn if a client states another version of its data than before."""
        now, name = member.info.data_version, member.name
        if now is None:
            return
        if (before := self.data.get(name, now)) != now:
            what = f"it was {before}; it is {now}"
            log(WARNING, "%s: its data has changed: %s", name, what)
            self._note("data changed", name, what)
        self.data[name] = now

    def at(self, node_id: int) -> Member:
        """Return the client at a node."""
        return next(m for m in self._known.values() if m.node_id == node_id)

    def answered(self, late: Late) -> None:
        """Note that a client that was given up has answered."""
        node_id = late.reply.metadata.src_node_id
        try:
            member = self.at(node_id)
        except StopIteration:
            return  # it has moved
        if late.reply.has_error():
            what = f"after {late.seconds:.0f} s: {late.reply.error.reason}"
            self._note("failed", member.name, what)
        else:
            what = f"it answered after {late.seconds:.0f} s, too late to be averaged"
            self._online.add(member.name)
            self._note("returned", member.name, what)
        log(WARNING, "%s: %s", member.name, what)

    def _nodes(self) -> set[int]:
        """Return the nodes that are online, without silent ones and those not admitted."""
        excluded = {m.node_id for m in self._known.values() if self._refusal(m)}
        return set(self._grid.get_node_ids()) - set(self._exchange.silent) - excluded


def in_order(members: Iterable[Member]) -> list[Member]:
    """Return members by name, client-2 before client-10: the fixed order of summation."""
    return sorted(members, key=lambda member: (_natural(member.name), member.name))


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _greeting(reply: Message) -> Greeting:
    if reply.has_error():
        raise client_error(reply.error.code, reply.error.reason)
    found = records_of(ConfigRecord, reply.content)
    if CLIENT_INFO not in found:
        raise ValueError(f"its reply has no ConfigRecord {CLIENT_INFO!r}")
    return Greeting.from_config(found[CLIENT_INFO])
