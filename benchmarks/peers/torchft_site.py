"""A site of torchft: LocalSGD with gloo, as its documentation shows it.

python torchft_site.py NUMBER SITES WINDOWS LIGHTHOUSE
"""

import sys
from datetime import timedelta

from site_step import STEPS, Site
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def main(number: int, sites: int, windows: int, lighthouse: str) -> None:
    """Train for so many windows."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    site = Site(f"site-{number}")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=600)),
        min_replica_size=sites,
        load_state_dict=site.model.load_state_dict,
        state_dict=site.model.state_dict,
        replica_id=f"site-{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=600),
        quorum_timeout=timedelta(seconds=600),
        use_async_quorum=False,
    )
    with LocalSGD(manager, site.model, site.optimizer, sync_every=STEPS):
        while manager.current_step() < windows:
            site.step()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
