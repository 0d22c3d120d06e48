"""Recommended periods and warnings: the paper's sections 3 and 5.2, and its takeaways."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

from flower_desloc.app.config.units import number_text, seconds_text
from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.theory import half_life, kept
from flower_desloc.app.plan.wall_clock import Topology
from flower_desloc.core.kinds import Kind
from flower_desloc.core.schedule import NEVER, PARAMS, RESET, Period
from flower_desloc.core.streams import starts_at_zero

MULTIPLES: Final = {
    Kind.FIRST_MOMENT: 3,
    Kind.SECOND_MOMENT: 6,
    Kind.MAXIMUM: 6,
}
"""K_u and K_v as multiples of K_x: "robust default choices" (the paper's ablation of
low-communication configurations). Any other stream has the period of params."""

FIRST_WITH_PARAMS: Final = {"exp_avg": 1, "exp_avg_sq": 6}
"""The multiples for Adam with ``sync_bound``, and for ADOPT if K_x is not long, which were
measured to cost less loss."""

LONG: Final = 2
"""Half-lives of both of Adam's moments, or of ADOPT's first, above which K_x counts as long.
Measured with Adam where clients hold unlike data (research/paper.md): at 1.2 rare averages of
exp_avg cost loss and those of exp_avg_sq none, at 2.4 neither do, from 4.7 on those of exp_avg_sq
do and those of exp_avg do not."""

AT_LONG: Final = {"exp_avg": 6, "exp_avg_sq": 1}
"""The multiples for Adam at a long K_x, if clients hold unlike data."""

_ADAMS: Final = ("adam", "adamw")

FORGOTTEN: Final = 5
"""Half-lives after which a moment counts as forgotten: 3% of it are left."""

LONGEST_TRIED: Final = 256
"""The longest K_x of the paper's comparisons."""


def can_bound(run: PlannedRun) -> bool:
    """Return whether the run has Adam's moments, with betas for which ``sync_bound`` exists."""
    first, second = run.beta("exp_avg"), run.beta("exp_avg_sq")
    if run.optimizer not in _ADAMS or first is None or second is None:
        return False
    return first**2 < second


def is_long(run: PlannedRun, period: Period) -> bool:
    """Return whether clients with unlike data average Adam's parameters at a ``LONG`` period."""
    return isinstance(period, int) and 0 < _longest_short(run) < period


def multiples(run: PlannedRun, period: int) -> Mapping[str, int]:
    """Return the recommended K_u and K_v as multiples of K_x, which is ``period``."""
    if can_bound(run):
        return AT_LONG if is_long(run, period) else FIRST_WITH_PARAMS
    if run.optimizer == "adopt" and period <= _longest_for_adopt(run):
        return FIRST_WITH_PARAMS
    return {s.name: MULTIPLES[s.kind] for s in run.streams if s.kind in MULTIPLES}


def recommended(run: PlannedRun, topology: Topology) -> dict[str, int] | None:
    """Return a period for every stream: multiples of the smallest affordable K_x.

    The multiples are those of ``multiples``. K_x is affordable if waiting takes at most
    ``run.share`` of compute; a smaller K_x gives a better model. On a star, ``run.delay`` counts.
    The result is None if no K_x up to the run's length is affordable.
    """

    def affordable(period: int) -> bool:
        other = run.with_periods(_at(run, period))
        return _waiting(other, topology) <= run.share * run.compute

    last_jump = min(_last_jump(run), run.steps)
    for period in range(1, last_jump + 1):
        if affordable(period):
            return _at(run, period)
    periods = range(last_jump + 1, run.steps + 1)
    at = bisect_left(periods, True, key=affordable)  # waiting falls with the period
    return _at(run, periods[at]) if at < len(periods) else None


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


def reasons(run: PlannedRun, periods: dict[str, int], topology: Topology) -> Iterator[str]:
    """Yield why ``periods`` are recommended, one sentence per stream."""
    run = run.with_periods(periods)
    period = periods[PARAMS]
    if period == 1:
        yield (
            f"{PARAMS} every step: that takes at most {run.share:.0%} of compute on this link, so "
            "consider data parallelism"
        )
    else:
        yield (
            f"{PARAMS} every {period}: the smallest K_x at which {_communication(run, topology)} "
            f"takes at most {run.share:.0%} of compute on this {topology}"
        )
    for stream in run.moments:
        period = periods[stream.name]
        left = _in_half_lives(stream, period)
        if run.leaves_out(stream.name):
            left = (
                f"longer than the run of {run.steps:,} steps, so on this link it is never averaged"
            )
        multiple = _multiple(run, stream.name, periods[PARAMS])
        yield f"{stream.name} every {period}: {multiple}; {left}"


