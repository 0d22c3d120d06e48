"""What the report says in words and numbers: headline, comparison, events, settings."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import get_args

from flower_desloc.config import Config, dump
from flower_desloc.runs.metrics import Line
from flower_desloc.runs.units import (
    bytes_text,
    duration_text,
    figures,
    loss_text,
    percent_text,
    period_text,
)
from flower_desloc.flower.observer import EventKind
from flower_desloc.runs.loaded import Group, Run, Spread, flat, natural
from flower_desloc.runs.figures.series import Curve, heldout_parts, measure, told
from flower_desloc.runs.report.time_model import modelled
from flower_desloc.plan.wall_clock import Link

NONE = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Table:
    """Rows of text below a head; ``words`` are the columns that are not numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset({0})
    marked: frozenset[int] = field(default_factory=frozenset)
    """Rows to be seen first."""
    title: str = ""


@dataclass(frozen=True)
class Tile:
    """One number of the headline."""

    name: str
    value: str
    note: str = ""


def sentence(run: Run) -> str:
    """Return what was run, as one says it."""
    config, clients = run.summary["config"], run.summary["clients"]
    streams = ", ".join(f"{s} {period_text(p)}" for s, p in config["periods"].items())
    coins = " on average" if config["coin_seed"] is not None else ""
    strategy = run.config.get("strategy", "desloc")
    by = f", Flower's own {strategy}," if strategy != "desloc" else ""
    return (
        f"{config['optimizer']}{by} on {clients} client{'' if clients == 1 else 's'}, task "
        f"{config['task']}, seed {config['seed']}; averaged: {streams} steps{coins}."
    )


def progress(run: Run) -> str:
    """Return how far the run came."""
    done, planned = run.num_steps, run.summary["config"]["steps"]
    steps = f"{done} steps" if done == planned else f"{done} of {planned} steps"
    windows = run.summary["windows"]
    return f"{run.status}, {steps}, {windows} window{'' if windows == 1 else 's'}"


def tiles(run: Run) -> list[Tile]:
    """Return the numbers of the headline."""
    summary, course = run.summary, run.summary["evaluation"].get(run.where, {})
    where = "on the server" if run.where == "central" else "on the clients"
    found = []
    if "loss" in course:
        first = loss_text(course["loss"]["first"])
        found.append(
            Tile("held-out loss", loss_text(course["loss"]["final"]), f"from {first}, {where}")
        )
    if "perplexity" in course:
        first = figures(course["perplexity"]["first"])
        found.append(Tile("perplexity", figures(course["perplexity"]["final"]), f"from {first}"))
    accuracy = run.final("accuracy")
    if accuracy is not None:
        found.append(Tile("accuracy", percent_text(accuracy), where))
    up, down = (summary["bytes"]["measured"][way]["total"] for way in ("up", "down"))
    found.append(Tile("sent up", bytes_text(up), f"{bytes_text(down)} down"))
    for name, key in (("Local Adam", "local_adam"), ("DDP", "ddp")):
        if summary["ratio"][key] is not None:
            sent, factor = summary["bytes"][key]["up"]["total"], figures(summary["ratio"][key])
            found.append(Tile(f"{name} sends", f"{factor} {TIMES}", f"{bytes_text(sent)} up"))
    seconds = summary["seconds"]
    if "total" in seconds:
        parts = ("clients", "evaluation", "exchange")
        split = ", ".join(f"{part} {duration_text(seconds.get(part, 0.0))}" for part in parts)
        found.append(Tile("wall-clock", duration_text(seconds["total"]), split))
    return found


def comparison(groups: Sequence[Group], link: Link) -> Table:
    """Return one row a group, the least loss first; those without one last."""
    runs = [run for group in groups for run in group.runs]
    accuracy = any(run.final("accuracy") is not None for run in runs)
    perplexity = any(run.final("perplexity") is not None for run in runs)
    head = ["", "runs", "status", "held-out loss"]
    head += ["perplexity"] * perplexity + ["accuracy"] * accuracy
    head += ["sent up", "Local Adam sends", "DDP sends", "modelled time", "worst domain"]
    return Table(
        head,
        [_row(group, link, perplexity, accuracy) for group in by_loss(groups)],
        frozenset({0, 1, 2, len(head) - 1}),
    )


def by_loss(groups: Iterable[Group]) -> list[Group]:
    """Return the groups, the least final loss first; those without one last."""

    def key(group: Group) -> tuple[bool, float]:
        loss = group.final("loss").mean
        return loss is None, loss or 0.0

    return sorted(groups, key=key)


