"""Copy the finished runs of studies into research/results.

    python research/collect.py runs/ladder_size ...

Each run of a study's folder becomes a record of research/results/STUDY.json; records that are
already there are kept.
"""

import json
import os
import platform
import re
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import typer
import yaml
from paired import RESULTS, Run, commit_of, required

from flower_desloc.app.runs.folder import read_lines

MOMENTS = ("exp_avg", "exp_avg_sq")
OTHER_PERIODS = {
    "DES-LOC, half the periods": (8, 24, 48),
    "Local, twice the period": (32, 32, 32),
    "Local, K = 24": (24, 24, 24),
    "u as often as x, K = 24": (24, 24, 96),
    "u as often as x, K = 12": (12, 12, 96),
    "K = 12/144/288": (12, 144, 288),
    "K = 12/96, v never": (12, 96, "never"),
    "K = 16/32, v never": (16, 32, "never"),
    "u as often as x, K = 22, v never": (22, 22, "never"),
}
"""Methods of the ladder at another K_x than the Local run that they are compared with."""
PERIOD = 16
"""K_x of that Local run."""
LADDER = "ladder_"
"""How the names of the ladder's studies start."""
FLOWERS = {
    strategy: f"{name} (Flower)"
    for strategy, name in {
        "fedavg": "FedAvg", "fedavgm": "FedAvgM", "fedprox": "FedProx", "fedadam": "FedAdam",
        "fedyogi": "FedYogi",
    }.items()
}  # fmt: skip
FORMATS = {
    ("int8", "int4", "int8"): "lean",
    ("int8", "int8", "int8"): "8 bits",
    ("int4", "int4", "int8"): "4 bits",
    ("int8", "int8"): "8 bits",
    ("int4", "int4"): "4 bits",
}
"""Formats of x, u and v -> their name in a method's name."""


def main(folders: list[Path]) -> None:
    """Copy the finished runs of studies into research/results."""
    for folder in folders:
        where = RESULTS / f"{folder.name}.json"
        kept = json.loads(where.read_text()) if where.exists() else {"code": [], "runs": []}
        found = {identity(run): run for run in kept["runs"]}
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        for place in required(sorted(folder.glob("[!.]*/*/")), folder):
            run = read_run(place)
            if run is None or identity(run) in found:
                continue
            code = {"commit": commit_of(folder), "machine": machine}
            code["versions"] = run.pop("versions", None)
            if code not in kept["code"]:
                kept["code"].append(code)
            found[identity(run)] = run | {"code": kept["code"].index(code)}
        runs = sorted(found.values(), key=identity)
        lines = ",\n".join(f"    {json.dumps(run)}" for run in runs)
        code_lines = ",\n".join(f"    {json.dumps(code)}" for code in kept["code"])
        where.write_text(f'{{\n  "code": [\n{code_lines}\n  ],\n  "runs": [\n{lines}\n  ]\n}}\n')
        print(f"{where}: {len(runs)} runs")


def read_run(folder: Path) -> Run | None:
    """Return the record of a finished run; None if the folder holds none."""
    try:
        outcome = json.loads((folder / "outcome.json").read_text())
    except OSError:
        return None
    config = yaml.safe_load(outcome["config"])
    name = method(config)
    at_other_periods = name.startswith(tuple(OTHER_PERIODS))
    if at_other_periods and not folder.parents[1].name.startswith(LADDER):
        name, at_other_periods = "Local" if "Local" in name else name, False
    record: Run = {
        "cell": slug(folder.parent.name),
        "seed": config["run"]["seed"],
        "optimizer": config["optimizer"]["name"],
        "betas": config["optimizer"].get("betas"),
        "method": name,
        "partition": config["data"]["partition"],
        "domains": config["data"]["domains"],
        "clients": config["simulation"]["num_clients"],
        "tokens": config["data"]["batch_size"] * config["data"]["seq_len"],
        "steps": config["run"]["steps"],
        "period": PERIOD if at_other_periods else config["sync"].get("params", PERIOD),
        "sync": config["sync"],
        "sync_once_at": config["sync_once_at"],
        "rate": (config.get("strategy_options") or {}).get("eta") or config["optimizer"]["lr"],
        "status": outcome["status"],
        "seconds": round(outcome["seconds"], 1),
        "date": date.fromtimestamp((folder / "outcome.json").stat().st_mtime).isoformat(),
    }
    if outcome["status"] != "completed":
        return record
    summary = json.loads((folder / "summary.json").read_text())
    windows = list(read_lines(folder / "metrics.jsonl"))
    central = [w["evaluation"]["central"] for w in windows if "central" in w.get("evaluation", {})]
    trained = windows[-1]["clients"].values()
    fairness = summary.get("fairness")
    rates = {name: rate_of_change(windows, name) for name in MOMENTS}
    return record | {
        "params": summary["stream_bytes"]["params"] // 4,
        "loss": summary["evaluation"]["central"]["loss"]["final"],
        "perplexity": summary["evaluation"]["central"]["perplexity"]["final"],
        "loss_by_domain": {name: part["loss"] for name, part in central[-1]["parts"].items()},
        "worst_client": fairness["worst"]["loss"] if fairness else None,
        "param_norm": fmean(client["param_norm"] for client in trained),
        "activation_norm": max(one["overall"]["activation_norm"] for one in central[1:]),
        "rates_of_change": {name: rate for name, rate in rates.items() if rate is not None},
        "bytes_sent_by_a_client": summary["bytes"]["measured"]["up"]["total"] // summary["clients"],
        "versions": summary["versions"],
    }


