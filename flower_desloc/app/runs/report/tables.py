"""The words and numbers of a report: headline, comparison, events, settings."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import get_args

from flower_desloc.app.config import Config, dump, units
from flower_desloc.app.config.metric import DIRECTIONS, OF_LOSS, metric_text, ordered
from flower_desloc.app.plan.wall_clock import Link
from flower_desloc.app.runs.figures.curves import common_metric
from flower_desloc.app.runs.figures.losses import worst_first
from flower_desloc.app.runs.folder import Line
from flower_desloc.app.runs.groups import NOT_COMPARED, SeedGroup, Spread, flat
from flower_desloc.app.runs.record import RunRecord, natural, yaml_mapping
from flower_desloc.app.runs.summary import OTHER_METHODS
from flower_desloc.app.runs.time_model import modelled
from flower_desloc.flower.observer import EventKind

NONE = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_MAX_ROWS = 60


@dataclass(frozen=True)
class TextTable:
    """Rows of text below a head, false without rows; ``words`` are the columns of no numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    marked: Collection[int] = ()
    """Rows that are highlighted."""
    title: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Tile:
    """One number of the headline."""

    name: str
    value: str
    note: str = ""


def progress(run: RunRecord) -> str:
    """Return how far the run came."""
    done, planned = run.num_steps, run.summary["config"]["steps"]
    steps = f"{done} steps" if done == planned else f"{done} of {planned} steps"
    return f"{run.status}, {steps}, {units.count_text(run.summary['windows'], 'window')}"


def tiles(run: RunRecord) -> list[Tile]:
    """Return the numbers of the headline."""
    summary, course = run.summary, run.summary["evaluation"].get(run.where, {})
    where = "on the server" if run.where == "central" else "on the clients"
    found = []
    for metric in ordered(course):
        if metric not in OF_LOSS[1:]:
            first, final = (metric_text(course[metric][end], metric) for end in ("first", "final"))
            name = "held-out loss" if metric == "loss" else metric
            found.append(Tile(name, final, f"from {first}, {where}"))
    up, down = (summary["bytes"]["measured"][way]["total"] for way in ("up", "down"))
    found.append(Tile("sent up", units.bytes_text(up), f"{units.bytes_text(down)} down"))
    for key, name in OTHER_METHODS.items():
        if summary["ratio"][key] is not None:
            sent = units.bytes_text(summary["bytes"][key]["up"]["total"])
            factor = units.figures(summary["ratio"][key])
            found.append(Tile(f"{name} sends", f"{factor} {TIMES}", f"{sent} up"))
    if slowest := _slowest(run):
        found.append(slowest)
    seconds = summary["seconds"]
    if "total" in seconds:
        parts = ("clients", "averaging", "evaluation", "exchange")
        split = ", ".join(f"{part} {units.duration_text(seconds.get(part, 0.0))}" for part in parts)
        found.append(Tile("wall-clock", units.duration_text(seconds["total"]), split))
    return found


def _slowest(run: RunRecord) -> Tile | None:
    """Return the share of its steps that the slowest client took, if not all."""
    taken: Counter[str] = Counter()
    planned: Counter[str] = Counter()
    for line in run.windows:
        for name, client in line["clients"].items():
            if steps := client.get("steps"):  # missing or 0: it did not say
                taken[name] += steps
                planned[name] += line["step"] - line["start"]
    shares = {name: taken[name] / planned[name] for name in taken if planned[name]}
    slowest = min(shares, key=shares.__getitem__, default="")
    if not slowest or shares[slowest] == 1:
        return None
    return Tile(
        "slowest client", units.percent_text(shares[slowest]), f"of its local steps, {slowest}"
    )


def comparison(groups: Sequence[SeedGroup], link: Link) -> TextTable:
    """Return one row for each group, lowest loss first; those without a loss last."""
    runs = [run for group in groups for run in group.runs]
    digits = {"perplexity": 2, **dict.fromkeys(("accuracy", *_own_metrics(runs)), 4)}
    metrics = {"loss": 3} | {
        metric: places
        for metric, places in digits.items()
        if any(run.final(metric) is not None for run in runs)
    }
    head = ["", "runs", "status", "held-out loss", *[*metrics][1:], "sent up"]
    head += [f"{name} sends" for name in OTHER_METHODS.values()]
    head += ["modelled time", "worst domain"]
    rows = [_row(group, link, metrics) for group in by_loss(groups)]
    return TextTable(head, rows, {0, 1, 2, len(head) - 1})


