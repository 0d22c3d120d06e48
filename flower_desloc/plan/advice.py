"""Which periods to take and what to beware of: the paper's sections 3 and 5.2, and takeaways."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from flower_desloc.core.schedule import NEVER, PARAMS, RESET
from flower_desloc.plan.moments import half_life, kept
from flower_desloc.plan.setting import Setting, Stream
from flower_desloc.plan.units import number_text
from flower_desloc.plan.wall_clock import Topology

MULTIPLES: Final = {
    "momentum_buffer": 3,
    "exp_avg": 3,
    "exp_avg_sq": 6,
    "max_exp_avg_sq": 6,
}
"""Of K_x, for K_u and K_v: "robust default choices" (the paper's ablation of low-communication
configurations). Any other stream goes with params."""

MANY: Final = 5
"""Half-lives after which a moment counts as forgotten: 3% of it are left."""

_TRIED: Final = 256
"""The longest K_x of the paper's comparisons."""


def recommended(setting: Setting, topology: Topology) -> dict[str, int] | None:
    """Return a period for every stream: K_x, 3 K_x and 6 K_x for the smallest K_x that will do.

    K_x is the smallest at which waiting takes at most ``setting.share`` of compute, since the model
    is the better the smaller it is. None where that is longer than the run.
    """

    def affordable(period: int) -> bool:
        other = setting.with_periods(_multiples(setting, period))
        return setting.waiting(other.desloc, topology) <= setting.share * setting.compute

    periods = range(1, setting.steps + 1)
    at = bisect_left(periods, True, key=affordable)  # waiting falls with the period
    return _multiples(setting, periods[at]) if at < len(periods) else None


def reasons(setting: Setting, periods: dict[str, int], topology: Topology) -> Iterator[str]:
    """Yield why ``periods`` are recommended, a sentence for every stream."""
    shortest = periods[PARAMS]
    if shortest == 1:
        yield (
            f"{PARAMS} every step: the link carries that in {setting.share:.0%} of compute, so "
            "data parallelism is worth a look"
        )
    else:
        yield (
            f"{PARAMS} every {shortest}: the smallest K_x at which communication takes at most "
            f"{setting.share:.0%} of compute on this {topology}"
        )
    for stream in setting.moments:
        period = periods[stream.name]
        yield (
            f"{stream.name} every {period}: {MULTIPLES[stream.name]} K_x, the paper's default; "
            f"{_in_half_lives(stream, period)}"
        )


def warnings(setting: Setting) -> Iterator[str]:
    """Yield what to beware of, each in a sentence that names the setting."""
    yield from _about_params(setting)
    for stream in setting.streams:
        if stream.name != PARAMS:
            yield from _about_state(setting, stream)
    betas = [stream.beta for stream in setting.moments if stream.beta is not None]
    if len(betas) > 1 and betas[0] > math.sqrt(betas[1]):
        yield (
            f"optimizer.betas=[{betas[0]:g},{betas[1]:g}]: Adam is known to converge for "
            f"beta1 up to sqrt(beta2), here {math.sqrt(betas[1]):.4g}"
        )
    unbounded = [stream.name for stream in setting.moments if stream.ceiling is None]
    if unbounded:
        yield (
            f"nothing bounds {' and '.join(unbounded)}: a drift bound needs a clipped gradient "
            "(optimizer.clip_norm or --rho), and no weight decay added to it"
        )
    if setting.workers == 1:
        yield "--workers=1: there is nobody to average with"
    yield from _about_links(setting)


def _about_params(setting: Setting) -> Iterator[str]:
    period = setting.periods[PARAMS]
    if period == NEVER:
        yield (
            f"sync.{PARAMS}=never: the workers' parameters meet once, at the end of training, "
            "and Theorem 1 then promises nothing"
        )
    elif isinstance(period, int) and period > setting.steps:
        yield (
            f"sync.{PARAMS}={period}: longer than the run of {setting.steps} steps, so the "
            "parameters are averaged once, at its end"
        )
    sooner = [
        stream.name
        for stream in setting.streams
        if isinstance(stream.period, int)
        and (period == NEVER or (isinstance(period, int) and stream.period < period))
    ]
    if sooner:
        yield (
            f"sync.{PARAMS}={period}: averaged less often than {' and '.join(sooner)}; the "
            "parameters need it most, so make theirs the shortest period"
        )


def _about_state(setting: Setting, stream: Stream) -> Iterator[str]:
    name, period = stream.name, stream.period
    shortest = setting.periods[PARAMS]
    if period == NEVER:
        yield (
            f"sync.{name}=never: every worker keeps its own, which stays noisy, and one that joins "
            "has none to start from (the paper's FAVG+OPT, whose activations grew)"
        )
    elif period == RESET:
        yield (
            f"sync.{name}=reset: it starts from zero after every average of {PARAMS}, and the "
            "loss may spike there (the paper's FAVG-OPT)"
        )
    elif period > setting.steps:
        yield (
            f"sync.{name}={period}: longer than the run of {setting.steps} steps, so it is never "
            "averaged"
        )
    if not isinstance(period, int):
        return
    if stream.beta is not None:
        tau = half_life(stream.beta)
        if period > MANY * tau:
            yield (
                f"sync.{name}={period}: {_in_half_lives(stream, period)}; an average steers only "
                f"the first steps after it, about {max(1, round(MANY * tau))} of {period}"
            )
    if isinstance(shortest, int) and period % shortest and not setting.coins:
        yield (
            f"sync.{name}={period}: no multiple of sync.{PARAMS}={shortest}, so that most of its "
            "averages are rounds of their own, each with its latency"
        )


def _about_links(setting: Setting) -> Iterator[str]:
    period = setting.periods[PARAMS]
    for topology in Topology:
        waiting = setting.waiting(setting.desloc, topology) / setting.compute
        if waiting > setting.share:
            yield (
                f"sync.{PARAMS}={period}: on a {topology} communication takes "
                f"{number_text(waiting)} times as long as compute, more than "
                f"--share={setting.share:g}"
            )
    needed = recommended(setting, Topology.STAR)
    if needed and isinstance(period, int) and 2 * needed[PARAMS] <= min(period, setting.steps):
        yield (
            f"sync.{PARAMS}={period}: the link of a star affords {needed[PARAMS]}, and the model "
            "is the better the more often its parameters are averaged"
        )
    if needed and needed[PARAMS] > _TRIED:
        yield (
            f"--bandwidth: on a star the link asks for sync.{PARAMS}={needed[PARAMS]}; the paper "
            f"compares methods up to {_TRIED}, and longer periods of {PARAMS} cost perplexity"
        )
    if setting.compute < setting.link.latency:
        yield (
            "--step-seconds: a step computes for less time than a message takes; if that is not "
            "your machine, give what a run of yours has measured, or its --flops"
        )


def _multiples(setting: Setting, period: int) -> dict[str, int]:
    return {stream.name: MULTIPLES.get(stream.name, 1) * period for stream in setting.streams}


def _in_half_lives(stream: Stream, period: int) -> str:
    assert stream.beta is not None
    tau = half_life(stream.beta)
    if not tau:
        return "it holds nothing of the past"
    left = kept(stream.beta, period)
    return (
        f"{number_text(period / tau)} half-lives, after which "
        f"{f'{left:.0%}' if left >= 0.005 else 'next to nothing'} of an average is left"
    )
