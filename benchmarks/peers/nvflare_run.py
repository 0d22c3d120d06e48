"""NVFlare's FedAvg, in its POC (a server and sites as processes of their own, TLS) or simulator.

python nvflare_run.py poc|simulator SITES WINDOWS FOLDER
"""

import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import PocEnv, SimEnv


def main(where: str, sites: int, windows: int, folder: str) -> None:
    """Run the job to its end."""
    here = Path(__file__).parent
    recipe = FedAvgRecipe(
        name="peer",
        # Not the model itself: all of transformers and PyTorch would be sent with the job.
        model={"path": "site_step.Model", "args": {}},
        min_clients=sites,
        num_rounds=windows,
        train_script=str(here / "nvflare_site.py"),
        server_expected_format=ExchangeFormat.PYTORCH,
    )
    recipe.add_server_file(str(here / "site_step.py"))
    recipe.add_client_file(str(here / "site_step.py"))
    if where == "poc":
        env = PocEnv(num_clients=sites)
    else:
        env = SimEnv(num_clients=sites, workspace_root=folder)
    run = recipe.execute(env)
    print(run.get_status(), run.get_result())
    if where == "poc":
        env.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
