"""What a run will send, before it is run."""

from flower_desloc.build import build_schedule, build_streams
from flower_desloc.config import Config
from flower_desloc.ledger import ddp_bytes, desloc_bytes, local_adam_bytes, stream_bytes
from flower_desloc.outputs.units import bytes_text
from flower_desloc.tasks import build_task
from flower_desloc.wire import wire_bytes


def prediction(config: Config) -> str:
    """Return the bytes one client will send up, by stream, beside Local Adam's and DDP's.

    Builds the model, to know its size; raises ``ValueError`` when that cannot be done.
    """
    schedule, steps = build_schedule(config), config.run.steps
    streams = build_streams(config, build_task(config).build_model())
    schedule.require([name for name in streams if name in schedule.periods], config.optimizer.name)
    sizes = stream_bytes(streams)
    events = schedule.num_events(steps)
    wire = wire_bytes(streams, config.wire)
    sent = desloc_bytes(schedule, wire, steps)
    lines = [f"each client will send, in {steps} steps:"]
    for stream, count in sent.items():
        times = f"{events[stream]} times {bytes_text(wire[stream])}"
        lines.append(f"  {stream:<16} {times:>24} {bytes_text(count):>10}")
    total = sum(sent.values())
    lines.append(f"  {'total':<16} {'':>24} {bytes_text(total):>10}")
    others = {
        "Local Adam": sum(local_adam_bytes(schedule, sizes, steps).values()),
        "DDP": ddp_bytes(sizes, steps),
    }
    for name, other in others.items():
        lines.append(f"{name} would send {bytes_text(other)}, {other / total:.2f} times as much")
    return "\n".join(lines)
