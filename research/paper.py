"""Tables of the paper's items (research/paper.md), of formats and of the tuned baseline."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from collect import MOMENTS, records, slug
from paired import RESULTS, SPARE, Draw, Estimate, Run, Table, differences, spread

from flower_desloc.app.plan.wall_clock import (
    MBIT,
    Link,
    Topology,
    communication_seconds,
    compute_seconds,
)
from flower_desloc.core.traffic import MethodRates

WIRE = {
    "fp32": "fp32, fp32, fp32: loss",
    "bf16": "bf16, bf16, bf16: % above it",
    "int8": "int8, int8, int8",
    "int8, u int4": "**int8, int4, int8**, those of `lean`",
    "int4, moments int8": "int4, int8, int8",
    "int4, v int8": "int4, int4, int8",
}
BETAS = {
    "ADOPT": ("0.9 0.9999", "0.95 0.9999", "0.99 0.9999", "0.995 0.9999"),
    "Adam": ("0.9 0.95", "0.95 0.95", "0.95 0.99", "0.99 0.99"),
}
SPLITS = {
    "Local": ("1 and 1", "1"),
    "3 and 6": ("3 and 6", "1/2"),
    "6 and 3": ("6 and 3", "1/2"),
    "4 and 4": ("4 and 4", "1/2"),
    "never": ("never (FAVG+OPT)", "1/3"),
}
"""Labels of the study: K_u and K_v as multiples of K_x, and the bytes."""
NOTEBOOK: dict[str, Any] = {
    "num_params": 1.3e9,
    "tokens": 2e6,
    "workers": 4,
    "flops": 312e12,
    "mfu": 0.5,
}
"""Inputs of the authors' notebook (research/paper.md), and its latency and bytes of a value."""
LATENCY, VALUE_BYTES = 0.01, 2
GBIT = (0.1, 1, 10, 100, 1000)


def cells(study: str) -> dict[str, dict[int, float]]:
    """Return the losses of a study's cells by seed."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for run in records(study):
        if run["seed"] < SPARE:
            found[run["cell"]][run["seed"]] = run["loss"]
    return found


def cell(*labels: str) -> str:
    """Return the name of a cell with these labels."""
    return slug("_".join(labels))


def rates() -> Table:
    """Return the rates of change of the moments, by optimizer and betas (RQ1)."""
    found = {run["cell"]: run["rates_of_change"] for run in records("rates_of_change")}
    rows = []
    for name, betas in ((name, betas) for name, all_betas in BETAS.items() for betas in all_betas):
        first, second = (found[cell(f"{name} {betas}")][moment] for moment in MOMENTS)
        beta_1, beta_2 = map(float, betas.split())
        predicted = math.log(beta_1) / math.log(beta_2)
        row = [f"{name} {beta_1}, {beta_2}", f"{first:.2f}", f"{second:.2g}"]
        rows.append([*row, f"{first / second:.3g}", f"{predicted:.4g}"])
    heads = ["optimizer, β₁, β₂", "exp_avg", "exp_avg_sq", "first over second"]
    return Table([*heads, "ratio of the half-lives"], rows)


def periods() -> Table:
    """Return the cost of each stream's period while the others stay at K_b (RQ2)."""
    found = cells("sync_periods")
    columns = [(optimizer, base) for optimizer in ("ADOPT", "Adam") for base in ("16", "64")]
    rows = []
    for position, name in enumerate(("params", "first moment", "second moment")):
        for period in ("16", "64", "256"):
            row = [f"{name} at {period}"]
            for optimizer, base in columns:
                varied = [base] * 3
                varied[position] = period
                reference = found[cell(optimizer, " ".join([base] * 3))]
                ours = found[cell(optimizer, " ".join(varied))]
                row.append("0" if ours is reference else Estimate.above(ours, reference).interval)
            rows.append(row)
    heads = [f"{optimizer}, K_b = {base}" for optimizer, base in columns]
    return Table(["what varies", *heads], rows)


def splits() -> Table:
    """Return the comparison of three splits of one budget."""
    found = cells("budget_splits")
    rows = []
    for name, (words, share) in SPLITS.items():
        row = [words]
        for optimizer in ("ADOPT", "Adam"):
            for base in ("16", "64"):
                ours, local = (found[cell(optimizer, f"{n}, K={base}")] for n in (name, "Local"))
                more = "" if ours is local else f", {Estimate.above(ours, local).interval}"
                row.append(f"{fmean(ours.values()):.3f}{more}")
        rows.append([*row, share])
    heads = [f"{optimizer}, K_x = {base}" for optimizer in ("ADOPT", "Adam") for base in (16, 64)]
    return Table(["K_u, K_v", *heads, "bytes"], rows)


