"""The sections of a report, each a figure or some tables with a caption."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from flower_desloc.config.units import bytes_text, figures, percent_text
from flower_desloc.plan.wall_clock import Link
from flower_desloc.runs.figures import (
    draw_bytes,
    draw_drift,
    draw_heldout,
    draw_holdings,
    draw_losses,
    draw_norms,
    draw_parts,
    draw_timeline,
)
from flower_desloc.runs.figures.curves import common_metric, metric_text
from flower_desloc.runs.figures.losses import final_values
from flower_desloc.runs.figures.partition import unlikeness
from flower_desloc.runs.figures.style import MAX_LINES
from flower_desloc.runs.groups import COLOURS, SeedGroup, grouped
from flower_desloc.runs.record import RunRecord
from flower_desloc.runs.report import tables
from flower_desloc.runs.report.tables import TextTable
from flower_desloc.runs.time_model import MBIT, seconds_per_step

_DRIFT = (
    "At every average of a stream: the distance of the clients from their mean (root mean square "
    "over clients), and the distance of that mean from the last one, both relative to its norm. "
    "A stream that changes slowly can be averaged rarely."
)


@dataclass(frozen=True)
class Section:
    """A figure or tables, with a caption."""

    key: str
    """Its anchor, and the name of its PNG."""
    title: str
    caption: str
    figure: Figure | None = None
    tables: Sequence[TextTable | None] = ()
    small: Sequence[TextTable] = ()
    """Tables placed next to each other."""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to show."""
        return self.figure is not None or any(self.tables) or bool(self.small)


def sections(runs: Sequence[RunRecord], link: Link) -> list[Section]:
    """Return the sections for which ``runs`` have data."""
    parts = _of_one(runs[0], link) if len(runs) == 1 else _of_many(runs, link)
    return [part for part in parts if part.has_data]


def _of_one(run: RunRecord, link: Link) -> Iterator[Section]:
    runs = [run]
    yield Section(
        "held-out",
        "Held-out quality",
        f"{_evaluated(run)} against steps, bytes sent up by all clients, and modelled "
        f"wall-clock: {_assumptions(runs, link)}.",
        draw_heldout(runs, link),
    )
    yield Section(
        "time",
        "Modelled wall-clock",
        f"This run, and Local Adam and DDP for the same steps: {_assumptions(runs, link)}.",
        tables=[tables.times(run, link)],
    )
    yield Section("bytes", "Bytes by stream", _traffic_caption(run), draw_bytes(runs))
    yield Section(
        "timeline",
        "Averages and clients",
        "Every average of every stream; below, which clients' work is in the averages.",
        draw_timeline(run),
    )
    yield Section(
        "losses",
        "Loss by client and domain",
        "The loss of each client's own batches during training; where the server evaluates, also "
        "the loss of the averaged model on held-out data, by domain.",
        draw_losses(runs),
    )
    yield Section("fairness", "Best and worst parts", _parts_caption(run), draw_parts(runs))
    yield Section("drift", "Drift and rates of change", _DRIFT, draw_drift(runs))
    many = len(run.clients) > MAX_LINES
    yield Section(
        "norms",
        "Norms and learning rate",
        "The mean over clients in black; "
        + ("the range of the clients, and 10 to 90 % of them." if many else "colours by client."),
        draw_norms(runs),
    )
    yield Section(
        "data",
        "Data of the clients",
        f"Each client's data by domain or label, as it reports them. To have the mixture of all, "
        f"{percent_text(unlikeness(run.client_data))} of a client's data would have to change.",
        draw_holdings(run.client_data, run.task),
    )
    yield Section(
        "events",
        "Joins, leaves and failures",
        "Clients that came or left during the run, the number of events by client and kind, and "
        "each event with its message.",
        tables=[tables.attendance(run), tables.event_counts(run), tables.events(run)],
    )
    yield Section(
        "settings",
        "Settings",
        "The complete configuration; settings that differ from the defaults are marked.",
        small=tables.settings(run),
    )
    yield Section(
        "provenance",
        "Provenance",
        "On the same hardware, the same settings and versions give the same weights.",
        tables=[tables.provenance(run)],
    )


