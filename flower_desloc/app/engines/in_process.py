"""Run the two apps in one process, without Ray: for tests, debugging, and studies on one device."""

from pathlib import Path

import torch
from flwr.app import Context, RecordDict

from flower_desloc.app.config import load_run_config
from flower_desloc.app.config.app_folder import make_importable
from flower_desloc.app.config.check import check_clients
from flower_desloc.app.config.run_config import RunConfig
from flower_desloc.app.runs.client_files import client_files, client_keys, client_memory
from flower_desloc.flower.inprocess import InProcessGrid, num_threads


def run_in_process(run_config: RunConfig, num_clients: int) -> Path:
    """Run the ServerApp and ``num_clients`` clients in this process; return the run's folder.

    ``run_config`` is complete: of keys that it lacks, the app's own values are not used. The
    clients keep their state in the folder ``.clients`` of the output folder until the run is
    complete. Raises what the ServerApp raises.
    """
    make_importable()
    from client_app import app as client_app
    from server_app import app as server_app

    config = load_run_config(run_config)
    check_clients(config)
    threads = config.simulation.client_cpus
    with (
        num_threads(threads),
        torch.random.fork_rng(),
        client_files(Path(str(run_config["output-dir"]))) as state_dir,
        client_memory(state_dir),
        client_keys(config, num_clients, state_dir) as keys,
    ):
        secure = {"secure-keys": str(keys)} if keys else {}
        nodes = [
            {
                "partition-id": i,
                "num-partitions": num_clients,
                "state-dir": str(state_dir),
                **secure,
            }
            for i in range(num_clients)
        ]
        context = Context(1, 0, {}, RecordDict(), dict(run_config))
        grid = InProcessGrid(client_app, nodes, run_config=run_config, threads=threads)
        server_app(grid, context)
    return Path(str(context.state.config_records["run"]["folder"]))
