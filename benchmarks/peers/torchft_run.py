"""torchft's LocalSGD: a lighthouse, and a process for each site; no server and no TLS.

python torchft_run.py SITES WINDOWS
"""

import subprocess
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer


def main(sites: int, windows: int) -> None:
    """Run the sites to their end."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=sites, join_timeout_ms=60_000, quorum_tick_ms=10
    )
    script = str(Path(__file__).with_name("torchft_site.py"))
    command = [sys.executable, script]
    running = [
        subprocess.Popen([*command, str(i), str(sites), str(windows), lighthouse.address()])
        for i in range(sites)
    ]
    codes = [process.wait() for process in running]
    lighthouse.shutdown()
    if any(codes):
        raise SystemExit(f"the sites ended with {codes}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