def _of_many(runs: Sequence[RunRecord], link: Link) -> Iterator[Section]:
    groups = grouped(runs)
    limit = len(COLOURS)
    only = f" The figures show the first {limit}." if len(groups) > limit else ""
    yield Section(
        "comparison",
        "Comparison",
        "Final held-out values, mean ± sample standard deviation over runs that differ only in "
        "their seed, lowest loss first. Bytes are of all clients together; the factors compare "
        f"Local Adam and DDP for the same steps.{only}",
        tables=[tables.comparison(groups, link)],
    )
    shown = _lowest_loss(groups, limit)
    bands = ""
    if any(len(group.runs) > 1 for group in grouped(shown)):
        bands = "; bands are one standard deviation over seeds"
    yield Section(
        "held-out",
        "Held-out quality",
        "The averaged model against steps, bytes sent up by all clients, and modelled "
        f"wall-clock: {_assumptions(shown, link)}{bands}.",
        draw_heldout(shown, link),
    )
    yield Section(
        "bytes",
        "Bytes by stream",
        "What all clients together sent up and received.",
        draw_bytes(shown),
    )
    yield Section(
        "losses",
        "Training loss",
        f"Mean over the clients' own batches{bands}.",
        draw_losses(shown),
    )
    yield Section(
        "fairness",
        "Best and worst parts",
        f"The final held-out {common_metric(shown)} of each domain and on each client's own data, "
        "the worst on top; dashed, of all data.",
        draw_parts(shown),
    )
    yield Section("drift", "Drift and rates of change", _DRIFT, draw_drift(shown))
    yield Section(
        "norms", "Norms and learning rate", f"Means over the clients{bands}.", draw_norms(shown)
    )
    yield Section(
        "events",
        "Runs that did not complete",
        "How far they came, and the error.",
        tables=[tables.problems(runs)],
    )
    differ, same = tables.differences(groups)
    yield Section(
        "settings",
        "Settings",
        "First the settings in which the runs differ, then the common ones.",
        tables=[differ] if differ.rows else [],
        small=same,
    )
    yield Section(
        "provenance",
        "Provenance",
        "The folders of the runs, the versions they were made with, and the hashes of the weights.",
        tables=[tables.provenances(runs)],
    )


def _lowest_loss(groups: Sequence[SeedGroup], limit: int) -> list[RunRecord]:
    best = tables.by_loss(groups)[:limit]
    return [run for group in groups if group in best for run in group.runs]


def _evaluated(run: RunRecord) -> str:
    places = {where for line in run.lines for where in line.get("evaluation", {})}
    if places >= {"central", "federated"}:
        return "The averaged model on the server's held-out data, and dashed on the clients' own,"
    place = "the server's" if run.where == "central" else "the clients' own"
    return f"The averaged model on {place} held-out data"


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
        for name, key in (("Local Adam", "local_adam"), ("DDP", "ddp"))
        if ratio[key] is not None
    )
    hatched = " (hatched, by formula for the same steps and clients; an arrow: off the scale)"
    return f"All clients together sent {bytes_text(up)} up{others}{hatched if others else ''}."


def _parts_caption(run: RunRecord) -> str:
    metric = common_metric([run])
    ends = []
    for kind, name in (("central", "domain"), ("federated", "client")):
        values = final_values([run], kind, metric)
        if len(values) > 1:
            ranked = sorted(values, key=values.__getitem__, reverse=metric == "loss")
            worst, best = (
                f"{part} with {metric_text(values[part], metric)}"
                for part in (ranked[0], ranked[-1])
            )
            ends.append(f"the worst {name} is {worst}, the best {best}")
    text = "; ".join(ends) or "there is one part"
    return f"Final held-out {metric} of the averaged model by part (dashed: of all data): {text}."
