"""What the runs say: time to a loss, share of computing, bytes on the interface, the planner."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
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

BASELINE = "Local AdamW"
COLOUR = {"DES-LOC": "#0072B2", "lean": "#56B4E9", "leanest": "#009E73"}

Run = dict[str, Any]
Seconds = dict[str, list[float]]


def results_file(cells: str) -> Path:
    """Return the file of the results of ``CELLS.yaml``."""
    return RESULTS / f"thin_links{'' if cells == 'cells' else f'_{cells}'}.json"


@cache
def results(of: str = "cells") -> tuple[dict[str, Any], list[Run], list[Run]]:
    """Return the settings of ``OF.yaml``, its runs in order, and the calibrations of its links."""
    found = json.loads(results_file(of).read_text())
    cells, order = found["cells"], list(found["cells"]["methods"])
    runs = [each for each in found["files"] if "method" in each]
    runs.sort(key=lambda run: (run["rate_mbit"], order.index(run["method"]), run["seed"]))
    return cells, runs, [each for each in found["files"] if "method" not in each]


def target(run: Run, share: float) -> float:
    """Return the loss that the baseline, with the seed of ``run``, has after a share of its steps.

    On a straight line between two evaluations. The baseline's losses are the same at every rate.
    """
    _, runs, _ = results()
    seed = run["seed"]
    [same, *_] = (each for each in runs if (each["method"], each["seed"]) == (BASELINE, seed))
    seen = [(w["step"], w["loss"]) for w in same["windows"] if w["loss"] is not None]
    step = share * seen[-1][0]
    for (before, high), (after, low) in pairwise(seen):
        if before <= step <= after:
            return float(high + (low - high) * (step - before) / (after - before))
    raise ValueError(f"{BASELINE} was not evaluated around step {step:g}")


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


def least_window(runs: list[Run]) -> float:
    """Return the seconds that a window takes besides its steps, however fast the link is.

    The mean over the runs on the fastest links.
    """
    fastest = max(run["rate_mbit"] for run in runs)
    return fmean(window_seconds(run) for run in runs if run["rate_mbit"] == fastest)


def times() -> Table:
    """Return the table of times; a cell is the mean over seeds, with the lowest and the highest."""
    cells_, runs, _ = results()
    least, shares = least_window(runs), cells_["targets"]
    heads = ["Mbit/s", "method", "seeds", *(f"s to {share:.0%} of Local" for share in shares)]
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
        cells += [
            spread([time_to(run, target(run, share)) for run in seeds], ".0f") for share in shares
        ]
        cells += [spread([end["loss"] for end in ends], ".3f"), spread(tokens, ".0f")]
        cells += [spread([100 * share for share in computing], ".0f"), spread(paces, ".3f")]
        cells += [spread(list(map(pace, seeds)), ".3f")]
        for words, plans in (
            ([], [planned(run, stated_link(run)) for run in seeds]),
            ([f"{least:.2f}"], [planned(run, measured_link(run), least) for run in seeds]),
        ):
            errors = [100 * (plan / pace - 1) for plan, pace in zip(plans, paces, strict=True)]
            cells += [*words, spread(plans, ".3f"), spread(errors, "+.0f")]
        rows.append(cells)
    return Table(heads, rows)


def volumes() -> Table:
    """Return the bytes on the server's interface and in the ledger: means over seeds."""
    heads = ["Mbit/s", "method"]
    for way in ("up", "down"):
        heads += [f"ledger {way}, MB", "interface, MB", "of it headers, %", "rest to ledger, %"]
        heads += ["rest of a window, kB", "bytes over rate, s a window"]
    rows = []
    for (rate, method), seeds in by_cell(results()[1]).items():
        cells = [f"{rate:g}", method]
        for way in ("up", "down"):
            found = [traffic(run, way) for run in seeds]
            headers = [100 * wire["headers"] / wire["interface"] for wire in found]
            more = [
                100 * ((wire["interface"] - wire["headers"]) / wire["ledger"] - 1) for wire in found
            ]
            cells += [
                f"{fmean(wire[what] for wire in found) / 1e6:.2f}"
                for what in ("ledger", "interface")
            ]
            cells += [f"{fmean(headers):.1f}", spread(more, "+.1f")]
            cells += [f"{fmean(rest(run, way) for run in seeds) / 1000:.0f}"]
            cells += [f"{fmean(wire_seconds(run, way) for run in seeds):.2f}"]
        rows.append(cells)
    return Table(heads, rows)


def wire_seconds(run: Run, way: str) -> float:
    """Return the seconds that a window's messages take on the server's port at the link's rate."""
    num_bytes = traffic(run, way)["ledger"]
    return 8e-6 * num_bytes / run["rate_mbit"] / (len(run["windows"]) - 1)


