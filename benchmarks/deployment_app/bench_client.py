"""The ClientApp of all variants: ours for DesLoc, otherwise one as in Flower's examples."""

import os
import time
from pathlib import Path

BEGAN = time.time()  # Flower's own imports are done

from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from flower_desloc.sites.warm import WarmClientApp
from flower_desloc.sites.warm.app import load


class Both(ClientApp):
    """Adds to every reply the times of the events in this process."""

    def __call__(self, message: Message, context: Context) -> Message:
        called = time.time()
        config = message.content.config_records["config"]
        ours = "run-key" in config
        if not ours:
            app = load("bench_fedavg:app")
        elif config.get("cold"):
            app = load("bench_desloc:app")
        else:
            app = WarmClientApp("bench_desloc:app")
        reply = app(message, context)
        if "times" in reply.content:
            reply.content["times"].update(
                {"process": _started(), "began": BEGAN, "called": called, "answered": time.time()}
            )
        if not ours:  # FedAvg accepts one MetricRecord per reply
            times = reply.content.pop("times")
            assert isinstance(times, MetricRecord)
            reply.content["metrics"].update({f"times/{k}": v for k, v in times.items()})
        return reply


def _started() -> float:
    """Return when this process started, as ``time.time()`` counts."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK")


app = Both()