def _own_metrics(runs: Iterable[RunRecord]) -> list[str]:
    """Return the metrics that only the runs' tasks know."""
    names = ordered(name for run in runs for name in run.summary["evaluation"].get(run.where, {}))
    return [name for name in names if name not in DIRECTIONS]


def by_loss(groups: Iterable[SeedGroup]) -> list[SeedGroup]:
    """Return the groups, lowest final loss first; those without a loss last."""

    def key(group: SeedGroup) -> tuple[bool, float]:
        loss = group.final("loss").mean
        return loss is None, loss or 0.0

    return sorted(groups, key=key)


def _row(group: SeedGroup, link: Link, metrics: Mapping[str, int]) -> list[str]:
    runs = group.counted
    seeds = sorted({run.seed for run in group.runs})
    states = Counter(run.status for run in group.runs)
    ratios = [Spread.of(run.summary["ratio"][key] for run in runs) for key in OTHER_METHODS]
    seconds = [m["this run"].total for run in runs if (m := modelled(run, link))]
    metric = common_metric(runs)
    worst = next(iter(worst_first(runs, "central", metric).items()), None)
    return [
        group.label,
        f"{len(group.runs)}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
        ", ".join(s if len(states) == 1 else f"{count} {s}" for s, count in states.items()),
        *(group.final(metric).text(digits) or NONE for metric, digits in metrics.items()),
        units.bytes_text(fmean(run.summary["bytes"]["measured"]["up"]["total"] for run in runs)),
        *(NONE if r.mean is None else f"{units.figures(r.mean)} {TIMES}" for r in ratios),
        units.duration_text(fmean(seconds)) if seconds else NONE,
        f"{worst[0]} {metric_text(worst[1], metric)}" if worst else NONE,
    ]


def times(run: RunRecord, link: Link) -> TextTable:
    """Return the modelled time of the run, of Local Adam and of DDP."""
    rows = [
        [
            name,
            *(units.duration_text(s) for s in (time.compute, time.communication, time.total)),
            f"{100 * time.communication / time.total:.0f} %" if time.total else NONE,
        ]
        for name, time in modelled(run, link).items()
    ]
    return TextTable(["", "compute", "communication", "total", "share of communication"], rows)


def events(run: RunRecord) -> TextTable:
    """Return each event with its client, message, count and steps."""
    seen: dict[tuple[str, str, str], list[Line]] = {}
    for line in run.lines:
        for event in line["events"]:
            seen.setdefault((event["client"], event["kind"], event["what"]), []).append(line)
    rows = []
    for (client, kind, what), lines in seen.items():
        start, stop = lines[0]["start"], lines[-1]["step"]
        steps = f"{start} to {stop}" if stop > start else str(stop)
        rows.append([steps, client or "all", kind, str(len(lines)), what])
    for resumed in run.summary.get("resumed", []):
        ended = resumed.get("ended") or "it had been stopped or killed"
        rows.append([str(resumed["step"]), "server", "resumed", "1", ended])
    return _limited(TextTable(["steps", "client", "event", "times", "what"], rows, {0, 1, 2, 4}))


def event_counts(run: RunRecord) -> TextTable:
    """Return the number of events by client and kind."""
    counts = Counter((e["client"], e["kind"]) for line in run.lines for e in line["events"])
    seen = {kind for _, kind in counts}
    kinds = [kind for kind in get_args(EventKind) if kind in seen]
    names = sorted({client for client, _ in counts}, key=natural)
    rows = [[name or "all", *(str(counts[name, kind]) for kind in kinds)] for name in names]
    return TextTable(["client", *kinds], rows)