def warnings(run: PlannedRun) -> Iterator[str]:
    """Yield one sentence per risk, each with the key or option to change."""
    yield from _params_warnings(run)
    for stream in run.streams:
        if starts_at_zero(stream.name):
            yield from _state_warnings(run, stream)
    first, second = run.beta("exp_avg"), run.beta("exp_avg_sq")
    if first is not None and second is not None and first > math.sqrt(second):
        yield (
            f"optimizer.betas=[{first:g},{second:g}]: Adam is known to converge for "
            f"beta1 up to sqrt(beta2), here {math.sqrt(second):.4g}"
        )
    unbounded = [stream.name for stream in run.moments if stream.ceiling is None]
    if unbounded:
        yield (
            f"nothing bounds {' and '.join(unbounded)}: a drift bound needs a clipped gradient "
            "(optimizer.clip_norm or --rho), and no weight decay added to it"
        )
    if can_bound(run) or run.optimizer == "adopt":
        yield from _first_moment_warnings(run)
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
    name, period = stream.name, run.periods[stream.name]
    of_params = run.periods[PARAMS]
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
    # A long K_x has a warning of its own.
    if stream.beta is not None and period > advised and not is_long(run, of_params):
        forgotten = FORGOTTEN * half_life(stream.beta)
        if period > forgotten:
            yield (
                f"sync.{name}={period}: {_in_half_lives(stream, period)}; an average affects only "
                f"the first steps after it, about {max(1, round(forgotten))} of {period}"
            )
    if isinstance(of_params, int) and period % of_params and not run.coins:
        yield (
            f"sync.{name}={period}: not a multiple of sync.{PARAMS}={of_params}, so most of its "
            "averages are rounds of their own, each with its latency"
        )


def _first_moment_warnings(run: PlannedRun) -> Iterator[str]:
    of_params, first, second = (run.periods[name] for name in (PARAMS, "exp_avg", "exp_avg_sq"))
    if isinstance(of_params, int) and is_long(run, of_params):
        if second not in (of_params, RESET):
            yield (
                f"sync.exp_avg_sq={second}: sync.params={of_params} is long for the half-lives of "
                "Adam's moments, where clients with unlike data lose by rare averages of "
                f"exp_avg_sq; set sync.exp_avg_sq={of_params}, and sync.exp_avg="
                f"{of_params * AT_LONG['exp_avg']} for fewer bytes (research/paper.md)"
            )
        return
    if not isinstance(first, int):
        return
    bounded = " and bounded" if can_bound(run) else ""
    # ADOPT: rare averages cost at K_x = 16, and are not shown to at 64 and 256, with IID data
    # (research/paper.md, RQ2 and RQ3).
    longest = math.inf if bounded else _longest_for_adopt(run)
    rare = isinstance(of_params, int) and of_params < first and of_params <= longest
    if rare:
        yield (
            f"sync.exp_avg={first}: the least loss was measured with exp_avg averaged with params"
            f"{bounded}; lossy formats offset the extra bytes, as in the preset lean "
            "(research/ladder.md)"
        )
    if bounded and not run.bound and first < (second if isinstance(second, int) else math.inf):
        yield (
            f"sync.exp_avg={first}: averaged more often than exp_avg_sq, after which Adam can "
            "spike; set sync_bound=true"
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
    if needed and needed[PARAMS] > LONGEST_TRIED:
        yield (
            f"--bandwidth: on a star the link needs sync.{PARAMS}={needed[PARAMS]}; the paper "
            f"tries {PARAMS} up to every {LONGEST_TRIED} steps, and longer periods raise the loss"
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


def _first_half_life(run: PlannedRun) -> float:
    """Return the half-life of the first moment in steps; 0 if there is none."""
    return half_life(run.beta("exp_avg") or 0.0)


def _longest_short(run: PlannedRun) -> int:
    """Return the greatest K_x that is not long; 0 if data are alike or moments not Adam's."""
    if run.partition == "iid" or not can_bound(run):
        return 0
    return int(LONG * max(half_life(stream.beta or 0.0) for stream in run.moments))


def _longest_for_adopt(run: PlannedRun) -> int:
    """Return the greatest K_x at which rare averages of ADOPT's first moment cost loss."""
    return int(LONG * _first_half_life(run))


def _last_jump(run: PlannedRun) -> int:
    """Return the greatest K_x that may have other multiples than the next; 0 if none has."""
    return _longest_for_adopt(run) if run.optimizer == "adopt" else _longest_short(run)


def _at(run: PlannedRun, period: int) -> dict[str, int]:
    times = multiples(run, period)
    return {stream.name: times.get(stream.name, 1) * period for stream in run.streams}


def _in_half_lives(stream: PlannedStream, period: int) -> str:
    assert stream.beta is not None
    tau = half_life(stream.beta)
    if not tau:
        return "it has no memory"
    left = kept(stream.beta, period)
    return (
        f"{number_text(period / tau)} half-lives, after which "
        f"{f'{left:.0%}' if left >= 0.005 else 'next to nothing'} of an average is left"
    )


def _multiple(run: PlannedRun, name: str, of_params: int) -> str:
    times = multiples(run, of_params)
    if name not in times:
        return "that of params"
    if times is AT_LONG:
        how_often = "with params" if times[name] == 1 else f"{times[name]} K_x"
        return f"{how_often}, which costs Adam the least loss at so long a K_x, with unlike data"
    if times[name] == 1:
        if can_bound(run):
            return "with params, which costs Adam the least loss if it is bounded"
        return "with params, which costs ADOPT the least loss at so short a K_x"
    return f"{times[name]} K_x, the paper's default"