def coins() -> Table:
    """Return the losses of SGDM with coins and with periods."""
    found = cells("coins")
    seeds = sorted(found["periods"])
    rows: list[list[object]] = []
    for name in ("periods", "coins"):
        losses = [found[name][seed] for seed in seeds]
        rows.append([name, *(f"{loss:.3f}" for loss in losses), spread(losses)])
    more = Estimate.above(found["coins"], found["periods"]).interval
    rows.append(["coins above periods, %", *[""] * len(seeds), more])
    return Table(["", *(f"seed {seed}" for seed in seeds), "mean"], rows)


def spike() -> Table:
    """Return the windows of the run that spiked whose loss is above the last window's by 0.8."""
    windows = json.loads((RESULTS / "spike.json").read_text())["windows"]
    rows = []
    for two_ago, before, now in zip(windows, windows[1:], windows[2:], strict=False):
        if now["train_loss"] - before["train_loss"] >= 0.8:
            row = [now["step"], f"{before['train_loss']:.3f}", f"{now['train_loss']:.3f}"]
            rows.append([*row, ", ".join(before["streams"]), ", ".join(two_ago["streams"])])
    heads = ["last step of the window", "train loss before", "train loss"]
    return Table([*heads, "averaged before the window", "and one window earlier"], rows)


def formats() -> Table:
    """Return the cost of lossy formats, compared with fp32 in the same partition."""
    found = cells("compression")
    sent = {run["cell"]: run["bytes_sent_by_a_client"] for run in records("compression")}
    partitions = ("IID", "by domain")
    rows = []
    for name, words in WIRE.items():
        both = [cell(name, partition) for partition in partitions]
        fp32 = [cell("fp32", partition) for partition in partitions]
        row = [words, f"1/{sent[fp32[0]] / sent[both[0]]:.2f}", len(found[both[0]])]
        for ours, reference in zip(both, fp32, strict=True):
            loss = f"{fmean(found[ours].values()):.3f}"
            gap = Estimate.above(found[ours], found[reference]).interval
            row.append(loss if ours == reference else gap)
        rows.append(row)
    return Table(["formats of x, u, v", "bytes", "seeds", *partitions], rows)


def baseline() -> Table:
    """Return the loss of Local AdamW by betas and decay, each at its best rate."""
    found = study_cells("fair_rates")
    place = next(
        one["scores"] for one in found if (one["betas"], one["decay"]) == ("0.9 0.95", "0.1")
    )
    rows = []
    for one in sorted(found, key=lambda one: one["mean"]):
        gap = Estimate.above(dict(enumerate(one["scores"])), dict(enumerate(place)))
        row = [one["betas"].replace(" ", ", "), one["decay"], one["warm-up"], f"{one['tuned']:.2g}"]
        row += [one["seeds"], f"{one['mean']:.3f}"]
        rows.append([*row, "" if one["scores"] == place else gap.interval])
    heads = ["β₁, β₂", "weight decay", "warm-up", "rate", "seeds", "loss"]
    return Table([*heads, "above 0.9, 0.95 with decay 0.1, %"], rows)


FAIR = {
    "IID": "fair_methods_iid",
    "by domain": "fair_methods_by_domain",
    "IID, K = 64": "fair_methods_k64",
    "by domain, K = 64": "fair_methods_k64_by_domain",
    "IID, 1.1M": "fair_methods_1m",
}
"""Studies by what their data are."""
MUON = {
    "IID": "muon_iid",
    "by domain": "muon_by_domain",
    "IID, K = 64": "muon_k64",
    "by domain, K = 64": "muon_k64_by_domain",
}
"""The same of Muon."""


def study_cells(study: str) -> list[dict[str, Any]]:
    """Return the cells of a study's results."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{study}.json").read_text())["cells"]
    return found


def methods(studies: Mapping[str, str], baseline: str) -> Table:
    """Return each method of some studies at its best rate, compared with ``baseline``."""
    rows = []
    for data, study in studies.items():
        found = study_cells(study)
        local = next(one for one in found if one["method"] == baseline)
        for one in found:
            share = one["bytes_up_per_client"] / local["bytes_up_per_client"]
            row = [data, one["method"], f"{one['tuned']:.2g}", one["seeds"], f"{one['mean']:.4f}"]
            rows.append([*row, "" if one is local else _above(one, local), f"{share:.3g}"])
    heads = ["data", "method", "rate", "seeds", "loss", f"above {baseline}, %"]
    return Table([*heads, f"bytes, {baseline}'s being 1"], rows)


def federated() -> Table:
    """Return Flower's FedAvg and FedAdam, and ADOPT, at their best rates, compared with Local."""
    rows, found = [], study_cells("fair_federated")
    adopt = {one["partition"]: one for one in found if one["method"] == "Local ADOPT"}
    for one in found:
        local = study_cells(FAIR[one["partition"]])[0]
        same = adopt[one["partition"]] if one["method"] == "DES-LOC-ADOPT" else None
        row = [one["partition"], one["method"], f"{one['tuned']:.3g}", one["seeds"]]
        gaps = [_above(one, local), _above(one, same) if same else ""]
        share = one["bytes_up_per_client"] / local["bytes_up_per_client"]
        rows.append([*row, f"{one['mean']:.4f}", *gaps, f"{share:.3g}"])
    heads = ["data", "method", "rate", "seeds", "loss", "above Local AdamW, %"]
    return Table([*heads, "above Local ADOPT, %", "bytes, Local AdamW's being 1"], rows)


