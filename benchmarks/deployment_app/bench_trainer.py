"""The clients of DesLoc and FedAvg, with the times of their phases in every reply."""

import time
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.client import build_worker
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client import client_app
from flower_desloc.flower.messages import Settings

fedavg = ClientApp()


@fedavg.train()
def train(message: Message, context: Context) -> Message:
    """Take the same step on the same model and data, written as in Flower's examples."""
    asked = time.time()
    config: Any = message.content.config_records["config"]
    worker = build_worker({"settings": config["settings"]}, context)
    built = time.time()
    params = message.content.array_records["arrays"].to_torch_state_dict()
    worker.module.load_state_dict(params, strict=False)  # tied weights are sent once
    step = config["server-round"]
    worker.steps(step - 1, step)
    arrays = ArrayRecord(dict(worker.module.named_parameters()))
    done = time.time()
    metrics = MetricRecord({"num-examples": 1, "seconds": done - built})
    times = ConfigRecord({"asked": asked, "built": built, "done": done})
    content = RecordDict({"arrays": arrays, "metrics": metrics, "times": times})
    return Message(content, reply_to=message)


class Timed(ClientApp):
    """Our ClientApp, with the record ``times`` added to a window's reply."""

    def __init__(self) -> None:
        super().__init__()
        self._built = 0.0
        self._ours = client_app(self._build)

    def _build(self, config: Settings, context: Context) -> Worker:
        worker = build_worker(config, context)
        self._built = time.time()
        return worker

    def __call__(self, message: Message, context: Context) -> Message:
        asked = time.time()
        reply = self._ours(message, context)
        if message.metadata.message_type == "train":
            times = ConfigRecord({"asked": asked, "built": self._built, "done": time.time()})
            reply.content["times"] = times
        return reply


desloc = Timed()
