"""A plan as tables on the terminal."""

import math
import textwrap
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flower_desloc.app.config import units
from flower_desloc.app.plan import theory
from flower_desloc.app.plan.advice import recommended, tradeoffs, waiting_text, warnings
from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.rules import LEAN, NOT_MEASURED, PAGE, RULES, Rule, rule_for
from flower_desloc.app.plan.wall_clock import Topology
from flower_desloc.core.schedule import NEVER, PARAMS, RESET

_DAY = 86400
NOT_TIMED = (
    "the compute of a step is estimated for text only; for times and recommended periods give "
    "--step-seconds: in metrics.jsonl of a run, `seconds` of a client divided by its `steps`"
)
_HOW = {
    Topology.STAR: "all workers' payloads, up and then down the server's link",
    Topology.RING: "one all-reduce per stream, as in the paper",
}


def show(run: PlannedRun, console: Console, psi: float) -> None:
    """Print the whole plan; ``psi`` is that of tau_psi."""
    console.print(_heading(run))
    never = "; never: K = T" if NEVER in run.periods.values() else ""
    _print(
        console,
        "Moments",
        f"left: beta^K; drift bound: 2 ceiling (1 - beta^K){never}",
        _moments(run, psi),
    )
    _remark(
        console,
        f"After tau_{psi:g} steps {psi:.0%} of an average is left in a moment. "
        "K: its period; left: the share left at the next average; if that is next to nothing, "
        "averages help little. Drift bound: how far apart the workers can be by then; near twice "
        "the ceiling it says nothing.",
    )
    if own := [stream.name for stream in run.streams if stream.own_ceiling]:
        _remark(
            console,
            f"{run.optimizer} itself gives the ceiling of {' and '.join(own)}; rho does not",
        )
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
        remark += f"; this run's largest window: {sent}"
    _remark(console, remark)
    of_params = run.periods[PARAMS]
    if isinstance(of_params, int):
        _print_list(console, "Rule", _rule(run, of_params))
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
            stream.name, run.schedule.period_text(stream.name), *_moment(stream, run, share)
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


def _rule(run: PlannedRun, of_params: int) -> Iterator[str]:
    rule = rule_for(run, of_params)
    words = [f"compression.{stream}={form}" for stream, form in LEAN.items() if rule.lean]
    yield f"{rule.case}: {' '.join([_settings(run, rule, of_params), *words])}"
    yield f"  {_cost(rule)}"
    measured = "" if rule.loss == NOT_MEASURED else f"measured in {PAGE}; "
    yield f"  {measured}all rules: desloc plan --rules"


def _cost(rule: Rule) -> str:
    if rule.loss == NOT_MEASURED:
        return f"cost in loss: {NOT_MEASURED}; {rule.note}"
    local = f"Local {rule.optimizer}'s"
    return (
        f"{rule.bytes_share:g} of {local} bytes; loss in % above {local}: {rule.loss}, {rule.note}"
    )


def show_rules(console: Console) -> None:
    """Print all rules."""
    heads = ("optimizer", "data", "K_x / tau", "K_u / K_x", "K_v / K_x", "bytes", "loss, %")
    table = _table(*heads)
    for rule in RULES:
        table.add_row(
            *(rule.optimizer, rule.data, rule.half_lives, f"{rule.first}", f"{rule.second}"),
            "-" if rule.bytes_share is None else f"{rule.bytes_share:g}",
            rule.loss.partition(" (")[0],
        )
    _print(console, "Rules", f"measured in {PAGE}", table)
    _remark(
        console,
        f"tau: a half-life of the slower of Adam's moments, and of ADOPT's first. Rules for Adam "
        f"have sync_bound=true and the formats {', '.join(LEAN.values())}, as the preset lean.",
    )
    for rule in RULES:
        _print_list(console, rule.case, [_cost(rule)])


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
            table.add_row(f"  sync_delay={run.delay}", *cells(run.late_waiting()), style="bold")
    return table


def _recommended(run: PlannedRun) -> Iterator[str]:
    for topology in run.topologies:
        periods = recommended(run, topology)
        if periods is None:
            yield (
                f"{topology}: none; communication takes more than {run.share:.0%} of compute "
                f"at any K_x up to the run's {run.steps:,} steps. Longer periods wait less and "
                "raise the loss:"
            )
            for tried in tradeoffs(run):
                settings = _settings(run, rule_for(run, tried[PARAMS]), tried[PARAMS], phases=True)
                yield f"  {settings}: {waiting_text(run, tried, topology)}"
            continue
        of_params = periods[PARAMS]
        rule = rule_for(run, of_params)
        yield f"{topology}: {_settings(run, rule, of_params, phases=True)}"
        yield (
            "  every step; consider data parallelism"
            if of_params == 1
            else f"  {waiting_text(run, periods, topology)}; rule: {rule.case}"
        )


def _settings(run: PlannedRun, rule: Rule, of_params: int, *, phases: bool = False) -> str:
    """Return what to set for a K_x by a rule; with ``phases``, also that there are none."""
    periods = rule.periods(run.streams, of_params)
    words = [f"sync.{stream}={period}" for stream, period in periods.items()]
    if phases:
        words += [f"sync_phase.{stream}=0" for stream, p in run.schedule.phases.items() if p]
    return " ".join(words + ["sync_bound=true"] * (rule.lean and not run.sync_bound))


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