def _row(group: Group, link: Link, perplexity: bool, accuracy: bool) -> list[str]:
    runs = group.counted
    seeds = sorted({run.seed for run in group.runs})
    named = f"{len(group.runs)}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    states = [run.status for run in group.runs]
    status = ", ".join(
        state if len(set(states)) == 1 else f"{states.count(state)} {state}"
        for state in dict.fromkeys(states)
    )
    row = [group.label, named, status, plus_minus(group.final("loss"), 3)]
    row += [plus_minus(group.final("perplexity"), 2)] * perplexity
    if accuracy:
        row.append(plus_minus(group.final("accuracy"), 4))
    row.append(bytes_text(fmean(run.summary["bytes"]["measured"]["up"]["total"] for run in runs)))
    for key in ("local_adam", "ddp"):
        ratios = Spread.of(run.summary["ratio"][key] for run in runs)
        row.append(NONE if ratios.mean is None else f"{figures(ratios.mean)} {TIMES}")
    times = [m["this run"].total for run in runs if (m := modelled(run, link))]
    row.append(duration_text(fmean(times)) if times else NONE)
    return [*row, _worst(runs)]


def plus_minus(spread: Spread, digits: int) -> str:
    """Return mean ± standard deviation, and of how many values where some are not finite.

    >>> plus_minus(Spread.of([1.0, 3.0]), 2), plus_minus(Spread.of([1.0, None]), 1)
    ('2.00 ± 1.41', '1.0 (1 of 2)')
    """
    if spread.mean is None:
        return NONE
    text = f"{spread.mean:.{digits}f}"
    if spread.std is not None:
        text += f" ± {spread.std:.{digits}f}"
    return (
        text if spread.numbers == spread.count else f"{text} ({spread.numbers} of {spread.count})"
    )


def fairness(run: Run, kind: str) -> tuple[str, float, str, float] | None:
    """Return the worst domain (or client) and its final loss or accuracy, the best and its."""
    metric = measure([run])
    finals = {n: c.last[1] for n, c in heldout_parts(run, metric, kind).items()}
    if not finals:
        return None
    ranked = sorted(finals, key=finals.__getitem__, reverse=metric == "loss")
    return ranked[0], finals[ranked[0]], ranked[-1], finals[ranked[-1]]


def _worst(runs: Sequence[Run]) -> str:
    metric = measure(runs)
    seen: dict[str, list[Curve]] = {}
    for run in runs:
        for name, curve in heldout_parts(run, metric, "central").items():
            seen.setdefault(name, []).append(curve)
    finals = {name: fmean(c.last[1] for c in curves) for name, curves in seen.items()}
    if not finals:
        return NONE
    worst = (max if metric == "loss" else min)(finals, key=finals.__getitem__)
    return f"{worst} {told(finals[worst], metric)}"


def times(run: Run, link: Link) -> Table | None:
    """Return the modelled time of the run beside Local Adam's and DDP's; None without steps."""
    methods = modelled(run, link)
    if not methods:
        return None
    return Table(
        ["", "compute", "exchange", "together", "of it exchange"],
        [
            [
                name,
                *(duration_text(s) for s in (time.compute, time.exchange, time.total)),
                f"{100 * time.exchange / time.total:.0f} %" if time.total else NONE,
            ]
            for name, time in methods.items()
        ],
    )


def events(run: Run) -> Table | None:
    """Return what happened to whom, how often and in which steps."""
    seen: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for line in run.lines:
        for client, kind, what in _events(line):
            seen.setdefault((client, kind, what), []).append((line["start"], line["step"]))
    rows = [
        [_steps(spans), client or "all", kind, str(len(spans)), what]
        for (client, kind, what), spans in seen.items()
    ]
    for resumed in run.summary.get("resumed", []):
        ended = resumed.get("ended") or "it had been stopped or killed"
        rows.append([str(resumed["step"]), "server", "gone on with", "1", ended])
    head = ["steps", "client", "event", "times", "what"]
    return _capped(Table(head, rows, frozenset({0, 1, 2, 4})))


def event_counts(run: Run) -> Table | None:
    """Return how often which kind of event happened to each client; None where none did."""
    counts = Counter((client, kind) for line in run.lines for client, kind, _ in _events(line))
    kinds = [
        kind for kind in (*get_args(EventKind), _LEFT_OUT) if any(k == kind for _, k in counts)
    ]
    names = sorted({client for client, _ in counts}, key=natural)
    rows = [[name or "all", *(str(counts[name, kind]) for kind in kinds)] for name in names]
    return Table(["client", *kinds], rows) if rows else None


_LEFT_OUT = "left out"


def _events(line: Line) -> list[tuple[str, str, str]]:
    """Return client, kind and text of each; of runs that did not tell kinds, who was left out."""
    if "events" in line:
        return [(event["client"], event["kind"], event["what"]) for event in line["events"]]
    return [(client, _LEFT_OUT, reason) for client, reason in line.get("left_out", {}).items()]


