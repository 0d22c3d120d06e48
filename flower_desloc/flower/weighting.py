"""A client's weight in the averages of a window (``policy.weighting``, ``policy.max_share``)."""

import math
from collections.abc import Iterable
from logging import WARNING
from typing import Protocol

from flower_desloc.core.types import Weight
from flower_desloc.flower.internals import log
from flower_desloc.flower.members import Member
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.replies import Contribution
from flower_desloc.flower.rounds import RoundLoop


class Weighs(Protocol):
    """What weights follow from: the strategy."""

    policy: Policy
    loop: RoundLoop


class Weighting:
    """Weights by the policy; the first time that one is capped, an event says so."""

    def __init__(self, run: Weighs) -> None:
        self._run = run
        self._capped: set[str] = set()  # clients with more examples than count

    def of(self, member: Member, reply: Contribution) -> Weight:
        """Return a client's weight, by tensor if clients take a part of the window's steps."""
        whole = 1.0
        if self._run.policy.weighting == "examples":
            whole = min(reply.examples, self._most(member, reply.examples))
        if reply.shares is None:
            return whole
        return {
            name: {key: whole * share for key, share in shares.items()}
            for name, shares in reply.shares.items()
        }

    def _most(self, member: Member, stated: float) -> float:
        """Return how many examples count of a client, given those that the others have stated."""
        share = self._run.policy.max_share
        others = _examples(m for m in self._run.loop.round.asked if m.name != member.name)
        most = others * share / (1 - share) if share < 1 and others > 0 else math.inf
        if stated > most and member.name not in self._capped:
            self._capped.add(member.name)
            what = f"its {stated:g} examples count as {most:g}; federation.max_share={share:g}"
            log(WARNING, "%s: %s", member.name, what)
            self._run.loop.note("capped", member.name, what)
        return most


def _examples(members: Iterable[Member]) -> int:
    return sum(member.info.num_examples or 0 for member in members)