def private_text() -> Table:
    """Return each method's loss on text, compared with Local Adam at the same epsilon.

    And how much more that is than without privacy: what privacy costs the method alone.
    """
    rows, found = [], study_cells("privacy_text")
    cells = {(one["epsilon"], one["method"]): dict(enumerate(one["scores"])) for one in found}

    def above(epsilon: str, method: str) -> dict[int, float]:
        return differences(cells[epsilon, method], cells[epsilon, "Local Adam"])

    for one in found:
        epsilon, method = one["epsilon"], one["method"]
        row = [epsilon, method, f"{one['tuned']:.2g}", one["seeds"], f"{one['mean']:.4f}"]
        own, without = above(epsilon, method), above("none", method)
        is_own, is_more = method != "Local Adam", epsilon != "none"
        gap = Estimate.of(own.values()).interval if is_own else ""
        more = Estimate.between(own, without).interval if is_own and is_more else ""
        rows.append([*row, gap, more])
    heads = ["epsilon", "method", "rate", "seeds", "held-out loss", "loss above Local Adam, %"]
    return Table([*heads, "more than without privacy, points"], rows)


def _above(one: Run, other: Run) -> str:
    """Return how far the scores of a cell of a study are above another's, paired by seed."""
    scores = (dict(enumerate(cell["scores"])) for cell in (one, other))
    return Estimate.above(*scores).interval


def outer_steps() -> Table:
    """Return the loss of DiLoCo and MuLoCo by their outer steps, on a spare seed."""
    found = study_cells("outer_rates")
    names = list(dict.fromkeys(one["method"] for one in found))
    losses = {(one["outer"], one["method"]): f"{one['mean']:.4f}" for one in found}
    outers = dict.fromkeys(outer for outer, _ in losses)
    rows = [[outer, *(losses[outer, name] for name in names)] for outer in outers]
    return Table(["outer steps", *(f"loss of {name}" for name in names)], rows)


def clock() -> Table:
    """Return the share of time computing on a ring, with the inputs of the authors' notebook.

    The last row has the notebook's slips: parameters, tokens and FLOP/s are each ten times as large
    as named, and the axis shows ten times the bandwidth that was used.
    """
    streams = {
        "DDP": (1.0,),
        "Local Adam": (1 / 256,) * 3,
        "DES-LOC": (1 / 256, 1 / 768, 1 / 1536),
        "FedAvg": (1 / 256,),
    }
    rows = [[name, *_shares(often)] for name, often in streams.items()]
    rows.append(["DDP, as the notebook draws it", *_shares(streams["DDP"], slip=10)])
    return Table(["share of time computing, ring", *(f"{gbit} Gbit/s" for gbit in GBIT)], rows)


def _shares(often: Sequence[float], slip: float = 1) -> list[str]:
    compute = slip * compute_seconds(**NOTEBOOK)
    size = slip * NOTEBOOK["num_params"] * VALUE_BYTES
    rates = MethodRates(
        name="", num_bytes=size * sum(often), exchanges=sum(often), windows=often[0]
    )
    shares = []
    for gbit in GBIT:
        link = Link(bandwidth=1000 * gbit / slip * MBIT, latency=LATENCY)
        waits = communication_seconds(rates, NOTEBOOK["workers"], link, Topology.RING)
        shares.append(f"{100 * compute / (compute + waits):.3g}%")
    return shares


TABLES: dict[str, Draw] = {
    "rates_of_change": rates,
    "sync_periods": periods,
    "budget_splits": splits,
    "coins": coins,
    "spike": spike,
    "compression": formats,
    "fair_rates": baseline,
    "fair_methods": partial(methods, FAIR, "Local"),
    "fair_federated": federated,
    "fair_outer": outer_steps,
    "privacy_text": private_text,
    "fair_muon": partial(methods, MUON, "AdamW"),
    "wall_clock": clock,
}
