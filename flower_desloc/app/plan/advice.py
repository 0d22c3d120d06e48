"""Recommended periods for a link, and warnings about the periods of a run."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

from flower_desloc.app.config.units import number_text, seconds_text
from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.rules import PAGE, family, longest_short, rule_for
from flower_desloc.app.plan.theory import half_life
from flower_desloc.app.plan.wall_clock import Topology
from flower_desloc.core.kinds import Kind
from flower_desloc.core.schedule import NEVER, PARAMS, RESET
from flower_desloc.core.streams import starts_at_zero

FORGOTTEN: Final = 5
"""Half-lives after which a moment counts as forgotten: 3% of it are left."""


def recommended(run: PlannedRun, topology: Topology) -> dict[str, int] | None:
    """Return the smallest affordable K_x, with the periods of the other streams by its rule.

    K_x is affordable if waiting takes at most ``run.share`` of compute; a smaller K_x gives a
    better model. On a star, ``run.delay`` counts. The result is None if no K_x up to the run's
    length is affordable.
    """

    def affordable(period: int) -> bool:
        other = run.with_periods(_at(run, period))
        return _waiting(other, topology) <= run.share * run.compute

    last = min(longest_short(run), run.steps)
    # Under one rule waiting falls with the period.
    for periods in (range(1, last + 1), range(last + 1, run.steps + 1)):
        found = bisect_left(periods, True, key=affordable)
        if found < len(periods):
            return _at(run, periods[found])
    return None


def tradeoffs(run: PlannedRun) -> Iterator[dict[str, int]]:
    """Yield periods at which the parameters are averaged 16, 8, 4 and 2 times in the run."""
    for period in sorted({run.steps // times for times in (2, 4, 8, 16)} - {0}):
        yield _at(run, period)


def waiting_text(run: PlannedRun, periods: Mapping[str, int], topology: Topology) -> str:
    """Return how long the run waits at ``periods``, and what it does not average there."""
    run = run.with_periods(periods)
    waiting = _waiting(run, topology)
    never = [name for name in periods if run.leaves_out(name)]
    text = (
        f"{_communication(run, topology)} takes {number_text(waiting / run.compute)} times as long "
        f"as compute, the run {seconds_text(run.steps * (run.compute + waiting))}"
    )
    return f"{text}; {' and '.join(never)} never averaged" if never else text


def warnings(run: PlannedRun) -> Iterator[str]:
    """Yield one sentence per risk, each with the key or option to change."""
    yield from _params_warnings(run)
    for stream in run.streams:
        if starts_at_zero(stream.name):
            yield from _state_warnings(run, stream)
    yield from _bound_warnings(run)
    if run.workers == 1:
        yield "--workers=1: there is no other worker to average with"
    if run.is_timed:
        yield from _link_warnings(run)


def _params_warnings(run: PlannedRun) -> Iterator[str]:
    period = run.periods[PARAMS]
    if period == NEVER:
        once = "once, at the end of training"
        times = once if run.leaves_out(PARAMS) else f"{run.averages[PARAMS]} times in the run"
        yield (
            f"sync.{PARAMS}=never: the parameters are averaged {times}, and Theorem 1 gives no "
            "guarantee"
        )
    elif isinstance(period, int) and run.leaves_out(PARAMS):
        yield (
            f"sync.{PARAMS}={period}: longer than the run of {run.steps} steps, so the "
            "parameters are averaged once, at its end"
        )
    longest = period if isinstance(period, int) else math.inf if period == NEVER else 0
    sooner = [s for s, K in run.periods.items() if isinstance(K, int) and longest > K]
    if sooner:
        yield (
            f"sync.{PARAMS}={period}: averaged less often than {' and '.join(sooner)}; the "
            "parameters need it most, so give them the shortest period"
        )


def _state_warnings(run: PlannedRun, stream: PlannedStream) -> Iterator[str]:
    name, period, of_params = stream.name, run.periods[stream.name], run.periods[PARAMS]
    if period == NEVER and run.leaves_out(name):
        yield (
            f"sync.{name}=never: every worker keeps its own, which stays noisy, and a worker that "
            "joins starts without one (the paper's FAVG+OPT, whose activations grew)"
        )
    elif period == RESET:
        yield (
            f"sync.{name}=reset: it starts from zero after every average of {PARAMS}, and the "
            "loss may spike there (the paper's FAVG-OPT)"
        )
    elif run.leaves_out(name):
        yield (
            f"sync.{name}={period}: longer than the run of {run.steps} steps, so it is never "
            "averaged"
        )
    if not isinstance(period, int):
        return
    advised = _at(run, of_params)[name] if isinstance(of_params, int) else 0
    forgotten = math.inf if stream.beta is None else FORGOTTEN * half_life(stream.beta)
    if family(run) != "other" and stream.beta is not None and period > advised == of_params:
        yield (
            f"sync.{name}={period}: rarely averaged it cost loss where that was measured, with "
            f"{rule_for(run, advised).case}; set sync.{name}={advised} ({PAGE})"
        )
    elif period > max(advised, forgotten):
        yield (
            f"sync.{name}={period}: an average of it affects only the first steps after it, about "
            f"{max(1, round(forgotten))} of {period}"
        )
    if isinstance(of_params, int) and period % of_params and not run.coins:
        yield (
            f"sync.{name}={period}: not a multiple of sync.{PARAMS}={of_params}, so most of its "
            "averages are rounds of their own, each with its latency"
        )


def _bound_warnings(run: PlannedRun) -> Iterator[str]:
    if family(run) != "Adam" or run.sync_bound:
        return
    first, second = run.moment(Kind.FIRST_MOMENT), run.moment(Kind.SECOND_MOMENT)
    assert first is not None, "an Adam has both moments"
    assert second is not None
    of_first, of_second = run.periods[first.name], run.periods[second.name]
    rarest = of_second if isinstance(of_second, int) else math.inf
    if isinstance(of_first, int) and of_first < rarest:
        yield (
            f"sync.{first.name}={of_first}: averaged more often than {second.name}, after which "
            "Adam can spike; set sync_bound=true"
        )


def _link_warnings(run: PlannedRun) -> Iterator[str]:
    period = run.periods[PARAMS]
    for topology in run.topologies:
        waiting = _waiting(run, topology) / run.compute
        if waiting > run.share:
            yield (
                f"sync.{PARAMS}={period}: on a {topology} {_communication(run, topology)} takes "
                f"{number_text(waiting)} times as long as compute, more than --share={run.share:g}"
            )
    needed = recommended(run, Topology.STAR)
    if needed and isinstance(period, int) and 2 * needed[PARAMS] <= min(period, run.steps):
        yield (
            f"sync.{PARAMS}={period}: the link of a star allows {needed[PARAMS]}, and more "
            "frequent averages of the parameters give a better model"
        )
    if run.compute < run.link.latency:
        yield (
            "--step-seconds: a step computes for less time than the latency of one message; if "
            "that is not your machine, give the measured time of a step, or --flops"
        )


def _waiting(run: PlannedRun, topology: Topology) -> float:
    return run.late_waiting() if _is_late(run, topology) else run.waiting(run.desloc, topology)


def _communication(run: PlannedRun, topology: Topology) -> str:
    hidden = f" that sync_delay={run.delay} does not hide"
    return f"communication{hidden if _is_late(run, topology) else ''}"


def _is_late(run: PlannedRun, topology: Topology) -> bool:
    return run.delay > 0 and topology is Topology.STAR


def _at(run: PlannedRun, of_params: int) -> dict[str, int]:
    return rule_for(run, of_params).periods(run.streams, of_params)