def large() -> Table:
    """Return for each rate the seconds of a window, and those of its bytes at that rate."""
    heads = ["Mbit/s", "MB up", "MB down", "bytes over rate, s", "a window, s", "ratio"]
    rows = []
    for run in results("large")[1]:
        windows = len(run["windows"]) - 2  # without the first, which sends nothing down
        megabytes = [
            sum(w[f"framed_bytes_{way}"] for w in run["windows"][2:]) / windows / 1e6
            for way in ("up", "down")
        ]
        least, seconds = 8 * sum(megabytes) / run["rate_mbit"], steady(run)[0] / windows
        cells = [f"{run['rate_mbit']:g}", *(f"{each:.0f}" for each in megabytes)]
        rows.append([*cells, f"{least:.1f}", f"{seconds:.1f}", f"{seconds / least:.2f}"])
    return Table(heads, rows)


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
    heads = ["Mbit/s", "round trip, ms", "one site up", "down", "all sites up", "down", "delay by"]
    rows = []
    links = [*results()[2], *results("large")[2]]
    for link in sorted(links, key=lambda link: link["rate_mbit"]):
        found = (f"{value:.1f}" for value in link["calibration"].values())
        rows.append([f"{link['rate_mbit']:g}", *found, link["delay"]])
    return Table(heads, rows)


def summary() -> Table:
    """Return the table of the page: seconds to the last target, by method and link."""
    cells, runs, _ = results()
    found, share = by_cell(runs), cells["targets"][-1]
    rates = sorted({rate for rate, _ in found})
    local = {run["seed"]: run["windows"][-1]["loss"] for run in found[rates[0], BASELINE]}
    rows = []
    for method in cells["methods"]:
        row = [method]
        for rate in rates:
            seconds = [time_to(run, target(run, share)) for run in found[rate, method]]
            row.append(spread(seconds, ".0f"))
        ends = {run["seed"]: run["windows"][-1]["loss"] for run in found[rates[0], method]}
        gaps = [100 * (ends[seed] / local[seed] - 1) for seed in ends]
        rows.append([*row, "" if method == BASELINE else spread(gaps, "+.1f")])
    heads = [f"s at {rate:g} Mbit/s" for rate in rates]
    return Table(["method", *heads, f"last loss above {BASELINE}, %"], rows)


def picture() -> None:
    """Draw the seconds to the last target by link and method: the mean over seeds, and each."""
    cells, runs, _ = results()
    share = cells["targets"][-1]
    found = by_cell(runs)
    rates = sorted({rate for rate, _ in found})
    made = Figure(figsize=(10, 2.6), layout="constrained")
    panels = made.subplots(1, len(rates), squeeze=False)[0]
    for panel, rate in zip(panels, rates, strict=True):
        seconds = {
            method: [at for run in seeds if (at := time_to(run, target(run, share))) is not None]
            for (at_rate, method), seeds in found.items()
            if at_rate == rate
        }

        def missed(method: str, rate: float = rate, seconds: Seconds = seconds) -> int:
            return len(found[rate, method]) - len(seconds[method])

        rows = sorted(seconds, key=lambda m: (-missed(m), -fmean(seconds[m] or [0])))
        for row, method in enumerate(rows):
            known = seconds[method]
            panel.plot(known, [row] * len(known), "k.", ms=3)
            if few := missed(method):
                words = f"{few} of {len(found[rate, method])} seeds never"
            else:
                panel.barh(row, fmean(known), color=COLOUR.get(method, "#BBBBBB"))
                words = f"{fmean(known):.0f} s"
            panel.text(max(known, default=0), row, f"  {words}", va="center", fontsize=8)
        panel.set_yticks(range(len(rows)), rows, fontsize=8)
        panel.set_ylim(-0.6, len(rows) - 0.4)
        panel.set_xlim(0, 1.5 * max(max(each, default=0) for each in seconds.values()))
        panel.set_title(f"{rate:g} Mbit/s", loc="left", fontsize=9)
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    words = f"seconds to the loss of {BASELINE} after {share:.0%} of its steps"
    made.supxlabel(words, fontsize=8)
    made.savefig(RESEARCH / "thin-links.png", dpi=130)


def pace(run: Run) -> float:
    """Return the mean over windows of the slowest client's own seconds per step."""
    windows = run["windows"]
    return fmean(
        w["seconds"]["clients"] / (w["step"] - before["step"]) for before, w in pairwise(windows)
    )


TABLES: dict[str, Draw] = {
    "thin_links": times,
    "thin_links_bytes": volumes,
    "thin_links_calibration": calibrations,
    "thin_links_large": large,
}
