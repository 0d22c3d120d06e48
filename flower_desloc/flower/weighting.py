"""A client's weight in averages and evaluations (``policy.weighting``, ``policy.max_share``)."""

import math
from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Protocol

from flower_desloc.core.types import FromTotals
from flower_desloc.flower.internals import log
from flower_desloc.flower.members import Member
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.replies import ClientEvaluation, Contribution
from flower_desloc.flower.rounds import RoundLoop


class Weighs(Protocol):
    """What weights follow from: the strategy."""

    policy: Policy
    metrics: FromTotals | None
    loop: RoundLoop


class Weighting:
    """Weights by the policy; the first time that a client's is capped, an event says so."""

    def __init__(self, run: Weighs) -> None:
        self._run = run
        self._capped: set[tuple[str, bool]] = set()  # a client, and whether in evaluations

    def of(self, member: Member, reply: Contribution) -> float:
        """Return a client's weight."""
        if self._run.policy.weighting == "examples":
            return min(reply.examples, self._most(member, reply.examples))
        return 1.0

    def of_evaluations(
        self, evaluations: Mapping[str, ClientEvaluation]
    ) -> dict[str, ClientEvaluation]:
        """Return the evaluations by client, those above the largest share scaled down to it."""
        by_examples = self._run.metrics is None
        sizes = {
            client: each.examples if by_examples else sum(each.totals.values())
            for client, each in evaluations.items()
        }
        counted = {}
        for client, each in evaluations.items():
            size, others = sizes[client], sum(sizes[c] for c in sizes if c != client)
            most = self._largest(others)
            if size > most:
                counts = f"its evaluation is {size / others:.3g} times all others'; it counts as"
                self._say_capped(client, f"{counts} {most / others:.3g} times", evaluation=True)
            counted[client] = each.scaled(most / size) if size > most else each
        return counted

    def _most(self, member: Member, stated: float) -> float:
        """Return how many examples count of a client, given those that the others have stated."""
        most = self._largest(
            _examples(m for m in self._run.loop.round.asked if m.name != member.name)
        )
        if stated > most:
            counts = f"its {stated:g} examples count as {most:g}"
            self._say_capped(member.name, counts, evaluation=False)
        return most

    def _largest(self, others: float) -> float:
        """Return how much may count of a client, compared with all others together."""
        share = self._run.policy.max_share
        return others * share / (1 - share) if share < 1 and others > 0 else math.inf

    def _say_capped(self, client: str, what: str, *, evaluation: bool) -> None:
        if (client, evaluation) not in self._capped:
            self._capped.add((client, evaluation))
            what += f"; federation.max_share={self._run.policy.max_share:g}"
            log(WARNING, "%s: %s", client, what)
            self._run.loop.note("capped", client, what)


def _examples(members: Iterable[Member]) -> int:
    return sum(member.info.num_examples or 0 for member in members)
