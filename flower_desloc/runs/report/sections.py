"""The sections of a report: which there are, with a sentence for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from flower_desloc.runs.figures.partition import unlikeness
from flower_desloc.runs.units import bytes_text, figures, percent_text
from flower_desloc.runs import figures as draw
from flower_desloc.runs.report import tables
from flower_desloc.runs.loaded import Group, Run, grouped
from flower_desloc.runs.figures.series import measure, told
from flower_desloc.runs.figures.style import NAMED
from flower_desloc.runs.report.tables import Table
from flower_desloc.runs.report.time_model import MBIT, seconds_per_step
from flower_desloc.plan.wall_clock import Link

_MOST_GROUPS = 11
"""As many as there are colours."""


@dataclass(frozen=True)
class Section:
    """One figure or some tables, and what they show."""

    key: str
    """Its anchor, and the name of its PNG."""
    title: str
    caption: str
    figure: Figure | None = None
    tables: Sequence[Table] = ()
    small: Sequence[Table] = ()
    """Tables that stand beside each other."""


def sections(runs: Sequence[Run], link: Link) -> list[Section]:
    """Return the sections for which ``runs`` have the data."""
    parts = _of_one(runs[0], link) if len(runs) == 1 else _of_many(runs, link)
    return [part for part in parts if part.figure is not None or part.tables or part.small]


def _of_one(run: Run, link: Link) -> Iterator[Section]:
    runs = [run]
    yield Section(
        "held-out",
        "Held-out quality",
        f"{_where(run)} against steps, bytes sent up by all clients, and modelled wall-clock: "
        f"{_assumptions(runs, link)}.",
        draw.held_out(runs, link),
    )
    yield Section(
        "time",
        "Modelled wall-clock",
        f"This run, and Local Adam and DDP for the same steps: {_assumptions(runs, link)}.",
        tables=[time] if (time := tables.times(run, link)) else [],
    )
    yield Section("bytes", "Bytes by stream", _traffic_caption(run), draw.traffic(runs))
    yield Section(
        "timeline",
        "What was averaged when",
        "Every average of every stream, and below it which clients' work is in the averages.",
        draw.timeline(run),
    )
    yield Section(
        "losses",
        "Loss by client and domain",
        "Left, what each client's own batches cost it while it trains; right, what the averaged "
        "model loses on data nobody trained on."
        if tables.fairness(run, "central")
        else "What each client's own batches cost it while it trains.",
        draw.training_loss(runs),
    )
    yield Section("fairness", "Whom the model serves", _fairness(run), draw.final_parts(runs))
    yield Section(
        "drift",
        "Drift and rates of change",
        "At every average of a stream: how far the clients were from their mean (root mean square "
        "over clients), and how far that mean is from the last one, both relative to its norm; a "
        "stream that changes slowly can be averaged rarely.",
        draw.drifts(runs),
    )
    yield Section(
        "norms",
        "Norms and learning rate",
        "The mean over clients in black, and the clients" + _bands(run) + ".",
        draw.norms(runs),
    )
    yield Section(
        "data",
        "Who holds what",
        f"Each client's data by domain or label, as it says itself{_at_the_right(run)}; for every "
        "client to have the mixture of all, "
        f"{percent_text(unlikeness(run.client_data))} of its data would have to change.",
        draw.shares(run),
    )
    told = (tables.attendance(run), tables.event_counts(run), tables.events(run))
    yield Section(
        "events",
        "Joins, leaves and failures",
        "Who came or left while the run went on; how often what happened to whom; and each event "
        "in its words.",
        tables=[table for table in told if table],
    )
    yield Section(
        "settings",
        "Settings",
        "The whole configuration; what differs from the defaults is marked.",
        small=tables.settings(run),
    )
    yield Section(
        "provenance",
        "Provenance",
        "On the same hardware the same settings and versions give the same weights.",
        tables=[tables.provenance(run)],
    )


def _of_many(runs: Sequence[Run], link: Link) -> Iterator[Section]:
    everybody, groups = runs, grouped(runs)
    yield Section(
        "comparison",
        "Comparison",
        "Final held-out values, mean ± sample standard deviation over runs that differ in their "
        "seed only, the least loss first; bytes are of all clients together, the factors say what "
        "Local Adam and DDP would send for the same steps."
        + (f" The figures show the first {_MOST_GROUPS}." if len(groups) > _MOST_GROUPS else ""),
        tables=[tables.comparison(groups, link)],
    )
    runs = _told_apart(groups)
    yield Section(
        "held-out",
        "Held-out quality",
        "Of the averaged model against steps, bytes sent up by all clients, and modelled "
        f"wall-clock: {_assumptions(runs, link)}{_bands_of_seeds(runs)}.",
        draw.held_out(runs, link),
    )
    yield Section(
        "bytes",
        "Bytes by stream",
        "What all clients together sent up, and were sent down.",
        draw.traffic(runs),
    )
    yield Section(
        "losses",
        "Training loss",
        f"Mean over the clients' own batches{_bands_of_seeds(runs)}.",
        draw.training_loss(runs),
    )
    yield Section(
        "fairness",
        "Whom the models serve",
        f"The final held-out {measure(runs)} of each domain and on each client's own data, the "
        "worst on top; dashed, over everything.",
        draw.final_parts(runs),
    )
    yield Section(
        "drift",
        "Drift and rates of change",
        "At every average of a stream: how far the clients were from their mean (root mean square "
        "over clients), and how far that mean is from the last one, relative to its norm.",
        draw.drifts(runs),
    )
    yield Section(
        "norms",
        "Norms and learning rate",
        f"Means over the clients{_bands_of_seeds(runs)}.",
        draw.norms(runs),
    )
    if problems := tables.problems(everybody):
        yield Section(
            "events", "Runs that did not complete", "How far they came.", tables=[problems]
        )
    differ, same = tables.differences(groups)
    yield Section(
        "settings",
        "Settings",
        "First those in which the runs differ, then those that are the same in all of them.",
        tables=[differ] if differ.rows else [],
        small=same,
    )
    yield Section(
        "provenance",
        "Provenance",
        "Where the runs are, with which versions they were made, and the hashes of their weights.",
        tables=[tables.provenances(everybody)],
    )


def _told_apart(groups: Sequence[Group]) -> list[Run]:
    """Return the runs to draw: of many groups, those of least loss."""
    best = tables.by_loss(groups)[:_MOST_GROUPS]
    return [run for group in groups if group in best for run in group.runs]


def _where(run: Run) -> str:
    both = {w for line in run.lines for w in line.get("evaluation", {})} >= {"central", "federated"}
    if both:
        return "The averaged model on the server's held-out data, and dashed on the clients' own,"
    place = "the server's" if run.where == "central" else "the clients' own"
    return f"The averaged model on {place} held-out data"


def _assumptions(runs: Sequence[Run], link: Link) -> str:
    paces = sorted(pace for run in runs if (pace := seconds_per_step(run)) is not None)
    if not paces:
        return "no step was measured"
    first, last = (figures(1000 * pace) for pace in (paces[0], paces[-1]))
    milliseconds = first if first == last else f"{first} to {last}"
    mbit, latency = link.bandwidth / MBIT, 1000 * link.latency
    return (
        f"{milliseconds} ms of compute a step, the median over windows of the slowest client as "
        f"measured, and every average through one link of the server's, {mbit:g} Mbit/s and "
        f"{latency:g} ms, up and then down, with nothing hidden behind compute"
    )


def _traffic_caption(run: Run) -> str:
    counts, ratio = run.summary["bytes"], run.summary["ratio"]
    up = bytes_text(counts["measured"]["up"]["total"])
    others = [
        f"{name} would send {figures(ratio[key])} times as much"
        for name, key in (("Local Adam", "local_adam"), ("DDP", "ddp"))
        if ratio[key] is not None
    ]
    return (
        f"All clients together sent {up} up" + "".join(f"; {other}" for other in others) + " "
        "(hatched, by formula: the same steps and clients; what leaves the panel has an arrow)."
        if others
        else f"All clients together sent {up} up."
    )


def _fairness(run: Run) -> str:
    metric = measure([run])
    ends = []
    for kind, name in (("central", "domain"), ("federated", "client")):
        if (found := tables.fairness(run, kind)) and found[0] != found[2]:
            worst, high, best, low = found
            ends.append(
                f"the worst {name} is {worst} with {told(high, metric)}, the best {best} with "
                f"{told(low, metric)}"
            )
    text = "; ".join(ends) or "there is one part"
    return f"Final held-out {metric} of the averaged model by part (dashed: of all): {text}."


def _at_the_right(run: Run) -> str:
    return ", and at the right how much" if len(run.client_data) <= NAMED else ""


def _bands(run: Run) -> str:
    many = len(run.clients) > 12
    return "' range, 10 to 90 % of them darker" if many else " in their colours, as above"


def _bands_of_seeds(runs: Sequence[Run]) -> str:
    several = any(len(group.runs) > 1 for group in grouped(runs))
    return "; bands are one standard deviation over seeds" if several else ""
