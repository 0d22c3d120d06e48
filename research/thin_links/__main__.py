"""Time to a loss over thin links: a deployment in network namespaces with shaped links.

    python research/thin_links measure [--cells FILE] [--results DIR] [--rate 10] [--seed 0] ...
    python research/thin_links calibrate               # the links only
    python research/thin_links collect                 # finished runs into one file of results/
    python research/thin_links --clean                 # what a killed run left behind

A SuperLink and SuperNodes, with TLS and keys, each in a network namespace of its own. Every rate's
links are measured before its runs, which are refused if the links are not what the cell says. A
finished run is one JSON file in the results folder, and is not repeated. Linux and root only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from network import (
    SERVER,
    CalibrationError,
    Network,
    NotAllowedError,
    about_machine,
    clean,
    network,
)

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from paired import required
from report import results_file

from flower_desloc.app.cli.terminal import exit_on_signals
from flower_desloc.app.config import load
from flower_desloc.app.engines.deployment import deploy
from flower_desloc.app.engines.simulation import flwr_run
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.runs.summary import versions
from flower_desloc.flower.atomic import atomic_write

RUN = "run"

Cells = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = ("measure", "calibrate", "collect")
    parser.add_argument("what", choices=commands, nargs="?", default="measure")
    parser.add_argument("--cells", type=Path, default=HERE / "cells.yaml")
    parser.add_argument("--results", type=Path, default=Path("runs/thin_links"))
    parser.add_argument(
        "--rate", type=float, nargs="+", help="in Mbit/s; by default all of --cells"
    )
    parser.add_argument("--method", nargs="+", help="by default all of --cells")
    parser.add_argument("--seed", type=int, nargs="+", help="by default all of --cells")
    parser.add_argument("--clean", action="store_true", help="remove leftovers and exit")
    args = parser.parse_args()
    if args.clean:
        print("removed:", ", ".join(clean()) or "nothing was left")
        return 0
    cells: Cells = yaml.safe_load(args.cells.read_text())
    if args.what == "collect":
        runs = [json.loads(path.read_text()) for path in sorted(args.results.glob("*.json"))]
        required(runs, args.results)
        kept = results_file(args.cells.stem)
        kept.write_text(json.dumps({"cells": cells, "files": runs}, indent=1) + "\n")
        print(f"{len(runs)} files into {kept}")
        return 0
    wanted = list(product(args.seed or cells["seeds"], args.method or cells["methods"]))
    args.results.mkdir(parents=True, exist_ok=True)
    os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy"), SERVER]))
    failed = 0
    with exit_on_signals("finished runs are kept"):
        for rate in args.rate or cells["rates"]:
            todo = [(m, s) for s, m in wanted if not result_file(args.results, rate, m, s).exists()]
            if args.what == "calibrate":
                todo = []
            elif not todo:
                continue
            try:
                measure(cells, rate, todo, args.results)
            except NotAllowedError as error:
                print(error, file=sys.stderr)
                return 2
            except CalibrationError as error:
                print(f"{rate:g} Mbit/s does not count: {error}", file=sys.stderr)
                failed = 1
    return failed


def result_file(results: Path, rate: float, method: str, seed: int) -> Path:
    name = re.sub(r"\W+", "-", method.lower())
    return results / f"{rate:g}mbit-{name}-{seed}.json"


def measure(cells: Cells, rate: float, todo: list[tuple[str, int]], results: Path) -> None:
    """Build the links of a rate, measure them, and make the runs that are missing."""
    with network(cells["sites"], rate, cells["round_trip_ms"] / 1000) as links:
        calibration = links.calibrate()
        print(f"{rate:g} Mbit/s:", ", ".join(f"{k} {v:.1f}" for k, v in calibration.items()))
        about = {
            "rate_mbit": rate,
            "round_trip_ms": cells["round_trip_ms"],
            "delay": links.delay,
            "calibration": calibration,
            "date": date.today().isoformat(),
            "machine": {**about_machine(), "load": os.getloadavg()[0]},
            "versions": versions(),
        }
        write(results / f"{rate:g}mbit-calibration.json", about)
        for method, seed in todo:
            print(f"\n{rate:g} Mbit/s, {method}, seed {seed}", flush=True)
            found = run(cells, links, method, seed)
            found = {**about, "method": method, "seed": seed, **found}
            write(result_file(results, rate, method, seed), found)


def run(cells: Cells, links: Network, method: str, seed: int) -> dict[str, Any]:
    """Run a method once; return what was recorded of it."""
    preset, *own = cells["methods"][method]
    clients = f"simulation.num_clients={links.sites} federation.min_clients={links.sites}"
    overrides = [*cells["overrides"], *own, f"run.seed={seed}", f"run.name={RUN}", *clients.split()]
    overrides.append(f"federation.data_address={links.data_address}")
    config = load(preset, overrides)
    with tempfile.TemporaryDirectory(prefix="desloc-bench-") as folder:
        arguments = {"config": preset, "overrides": " ".join(overrides), "output-dir": folder}
        sites: list[dict[str, str | int]] = [
            {
                "partition-id": number,
                "num-partitions": links.sites,
                "state-dir": f"{folder}/state",
                "step-seconds": str(cells["step_seconds"]),
            }
            for number in range(links.sites)
        ]
        command = flwr_run(HERE / "app", arguments)
        load_before = os.getloadavg()[0]
        status = deploy(command, sites, 1, verbose=False, hosts=links.hosts)
        if not status.completed:
            raise RuntimeError(status.error)
        made = Path(folder, RUN)
        summary = json.loads((made / "summary.json").read_text())
        windows = zip(
            read_lines(made / "metrics.jsonl"), read_lines(made / "links.jsonl"), strict=True
        )
        return {
            "preset": preset,
            "overrides": overrides,
            "step_seconds": cells["step_seconds"],
            "tokens_per_step": links.sites * config.data.batch_size * config.data.seq_len,
            "load": [load_before, os.getloadavg()[0]],
            "windows": [window(line, at) for line, at in windows],
            "bytes": summary["bytes"]["measured"],
            "stream_bytes": summary["stream_bytes"],
            "compressed_bytes": summary["compressed_bytes"],
            "weights_sha256": summary["weights_sha256"],
        }


def window(line: dict[str, Any], at: dict[str, Any]) -> dict[str, Any]:
    """Return a window; interface bytes are since the namespace was made."""
    evaluated = line.get("evaluation", {}).get("central")
    return {
        **{key: line[key] for key in ("step", "streams", "framed_bytes_up", "framed_bytes_down")},
        "payload_up": sum(line["bytes_up"].values()),
        "payload_down": sum(line["bytes_down"].values()),
        "loss": evaluated and evaluated["overall"]["loss"],
        "seconds": line["seconds_split"],
        "interface": at,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)}: {error.stderr}")
