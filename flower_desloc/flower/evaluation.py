"""Evaluations of the averaged model: when one is due, and what the clients' add up to."""

from collections.abc import Iterable

from flwr.app import Message, MetricRecord

from flower_desloc.core.schedule import PARAMS, Window
from flower_desloc.core.types import FromTotals
from flower_desloc.flower.members import Member
from flower_desloc.flower.metrics import pooled, unusual
from flower_desloc.flower.replies import ClientEvaluation, WindowReply
from flower_desloc.flower.rounds import RoundLoop
from flower_desloc.flower.server_state import ServerState
from flower_desloc.flower.weighting import Weighting


def is_due(window: Window, state: ServerState, every: int, num_steps: int) -> bool:
    """Return whether to evaluate after a window.

    That is before and after training, and at the first average of params at or after each multiple
    of ``every`` steps; 0: only then.
    """
    stop = window.stop
    multiples = every > 0 and stop // every > state.evaluated // every
    return stop == 0 or ((stop == num_steps or multiples) and state.versions[PARAMS] == stop)


def federated(
    replies: Iterable[Message],
    loop: RoundLoop,
    state: ServerState,
    metrics: FromTotals | None,
    weighting: Weighting,
) -> MetricRecord | None:
    """Return the metrics of all clients together, and each one's as ``client/metric``.

    A client whose evaluation cannot be used, or is far beyond those of most clients, is left out.
    """
    usable: dict[str, ClientEvaluation] = {}
    members: dict[str, Member] = {}
    for message in replies:
        with loop.leaving_out(message, evaluation=True) as member:
            reply = WindowReply.of(message)
            usable[member.name] = ClientEvaluation.of(reply, loop.round.window.stop, metrics)
            member.versions |= {name: state.versions[name] for name in state.model_streams}
            members[member.name] = member
    for name, why in unusual(usable).items():
        del usable[name]
        loop.leave_out(members[name], why, "outlier", evaluation=True)
    return pooled(weighting.of_evaluations(usable), metrics)
