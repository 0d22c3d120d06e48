"""What the runs say: time to a loss, share of computing, bytes on the interface, the planner."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from network import HEADERS
from paired import RESEARCH, RESULTS, Draw, Table

from flower_desloc.app.config import load
from flower_desloc.app.plan.from_config import planned_run
from flower_desloc.app.plan.wall_clock import MBIT, Link, Topology

CELLS = ("cells", "late", "leanest")
"""Those with losses; the runs of `IDLE` have next to no payload."""
IDLE = "idle"
COLOUR = {"DES-LOC": "#0072B2", "lean": "#56B4E9"}

Run = dict[str, Any]


def results_file(cells: str) -> Path:
    """Return the file of the results of ``CELLS.yaml``."""
    suffix = "" if cells == "cells" else f"_{cells}"
    return RESULTS / f"thin_links{suffix}.json"


def read_results(cells: str) -> tuple[dict[str, Any], list[Run], list[Run]]:
    """Return the settings of ``CELLS.yaml``, its runs and the calibrations of its links."""
    results = json.loads(results_file(cells).read_text())
    runs = [found for found in results["files"] if "method" in found]
    return results["cells"], runs, [found for found in results["files"] if "method" not in found]


def elapsed(run: Run) -> list[float]:
    """Return the seconds from the first window's start to the end of each, without evaluation."""
    zero, *windows = run["windows"]
    seconds, evaluated = [], 0.0
    for window in windows:
        evaluated += window["seconds"]["evaluation"]
        seconds.append(window["interface"]["time"] - zero["interface"]["time"] - evaluated)
    return seconds


def time_to(run: Run, loss: float) -> float | None:
    """Return the seconds until ``loss``, on a straight line between two evaluations; None: never.

    An evaluation comes after every window. Without the line, a loss that is missed by a rounding
    would count a whole window later.
    """
    before = None
    for now, window in zip(elapsed(run), run["windows"][1:], strict=True):
        if (reached := window["loss"]) is None:
            continue
        if reached <= loss:
            if before is None:
                return now
            share = (before[1] - loss) / (before[1] - reached)
            return before[0] + share * (now - before[0])
        before = now, reached
    return None


def steady(run: Run) -> tuple[float, int]:
    """Return the seconds and the steps of all windows but the first.

    The first sends no averages down, so from the second on uploads and downloads balance.
    """
    seconds, windows = elapsed(run), run["windows"]
    return seconds[-1] - seconds[0], windows[-1]["step"] - windows[1]["step"]


def stated_link(run: Run) -> Link:
    """Return the link as the cell states it."""
    return Link(bandwidth=run["rate_mbit"] * MBIT, latency=run["round_trip_ms"] / 2000)


def measured_link(run: Run) -> Link:
    """Return the link as it was calibrated."""
    found = run["calibration"]
    goodput = fmean([found["all_sites_up_mbit"], found["all_sites_down_mbit"]])
    return Link(bandwidth=goodput * MBIT, latency=found["round_trip_ms"] / 2000)


def planned(run: Run, link: Link, window_seconds: float = 0.0) -> float:
    """Return the seconds per step that `desloc plan` gives for the star."""
    options: Run = {"step_seconds": run["step_seconds"], "flops": 1.0, "mfu": 1.0}
    config = load(run["preset"], run["overrides"])
    if "gradients" in config.sync:  # a plan compares with data parallelism by itself
        config = replace(config, sync={"params": 1, "exp_avg": "never", "exp_avg_sq": "never"})
    plan = replace(planned_run(config, link, **options), window_seconds=window_seconds)
    late = plan.late_waiting() if plan.delay else plan.waiting(plan.desloc, Topology.STAR)
    return plan.compute + late


def window_seconds(run: Run) -> float:
    """Return the mean seconds of a window besides its steps."""
    seconds, steps = steady(run)
    return (seconds - run["step_seconds"] * steps) / (len(run["windows"]) - 2)


def traffic(run: Run, way: str) -> dict[str, float]:
    """Return the bytes of training in one direction, ``up`` or ``down`` from a site's view."""
    first, last = run["windows"][0]["interface"], run["windows"][-1]["interface"]
    side = {"up": "rx", "down": "tx"}[way]
    on_wire, packets = (
        last[f"{side}_{what}"] - first[f"{side}_{what}"] for what in ("bytes", "packets")
    )
    ledger = sum(window[f"framed_bytes_{way}"] for window in run["windows"][1:])
    return {"interface": on_wire, "headers": HEADERS * packets, "ledger": ledger}