def method(config: Run) -> str:
    """Return the method's name, derived from the periods, the formats and the bound."""
    formats = tuple(form for form in (config["compression"] or {}).values() if form != "fp32")
    return (
        periods_name(config)
        + (f", {FORMATS.get(formats, '/'.join(formats))}" if formats else "")
        + (", bounded" if _is_bounded(config) else "")
    )


def _is_bounded(config: Run) -> bool:
    """Whether the bound can change anything: Adam's moments, averaged at different steps."""
    is_adam = config["optimizer"]["name"] in ("adam", "adamw")
    moments = {config["sync"].get(name, "never") for name in MOMENTS}
    return bool(config.get("sync_bound")) and is_adam and len(moments) > 1


def periods_name(config: Run) -> str:
    """Return the name of a method that sends fp32."""
    sync = config["sync"]
    if config["strategy"] in FLOWERS:
        return FLOWERS[config["strategy"]]
    if config["outer"]["name"] != "none":
        return "DiLoCo"
    if "gradients" in sync:
        return "DDP"
    first, second = (sync.get(name) for name in MOMENTS)
    if first is None:  # SGDM
        return "DES-LOC"
    for name, periods in OTHER_PERIODS.items():
        if sync == dict(zip(("params", *MOMENTS), periods, strict=True)):
            return name
    if config["sync_once_at"]:
        return "early average"
    if "reset" in (first, second):
        return "FAVG-OPT"
    if (first, second) == (sync["params"],) * 2:
        return "Local"
    if first == sync["params"]:
        return "u as often as x" + (", v never" if second == "never" else "")
    if second == sync["params"]:
        return "v as often as x" + (", u never" if first == "never" else "")
    if first == second != "never":
        return "v as often as u"
    names = {(True, True): "FAVG+OPT", (True, False): "u never", (False, True): "v never"}
    return names.get((first == "never", second == "never"), "DES-LOC")


def rate_of_change(windows: list[Run], stream: str) -> float | None:
    """Return a stream's median rate of change |s_t - s_{t-K}| / |s_{t-K}|, if it has one."""
    drifts = [window["drift"][stream] for window in windows if stream in window["drift"]]
    # The first average has no earlier one to compare with.
    changes = [now["moved"] / before["norm"] for before, now in pairwise(drifts)]
    return median(changes) if changes else None


def slug(labels: str) -> str:
    """Return a cell's labels as in the name of its folder, with one kind of dash."""
    return re.sub(r"[^a-z0-9.]+", "-", labels.lower().replace("+", "-plus-")).strip("-.")


def identity(run: Run) -> str:
    """Return a key that is equal for repetitions of the same run."""
    keys = ("cell", "optimizer", "method", "partition", "tokens", "steps", "period", "rate", "seed")
    return json.dumps([run.get(key) for key in (*keys, "domains")])


def records(study: str) -> list[Run]:
    """Return the runs of research/results/STUDY.json."""
    runs: list[Run] = json.loads((RESULTS / f"{study}.json").read_text())["runs"]
    return runs


if __name__ == "__main__":
    typer.run(main)
