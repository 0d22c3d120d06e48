"""Flower's FedAvg, over a SuperLink and SuperNodes with TLS, or in its simulation.

python flower_run.py deployment|simulation SITES WINDOWS FOLDER
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "flower_app")]

from flower_runs import run_app, simulate

from flower_desloc.app.engines.deployment import NodeConfig, deployment


def main(where: str, sites: int, windows: int, folder: str) -> None:
    """Run it to its end."""
    if where == "simulation":
        from flower_client import app as client
        from flower_server import train

        simulate(lambda grid, _: train(grid, windows), client, sites)
        return
    nodes: list[NodeConfig] = [
        {"partition-id": i, "num-partitions": sites, "state-dir": f"{folder}/state{i}"}
        for i in range(sites)
    ]
    with deployment(nodes, threads=1) as (superlink, _):
        settings = {"windows": windows, "output": f"{folder}/done.json"}
        run_app(superlink, HERE / "flower_app", settings)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