def least_by_machine(runs: list[Run], method: str | None = None) -> dict[str | None, float]:
    """Return the seconds that a window takes besides its steps, however fast the link is.

    For each machine: the mean over its runs on the fastest links, by default of all methods. A
    machine without such runs has the mean of the others.
    """
    fastest = max(run["rate_mbit"] for run in runs)
    found: dict[str | None, list[float]] = {}
    for run in runs:
        if run["rate_mbit"] == fastest and method in (None, run["method"]):
            found.setdefault(machine(run), []).append(window_seconds(run))
    least = {name: fmean(seconds) for name, seconds in found.items()}
    return dict.fromkeys(map(machine, runs), fmean(least.values())) | least


def machine(run: Run) -> str | None:
    """Return what names the machine of a run; None for runs that did not record it."""
    name: str | None = run["machine"].get("boot")
    return name


def times(runs: list[Run], targets: list[float], least: dict[str | None, float]) -> Table:
    """Return the table of times; ``least`` is from ``least_by_machine``.

    A cell is the mean over seeds, with the lowest and the highest.
    """
    heads = ["Mbit/s", "method", "seeds", *(f"s to {target:g}" for target in targets)]
    heads += ["last loss", "tokens/s", "computing, %", "s a step", "slowest client's own, s"]
    heads += ["plan", "error, %", "W", "plan with W", "error, %"]
    rows = []
    for (rate, method), seeds in by_cell(runs).items():
        paces = [seconds / steps for seconds, steps in map(steady, seeds)]
        totals = [elapsed(run)[-1] for run in seeds]
        ends = [run["windows"][-1] for run in seeds]
        speeds = [end["step"] / total for end, total in zip(ends, totals, strict=True)]
        tokens, computing = (
            [run[of] * speed for run, speed in zip(seeds, speeds, strict=True)]
            for of in ("tokens_per_step", "step_seconds")
        )
        cells = [f"{rate:g}", method, str(len(seeds))]
        cells += [spread([time_to(run, target) for run in seeds], ".0f") for target in targets]
        cells += [spread([end["loss"] for end in ends], ".3f"), spread(tokens, ".0f")]
        cells += [spread([100 * share for share in computing], ".0f"), spread(paces, ".3f")]
        cells += [spread(list(map(pace, seeds)), ".3f")]
        windows = spread([least[machine(run)] for run in seeds], ".2f")
        for words, plans in (
            ([], [planned(run, stated_link(run)) for run in seeds]),
            ([windows], [planned(run, measured_link(run), least[machine(run)]) for run in seeds]),
        ):
            errors = [100 * (plan / pace - 1) for plan, pace in zip(plans, paces, strict=True)]
            cells += [*words, spread(plans, ".3f"), spread(errors, "+.0f")]
        rows.append(cells)
    return Table(heads, rows)


def volumes() -> Table:
    """Return the bytes on the server's interface and in the ledger: means over seeds.

    The last column of a direction is what is left of the interface without ledger, headers and
    what small messages take, which the runs of ``idle.yaml`` measure.
    """
    heads = ["cells", "Mbit/s", "method"]
    for way in ("up", "down"):
        heads += [f"ledger {way}, MB", "interface, MB", "of it headers, %", "rest to ledger, %"]
        heads += ["rest of a window, kB", "without small messages, % of the interface"]
    empty = {run["method"]: run for run in runs_of(IDLE)}
    rows = []
    for name in (*CELLS, IDLE):
        for (rate, method), seeds in by_cell(runs_of(name)).items():
            cells = [name, f"{rate:g}", method]
            for way in ("up", "down"):
                found = [traffic(run, way) for run in seeds]
                headers = [100 * wire["headers"] / wire["interface"] for wire in found]
                more = [
                    100 * ((wire["interface"] - wire["headers"]) / wire["ledger"] - 1)
                    for wire in found
                ]
                cells += [
                    f"{fmean(wire[what] for wire in found) / 1e6:.2f}"
                    for what in ("ledger", "interface")
                ]
                cells += [f"{fmean(headers):.1f}", spread(more, "+.1f")]
                cells += [f"{fmean(rest(run, way) for run in seeds) / 1000:.0f}"]
                known = name == "cells" and method in empty
                cells += [spread(unexplained(seeds, empty[method], way), "+.1f") if known else ""]
            rows.append(cells)
    return Table(heads, rows)


def unexplained(runs: list[Run], idle: Run, way: str) -> list[float]:
    """Return what is left of the interface's bytes without those of ``idle``, in per cent."""
    return [
        100
        * (rest(run, way) - rest(idle, way))
        * (len(run["windows"]) - 1)
        / traffic(run, way)["interface"]
        for run in runs
    ]


def rest(run: Run, way: str) -> float:
    """Return the mean bytes of a window besides headers and ledger."""
    found = traffic(run, way)
    return (found["interface"] - found["headers"] - found["ledger"]) / (len(run["windows"]) - 1)


def by_cell(runs: list[Run]) -> dict[tuple[float, str], list[Run]]:
    """Return the runs of every rate and method."""
    found: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run["rate_mbit"], run["method"]), []).append(run)
    return found


