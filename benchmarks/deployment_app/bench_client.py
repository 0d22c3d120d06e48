"""The ClientApp of all variants: ours for DesLoc, otherwise one as in Flower's examples."""

import os
import time
from pathlib import Path
from pkgutil import resolve_name

BEGAN = time.time()  # Flower's own imports are done

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_desloc.app.sites.warm import WarmClientApp


class Both(ClientApp):
    """Adds to every reply the times of the events in this process."""

    def __call__(self, message: Message, context: Context) -> Message:
        called = time.time()
        config = message.content.config_records["config"]
        if "run-key" not in config:
            app = resolve_name("bench_trainer:fedavg")
        elif config.get("cold"):
            app = resolve_name("bench_trainer:desloc")
        else:
            app = WarmClientApp("bench_trainer:desloc")
        reply = app(message, context)
        if "times" in reply.content:
            reply.content["times"].update(
                {"process": _started(), "began": BEGAN, "called": called, "answered": time.time()}
            )
        return reply


def _started() -> float:
    """Return when this process started, as ``time.time()`` counts."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK")


app = Both()
