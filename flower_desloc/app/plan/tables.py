"""A plan as tables on the terminal."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flower_desloc.app.config import units
from flower_desloc.app.plan import theory
from flower_desloc.app.plan.advice import (
    can_bound,
    reasons,
    recommended,
    tradeoffs,
    waiting_text,
    warnings,
)
from flower_desloc.app.plan.evidence import SAFE, MeasuredGap, nearest, unknown
from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.wall_clock import Topology
from flower_desloc.core.schedule import NEVER, PARAMS, RESET
from flower_desloc.core.traffic import rate

_DAY = 86400
_SHOWN = 3  # measurements
NOT_TIMED = (
    "the compute of a step is estimated for text only; for times and recommended periods give "
    "--step-seconds: in metrics.jsonl of a run, `seconds` of a client divided by its `steps`"
)
_HOW = {
    Topology.STAR: "all workers' payloads, up and then down the server's link",
    Topology.RING: "one all-reduce per stream, as in the paper",
}


@dataclass(frozen=True)
class Assumptions:
    """Constants of the theory that no run measures: tau's psi, Theorem 1's L and B.

    L or B of None is 1; if both are None, the theorem is printed for SGDM only.
    """

    psi: float
    smoothness: float | None
    dissimilarity: float | None


def show(run: PlannedRun, console: Console, assumed: Assumptions) -> None:
    """Print the whole plan."""
    console.print(_heading(run))
    never = "; never: K = T" if NEVER in run.periods.values() else ""
    _print(
        console,
        "Moments",
        f"left: beta^K; drift bound: 2 ceiling (1 - beta^K){never}",
        _moments(run, assumed.psi),
    )
    _remark(
        console,
        f"After tau_{assumed.psi:g} steps {assumed.psi:.0%} of an average is left in a moment. "
        "K: its period; left: the share left at the next average; if that is next to nothing, "
        "averages help little. Drift bound: how far apart the workers can be by then; near twice "
        "the ceiling it says nothing.",
    )
    if run.optimizer == "adopt":
        _remark(console, "ADOPT clips g / sqrt(v) at T^(1/4): that, not rho, is exp_avg's ceiling")
    _print(
        console,
        "Bytes",
        "sent by one worker; right: how many times as much other methods send",
        _bytes(run),
    )
    largest = max(num_bytes for _, num_bytes in run.windows)
    payloads = largest / run.sizes[PARAMS]
    remark = f"a payload: the parameters, {units.bytes_text(run.sizes[PARAMS])}"
    if payloads > 1 and not run.coins:
        sent = f"{units.bytes_text(largest)}, {payloads:.3g} payloads"
        remark += f"; DES-LOC's largest window: {sent}"
    _remark(console, remark)
    if run.tokens is None:
        console.print()
        console.print(Text.assemble(("Loss", "bold"), ("  unknown: measured for text only", "dim")))
        gaps = []
    else:
        gaps = nearest(
            run.optimizer,
            run.periods,
            run.num_params,
            run.tokens / run.workers,
            bound=run.bound,
            formats=run.formats,
            partition=run.partition,
            unmeasured=run.unmeasured,
        )
    if gaps:
        _print(
            console,
            "Loss",
            "of DES-LOC above Local: the nearest measurements, research/ladder.md",
            _gaps(gap for _, gap in gaps[:_SHOWN]),
        )
        _remark(console, _verdict(run, *gaps[0]))
    for topology in run.topologies if run.is_timed else ():
        _print(console, f"Time on a {topology}", _HOW[topology], _times(run, topology))
    if run.is_timed:
        _remark(
            console,
            "right: the bandwidth at which waiting takes that many times as long as compute",
        )
    else:
        console.print()
        console.print(Text.assemble(("Time", "bold"), (f"  unknown: {NOT_TIMED}", "dim")))
    known = assumed.smoothness, assumed.dissimilarity
    L, B = (value or 1.0 for value in known)
    if (run.optimizer == "sgdm" or any(known)) and (table := _theorem(run, L, B)):
        root = f"1/sqrt(T) = {1 / math.sqrt(run.steps):.3g}"
        what = f"for SGDM, p = 1/K; L = {L:g}, B = {B:g}, {root}"
        _print(console, "Theorem 1", what, table)
        _remark(
            console,
            "eta_0: the largest learning rate for which it proves convergence; limited by psi, "
            "more frequent averages allow a larger one; by 1 - beta, a smaller beta does",
        )
    if run.is_timed:
        _print_list(console, "Recommended", _recommended(run))
    _print_list(console, "Warnings", warnings(run), style="yellow")


def _heading(run: PlannedRun) -> Text:
    link = run.link
    of_tokens = f" of {run.tokens:,.0f} tokens" if run.tokens else ""
    hidden = f"; {1 - run.alpha:.0%} of communication hidden" if run.alpha < 1 else ""
    coins = "; averaged by coins" if run.coins else ""
    computes = f"; a step computes {units.seconds_text(run.compute)}" if run.is_timed else ""
    computes += f", at {run.peak}" if run.peak else ""
    return Text.assemble(
        (run.name, "bold"),
        f": {run.num_params:,.0f} parameters, {run.optimizer} on "
        f"{units.count_text(run.workers, 'worker')}\n"
        f"{run.steps:,} steps{of_tokens}{computes}\n"
        f"{units.bandwidth_text(link.bandwidth)}, "
        f"{units.seconds_text(link.latency)} latency{hidden}{coins}",
    )


def _moments(run: PlannedRun, share: float) -> Table:
    tau = f"tau_{share:g}"
    table = _table("stream", "averaged", tau, "K / tau", "left", "ceiling", "drift bound")
    for stream in run.streams:
        table.add_row(
            stream.name, units.period_text(run.schedule, stream.name), *_moment(stream, run, share)
        )
    return table


def _moment(stream: PlannedStream, run: PlannedRun, share: float) -> list[str]:
    cells, period = ["-"] * 5, run.periods[stream.name]
    if stream.beta is None:
        return cells
    tau = theory.half_life(stream.beta, share)
    cells[0] = f"{tau:,.1f}"
    if period == RESET:
        return cells  # it is zero after every average of params
    steps = period if isinstance(period, int) else run.steps
    cells[1] = units.number_text(steps / tau) if tau else "-"
    cells[2] = f"{theory.kept(stream.beta, steps):.3g}"
    if stream.ceiling is not None:
        cells[3] = f"{stream.ceiling:.3g}"
        cells[4] = f"{theory.drift_bound(stream.beta, steps, stream.ceiling):.3g}"
    return cells


def _bytes(run: PlannedRun) -> Table:
    table = _table("method", "payloads", "a step", "a day of compute", "DDP", "Local Adam")
    ddp, local_adam, *_ = run.methods
    for method in run.methods:
        sent = method.num_bytes
        table.add_row(
            method.name,
            f"{sent / run.sizes[PARAMS]:.3g}",
            units.bytes_text(sent),
            units.bytes_text(sent * _DAY / run.compute) if run.is_timed else "-",
            *(
                units.times_text(m.num_bytes / sent if sent else math.inf)
                for m in (ddp, local_adam)
            ),
            style="bold" if method is run.desloc else None,
        )
    return table


def _verdict(run: PlannedRun, apart: float, gap: MeasuredGap) -> str:
    """Return in words what the nearest measurement says of this run."""
    if why := unknown(apart, run.unmeasured):
        return f"unknown: {why}"
    if gap.is_safe:
        return f"safe: the nearest measurement is within {SAFE:g}% of Local"
    return f"not shown to be safe: the nearest measurement reaches {gap.high:+.2f}%"


def _gaps(gaps: Iterable[MeasuredGap]) -> Table:
    table = _table("periods", "model", "tokens", "text", "steps", "loss", "95% interval")
    for gap in gaps:
        table.add_row(
            "/".join(map(str, gap.periods)) + (" lossy" if gap.formats else ""),
            f"{units.figures(gap.params / 1e6)}M",
            f"{gap.tokens:,}",
            "IID" if gap.partition == "iid" else "by domain",
            f"{gap.steps:,}",
            f"{gap.loss:+.2f}%",
            f"{gap.low:+.2f} to {gap.high:+.2f}%",
        )
    return table


def _times(run: PlannedRun, topology: Topology) -> Table:
    shares = dict.fromkeys((run.share, 1.0))
    at = (f"{share:.3g}x at" for share in shares)
    table = _table("method", "waiting a step", "the run", "computing", *at)

    def cells(waiting: float) -> list[str]:
        step = run.compute + waiting
        total = units.seconds_text(run.steps * step)
        return [units.seconds_text(waiting), total, f"{100 * run.compute / step:.3g}%"]

    for method in run.methods:
        enough = (run.bandwidth_for(method, topology, s) for s in shares)
        table.add_row(
            method.name,
            *cells(run.waiting(method, topology)),
            *("none" if b is None else units.bandwidth_text(b) if b else "any" for b in enough),
            style="bold" if method is run.desloc else None,
        )
        if method is run.desloc and run.delay and topology is Topology.STAR:
            table.add_row(f"  late by {run.delay}", *cells(run.late_waiting()), style="bold")
    return table


def _theorem(run: PlannedRun, smoothness: float, dissimilarity: float) -> Table | None:
    moment = next(iter(run.moments), None)
    if moment is None or moment.beta is None or run.periods[moment.name] == RESET:
        return None  # the theorem does not cover a moment that is reset
    beta = moment.beta
    p_x, p_u = rate(run.periods[PARAMS]), rate(run.periods[moment.name])
    table = _table("momentum averaged", "p_x", "p_u", "psi", "eta_0", "limited by")
    # The stated period comes last and replaces an equal row.
    for p, name in {0.0: "never", p_x: f"with {PARAMS}", p_u: "as stated"}.items():
        value = theory.psi(p_x, p, beta)
        bound = theory.step_size_bound(
            value, beta, smoothness=smoothness, dissimilarity=dissimilarity
        )
        by_averages = theory.averaging_limit(value, dissimilarity) < 1 - beta
        table.add_row(
            name,
            f"{p_x:.3g}",
            f"{p:.3g}",
            units.figures(value),
            f"{bound:.3g}",
            "psi" if by_averages else "1 - beta",
            style="bold" if name == "as stated" else None,
        )
    return table


def _recommended(run: PlannedRun) -> Iterator[str]:
    def settings(periods: Mapping[str, int]) -> str:
        words = [f"sync.{stream}={period}" for stream, period in periods.items()]
        # The recommended periods have no phases.
        words += [f"sync_phase.{stream}=0" for stream, p in run.schedule.phases.items() if p]
        return " ".join(words + ["sync_bound=true"] * (can_bound(run) and not run.bound))

    for topology in run.topologies:
        periods = recommended(run, topology)
        if periods is None:
            yield (
                f"{topology}: none; communication takes more than {run.share:.0%} of compute "
                f"at any K_x up to the run's {run.steps:,} steps. Longer periods wait less and "
                "raise the loss:"
            )
            for tried in tradeoffs(run):
                yield f"  {settings(tried)}: {waiting_text(run, tried, topology)}"
            continue
        yield f"{topology}: {settings(periods)}"
        for reason in reasons(run, periods, topology):
            yield f"  {reason}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _print(console: Console, title: str, what: str, table: Table) -> None:
    console.print()
    console.print(Text.assemble((title, "bold"), (f"  {what}", "dim")))
    console.print(table)


def _remark(console: Console, text: str) -> None:
    console.print(Text(text, style="dim"))


def _print_list(console: Console, title: str, items: Iterable[str], style: str = "") -> None:
    lines = list(items)
    if lines:
        console.print()
        console.print(Text(title, style="bold"))
    for line in lines:
        indent = " " * (2 + len(line) - len(line.lstrip()))
        wrapped = textwrap.wrap(
            line.strip(), console.width, initial_indent=indent, subsequent_indent=f"{indent}  "
        )
        console.print(Text("\n".join(wrapped), style=style), soft_wrap=True)
