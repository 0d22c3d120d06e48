"""The sections of a report, each a figure or some tables with a caption."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from flower_desloc.app.config.imports import is_path
from flower_desloc.app.config.metric import metric_text
from flower_desloc.app.config.units import bytes_text, figures, percent_text
from flower_desloc.app.plan.wall_clock import MBIT, Link
from flower_desloc.app.runs import figures as draw
from flower_desloc.app.runs.figures.curves import common_metric
from flower_desloc.app.runs.figures.losses import KINDS, worst_first
from flower_desloc.app.runs.figures.partition import total_variation
from flower_desloc.app.runs.figures.style import MAX_LINES
from flower_desloc.app.runs.groups import COLOURS, grouped
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.app.runs.report import tables
from flower_desloc.app.runs.report.tables import TextTable
from flower_desloc.app.runs.summary import OTHER_METHODS
from flower_desloc.app.runs.time_model import seconds_per_step


@dataclass(frozen=True)
class Section:
    """A figure or tables, with a caption."""

    key: str
    """Its anchor, and the name of its PNG."""
    title: str
    caption: str
    figure: Figure | None = None
    tables: Sequence[TextTable] = ()
    small: Sequence[TextTable] = ()
    """Tables placed next to each other."""


def sections(runs: Sequence[RunRecord], link: Link) -> list[Section]:
    """Return the sections for which ``runs`` have data; several runs are compared."""
    return [s for s in _sections(runs, link) if s.figure or any(s.tables) or s.small]


def _sections(runs: Sequence[RunRecord], link: Link) -> Iterator[Section]:
    run = runs[0] if len(runs) == 1 else None
    groups = grouped(runs)
    best = tables.by_loss(groups)[: len(COLOURS)]
    shown = [run for group in groups if group in best for run in group.runs]
    several_seeds = run is None and any(len(group.runs) > 1 for group in best)
    bands = "; bands are one standard deviation over seeds" if several_seeds else ""
    if run is None:
        only = f" The figures show the first {len(best)}." if len(best) < len(groups) else ""
        yield Section(
            "comparison",
            "Comparison",
            "Final held-out values, mean ± sample standard deviation over runs that differ only in "
            "their seed, lowest loss first. Bytes are of all clients together; the factors compare "
            f"Local Adam and DDP for the same steps.{only}",
            tables=[tables.comparison(groups, link)],
        )
    yield Section(
        "held-out",
        "Held-out quality",
        f"The averaged model{_where(run) if run else ''} against steps, bytes sent up by all "
        f"clients, and modelled wall-clock: {_assumptions(shown, link)}{bands}.",
        draw.draw_heldout(shown, link),
    )
    if run:
        yield Section(
            "time",
            "Modelled wall-clock",
            f"This run, and Local Adam and DDP for the same steps: {_assumptions(runs, link)}.",
            tables=[tables.times(run, link)],
        )
    yield Section(
        "bytes",
        "Bytes by stream",
        _traffic_caption(run) if run else "What all clients together sent up and received.",
        draw.draw_bytes(shown),
    )
    if run:
        yield Section(
            "timeline",
            "Averages and clients",
            "Every average of every stream; below, which clients' work is in the averages.",
            draw.draw_timeline(run),
        )
    yield Section(
        "losses",
        "Loss by client and domain" if run else "Training loss",
        "The loss of each client's own batches during training; where the server evaluates, also "
        "the loss of the averaged model on held-out data, by domain."
        if run
        else f"Mean over the clients' own batches{bands}.",
        draw.draw_losses(shown),
    )
    yield Section("fairness", "Best and worst parts", _parts_caption(shown), draw.draw_parts(shown))
    yield Section(
        "drift",
        "Drift and rates of change",
        "At every average of a stream: the distance of the clients from their mean (root mean "
        "square over clients), and the distance of that mean from the last one, both relative to "
        "its norm. M clients whose tensors are unrelated (orthogonal and equally long) have a "
        "drift of \N{SQUARE ROOT}(M - 1): a moment that is mostly noise comes near it, and "
        "parameters must stay far below. A stream that changes slowly can be averaged rarely.",
        draw.draw_drift(shown),
    )
    yield Section(
        "norms", "Norms and learning rate", _norms_caption(run, bands), draw.draw_norms(shown)
    )
    if run:
        yield Section(
            "data",
            "Data of the clients",
            "Each client's data by domain or label, as it reports them. To have the mixture of "
            f"all, {percent_text(total_variation(run.client_data))} of a client's data would have "
            "to change.",
            draw.draw_holdings(run.client_data, run.task),
        )
        yield Section(
            "events",
            "Joins, leaves and failures",
            "Clients that joined or left during the run, the number of events by client and kind, "
            "and each event with its message.",
            tables=[tables.attendance(run), tables.event_counts(run), tables.events(run)],
        )
        yield Section(
            "settings",
            "Settings",
            "The complete configuration; settings that differ from the defaults are marked."
            + (f" Of data and model, {run.task} reads what it likes." if is_path(run.task) else ""),
            small=tables.settings(run),
        )
    else:
        yield Section(
            "events",
            "Runs that did not complete",
            "The last step of each, and the error.",
            tables=[tables.problems(runs)],
        )
        differ, same = tables.differences(groups)
        yield Section(
            "settings",
            "Settings",
            "First the settings in which the runs differ, then the common ones.",
            tables=[differ],
            small=same,
        )
    yield Section(
        "provenance",
        "Provenance",
        "On the same hardware, the same settings and versions give the same weights."
        if run
        else "The folders of the runs, the versions they were made with, and the hashes of the "
        "weights.",
        tables=[tables.provenance(runs)],
    )


def _where(run: RunRecord) -> str:
    if run.summary["evaluation"].keys() >= {"central", "federated"}:
        return " on the server's held-out data, and dashed on the clients' own,"
    place = "the server's" if run.where == "central" else "the clients' own"
    return f" on {place} held-out data"


def _assumptions(runs: Sequence[RunRecord], link: Link) -> str:
    paces = sorted(pace for run in runs if (pace := seconds_per_step(run)) is not None)
    if not paces:
        return "no step was measured"
    first, last = (figures(1000 * pace) for pace in (paces[0], paces[-1]))
    milliseconds = first if first == last else f"{first} to {last}"
    return (
        f"{milliseconds} ms of compute per step, the median over windows of the slowest client as "
        f"measured; every average goes through one link of the server, "
        f"{link.bandwidth / MBIT:g} Mbit/s and {1000 * link.latency:g} ms, up and then down, "
        "without overlap with compute"
    )


def _traffic_caption(run: RunRecord) -> str:
    up, ratio = run.summary["bytes"]["measured"]["up"]["total"], run.summary["ratio"]
    others = "".join(
        f"; {name} would send {figures(ratio[key])} times as much"
        for key, name in OTHER_METHODS.items()
        if ratio[key] is not None
    )
    hatched = " (hatched, by formula for the same steps and clients; an arrow: off the scale)"
    return f"All clients together sent {bytes_text(up)} up{others}{hatched if others else ''}."


def _parts_caption(runs: Sequence[RunRecord]) -> str:
    metric = common_metric(runs)
    if len(runs) > 1:
        return (
            f"The final held-out {metric} of each domain and on each client's own data, the worst "
            "on top; dashed, of all data."
        )
    ends = []
    for kind, name in KINDS.items():
        parts = [
            f"{part} with {metric_text(value, metric)}"
            for part, value in worst_first(runs, kind, metric).items()
        ]
        if len(parts) > 1:
            ends.append(f"the worst {name} is {parts[0]}, the best {parts[-1]}")
    text = "; ".join(ends) or "there is one part"
    return f"Final held-out {metric} of the averaged model by part (dashed: of all data): {text}."


def _norms_caption(run: RunRecord | None, bands: str) -> str:
    if run is None:
        return f"Means over the clients{bands}."
    many = len(run.clients) > MAX_LINES
    lines = "the range of the clients, and 10 to 90 % of them" if many else "colours by client"
    return f"The mean over clients in black; {lines}."