def attendance(run: RunRecord) -> TextTable:
    """Return which clients joined late, left early or were absent in between.

    No client is listed where the server draws those of each window: absence is normal there.
    """
    drawn = run.config.get("federation", {}).get("fraction_train", 1.0) != 1.0
    clients = run.clients if run.windows and not drawn else []
    rows = [row for client in clients for row in _attendance(client, run.windows)]
    rows.sort(key=lambda row: int(row[0]))
    return _limited(TextTable(["after step", "client", "what"], rows, {1, 2}))


def _attendance(client: str, windows: Sequence[Line]) -> list[list[str]]:
    present = [client in line["clients"] or client in line["left_out"] for line in windows]
    if not any(present):
        return [["0", client, "never took part"]]
    rows, has_been_there = [], present[0]
    for line, before, now in zip(windows[1:], present, present[1:], strict=False):
        if now != before:
            what = "left" if before else "came back" if has_been_there else "joined"
            has_been_there = True
            rows.append([str(line["start"]), client, what])
    return rows


def problems(runs: Sequence[RunRecord]) -> TextTable:
    """Return the runs that did not complete, with the error if it is known."""
    unfinished = [run for run in runs if run.status != "completed"]
    rows = [[str(run.path), progress(run), run.summary.get("error") or NONE] for run in unfinished]
    return TextTable(["run", "status", "error"], rows, {0, 1, 2})


def settings(run: RunRecord) -> list[TextTable]:
    """Return the settings by section; those that differ from the defaults are marked."""
    default, own = flat(yaml_mapping(dump(Config()))), flat(run.config)
    marked = {
        key
        for key, value in own.items()
        if not key.startswith("sync.") and key != "run.name" and default.get(key) != value
    }
    return _by_section({key: _text(value) for key, value in own.items()}, marked)


def differences(groups: Sequence[SeedGroup]) -> tuple[TextTable, list[TextTable]]:
    """Return the settings in which the groups differ, and by section the common ones."""
    each = [flat(group.runs[0].config) for group in groups]
    keys = [k for k in dict.fromkeys(k for s in each for k in s) if k not in NOT_COMPARED]
    rows = {key: [_text(settings.get(key, NONE)) for settings in each] for key in keys}
    differ = [[key, *row] for key, row in rows.items() if len(set(row)) > 1]
    same = {key: row[0] for key, row in rows.items() if len(set(row)) == 1}
    head = ["setting", *(group.label for group in groups)]
    return TextTable(head, differ, range(len(head))), _by_section(same, ())


def provenance(runs: Sequence[RunRecord]) -> TextTable:
    """Return the folders of runs, the versions they were made with, and hashes of the weights."""
    if len(runs) == 1:
        [run] = runs
        rows = [["folder", str(run.path)], *map(list, run.summary.get("versions", {}).items())]
        return TextTable([], [*rows, ["weights (SHA-256)", _weights(run)]], {0, 1})
    rows = [
        [
            str(run.path),
            str(run.seed),
            ", ".join(f"{name} {v}" for name, v in run.summary.get("versions", {}).items()) or NONE,
            _weights(run),
        ]
        for run in runs
    ]
    return TextTable(["folder", "seed", "versions", "weights (SHA-256)"], rows, {0, 2, 3})


def _weights(run: RunRecord) -> str:
    return run.summary.get("weights_sha256") or NONE


def _by_section(settings: Mapping[str, str], marked: Collection[str]) -> list[TextTable]:
    sections: dict[str, list[str]] = {}
    for key in settings:
        section, dot, _ = key.partition(".")
        sections.setdefault(section if dot else "", []).append(key)
    return [
        TextTable(
            [],
            [[key.removeprefix(f"{section}."), settings[key]] for key in keys],
            {0, 1},
            {row for row, key in enumerate(keys) if key in marked},
            title=section or "whole run",
        )
        for section, keys in sorted(sections.items(), key=lambda item: item[0] == "")
    ]


def _limited(table: TextTable) -> TextTable:
    more = len(table.rows) - _MAX_ROWS
    if more <= 0:
        return table
    rest = [*("" for _ in table.head[1:]), f"and {more} more, in metrics.jsonl"]
    return TextTable(table.head, [*table.rows[:_MAX_ROWS], rest], table.words)


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)