def attendance(run: Run) -> Table | None:
    """Return who joined late, left early or was away between."""
    windows = run.windows
    if not windows:
        return None
    rows: list[list[str]] = []
    # Where the server draws who trains, being away is nothing to tell of.
    drawn = run.config.get("federation", {}).get("fraction_train", 1.0) != 1.0
    for client in run.clients if not drawn else ():
        there = [client in line["clients"] or client in line["left_out"] for line in windows]
        if not any(there):
            rows.append(["0", client, "never took part"])
            continue
        first, last = there.index(True), len(there) - 1 - there[::-1].index(True)
        if first > 0:
            rows.append([str(windows[first]["start"]), client, "joined"])
        for index in range(first + 1, last + 1):
            if there[index] != there[index - 1]:
                step = str(windows[index]["start"])
                rows.append([step, client, "came back" if there[index] else "left"])
        if last < len(there) - 1:
            rows.append([str(windows[last]["step"]), client, "left"])
    rows.sort(key=lambda row: int(row[0]))
    return _capped(Table(["after step", "client", "what"], rows, frozenset({1, 2})))


def problems(runs: Sequence[Run]) -> Table | None:
    """Return the runs that did not complete, and why, where it is known."""
    rows = [
        [str(run.path), progress(run), run.summary.get("error") or NONE]
        for run in runs
        if run.status != "completed"
    ]
    return Table(["run", "status", "error"], rows, frozenset({0, 1, 2})) if rows else None


def settings(run: Run) -> list[Table]:
    """Return the settings by section; marked are those that differ from the defaults."""
    default = flat(_plain(Config()))
    own = flat(run.config)
    marked = {
        key
        for key, value in own.items()
        if not key.startswith("sync.") and key != "run.name" and default.get(key) != value
    }
    return _by_section({key: _text(value) for key, value in own.items()}, marked)


def differences(groups: Sequence[Group]) -> tuple[Table, list[Table]]:
    """Return the settings in which the groups differ, and by section those they share."""
    each = [flat(group.runs[0].config) for group in groups]
    keys = [
        k for k in dict.fromkeys(k for s in each for k in s) if k not in ("run.seed", "run.name")
    ]
    rows = {key: [_text(settings.get(key, NONE)) for settings in each] for key in keys}
    differ = {key: row for key, row in rows.items() if len(set(row)) > 1}
    return (
        Table(
            ["setting", *(group.label for group in groups)],
            [[key, *row] for key, row in differ.items()],
            frozenset(range(len(groups) + 1)),
        ),
        _by_section({key: row[0] for key, row in rows.items() if key not in differ}, set()),
    )


def provenance(run: Run) -> Table:
    """Return where the run is, with which versions it was made, and the hash of its weights."""
    rows = [
        ["folder", str(run.path)],
        *([name, version] for name, version in run.summary.get("versions", {}).items()),
        ["weights (SHA-256)", run.summary.get("weights_sha256") or NONE],
    ]
    return Table([], rows, frozenset({0, 1}))


def provenances(runs: Sequence[Run]) -> Table:
    """Return the same of several runs."""
    rows = [
        [
            str(run.path),
            str(run.seed),
            ", ".join(f"{name} {v}" for name, v in run.summary.get("versions", {}).items()) or NONE,
            run.summary.get("weights_sha256") or NONE,
        ]
        for run in runs
    ]
    return Table(["folder", "seed", "versions", "weights (SHA-256)"], rows, frozenset({0, 2, 3}))


def _by_section(settings: Mapping[str, str], marked: Container[str]) -> list[Table]:
    sections: dict[str, list[str]] = {}
    for key in settings:
        section, dot, _ = key.partition(".")
        sections.setdefault(section if dot else "", []).append(key)
    return [
        Table(
            [],
            [[key.removeprefix(f"{section}."), settings[key]] for key in keys],
            frozenset({0, 1}),
            frozenset(row for row, key in enumerate(keys) if key in marked),
            title=section or "task and clock",
        )
        for section, keys in sorted(sections.items(), key=lambda item: item[0] == "")
    ]


_MOST_ROWS = 60


def _capped(table: Table) -> Table | None:
    if not table.rows:
        return None
    more = len(table.rows) - _MOST_ROWS
    if more <= 0:
        return table
    rest = ["" for _ in table.head]
    rest[-1] = f"and {more} more, in metrics.jsonl"
    return Table(table.head, [*table.rows[:_MOST_ROWS], rest], table.words)


def _steps(spans: Sequence[tuple[int, int]]) -> str:
    start, stop = spans[0][0], spans[-1][1]
    return f"{start} to {stop}" if stop > start else str(stop)


def _plain(config: Config) -> Mapping[str, object]:
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(OmegaConf.create(dump(config)))
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