def spread(values: Sequence[float | None], how: str) -> str:
    """Return the mean, and the lowest and highest where they differ as printed."""
    if any(value is None for value in values):
        return "-"
    known = [value for value in values if value is not None]
    low, mean, high = (format(value, how) for value in (min(known), fmean(known), max(known)))
    return mean if low == high else f"{mean} ({low} to {high})"


def calibrations() -> Table:
    heads = ["cells", "Mbit/s", "round trip, ms", "one site up", "down", "all sites up", "down"]
    rows = []
    for name in (*CELLS, IDLE):
        _, _, links = read_results(name)
        for link in sorted(links, key=lambda link: link["rate_mbit"]):
            found = (f"{value:.1f}" for value in link["calibration"].values())
            rows.append([name, f"{link['rate_mbit']:g}", *found, link["delay"]])
    return Table([*heads, "delay by"], rows)


def runs_of(name: str) -> list[Run]:
    """Return the runs of ``NAME.yaml`` in the order of its methods."""
    cells, runs, _ = read_results(name)
    order = list(cells["methods"])
    return sorted(runs, key=lambda r: (r["rate_mbit"], order.index(r["method"]), r["seed"]))


def times_of(name: str) -> Table:
    """Return the table of times of ``NAME.yaml``."""
    cells, *_ = read_results(name)
    runs = runs_of(name)
    return times(runs, cells["targets"], least_by_machine(runs, cells.get("window_seconds_from")))


def summary() -> Table:
    """Return the table of the page: seconds to the last target, by method and link."""
    cells, *_ = read_results("cells")
    found, target = by_cell(runs_of("cells")), cells["targets"][-1]
    rates = sorted({rate for rate, _ in found})
    local = {run["seed"]: run["windows"][-1]["loss"] for run in found[rates[0], "Local Adam"]}
    rows = []
    for method in cells["methods"]:
        row = [method]
        timed = ([time_to(run, target) for run in found.get((rate, method), [])] for rate in rates)
        row += [spread(seconds or [None], ".0f") for seconds in timed]
        ends = {run["seed"]: run["windows"][-1]["loss"] for run in found[rates[0], method]}
        gaps = [100 * (ends[seed] / local[seed] - 1) for seed in ends]
        rows.append([*row, "" if method in ("Local Adam", "DDP") else spread(gaps, "+.1f")])
    heads = [f"s to {target:g} at {rate:g} Mbit/s" for rate in rates]
    return Table(["method", *heads, "last loss above Local Adam, %"], rows)


def picture(name: str) -> None:
    """Draw the seconds until a loss by link and method: the mean over seeds, and every seed."""
    runs, (_, target) = runs_of(name), read_results(name)[0]["targets"]
    rates = sorted({run["rate_mbit"] for run in runs})
    made = Figure(figsize=(7.2, 2.4), layout="constrained")
    panels = made.subplots(1, len(rates), squeeze=False)[0]
    for panel, rate in zip(panels, rates, strict=True):
        found: dict[str, list[float]] = {}
        for run in runs:
            at = time_to(run, target)
            if run["rate_mbit"] == rate and at is not None:
                found.setdefault(run["method"], []).append(at)
        ordered = sorted(found.items(), key=lambda pair: -fmean(pair[1]))
        for row, (method, seconds) in enumerate(ordered):
            mean = fmean(seconds)
            panel.barh(row, mean, color=COLOUR.get(method, "#BBBBBB"))
            panel.plot(seconds, [row] * len(seconds), "k.", ms=3)
            every = len(by_cell(runs)[rate, method])
            missed = f", {every - len(seconds)} of {every} never" if len(seconds) < every else ""
            panel.text(max(seconds), row, f"  {mean:.0f} s{missed}", va="center", fontsize=8)
        panel.set_yticks(range(len(ordered)), [method for method, _ in ordered], fontsize=8)
        panel.set_title(f"{rate:g} Mbit/s", loc="left", fontsize=9)
        panel.set_xlabel(f"seconds to a loss of {target:g}", fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
        panel.margins(x=0.18)
        panel.spines[["top", "right"]].set_visible(False)
    made.savefig(RESEARCH / "thin-links.png", dpi=130)


def pace(run: Run) -> float:
    """Return the mean over windows of the slowest client's own seconds per step."""
    windows = run["windows"]
    return fmean(
        w["seconds"]["clients"] / (w["step"] - before["step"]) for before, w in pairwise(windows)
    )


TABLES: dict[str, Draw] = {
    "thin_links": lambda: times_of("cells"),
    "thin_links_late": lambda: times_of("late"),
    "thin_links_leanest": lambda: times_of("leanest"),
    "thin_links_bytes": volumes,
    "thin_links_calibration": calibrations,
}
