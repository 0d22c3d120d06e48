"""DES-LOC whose server learns the sums of what the sites send, and nothing of a single one."""

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from logging import WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from flower_desloc.core.averaging import Drift, distance
from flower_desloc.core.schedule import PARAMS, SyncSchedule
from flower_desloc.core.streams import check_like, digest
from flower_desloc.core.types import Streams
from flower_desloc.flower.arrays import from_record
from flower_desloc.flower.exchange import event_kind
from flower_desloc.flower.failures import reason_of
from flower_desloc.flower.internals import log
from flower_desloc.flower.members import Member
from flower_desloc.flower.messages import STATE_NEW, WindowRequest
from flower_desloc.flower.metrics import trained
from flower_desloc.flower.options import BY_SECURE_SUMS
from flower_desloc.flower.replies import (
    Contribution,
    WindowReply,
    check_streams,
    check_window,
    client_record,
)
from flower_desloc.flower.requests import Requests
from flower_desloc.flower.secure.at_site import LOSS_SCALE, MASKED_LOSS, order_of
from flower_desloc.flower.secure.record import (
    ASK,
    CONFIRM,
    KEYS,
    SECURE,
    SHARES,
    UNMASK,
    by_name,
    read_by_name,
    record_of,
    request_digest,
)
from flower_desloc.flower.strategy import DesLoc
from flower_desloc.secure.agreement import SumTerms, least_threshold, shapes_digest, stated
from flower_desloc.secure.codes import (
    Codes,
    largest_of,
    mean_of,
    scale_after,
    signed,
    unpacked,
    width_of,
)
from flower_desloc.secure.given import FORGET
from flower_desloc.secure.server import HiddenSumError, ServerSum


class SecureRequests(Requests):
    """Requests that carry the other sites' shares to each site."""

    def __init__(self, run: "SecureDesLoc") -> None:
        super().__init__(run)
        self._sums = run

    def _train(self, member: Member) -> Message:
        message = super()._train(member)
        if (total := self._sums.total) is not None:
            message.content[SECURE] = ConfigRecord(by_name(total.sealed_for(member.name)))
        return message


class SecureDesLoc(DesLoc):
    """DES-LOC by secure sums: every client needs keys (``flower_desloc.secure``).

    A sum has more than two thirds of the clients that were asked, and at least the policy's
    ``min_clients``; below that nothing is revealed and the window is repeated.

    Parameters
    ----------
    schedule, num_steps
        As in ``DesLoc``.
    **options
        As in ``DesLoc``; ``templates`` must have every averaged state. Averages are means, of equal
        weights; there are no lossy formats, late averages or evaluations by clients.

    Raises
    ------
    ValueError
        For an option that needs what a single client sends.

    """

    title = "DES-LOC by secure sums"
    excludes = (BY_SECURE_SUMS,)
    has_bound = False  # of a single client's update nothing is known

    def __init__(self, schedule: SyncSchedule, num_steps: int, **options: Any) -> None:
        super().__init__(schedule, num_steps, **{**options, "evaluate_clients": False})
        self.state.sends_codes = True
        self.requests = SecureRequests(self)
        self.total: ServerSum | None = None
        """The sum of the window in progress."""
        self._digests: dict[tuple[str, int], str] = {}  # by stream and version
        self._unhelpful: dict[str, str] = {}  # sites in it that do not unmask it, and why
        self._given: frozenset[str] = frozenset()
        """The sites in the last sum that some were asked to unmask, until there is an average."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the clients drawn for this window exchange keys, and ask them for it."""
        now, self.total = self.loop.round, None
        del server_round, arrays, grid  # as in the parent
        now.asked = self._drawn()
        try:
            total = self._agree(now.asked, config)
            names = total.sharing
        except HiddenSumError as error:
            self._hidden(error)
            return []
        self.total = total
        now.asked = [member for member in now.asked if member.name in names]
        return self.requests.train(now.asked, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the masked replies, unmask their sum, and average; below the threshold nothing."""
        now, state, total = self.loop.round, self.state, self.total
        del server_round
        added: list[Member] = []
        for message in replies:
            with self.loop.timed("averaging"), self.loop.leaving_out(message) as member:
                assert total is not None, "a reply to a request of no sum"
                reply = self._checked(message)
                total.add_masked(member.name, self._codes(reply, total.terms))
                self.loop.add(member, reply, state.versions)
                del reply
                added.append(member)
            del message  # free its memory before the next one is received
        if total is None:  # the sites have not agreed on keys
            return None, None
        try:
            with self.loop.timed("averaging"):
                self._unmask(total, added)
                (loss, number), *sums = total.total()
                for name in total.false:
                    self.loop.note("failed", name, "it gave a false share; the others sufficed")
                averages = self._averages(sums, total.terms, len(added))
        except ValueError as error:  # too few are left, or one of them has sent nonsense
            now.left_out |= self._unhelpful
            self._hidden(error)
            return None, None
        finally:
            self.total = None
        self._given = frozenset()
        with self.loop.timed("averaging"):
            for member in added:
                member.versions = dict(state.versions)
            now.drift = self._drift(averages)
            state.publish(averages, now.window, now.drift, self.schedule.resets)
        metrics = trained(now.clients)
        metrics["train-loss"] = float(loss) * 2.0**-LOSS_SCALE / number if number else math.nan
        has_params = state.versions[PARAMS] == now.window.stop
        return state.averages[PARAMS] if has_params else None, metrics

    # Before the window

    def _drawn(self) -> list[Member]:
        """Return the sites to ask: after a sum that some may have given, those that are in it.

        They give no other sum of these steps. Who has given is not known: an answer may be lost. If
        one of them is gone, others are asked, which have given none, where there are enough.
        """
        now, members = self.loop.round, self.loop.members
        same = [member for member in members.online() if member.name in self._given]
        if self._given and len(same) == len(self._given):
            return same
        most = max(now.failures.values(), default=0) + 1
        last = dict.fromkeys(sorted(self._given), most)
        drawn = members.drawn(now.window.start, now.failures | last)
        others = [member for member in drawn if member.name not in self._given]
        return others if len(others) >= self.policy.min_clients else drawn

    def _agree(self, members: Iterable[Member], config: ConfigRecord) -> ServerSum:
        """Exchange keys and shares; raises ``HiddenSumError`` below the threshold.

        If some have taken other windows than the others, all begin from the last averages.
        """
        having = list(members)
        alike = [request_digest(each.content) for each in self.requests.train(having[:1], config)]
        terms = self._terms(max(len(having), 2), "".join(alike))  # of fewer there is none
        total = self._keyed(terms, having)
        if not total.is_alike:
            having = [member for member in having if member.name in total.keys]
            total = self._keyed(replace(terms, attempt=secrets.token_hex(16), fresh=True), having)
            self.loop.note("state lost", "", "clients begin from the averages: some were away")
            for member in having:
                member.versions.clear()
        keys = total.keys
        having = [member for member in having if member.name in keys]
        for reply in self._ask(having, SHARES, by_name(keys)):
            with self.loop.leaving_out(reply) as member:
                total.add_shares(member.name, read_by_name(record_of(reply)))
        return total

    def _keyed(self, terms: SumTerms, members: Iterable[Member]) -> ServerSum:
        """Return a sum with the keys of the sites that have sent some."""
        total = ServerSum(terms)
        for reply in self._ask(members, KEYS, {"terms": terms.to_json()}):
            with self.loop.leaving_out(reply) as member:
                (data,) = read_by_name(record_of(reply)).values()
                total.add_keys(member.name, data)
        return total

    def _terms(self, number: int, request: str) -> SumTerms:
        window, templates = self.loop.round.window, self.state.templates
        for name in window.due:
            for key, tensor in templates.get(name, {}).items():
                if tensor.dtype not in (torch.float32, torch.float64):
                    raise ValueError(
                        f"{key!r} of stream {name!r} is of type {tensor.dtype}, and secure sums "
                        "are of float32; set model.dtype=float32"
                    )
            if name not in templates:
                raise ValueError(f"secure sums of {name!r} need templates={{...}} that have it")
        averages = self._stated_averages()
        widths = {name: width_of(self.state.kind(name)) for name in window.due}
        return SumTerms(
            run=self.run_key,
            attempt=secrets.token_hex(16),
            start=window.start,
            stop=window.stop,
            threshold=max(self.policy.min_clients, least_threshold(number)),
            shapes={
                name: shapes_digest({key: t.shape for key, t in templates[name].items()})
                for name in window.due
            },
            scales={n: scale_after(averages.get(n), number, widths[n]) for n in window.due},
            widths=widths,
            most=number,
            averages=averages,
            fresh=False,
            request=request,
        )

    def _stated_averages(self) -> dict[str, str]:
        """Return what each average is, by stream; an average is hashed once."""
        now = {name: self.state.versions[name] for name in self.state.averages}
        self._digests = {
            each: self._digests.get(each) or _named(each[1], self.state.averages[each[0]])
            for each in now.items()
        }
        return {name: self._digests[name, version] for name, version in now.items()}

    # After it

    def _checked(self, message: Message) -> Contribution:
        """Read a reply; raises ``ValueError`` saying why it cannot be used."""
        reply, window = WindowReply.of(message), self.loop.round.window
        check_window(reply.metrics, window)
        if reply.streams.keys() != window.due:
            raise ValueError(f"its reply has the streams {sorted(reply.streams)}")
        templates = self.state.reply_templates
        for name, stream in reply.streams.items():
            check_like(name, stream, templates[name])
            if any(tensor.dtype != torch.uint8 for tensor in stream.values()):
                raise ValueError(f"its stream {name!r} is not of masked codes")
        loss = reply.metrics.get(MASKED_LOSS)
        if not isinstance(loss, list) or len(loss) != 2 or not all(map(_is_code, loss)):
            raise ValueError("its reply has no masked loss")
        return Contribution(
            streams={MASKED_LOSS: {"": torch.tensor(loss)}, **reply.streams},
            examples=1,
            shares=None,
            record=client_record(reply.metrics, window.stop - window.start),
            is_new=STATE_NEW in reply.metrics,
        )

    def _codes(self, reply: Contribution, terms: SumTerms) -> Iterator[Codes]:
        """Yield the arrays of a reply in the order of the sum, each when it is asked for."""
        yield reply.streams[MASKED_LOSS][""].numpy()
        for name, key in order_of({name: self.state.templates[name] for name in terms.widths}):
            yield unpacked(reply.streams[name][key].numpy(), terms.widths[name])

    def _unmask(self, total: ServerSum, members: list[Member]) -> None:
        """Let the sites confirm who is in the sum, and give their shares."""
        self._unhelpful = {}
        survivors = by_name(dict.fromkeys(total.survivors, b""))
        for reply in self._ask(members, CONFIRM, survivors):
            with self._tolerating(reply) as member:
                (data,) = read_by_name(record_of(reply)).values()
                total.add_signature(member.name, data)
        signatures = total.signatures
        self._given = frozenset(total.survivors)
        confirmed = [member for member in members if member.name in signatures]
        for _ in range(2):  # a site gives the same answer again
            asked = [member for member in confirmed if member.name not in total.unmasking]
            for reply in self._ask(asked, UNMASK, by_name(signatures)):
                with self._tolerating(reply) as member:
                    total.add_unmasking(member.name, read_by_name(record_of(reply)))
                    self._unhelpful.pop(member.name, None)

    def _averages(
        self, sums: list[Codes], terms: SumTerms, count: int
    ) -> dict[str, dict[str, Tensor]]:
        """Return the averages from the sums; raises ``ValueError`` for impossible ones."""
        templates = {name: self.state.templates[name] for name in terms.widths}
        averages: dict[str, dict[str, Tensor]] = {name: {} for name in templates}
        for name, key in order_of(templates):
            codes = signed(sums.pop(0), terms.widths[name])
            averages[name][key] = mean_of(codes, terms.scales[name], count, templates[name][key])
        check_streams(averages, templates, self.state.kinds)
        return averages

    def _drift(self, averages: Streams) -> dict[str, Drift]:
        """Return how far the averages moved; of the spread between clients nothing is known."""
        last = self.state.last_averages(averages)
        return {
            name: Drift(
                spread=math.nan,
                moved=distance(stream, last.get(name)),
                norm=distance(stream),
            )
            for name, stream in averages.items()
        }

    # Questions

    def _ask(
        self,
        members: Iterable[Member],
        phase: str,
        content: Mapping[str, Any],
    ) -> Iterator[Message]:
        """Ask the sites the question of a phase, and yield their replies."""
        now, exchange = self.loop.round, self.loop.exchange
        asked = WindowRequest(run_key=self.run_key, start=now.window.start, stop=now.window.stop)
        requests = []
        for member in members:
            message = exchange.request(member.node_id, ASK, asked, server_round=now.number)
            message.content[SECURE] = ConfigRecord({"phase": phase, **content})
            requests.append(message)
        return exchange.replies(requests)

    @contextmanager
    def _tolerating(self, reply: Message) -> Iterator[Member]:
        """Note that a site whose part is in the sum already does not help to unmask it."""
        member = self.loop.members.at(reply.metadata.src_node_id)
        try:
            yield member
        except ValueError as error:
            log(WARNING, "%s: it is in the sum, and does not unmask it: %s", member.name, error)
            self.loop.note(event_kind(reply), member.name, reason_of(error))
            self._unhelpful[member.name] = reason_of(error)

    def _hidden(self, error: ValueError) -> None:
        log(WARNING, "%s is not summed: %s", self.loop.round, error)
        if self._given:
            names = ", ".join(sorted(self._given))
            text = "the sites may refuse %s over others than %s, until persons there use `%s`"
            log(WARNING, text, self.loop.round, names, FORGET)
        self.loop.note("failed", "", reason_of(error))


def _is_code(value: object) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _named(version: int, average: ArrayRecord) -> str:
    stream = from_record(average)
    return stated(version, digest(stream), largest_of(stream))
